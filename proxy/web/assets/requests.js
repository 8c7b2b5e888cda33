// The last requests, the newest first, all or chosen ones; each can be opened to see why it reused no more.

import { byId, choice, fetchJson, make, measure, say } from "./dom.js";
import { explanation, isMiss } from "./explanation.js";
import { partsOf, showTurns } from "./turns.js";
import { clock, counted, nameOf, number, percent, seconds } from "./words.js";

const N_SHOWN = 12;
const N_MORE = 150;
const N_COLUMNS = 6;
const NONE_IS_CHOSEN = { onlyMisses: false, client: "", conversation: "" };

export class Requests {
  #body = byId("requests").tBodies[0];
  #records = [];
  #recent = []; // whatever is chosen
  #keeps = "text";
  #nShown = N_SHOWN;
  #chosen = NONE_IS_CHOSEN;
  #pressWhich;

  constructor() {
    byId("older").addEventListener("click", () => this.#showOlder());
    byId("client").addEventListener("change", (event) => this.choose({ client: event.target.value }));
    byId("every-conversation").addEventListener("click", () => this.choose({ conversation: "" }));
    this.#pressWhich = choice(byId("which"), { all: "All", misses: "Misses only" }, (which) => this.choose({ onlyMisses: which === "misses" }));
    this.#pressWhich("all");
  }

  get latest() {
    return this.#recent;
  }

  // Takes what is new, the newest first.
  take(records, keeps) {
    this.#keeps = keeps;
    const known = new Set(this.#recent.map((record) => record.id));
    const news = records.filter((record) => !known.has(record.id));
    if (!news.length) return;
    const isFirst = !this.#recent.length;
    this.#recent = [...news, ...this.#recent].slice(0, 2 * N_MORE);
    this.#offerClients();
    const loaded = new Set(this.#records.map((record) => record.id)); // while the page was paused
    const fresh = news.filter((record) => this.#isChosen(record) && !loaded.has(record.id));
    this.#records = [...fresh, ...this.#records];
    const rows = fresh.map((record) => this.#row(record));
    if (!isFirst && fresh.length) {
      rows.forEach((row) => row.classList.add("just-come"));
      say(byId("news"), `${counted(fresh.length, "new request")}. The last: ${fresh[0].cause}, ${reuseWords(fresh[0]).join(", ")}`);
    }
    this.#body.prepend(...rows);
    this.#trim();
    this.#showWhatIsChosen();
  }

  // Shows only misses, one client or one conversation; what is not named stays as it was chosen.
  async choose(wanted) {
    const isAll = wanted.onlyMisses === false && this.#chosen.conversation;
    this.#chosen = { ...(isAll ? NONE_IS_CHOSEN : this.#chosen), ...wanted };
    this.#nShown = N_SHOWN;
    this.#pressWhich(this.#chosen.onlyMisses ? "misses" : "all");
    byId("client").value = this.#chosen.client;
    byId("requests-title").focus();
    await this.#load();
  }

  #isChosen(record) {
    const { onlyMisses, client, conversation } = this.#chosen;
    if (onlyMisses && !isMiss(record)) return false;
    return (!client || record.client === client) && (!conversation || record.conversation === conversation);
  }

  async #load() {
    const chosen = this.#chosen;
    const { onlyMisses, client, conversation } = chosen;
    const limit = conversation ? N_MORE : this.#nShown;
    const query = new URLSearchParams({ limit, misses: onlyMisses, client, conversation });
    const requests = await fetchJson(`requests?${query}`).then((found) => found.requests, () =>
      this.#recent.filter((record) => this.#isChosen(record)).slice(0, limit)); // the proxy is away
    if (chosen !== this.#chosen) return; // others were chosen meanwhile
    this.#records = requests;
    this.#body.replaceChildren(...requests.map((record) => this.#row(record)));
    byId("older").hidden = requests.length < limit;
    this.#showWhatIsChosen();
  }

  #showWhatIsChosen() {
    const { conversation, onlyMisses, client } = this.#chosen;
    const close = byId("every-conversation");
    close.hidden = !conversation;
    say(close, "✕ This conversation only");
    if (conversation) showTurns(this.#records, (id) => this.show(id));
    else byId("turns").hidden = true;
    byId("no-requests").hidden = this.#records.length > 0;
    const missed = onlyMisses ? "No request has missed what was known" : "No request has come yet";
    say(byId("no-requests"), client || conversation ? "No such request is known." : `${missed}.`);
  }

  #offerClients() {
    const select = byId("client");
    const known = new Set([...select.options].map((option) => option.value));
    for (const { client } of this.#recent) {
      if (client && !known.has(client)) select.append(make("option", { value: client }, client));
      known.add(client);
    }
  }

  // Opens a request, wherever it is mentioned, and goes there.
  async show(id) {
    if (!this.#find(id)) {
      this.#chosen = NONE_IS_CHOSEN;
      this.#pressWhich("all");
      byId("client").value = "";
      await this.#showOlder();
    }
    if (!this.#find(id)) await this.#showOldest(id);
    const button = this.#find(id)?.querySelector("button[aria-expanded]");
    if (!button) return say(byId("news"), `Request ${id} is not known any more.`);
    if (button.getAttribute("aria-expanded") === "false") button.click();
    button.focus();
  }

  // The proxy remembers more requests than the page has loaded.
  async #showOldest(id) {
    const found = await fetchJson(`requests/${encodeURIComponent(id)}`).catch(() => null);
    if (!found) return;
    this.#records.push(found.request);
    this.#body.append(this.#row(found.request));
  }

  #find(id) {
    return this.#body.querySelector(`tr[data-id="${CSS.escape(id)}"]`);
  }

  #row(record) {
    const button = make("button", {
      type: "button", class: isMiss(record) ? "plain miss" : "plain", "aria-expanded": "false", "aria-controls": `why-${record.id}`,
      onclick: () => this.#toggle(record, button),
    }, saysWhy(record) ? (record.why ?? record.cause) : record.cause);
    const title = make("button", { type: "button", class: "link title", onclick: () => this.choose({ conversation: record.conversation }) }, nameOf(record));
    const from = [record.kind, record.client, record.server ?? record.model].filter(Boolean).join(" · ");
    return make("tr", { "data-id": record.id },
      make("th", { scope: "row", class: "time" }, clock(record.at)),
      make("td", { class: "cut" }, title, make("span", { class: "quiet from" }, from), make("div", { class: "narrow" }, reuse(record))),
      make("td", { class: "wide" }, reuse(record)),
      make("td", { class: "number wide" }, duration(record.first_token_seconds)),
      make("td", { class: "number wide" }, record.saved_seconds > 0 ? seconds(record.saved_seconds) : "–"),
      make("td", {}, button));
  }

  async #toggle(record, button) {
    const row = button.closest("tr");
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) return row.nextElementSibling.remove();
    const cell = make("td", { colspan: N_COLUMNS }, "Loading …");
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
    await this.#load();
  }

  #trim() {
    for (const record of this.#records.splice(Math.max(this.#nShown, this.#chosen.conversation ? N_MORE : 0))) {
      byId(`why-${record.id}`)?.remove();
      this.#find(record.id)?.remove();
      byId("older").hidden = false;
    }
    if (this.#records.length >= this.#nShown) byId("older").hidden = false;
  }
}

const saysWhy = ({ cause, outcome }) => cause === "not looked up" || outcome === "unanswered";

const duration = (n) => (n === null ? "–" : seconds(n));

function reuse(record) {
  const [text, ...more] = reuseWords(record);
  if (!more.length) return make("span", { class: "quiet" }, text);
  const [reused, missed] = partsOf(record);
  return measure([text, ...more], record.n_prompt, ["reused", reused], ["missed", missed]);
}

function reuseWords(record) {
  const { confirmed, n_prompt: whole } = record;
  if (whole === null || confirmed === null) return [record.outcome];
  return [percent(confirmed, whole), `${number(confirmed)} of ${number(whole)}`];
}
