// How requests are served, what is wrong, and what was saved today.

import { byId, make, prose, reconcile, say } from "./dom.js";
import { capital, clock, counted, number, percent, span } from "./words.js";

const NAME = document.title;
const CONNECTIONS = {
  live: "Live",
  polling: "Live, every 4 s",
  paused: "Paused",
  gone: "The proxy does not answer",
};

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

export function showToday(today) {
  const saved = today.saved_seconds;
  const figures = [
    ["Tokens reused", number(today.n_reused), `${percent(today.n_reused, today.n_prompt)} of ${number(today.n_prompt)} in prompts`],
    ["Time saved", saved === null ? "–" : span(saved), saved === null ? "not measured yet" : "measured, less the restores"],
    ["Restored from disk", number(today.n_restored), "of the tokens reused"],
    ["Requests", number(today.n_requests), `${number(today.n_reusing)} reused something`],
    ["Known, yet evaluated", number(today.n_missed), "tokens; each request says why"],
  ];
  reconcile(byId("today"), figures, ([name]) => name, makeFigure, (element, [, value, note]) => {
    const [first, second] = element.querySelectorAll("dd");
    say(first, value);
    say(second, note);
  });
  say(byId("today-title"), `Today, since ${clock(today.since)}`);
}

function makeFigure([name]) {
  return make("div", {}, make("dt", {}, name), make("dd"), make("dd", { class: "quiet" }));
}

export function showQueue(overview) {
  const running = overview.servers.flatMap((server) => server.slots).filter((slot) => slot.state === "leased" && !slot.is_closing).length;
  const waiting = overview.n_waiting ? `${counted(overview.n_waiting, "request")} waiting` : "nobody waits";
  say(byId("queue"), `${running} running, ${waiting}`);
}
