// The last two hours by minutes, and the last 30 days by days.

import { byId, choice, fetchJson, kept, say } from "./dom.js";
import { showColumns, total } from "./columns.js";
import { counted, day, hour, percent, seconds, short } from "./words.js";

const REST_MS = 5000; // a busy proxy has news all the time
const TURN_MS = 60000;
const N_MINUTES = 120;
const N_DAYS = 30;

export class History {
  #kept = { minutes: [], hours: [], isAsked: true };
  #period = kept.get("period") ?? "hours";
  #unit = kept.get("unit") ?? "tokens";
  #position = null;
  #timer = null;
  #press;

  constructor() {
    this.#press = {
      period: choice(byId("period"), { hours: "2 hours", days: "30 days" }, (period) => this.show({ period })),
      unit: choice(byId("unit"), { tokens: "tokens", seconds: "seconds saved" }, (unit) => this.show({ unit })),
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
    const said = isTokens ? tokensSaid : secondsSaid;
    showColumns(byId("history"), spans.map((s) => ({ parts: partsOf(s), title: `${s.name}: ${describe(s.n, said(partsOf(s)))}` })), {
      top: isTokens ? short : seconds,
      axis: period === "hours" ? ["2 hours ago", "1 hour ago", "now"] : [spans[0].name, spans[N_DAYS / 2].name, "today"],
    });
    const sums = partsOf(spans[0]).map((_, i) => spans.reduce((sum, s) => sum + partsOf(s)[i], 0));
    const n = spans.reduce((count, s) => count + s.n, 0);
    const when = period === "hours" ? "In the last two hours" : "In the last 30 days";
    const none = this.#kept.isAsked ? "" : `${when} no request has ended.`;
    say(byId("history-sum"), n ? `${when}: ${describe(n, said(sums))}` : none);
  }
}

const describe = (n, said) => [counted(n, "request"), ...said].join(", ");

function tokensSaid(parts) {
  const [reused, missed] = parts;
  const whole = total(parts);
  const said = whole ? [`${percent(reused, whole)} of ${counted(whole, "token")} reused`] : [];
  return missed ? [...said, `${counted(missed, "token")} known, yet evaluated`] : said;
}

const secondsSaid = ([saved]) => (saved > 0 ? [`${seconds(saved)} saved`] : []);

// A span as the proxy keeps it: when it began, then what was counted.
function add(into, [, n, , reused, missed, fresh, savedSeconds]) {
  into.n += n;
  [reused, missed, fresh].forEach((tokens, i) => (into.tokens[i] += tokens));
  into.seconds[0] += savedSeconds; // below zero if restores took longer than evaluating
}

const empty = (name) => ({ name, n: 0, tokens: [0, 0, 0], seconds: [0] });

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
