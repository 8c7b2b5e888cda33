// How requests are served, what is wrong, and where clients come in.

import { byId, make, prose, reconcile, say } from "./dom.js";
import { capital, clock } from "./words.js";

const NAME = document.title;
const CONNECTIONS = {
  live: "Live",
  paused: "Paused",
  gone: "The proxy does not answer",
};
const EVERYWHERE = ["", "0.0.0.0", "[::]"];

export function showConnection(connection) {
  say(byId("connection"), CONNECTIONS[connection]);
  byId("connection").className = connection === "gone" ? "gone" : "";
}

export function showState({ state, since, reasons, servers }) {
  say(byId("state-word"), capital(state));
  document.title = state === "caching" ? NAME : `${capital(state)} · ${NAME}`;
  byId("state").className = `state ${state}`;
  byId("state").title = `since ${clock(Date.parse(since) / 1000)}`;
  say(byId("server"), servers.length ? servers.map(describe).join(" · ") : "no llama-server is attached");
  reconcile(byId("reasons"), reasons, (reason) => reason.reason, makeReason, (element, reason) => {
    element.className = state;
    say(element.querySelector(".reason"), reason.reason);
  });
}

function describe({ name, build, rule }, index, servers) {
  return `${servers.length > 1 ? name : `llama-server ${build}`} · rule: ${rule}`;
}

function makeReason(reason) {
  return make("li", {},
    make("strong", {}, reason.kind),
    make("span", { class: "quiet" }, ` since ${clock(Date.parse(reason.since) / 1000)}`),
    make("p", { class: "reason" }),
    make("p", {}, make("strong", {}, "What helps: "), ...prose(reason.cure)));
}

// Says where to point a client, as long as none has come.
export function showWelcome({ listen, today, requests, in_flight: inFlight }) {
  const isNew = !today.n_requests && !requests.length && !inFlight.length;
  if (isNew === !byId("welcome").hidden) return;
  byId("welcome").hidden = !isNew;
  document.body.classList.toggle("new", isNew);
  const at = listen.lastIndexOf(":");
  const host = EVERYWHERE.includes(listen.slice(0, at)) ? location.hostname : listen.slice(0, at);
  const address = `http://${host}${listen.slice(at)}`;
  say(byId("openai-address"), `${address}/v1`);
  say(byId("anthropic-address"), address);
}
