// Why one request reused no more than it did.

import { make, prose } from "./dom.js";
import { difference } from "./difference.js";
import { capital, counted, number, seconds } from "./words.js";

const PARTS = {
  tools: "in the tools",
  system: "in the system prompt",
  user: "in a message of the user",
  assistant: "in an answer of the model",
  tool: "in a tool's result",
  text: "in the text",
};
const NOT_MISSES = ["hit", "first sight", "not looked up", "refused", "not answered to its end"];

export const isMiss = ({ cause }) => !NOT_MISSES.includes(cause);

const N_LARGEST = 12;

export function explanation({ request, says, cure, nearest, divergence, costs }, keeps, show) {
  return make("div", { class: "explanation" },
    make("p", {}, make("strong", {}, `${capital(request.cause)}. `), ...prose(says)),
    isMiss(request) ? make("p", {}, make("strong", {}, "What helps: "), ...prose(cure)) : null,
    divergence ? texts(divergence, keeps) : null,
    facts(request, nearest, divergence, show),
    costs.length ? parts(costs) : null);
}

// About what the prompt is made of: its largest parts, and which of them the compared prompt had not.
function parts(costs) {
  const largest = [...costs].sort((a, b) => b.n_tokens - a.n_tokens).slice(0, N_LARGEST);
  const rows = largest.map((cost) => make("tr", {},
    make("td", { class: "number" }, number(cost.n_tokens)),
    make("td", {}, [cost.part, cost.name || (cost.message === null ? "" : `message ${cost.message}`)].filter(Boolean).join(" ")),
    make("td", {}, cost.is_changed ? "changed or new" : "")));
  const nTools = costs.filter(({ part }) => part === "tools").reduce((sum, cost) => sum + cost.n_tokens, 0);
  const summary = `About what it costs, in tokens: ${counted(costs.length, "part")}, tools ${number(nTools)}`;
  return make("details", {}, make("summary", {}, summary), make("table", {}, make("tbody", {}, ...rows)));
}

function facts(request, nearest, divergence, show) {
  const list = make("dl");
  const add = (name, ...value) => value.some(Boolean) && list.append(make("dt", {}, name), make("dd", {}, ...value));
  add("Request", `${request.kind ? `${request.kind} · ` : ""}${request.id} · ${request.path} · ${request.outcome}${request.status ? ` · status ${request.status}` : ""}`);
  add("Prompt", reuse(request));
  if (divergence) add("Where", `${place(divergence)}, behind ${counted(nearest.n_common, "equal token")}`);
  if (nearest) add("Compared with", ...compared(nearest, show));
  const isRefused = request.cause === "refused";
  add("Error", isRefused && request.why);
  add("Plan", !isRefused && plan(request));
  add("Not chosen", request.alternatives?.join("; "));
  add("Times", times(request));
  add("Rewritten by", request.rewrites?.join(", "));
  return list;
}

function reuse(request) {
  if (request.n_prompt === null || request.confirmed === null) return null;
  const parts = [`${number(request.confirmed)} of ${counted(request.n_prompt, "token")} reused`];
  if (request.n_missed) parts.push(`${number(request.n_missed)} known, yet evaluated`);
  if (request.expected !== request.confirmed) parts.push(`${number(request.expected ?? 0)} were expected`);
  return parts.join(", ");
}

function place(divergence) {
  const part = PARTS[divergence.part] ?? "somewhere";
  return capital(part + (divergence.message === null ? "" : ` (message ${divergence.message})`));
}

function compared(nearest, show) {
  const common = counted(nearest.n_common, "token");
  if (nearest.id === null) return [`a kept state, with ${common} in common`];
  const link = make("button", { type: "button", class: "link", onclick: () => show(nearest.id) }, `request ${nearest.id}`);
  return [link, `, ${seconds(nearest.age_seconds ?? 0)} before: ${common} of its ${number(nearest.n_tokens ?? 0)} in common`];
}

function plan(request) {
  const parts = [request.chosen, request.why];
  if (request.slot !== null) parts.push(`slot ${request.slot}`);
  if (request.expected_seconds !== null) parts.push(`expected to take ${seconds(request.expected_seconds)}`);
  if (request.stops?.length) parts.push(`stops at ${request.stops.map(number).join(", ")}`);
  return parts.filter(Boolean).join(" · ");
}

function times(request) {
  const parts = [
    ["waited", request.queued_seconds], ["prepared", request.prepared_seconds],
    ["first token", request.first_token_seconds], ["whole answer", request.seconds], ["saved", request.saved_seconds > 0 ? request.saved_seconds : null],
  ];
  return parts.filter(([, n]) => n !== null).map(([name, n]) => `${name} ${seconds(n)}`).join(" · ");
}

function texts(divergence, keeps) {
  if (!divergence.known && !divergence.now) return make("p", { class: "quiet" }, `The texts are not kept: explain_keep is ${keeps}.`);
  // Prompts part within a word as often as not.
  const [begun] = divergence.before.match(/[\p{L}\p{N}_]*$/u);
  const before = divergence.before.slice(0, divergence.before.length - begun.length);
  const [old, now] = difference(begun + divergence.known, begun + divergence.now);
  return make("figure", { class: "texts" },
    make("figcaption", {}, "Known before"), line(before, old, "del"),
    make("figcaption", {}, "Now"), line(before, now, "ins"));
}

function line(before, pieces, mark) {
  const marked = pieces.map(([text, isChanged]) => (isChanged ? make(mark, {}, visible(text)) : text));
  return make("pre", {}, make("span", { class: "same" }, before ? `… ${before}` : ""), ...marked, " …");
}

// White space that has changed would be marked, but not seen.
const visible = (text) => text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥").replace(/^ +$/, (spaces) => "␣".repeat(spaces.length));
