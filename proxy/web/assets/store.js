// The store as a map: headers, in them the conversations that begin with them, by the room that they take.

import { byId, choice, fetchJson, kept, make, say } from "./dom.js";
import { divide } from "./rectangles.js";
import { States } from "./states.js";
import { ago, bytes, counted, number, seconds } from "./words.js";

const N_NODES = 300;
const REST_MS = 1500; // a busy proxy changes its store often
const LABEL_PX = 20;
const LINE_PX = 17;
const GAP_PX = 3;
const AGES = [3600, 86400, 7 * 86400];

export class Store {
  #map = byId("map");
  #nodes = [];
  #nLeftOut = 0;
  #version = null;
  #last = null; // as the last overview told it
  #isLoading = false;
  #measure = kept.get("measure") ?? "bytes";
  #selected = null;
  #states = new States(() => this.#load());

  constructor() {
    const press = choice(byId("measure"), { bytes: "by bytes", seconds: "by seconds" }, (measure) => {
      this.#measure = measure;
      kept.set("measure", measure);
      this.#draw();
    });
    press(this.#measure);
    new ResizeObserver(() => this.#draw()).observe(this.#map);
  }

  // Takes the store's version; the map is asked for again if it has changed.
  take(store) {
    this.#last = store;
    const isEmpty = !store?.n_checkpoints;
    byId("no-store").hidden = !isEmpty;
    byId("map").hidden = byId("map-legend").hidden = isEmpty;
    say(byId("store-size"), store
      ? `${counted(store.n_checkpoints, "state")}, ${bytes(store.size_bytes)} of ${bytes(store.max_bytes)}`
      : "is not open");
    if (store && store.version !== this.#version && !this.#isLoading) this.#load();
  }

  async #load() {
    this.#isLoading = true;
    try {
      const { nodes, n_left_out: nLeftOut, version } = await fetchJson(`tree?limit=${N_NODES}`);
      [this.#nodes, this.#nLeftOut, this.#version] = [nodes, nLeftOut, version];
      this.#draw();
      if (this.#selected) await this.#select(this.#selected);
    } catch {
      this.#version = null; // the proxy is away
    } finally {
      setTimeout(() => {
        this.#isLoading = false;
        if (this.#version !== null) this.take(this.#last); // it may have changed meanwhile
      }, REST_MS);
    }
  }

  // Lays out the headers, and in each of them its conversations and what they share.
  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#map;
    if (!width) return;
    const focused = document.activeElement?.dataset?.node;
    const groups = this.#groups();
    const areas = divide(groups.map((group) => group.size), { x: 0, y: 0, width, height });
    this.#map.replaceChildren(...groups.flatMap((group, i) => this.#drawGroup(group, areas[i])));
    say(byId("map-rest"), this.#nLeftOut ? ` · ${number(this.#nLeftOut)} smaller ones are not shown: llama-prefix-cache ls --all` : "");
    if (focused) this.#map.querySelector(`[data-node="${CSS.escape(focused)}"]`)?.focus();
  }

  #groups() {
    const below = Map.groupBy(this.#nodes, (node) => node.parent);
    const models = below.get("") ?? [];
    const groups = models.flatMap((model) => (below.get(model.id) ?? []).map((header) => {
      const sessions = below.get(header.id) ?? [];
      const cells = sessions.map((node) => ({ node, size: this.#sizeOf(node) }));
      const sharedBytes = header.size_bytes - sessions.reduce((sum, node) => sum + node.size_bytes, 0);
      const shared = this.#measure === "seconds" ? (header.seconds ?? 0) : sharedBytes;
      if (shared > 0 && sharedBytes > 0) cells.push({ node: header, size: shared });
      cells.sort((a, b) => b.size - a.size);
      const size = cells.reduce((sum, cell) => sum + cell.size, 0);
      return { header, cells: cells.filter((cell) => cell.size > 0), size, label: headerName(header, model, models) };
    }));
    return groups.filter((group) => group.size > 0).sort((a, b) => b.size - a.size);
  }

  #sizeOf(node) {
    return this.#measure === "seconds" ? (node.seconds ?? 0) : node.size_bytes;
  }

  #drawGroup({ label, cells }, { x, y, width: whole, height: high }) {
    const [width, height] = [Math.max(1, whole - GAP_PX), Math.max(1, high - GAP_PX)];
    const top = height > 3 * LABEL_PX && width > 4 * LABEL_PX ? LABEL_PX : 0;
    const name = make("span", { class: "group-name" }, label);
    place(name, { x, y, width, height: LABEL_PX });
    const areas = divide(cells.map((cell) => cell.size), { x, y: y + top, width, height: height - top });
    return [...(top ? [name] : []), ...cells.map(({ node, size }, i) => this.#drawCell(node, size, areas[i]))];
  }

  #drawCell(node, size, area) {
    const age = AGES.findIndex((limit) => Date.now() / 1000 - node.last_used_at < limit);
    const classes = ["cell", `age-${age < 0 ? AGES.length : age}`, node.n_pinned && node.level === "session" ? "pinned" : ""];
    const said = [this.#measure === "seconds" ? seconds(size) : bytes(size), `used ${ago(node.last_used_at)}`];
    const cell = make("button", {
      type: "button", class: classes.join(" "), "data-node": node.id, title: `${nodeName(node)}: ${said.join(", ")}`,
      "aria-label": `${nodeName(node)}, ${said.join(", ")}${node.n_pinned ? ", pinned" : ""}`, "aria-pressed": String(node.id === this.#selected),
      onclick: () => this.#select(node.id).catch(() => (this.#version = null)),
    }, make("span", { class: "title" }, nodeName(node)), make("span", { class: "quiet" }, said.join(" · ")));
    place(cell, area);
    cell.firstElementChild.style.webkitLineClamp = Math.max(1, Math.floor((area.height - 1.6 * LABEL_PX) / LINE_PX));
    if (area.width < 56 || area.height < 24) cell.replaceChildren();
    else if (area.height < 44) cell.lastElementChild.remove();
    return cell;
  }

  async #select(id) {
    const node = this.#nodes.find((each) => each.id === id);
    this.#selected = node ? id : null;
    for (const cell of this.#map.querySelectorAll("[data-node]")) cell.setAttribute("aria-pressed", String(cell.dataset.node === id));
    await this.#states.show(node ?? null, node ? nodeName(node) : "");
  }
}

function place(element, { x, y, width, height }) {
  Object.assign(element.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
}

function headerName(header, model, models) {
  const named = header.n_tokens ? `${header.client || "Header"}, ${counted(header.n_tokens, "token")}` : "No header";
  if (models.length < 2) return named;
  const isAlone = models.every((other) => other === model || other.model !== model.model);
  return `${named} · ${model.model ?? "another model"}${isAlone ? "" : ` (${model.id.slice(0, 4)})`}`;
}

function nodeName(node) {
  if (node.level === "header") return `Shared: ${node.n_tokens ? `header of ${counted(node.n_tokens, "token")}` : "no header"}`;
  return node.title || `Conversation ${node.id.split("/").at(-1).slice(0, 8)}`;
}
