// The live page: every overview that the proxy sends is given to the parts that show it.

import { byId } from "./dom.js";
import { Requests } from "./requests.js";
import { showSlots } from "./slots.js";
import { showConnection, showQueue, showState, showToday } from "./state.js";
import { Store } from "./store.js";
import { Stream } from "./stream.js";

const AGES_MS = 10000;

const requests = new Requests();
const store = new Store();
let last = null;

function show(overview) {
  last = overview;
  showState(overview);
  showToday(overview.today);
  showQueue(overview);
  requests.take(overview.requests, overview.keeps);
  showSlots(overview.servers, requests.latest, (id) => requests.show(id));
  store.take(overview.store);
  document.documentElement.dataset.shown = overview.position;
}

const stream = new Stream(show, showConnection);

byId("pause").addEventListener("click", (event) => {
  const isPaused = event.target.getAttribute("aria-pressed") !== "true";
  event.target.setAttribute("aria-pressed", String(isPaused));
  stream.isPaused = isPaused;
});

setInterval(() => last && showSlots(last.servers, requests.latest, (id) => requests.show(id)), AGES_MS);
