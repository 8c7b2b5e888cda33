// The last two hours by minutes, and the last 30 days by days.

import { byId, choice, fetchJson, kept, say } from "./dom.js";
import { showColumns, total } from "./columns.js";
import { counted, day, hour, number, percent, short, span } from "./words.js";

const REST_MS = 5000; // a busy proxy has news all the time
const TURN_MS = 60000;
const N_MINUTES = 120;
const N_DAYS = 30;

export class History {
  #kept = { minutes: [], hours: [] };
  #period = kept.get("period") ?? "hours";
  #unit = kept.get("unit") ?? "tokens";
  #position = null;
  #timer = null;
  #press;

  constructor() {
    this.#press = {
      period: choice(byId("period"), { hours: "2 hours", days: "30 days" }, (period) => this.show({ period })),
      unit: choice(byId("unit"), { tokens: "tokens", seconds: "seconds" }, (unit) => this.show({ unit })),
    };
    setInterval(() => document.hidden || this.show({}), TURN_MS);
    this.show({});
  }

  // Asks for the history again when requests have ended since.
  take(position) {
    if (position === this.#position || this.#timer !== null) return;
    const isFirst = this.#position === null;
    this.#position = position;
    this.#timer = setTimeout(() => this.#load(), isFirst ? 0 : REST_MS);
  }

  async #load() {
    try {
      this.#kept = await fetchJson("history");
      this.show({});
    } catch {
      this.#position = null; // the proxy is away
    } finally {
      this.#timer = null;
    }
  }

  show({ period = this.#period, unit = this.#unit }) {
    [this.#period, this.#unit] = [period, unit];
    this.#press.period(period);
    this.#press.unit(unit);
    kept.set("period", period);
    kept.set("unit", unit);
    const spans = period === "hours" ? minutes(this.#kept.minutes) : days(this.#kept.hours);
    const isTokens = unit === "tokens";
    const partsOf = (s) => (isTokens ? s.tokens : s.seconds);
    const amount = (n) => (isTokens ? counted(Math.round(n), "token") : span(n));
    showColumns(byId("history"), spans.map((s) => ({ parts: partsOf(s), title: describe(s, partsOf(s), amount) })), {
      top: (most) => (isTokens ? short(most) : span(most)),
      axis: period === "hours" ? ["2 hours ago", "1 hour ago", "now"] : [spans[0].name, spans[N_DAYS / 2].name, "today"],
    });
    const sums = [0, 1, 2].map((i) => spans.reduce((sum, s) => sum + partsOf(s)[i], 0));
    const n = spans.reduce((count, s) => count + s.n, 0);
    const when = period === "hours" ? "In the last two hours" : "In the last 30 days";
    say(byId("history-sum"), n ? `${when}: ${describe({ name: "", n }, sums, amount)}` : `${when} no request has ended.`);
  }
}

function describe({ name, n }, parts, amount) {
  const [reused, missed] = parts;
  const whole = total(parts);
  const said = [counted(n, "request")];
  if (whole) said.push(`${percent(reused, whole)} of ${amount(whole)} reused`);
  if (missed) said.push(`${amount(missed)} known, yet evaluated`);
  return (name ? `${name}: ` : "") + said.join(", ");
}

// A span as the proxy keeps it: when it began, then what was counted.
function add(into, [, n, , reused, missed, fresh, savedSeconds, missedSeconds, newSeconds]) {
  into.n += n;
  [reused, missed, fresh].forEach((tokens, i) => (into.tokens[i] += tokens));
  [savedSeconds, missedSeconds, newSeconds].forEach((seconds, i) => (into.seconds[i] += Math.max(0, seconds)));
}

const empty = (name) => ({ name, n: 0, tokens: [0, 0, 0], seconds: [0, 0, 0] });

function minutes(spans) {
  const last = Math.floor(Date.now() / 60000);
  const all = Array.from({ length: N_MINUTES }, (_, i) => empty(hour((last - N_MINUTES + 1 + i) * 60)));
  for (const kept of spans) {
    const i = kept[0] / 60 - (last - N_MINUTES + 1);
    if (all[i]) add(all[i], kept);
  }
  return all;
}

function days(spans) {
  const begin = new Date();
  begin.setHours(0, 0, 0, 0);
  const all = new Map();
  for (let i = N_DAYS - 1; i >= 0; i--) {
    const at = new Date(begin);
    at.setDate(begin.getDate() - i);
    all.set(at.toDateString(), empty(day(at / 1000)));
  }
  for (const kept of spans) {
    const into = all.get(new Date(kept[0] * 1000).toDateString());
    if (into) add(into, kept);
  }
  return [...all.values()];
}
