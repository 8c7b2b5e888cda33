// The store as a tree: namespaces, headers, sessions, checkpoints. What is not open is not asked for.

import { byId, fetchJson, make, reconcile, say } from "./dom.js";
import { ago, bytes, counted, number, seconds } from "./words.js";

const PAGE = 100;
const MAX_PAGE = 1000;
const REST_MS = 1000; // a busy proxy changes its store often

export class Store {
  #root = byId("tree");
  #version = null; // what is shown; null while that is asked for
  #isLoading = false;
  #isStale = false;

  constructor() {
    this.#root.dataset.node = "";
    this.#refresh();
  }

  // Takes the store's version; what is open is asked for again if it has changed.
  take(store) {
    byId("no-store").hidden = Boolean(store?.n_checkpoints);
    say(byId("store-size"), store
      ? `${counted(store.n_checkpoints, "checkpoint")}, ${bytes(store.size_bytes)} of ${bytes(store.max_bytes)}`
      : "is not open");
    if (store && this.#version !== null && store.version !== this.#version) this.#refresh();
  }

  async #refresh() {
    this.#isStale = true;
    if (this.#isLoading) return;
    this.#isLoading = true;
    try {
      while (this.#isStale) {
        this.#isStale = false;
        for (const list of [this.#root, ...this.#root.querySelectorAll("ul")]) {
          if (list.isConnected) await this.#load(list);
        }
        await new Promise((resolve) => setTimeout(resolve, REST_MS));
      }
    } finally {
      this.#isLoading = false;
    }
  }

  // Asks for the children of a list's node, as many as are shown or *more*.
  async #load(list, more = 0) {
    const shown = list.querySelectorAll(":scope > li[data-id]").length;
    try {
      const level = await fetchLevel(list.dataset.node, Math.max(PAGE, shown + more));
      if (list === this.#root) this.#version = level.version;
      this.#fill(list, level);
    } catch {
      // Nothing lies under this node any more, or the proxy is away.
      if (list === this.#root) this.#version = -1;
    }
  }

  #fill(list, { children, nChildren }) {
    const rest = nChildren - children.length;
    const items = rest > 0 ? [...children, { level: "more", id: "more" }] : children;
    reconcile(list, items, (item) => item.id, (item) => this.#item(item), (element, item) => {
      if (item.level !== "more") say(element.querySelector(".about"), about(item));
      else say(element.firstElementChild, `Show more of ${number(rest)} others`);
    });
  }

  #item(item) {
    if (item.level === "more") {
      const more = make("button", { type: "button", onclick: () => this.#load(more.closest("ul"), PAGE) });
      return make("li", {}, more);
    }
    const description = make("span", { class: "about quiet" });
    if (item.level === "checkpoint") {
      return make("li", { "data-id": item.id },
        make("div", { class: "node leaf" }, make("span", {}, name(item)), description));
    }
    const button = make("button", {
      type: "button", class: "plain", "aria-expanded": "false", onclick: () => this.#toggle(item, button),
    }, name(item));
    return make("li", { "data-id": item.id }, make("div", { class: "node" }, button, description));
  }

  async #toggle(item, button) {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    const element = button.closest("li");
    if (isOpen) return element.querySelector("ul").remove();
    const list = make("ul", { "data-node": item.id, "aria-label": `In ${name(item)}` });
    element.append(list);
    await this.#load(list);
  }
}

// Returns the first *n* children of a node.
async function fetchLevel(node, n) {
  const children = [];
  let level;
  do {
    const limit = Math.min(MAX_PAGE, n - children.length);
    level = await fetchJson(`tree?limit=${limit}&offset=${children.length}&parent=${encodeURIComponent(node)}`);
    children.push(...level.children);
  } while (level.next_offset !== null && children.length < n);
  return { children, nChildren: level.node.n_children, version: level.version };
}

function name(item) {
  const short = item.id.split("/").at(-1).slice(0, 8);
  switch (item.level) {
    case "namespace":
      if (item.model) return `${item.model} (${short}${item.is_served === false ? ", not served now" : ""})`;
      return item.is_served === false ? `Another model or key ${short}` : `Model and key ${short}`;
    case "header":
      return item.n_tokens ? `Header of ${counted(item.n_tokens, "token")}` : "No known header";
    case "session":
      return `Session ${short}`;
    default:
      return `${KINDS[item.kind] ?? item.kind} at ${counted(item.n_tokens, "token")}`;
  }
}

const KINDS = { header: "Header", "turn start": "Turn start", branch: "Branch", conversation: "End" };

function about(item) {
  const parts = [];
  if (item.level === "checkpoint") {
    parts.push(bytes(item.size_bytes));
    if (item.restore_points.length) parts.push(`can be continued at ${counted(item.restore_points.length, "earlier place")}`);
  } else {
    if (item.level === "session") parts.push(`up to ${counted(item.n_tokens, "token")}`);
    parts.push(counted(item.n_checkpoints, "checkpoint"), bytes(item.size_bytes));
  }
  parts.push(item.n_restores ? `restored ${number(item.n_restores)}×` : "never restored");
  parts.push(`made ${ago(item.created_at)}`, `used ${ago(item.last_used_at)}`);
  if (item.value_seconds) parts.push(`worth ${seconds(item.value_seconds)}`);
  if (item.is_warm) parts.push("in memory");
  if (item.quarantine) parts.push(`quarantined: ${item.quarantine.why}`);
  if (item.is_pinned || item.n_pinned) parts.push(item.is_pinned ? "pinned" : `${number(item.n_pinned)} pinned`);
  return parts.join(" · ");
}
