// Follows the proxy: by its event stream, and where that breaks by asking every few seconds.

import { fetchJson } from "./dom.js";

const POLL_MS = 4000;
const STREAM_AGAIN_MS = 15000;

export class Stream {
  #source = null;
  #timer = null;
  #position = "";
  #openedAt = 0;
  #isPaused = false;

  constructor(onOverview, onConnection) {
    this.onOverview = onOverview;
    this.onConnection = onConnection;
    // Browsers allow few connections to one host: pages that nobody sees give theirs back.
    document.addEventListener("visibilitychange", () => this.#follow());
    this.#follow();
  }

  set isPaused(isPaused) {
    this.#isPaused = isPaused;
    this.#follow();
  }

  #follow() {
    this.#close();
    if (this.#isPaused) this.onConnection("paused");
    else if (!document.hidden) this.#open();
  }

  #open() {
    this.#openedAt = Date.now();
    this.#source = new EventSource(`events?since=${encodeURIComponent(this.#position)}`);
    this.#source.onmessage = (event) => {
      this.#take(JSON.parse(event.data));
      this.onConnection("live");
    };
    this.#source.onerror = () => {
      this.#close();
      this.#poll();
    };
  }

  async #poll() {
    try {
      this.#take(await fetchJson(`overview?since=${encodeURIComponent(this.#position)}`));
      this.onConnection("polling");
    } catch {
      this.onConnection("gone");
    }
    if (this.#source || this.#isPaused || document.hidden) return;
    const isDue = Date.now() - this.#openedAt > STREAM_AGAIN_MS;
    this.#timer = setTimeout(() => (isDue ? this.#open() : this.#poll()), POLL_MS);
  }

  #take(overview) {
    this.#position = overview.position;
    this.onOverview(overview);
  }

  #close() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }
}
