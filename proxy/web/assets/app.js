// The live page: every overview that the proxy sends is given to the parts that show it.

import { byId } from "./dom.js";
import { Figures } from "./figures.js";
import { showFlights, showQueue } from "./flights.js";
import { History } from "./history.js";
import { Requests } from "./requests.js";
import { showSlots } from "./slots.js";
import { showConnection, showState, showWelcome } from "./state.js";
import { Store } from "./store.js";
import { Stream } from "./stream.js";

const AGES_MS = 1000;

const requests = new Requests();
const store = new Store();
const history = new History();
const figures = new Figures({
  showRequests: () => requests.choose({ onlyMisses: false }),
  showMisses: () => requests.choose({ onlyMisses: true }),
  showSeconds: () => history.show({ unit: "seconds" }),
  showStore: () => byId("store-title").focus(),
});
let last = null;

function show(overview) {
  last = overview;
  showState(overview);
  showWelcome(overview);
  figures.show(overview);
  requests.take(overview.requests, overview.keeps);
  history.take(overview.position);
  store.take(overview.store);
  showTimes();
  document.documentElement.dataset.shown = overview.position;
}

// What changes with the time, too.
function showTimes() {
  showQueue(last);
  showFlights(last);
  showSlots(last.servers, [...last.in_flight, ...requests.latest], (conversation) => requests.choose({ conversation }));
}

const stream = new Stream(show, showConnection);

byId("pause").addEventListener("click", (event) => {
  const isPaused = event.target.getAttribute("aria-pressed") !== "true";
  event.target.setAttribute("aria-pressed", String(isPaused));
  stream.isPaused = isPaused;
});

setInterval(() => last && !document.hidden && showTimes(), AGES_MS);
