// What each slot of llama-server holds now.

import { byId, make, measure, reconcile, say } from "./dom.js";
import { ago, number } from "./words.js";

const STATES = { leased: "In use", known: "Idle", empty: "Empty", unknown: "Not known" };

// *requests* are the last ones, the newest first; *show* opens one of them.
export function showSlots(servers, requests, show) {
  const several = servers.length > 1;
  const slots = servers.flatMap((server) => server.slots.map((slot) => ({ server, slot })));
  const nameOf = ({ server, slot }) => (several ? `${server.name} ${slot.id}` : String(slot.id));
  reconcile(byId("slots").tBodies[0], slots, nameOf, (item) => makeRow(nameOf(item)), (row, { server, slot }) => {
    const last = requests.find((request) => request.slot === slot.id && (!request.server || request.server === server.name));
    update(row, slot, server.n_ctx, last, show);
  });
}

function makeRow(name) {
  return make("tr", {},
    make("th", { scope: "row" }, name),
    make("td", { class: "outcome" }),
    make("td"), make("td", { class: "wide" }), make("td", { class: "wide time" }));
}

function update(row, slot, nCtx, last, show) {
  const [, state, holds, request, since] = row.cells;
  say(state, slot.is_closing ? "Saving" : STATES[slot.state]);
  const { n_tokens: nTokens, n_unsaved: nUnsaved } = slot;
  holds.replaceChildren(measure([describe(slot, nCtx)], nCtx, ["reused", nTokens - nUnsaved], ["unsaved", nUnsaved]));
  if (request.dataset.id !== (last?.id ?? "")) {
    request.dataset.id = last?.id ?? "";
    request.replaceChildren(last ? make("button", { type: "button", class: "link", onclick: () => show(last.id) }, last.id) : "–");
  }
  say(since, slot.used_at ? ago(slot.used_at) : "–");
}

function describe(slot, nCtx) {
  const parts = [];
  if (slot.n_coming) parts.push(`a prompt of ${number(slot.n_coming)} tokens is served`);
  else if (slot.n_tokens) parts.push(`${number(slot.n_tokens)} of ${number(nCtx)} tokens`);
  else if (slot.state === "empty") parts.push("nothing");
  else parts.push("what it holds is not known");
  if (slot.n_header && !slot.n_coming) parts.push(`header ${number(slot.n_header)}`);
  if (slot.n_unsaved && !slot.n_coming) parts.push(`${number(slot.n_unsaved)} not saved yet`);
  return parts.join(" · ");
}
