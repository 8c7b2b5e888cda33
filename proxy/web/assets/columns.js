// Stacked columns: what was reused lies below, what was known and evaluated above it, and what was new on top.

import { make } from "./dom.js";

const KINDS = ["reused", "missed", "fresh"];

// *items* have `parts` (reused, missed, new), a `title`, and where they lead, an `onclick`.
export function showColumns(figure, items, { axis, top }) {
  const most = Math.max(...items.map(({ parts }) => total(parts)), 0);
  const columns = items.map((item) => makeColumn(item, most));
  figure.replaceChildren(
    make("span", { class: "top quiet", "aria-hidden": "true" }, most ? top(most) : ""),
    make("div", { class: "stacks" }, ...columns),
    make("div", { class: "axis quiet", "aria-hidden": "true" }, ...axis.map((text) => make("span", {}, text))));
}

export const total = (parts) => parts.reduce((sum, n) => sum + n, 0);

function makeColumn({ parts, title, onclick }, most) {
  const stack = parts.map((n, i) => {
    const part = make("span", { class: KINDS[i] });
    part.style.height = `${most ? Math.max(0, (100 * n) / most) : 0}%`;
    return part;
  });
  if (!onclick) return make("div", { class: "stack", title }, ...stack);
  return make("button", { type: "button", class: "stack", title, "aria-label": title, onclick }, ...stack);
}
