// Follows the proxy: asks what has changed, as long as somebody looks at the page.

import { fetchJson } from "./dom.js";

const ASK_MS = 500;
const ASK_AGAIN_MS = 4000;

export class Stream {
  #timer = null;
  #round = 0;
  #position = "";
  #told = "";
  #isPaused = false;

  constructor(onOverview, onConnection) {
    this.onOverview = onOverview;
    this.onConnection = onConnection;
    document.addEventListener("visibilitychange", () => this.#follow());
    this.#follow();
  }

  set isPaused(isPaused) {
    this.#isPaused = isPaused;
    this.#follow();
  }

  #follow() {
    clearTimeout(this.#timer);
    this.#round += 1;
    if (this.#isPaused) this.onConnection("paused");
    else if (!document.hidden) this.#ask(this.#round);
  }

  async #ask(round) {
    const path = `overview?since=${encodeURIComponent(this.#position)}`;
    const overview = await fetchJson(path).catch(() => null);
    if (round !== this.#round) return; // paused, hidden or begun anew meanwhile
    if (overview) this.#take(overview);
    this.onConnection(overview ? "live" : "gone");
    this.#timer = setTimeout(() => this.#ask(round), overview ? ASK_MS : ASK_AGAIN_MS);
  }

  #take(overview) {
    const told = JSON.stringify(overview);
    if (told === this.#told) return;
    this.#told = told;
    this.#position = overview.position;
    this.onOverview(overview);
  }
}
