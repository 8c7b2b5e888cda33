// Builds elements. Whatever comes from a request is appended as text, so that it can never be markup.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Says something only if it is new: a live region would repeat it to screen readers.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Appends a text that names settings in `backticks`.
export const prose = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));

// A bar of shares of a whole, beside a text that says the same in numbers.
// *text* is one or more pieces; all but the first are left out where there is no room.
export function measure([text, ...more], whole, ...parts) {
  const spans = parts.map(([name, n]) => {
    const span = make("span", { class: name });
    span.style.width = `${whole ? Math.min(100, (100 * n) / whole) : 0}%`;
    return span;
  });
  const bar = make("div", { class: "bar", "aria-hidden": "true" }, ...spans);
  return make("div", { class: "measure" }, bar, make("span", { class: "quiet" }, text, ...more.map((piece) => make("span", { class: "wide" }, ` · ${piece}`))));
}

// Brings the children of a list to those of *items*, keeping the elements of those that stay.
export function reconcile(list, items, keyOf, create, update) {
  const focused = document.activeElement;
  const known = new Map([...list.children].map((child) => [child.dataset.key, child]));
  let place = list.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = known.get(key);
    known.delete(key);
    if (!element) {
      element = create(item);
      element.dataset.key = key;
    }
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else list.insertBefore(element, place);
  }
  for (const gone of known.values()) gone.remove();
  if (document.activeElement !== focused && focused.isConnected) focused.focus();
}

export async function fetchJson(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${path}: ${reply.status} ${await reply.text()}`);
  return reply.json();
}
