// What was reused and saved today; each figure leads to what it counts.

import { byId, kept, make, reconcile, say } from "./dom.js";
import { bytes, counted, energy, hour, number, percent, span } from "./words.js";

const WATTS = "watts";

export class Figures {
  #actions;
  #overview = null;
  #watts = Number(kept.get(WATTS)) || 0;

  constructor(actions) {
    this.#actions = actions;
  }

  show(overview) {
    this.#overview = overview;
    const { today, store } = overview;
    const isWhole = new Date(today.since * 1000).getHours() === 0;
    say(byId("today-title"), isWhole ? "Today" : `Today, since ${hour(today.since)}`);
    reconcile(byId("figures"), this.#figures(today, store), ({ name }) => name,
      (figure) => (figure.name === WATTS ? this.#makeEnergy() : makeFigure(figure)), update);
  }

  #figures(today, store) {
    const saved = Math.max(0, today.saved_seconds);
    const { showRequests, showMisses, showSeconds, showStore } = this.#actions;
    return [
      {
        name: "reused", value: today.n_prompt ? percent(today.n_reused, today.n_prompt) : "–", label: "of prompts reused",
        note: `${number(today.n_reused)} of ${counted(today.n_prompt, "token")}`, action: showRequests,
      },
      {
        name: "saved", value: saved ? span(saved) : "–", label: "of evaluation saved",
        note: today.n_reused ? `${number(today.n_reused - today.n_restored)} tokens lay in slots, ${number(today.n_restored)} on disk` : "nothing yet",
        action: showSeconds,
      },
      { name: WATTS, value: this.#watts && saved ? energy((saved * this.#watts) / 3600) : "–", label: "of energy saved" },
      {
        name: "missed", value: number(today.n_missing), label: today.n_missing === 1 ? "request missed" : "requests missed",
        note: today.n_missing ? `${counted(today.n_missed, "token")} known, yet evaluated` : `of ${counted(today.n_requests, "request")}`,
        action: showMisses, isBad: today.n_missing > 0,
      },
      {
        name: "store", value: store ? bytes(store.size_bytes) : "–", label: "stored",
        note: store ? `of ${bytes(store.max_bytes)}, ${counted(store.n_checkpoints, "state")}` : "the store is not open", action: showStore,
      },
    ];
  }

  #makeEnergy() {
    const input = make("input", {
      type: "number", min: 0, max: 100000, step: 10, value: this.#watts || null, placeholder: "350", "aria-label": "Watts while it evaluates",
    });
    input.addEventListener("input", () => {
      this.#watts = Math.max(0, Number(input.value) || 0);
      kept.set(WATTS, this.#watts);
      this.show(this.#overview);
    });
    return make("div", { class: "figure" }, ...valueAndLabel(), make("span", { class: "note quiet" }, "at ", input, " watts"));
  }
}

const valueAndLabel = () => [make("span", { class: "value" }), make("span", { class: "label" })];

function makeFigure({ action }) {
  return make("button", { type: "button", class: "figure", onclick: action }, ...valueAndLabel(), make("span", { class: "note quiet" }));
}

function update(element, { value, label, note, isBad }) {
  say(element.querySelector(".value"), value);
  say(element.querySelector(".label"), label);
  element.classList.toggle("bad", Boolean(isBad));
  if (note !== undefined) say(element.querySelector(".note"), note);
}
