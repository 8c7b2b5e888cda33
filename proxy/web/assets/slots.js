// What each slot of llama-server holds now.

import { byId, make, measure, reconcile, say } from "./dom.js";
import { ago, nameOf as titleOf, number } from "./words.js";

const STATES = { leased: "In use", known: "Idle", empty: "Empty", unknown: "Not known" };

// *requests* are those in flight and the last ones, the newest first; *choose* shows a conversation.
export function showSlots(servers, requests, choose) {
  const several = servers.length > 1;
  const slots = servers.flatMap((server) => server.slots.map((slot) => ({ server, slot })));
  const nameOf = ({ server, slot }) => (several ? `${server.name} ${slot.id}` : String(slot.id));
  reconcile(byId("slots").tBodies[0], slots, nameOf, (item) => makeRow(nameOf(item)), (row, { server, slot }) => {
    const last = requests.find((request) => request.slot === slot.id && (!request.server || request.server === server.name));
    update(row, slot, server.n_ctx, last, choose);
  });
}

function makeRow(name) {
  return make("tr", {},
    make("th", { scope: "row" }, name),
    make("td", { class: "outcome" }),
    make("td"), make("td", { class: "wide cut" }), make("td", { class: "wide time" }));
}

function update(row, slot, nCtx, last, choose) {
  const [, state, holds, conversation, since] = row.cells;
  say(state, slot.is_closing ? "Saving" : STATES[slot.state]);
  const { n_tokens: nTokens, n_unsaved: nUnsaved } = slot;
  const said = describe(slot, nCtx);
  if (holds.dataset.said !== said.join()) {
    holds.dataset.said = said.join();
    holds.replaceChildren(measure(said, nCtx, ["reused", nTokens - nUnsaved], ["unsaved", nUnsaved]));
  }
  const id = nTokens || slot.n_coming ? (last?.conversation ?? "") : "";
  if (conversation.dataset.id !== id) {
    conversation.dataset.id = id;
    conversation.replaceChildren(id ? make("button", { type: "button", class: "link", onclick: () => choose(id) }, titleOf(last)) : "–");
  }
  say(since, slot.used_at ? ago(slot.used_at) : "–");
}

function describe(slot, nCtx) {
  const parts = [];
  if (slot.n_coming) parts.push(`a prompt of ${number(slot.n_coming)} tokens`);
  else if (slot.n_tokens) parts.push(`${number(slot.n_tokens)} of ${number(nCtx)} tokens`);
  else if (slot.state === "empty") parts.push("nothing");
  else parts.push("not known");
  if (slot.n_unsaved && !slot.n_coming) parts.push(`${number(slot.n_unsaved)} unsaved`);
  return parts;
}
