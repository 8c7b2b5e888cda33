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

// Keeps what the user has chosen, as far as the browser allows that.
export const kept = {
  get(name) {
    try {
      return localStorage.getItem(name);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(name, value);
    } catch {
      // Then it lasts as long as the page.
    }
  },
};

// Fills a group with one button for each of *options*, a name and its label; returns what presses one.
export function choice(group, options, onChoose) {
  const buttons = Object.entries(options).map(([name, label]) =>
    make("button", { type: "button", "data-name": name, onclick: () => choose(name) }, label));
  const press = (name) => buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.name === name)));
  const choose = (name) => {
    press(name);
    onChoose(name);
  };
  group.replaceChildren(...buttons);
  return press;
}

// The shares of a whole, side by side.
export function bar(whole, ...parts) {
  const spans = parts.map(([name, n]) => {
    const span = make("span", { class: name });
    span.style.width = `${whole ? Math.max(0, Math.min(100, (100 * n) / whole)) : 0}%`;
    return span;
  });
  return make("div", { class: "bar", "aria-hidden": "true" }, ...spans);
}

// A bar beside a text that says the same in numbers.
// *text* is one or more pieces; all but the first are left out where there is no room.
export function measure([text, ...more], whole, ...parts) {
  const words = more.map((piece) => make("span", { class: "wide" }, ` · ${piece}`));
  return make("div", { class: "measure" }, bar(whole, ...parts), make("span", { class: "quiet" }, text, ...words));
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

export async function fetchJson(path, method = "GET") {
  const reply = await fetch(path, { cache: "no-store", method });
  const content = await reply.json();
  if (!reply.ok) throw new Error(content.error ?? `${reply.status}`);
  return content;
}
