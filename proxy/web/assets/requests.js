// The last requests, the newest first; each can be opened to see why it reused no more.

import { byId, fetchJson, make, measure, say } from "./dom.js";
import { explanation } from "./explanation.js";
import { clock, counted, number, percent, seconds } from "./words.js";

const N_SHOWN = 20;
const N_MORE = 150;
const NARROW = matchMedia("(max-width: 40rem)");

// One column more than are shown would be an empty one.
const nColumns = () => (NARROW.matches ? 4 : 5);

export class Requests {
  #body = byId("requests").tBodies[0];
  #records = [];
  #keeps = "text";
  #nShown = N_SHOWN;

  constructor() {
    byId("older").addEventListener("click", () => this.#showOlder());
    NARROW.addEventListener("change", () => {
      for (const row of this.#body.querySelectorAll(".detail")) row.cells[0].colSpan = nColumns();
    });
  }

  get latest() {
    return this.#records;
  }

  // Takes what is new, the newest first.
  take(records, keeps) {
    this.#keeps = keeps;
    const known = new Set(this.#records.map((record) => record.id));
    const fresh = records.filter((record) => !known.has(record.id));
    if (!fresh.length) return;
    const isFirst = !this.#records.length;
    this.#records = [...fresh, ...this.#records];
    const rows = fresh.map((record) => this.#row(record));
    if (!isFirst) {
      rows.forEach((row) => row.classList.add("just-come"));
      say(byId("news"), `${counted(fresh.length, "new request")}. The last: ${fresh[0].cause}, ${reuseWords(fresh[0]).join(", ")}`);
    }
    this.#body.prepend(...rows);
    this.#trim();
    byId("no-requests").hidden = true;
  }

  // Opens a request, wherever it is mentioned, and goes there.
  async show(id) {
    let row = this.#find(id);
    if (!row) {
      await this.#showOlder();
      row = this.#find(id);
    }
    const button = row?.querySelector("button[aria-expanded]");
    if (!button) return say(byId("news"), `Request ${id} is not known any more.`);
    if (button.getAttribute("aria-expanded") === "false") button.click();
    button.focus();
  }

  #find(id) {
    return this.#body.querySelector(`tr[data-id="${CSS.escape(id)}"]`);
  }

  #row(record) {
    const button = make("button", {
      type: "button", class: "plain", "aria-expanded": "false", "aria-controls": `why-${record.id}`,
      onclick: () => this.#toggle(record, button),
    }, record.cause === "not looked up" ? (record.why ?? record.cause) : record.cause);
    return make("tr", { "data-id": record.id },
      make("th", { scope: "row", class: "time" }, clock(record.at)),
      make("td", {}, reuse(record)),
      make("td", { class: "number" }, duration(record.first_token_seconds)),
      make("td", { class: "number wide" }, record.saved_seconds ? seconds(record.saved_seconds) : "–"),
      make("td", {}, button));
  }

  async #toggle(record, button) {
    const row = button.closest("tr");
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) return row.nextElementSibling.remove();
    const cell = make("td", { colspan: nColumns() }, "Loading …");
    row.after(make("tr", { class: "detail", id: `why-${record.id}` }, cell));
    try {
      const found = await fetchJson(`requests/${encodeURIComponent(record.id)}`);
      cell.replaceChildren(explanation(found, this.#keeps, (id) => this.show(id)));
    } catch {
      cell.replaceChildren("This request is not known any more.");
    }
  }

  async #showOlder() {
    this.#nShown += N_MORE;
    const { requests } = await fetchJson(`requests?limit=${this.#nShown}`);
    const known = new Set(this.#records.map((record) => record.id));
    const older = requests.filter((record) => !known.has(record.id));
    this.#records = [...this.#records, ...older];
    this.#body.append(...older.map((record) => this.#row(record)));
    byId("older").hidden = requests.length < this.#nShown;
  }

  #trim() {
    for (const record of this.#records.splice(this.#nShown)) {
      const row = this.#find(record.id);
      const detail = byId(`why-${record.id}`);
      detail?.remove();
      row?.remove();
      byId("older").hidden = false;
    }
    if (this.#records.length >= this.#nShown) byId("older").hidden = false;
  }
}

const duration = (n) => (n === null ? "–" : seconds(n));

function reuse(record) {
  const [text, ...more] = reuseWords(record);
  if (!more.length) return make("span", { class: "quiet" }, text);
  // What was known may be counted in tokens of the older prompt, which can be longer.
  const missed = Math.min(record.n_missed, record.n_prompt - record.confirmed);
  return measure([text, ...more], record.n_prompt, ["reused", record.confirmed], ["missed", missed]);
}

function reuseWords(record) {
  const { confirmed, n_prompt: whole } = record;
  if (whole === null || confirmed === null) return [record.outcome];
  return [percent(confirmed, whole), `${number(confirmed)} of ${number(whole)}`];
}
