// The requests that have not ended: what is done for them, and what they wait for.

import { byId, make, measure, reconcile, say } from "./dom.js";
import { counted, nameOf, number, percent, span } from "./words.js";

export function showFlights({ in_flight: inFlight, servers }) {
  reconcile(byId("flights"), inFlight, (flight) => flight.id, makeFlight, (element, flight) => update(element, flight, servers.length > 1));
}

export function showQueue({ in_flight: inFlight, n_waiting: nWaiting }) {
  const nRunning = inFlight.length - Math.min(nWaiting, inFlight.length);
  const words = [nRunning ? `${number(nRunning)} running` : null, nWaiting ? `${counted(nWaiting, "request")} waiting` : null];
  say(byId("queue"), words.filter(Boolean).join(", ") || "nothing runs");
}

function makeFlight(flight) {
  return make("li", {},
    make("div", { class: "who" }, make("span", { class: "title" }, nameOf(flight)), make("span", { class: "quiet from" })),
    make("div", { class: "how" }));
}

function update(element, flight, isOfMany) {
  const from = [flight.client, isOfMany ? flight.server || flight.model : flight.model];
  say(element.querySelector(".from"), from.filter(Boolean).join(" · "));
  const { n_prompt: whole, n_reused: reused, n_done: done } = flight;
  const isKnown = whole !== null && reused !== null;
  element.querySelector(".how").replaceChildren(isKnown
    ? measure(phase(flight), whole, ["reused", reused], ["done", Math.max(0, done - reused)])
    : make("span", { class: "quiet" }, ...phase(flight).join(" · ")));
}

function phase(flight) {
  const { n_prompt: whole, n_done: done, n_reused: reused, n_generated: generated } = flight;
  const took = span(Math.max(0, Date.now() / 1000 - flight.at));
  const slot = flight.slot === null ? "" : `slot ${flight.slot}`;
  switch (flight.phase) {
    case "evaluates":
      return [`evaluates, ${percent(done, whole)} of ${counted(whole, "token")}`, took, slot].filter(Boolean);
    case "restores":
      return [`restores ${counted(reused, "token")} from disk`, took, slot].filter(Boolean);
    case "answers":
      return [generated ? `answers, ${counted(generated, "token")}` : "answers", took, slot].filter(Boolean);
    default:
      return [flight.phase, took, slot].filter(Boolean);
  }
}
