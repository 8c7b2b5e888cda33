// What is stored of one conversation: its states, which can be kept whatever happens, and deleted.

import { byId, fetchJson, make, say } from "./dom.js";
import { ago, bytes, counted, number, seconds } from "./words.js";

const KINDS = { header: "header", "turn start": "start of a turn", branch: "branch", conversation: "end" };

export class States {
  #panel = byId("states");
  #asked = 0;
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
  }

  // Shows the states directly under a node; null shows nothing.
  async show(node, name) {
    this.#asked += 1;
    const asked = this.#asked;
    this.#panel.hidden = !node;
    if (!node) return;
    const { checkpoints } = await fetchJson(`checkpoints?under=${encodeURIComponent(node.id)}`);
    if (asked !== this.#asked) return; // another node was chosen, or the states have changed
    const states = checkpoints.filter((state) => state.parent === node.id).sort((a, b) => a.n_tokens - b.n_tokens);
    this.#panel.dataset.node = node.id;
    this.#panel.replaceChildren(
      make("div", { class: "states-title" }, make("h3", {}, name), this.#buttons(node, name, states)),
      make("p", { class: "quiet" }, about(node)),
      make("p", { id: "states-news", class: "quiet", role: "status" }),
      make("ul", {}, ...states.map((state) => make("li", {}, describe(state)))));
  }

  #buttons(node, name, states) {
    const isPinned = states.length > 0 && states.every((state) => state.is_pinned);
    const pin = make("button", { type: "button", onclick: () => this.#pin(states, !isPinned) }, isPinned ? "Unpin" : "Pin");
    const remove = make("button", { type: "button", class: "danger", onclick: () => this.#askToDelete(node, name, states) }, "Delete …");
    return make("span", { class: "choices" }, pin, " ", remove);
  }

  #pin(states, isPinned) {
    return this.#change(states, (id) => fetchJson(`checkpoints/${id}/pin`, isPinned ? "PUT" : "DELETE"));
  }

  #askToDelete(node, name, states) {
    const size = states.reduce((sum, state) => sum + state.size_bytes, 0);
    const cost = node.seconds ? ` Evaluating it again takes about ${seconds(node.seconds)}.` : "";
    const nPinned = states.filter((state) => state.is_pinned).length;
    const pinned = nPinned ? ` ${counted(nPinned, "state")} of it pinned.` : "";
    const dialog = byId("confirm");
    say(byId("confirm-title"), `Delete ${counted(states.length, "state")} of “${name}” with ${bytes(size)}?${cost}${pinned}`);
    // A click is heard at once; "close" comes later, perhaps when the next question is asked already.
    dialog.querySelector("[value=yes]").onclick = () => this.#change(states, (id) => fetchJson(`checkpoints/${id}?pinned=true`, "DELETE"));
    dialog.showModal();
  }

  // Changes state after state; what one of them refuses is said.
  async #change(states, change) {
    let why = "";
    for (const { id } of states) {
      try {
        await change(id);
      } catch (error) {
        why = error.message;
      }
    }
    await this.#onChange();
    const news = byId("states-news");
    if (why && news) say(news, `Not all could be changed: ${why}.`);
  }
}

function about(node) {
  const facts = [node.client, node.model, counted(node.n_tokens, "token"), `used ${ago(node.last_used_at)}`];
  facts.push(node.n_restores ? `restored ${number(node.n_restores)}×` : "never restored");
  if (node.seconds) facts.push(`${seconds(node.seconds)} to evaluate again`);
  return facts.filter(Boolean).join(" · ");
}

function describe(state) {
  const facts = [`${counted(state.n_tokens, "token")}, ${KINDS[state.kind] ?? state.kind}`, bytes(state.size_bytes)];
  if (state.restore_points.length) facts.push(`can be continued at ${counted(state.restore_points.length, "earlier place")}`);
  facts.push(`made ${ago(state.created_at)}`);
  if (state.value_seconds) facts.push(`worth ${seconds(state.value_seconds)}`);
  if (state.is_warm) facts.push("in memory");
  if (state.quarantine) facts.push(`quarantined: ${state.quarantine.why}`);
  if (state.is_pinned) facts.push("pinned");
  return facts.join(" · ");
}
