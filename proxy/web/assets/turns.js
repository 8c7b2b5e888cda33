// One conversation as a picture: each of its requests as a column, the first one on the left.

import { byId, say } from "./dom.js";
import { showColumns } from "./columns.js";
import { clock, counted, nameOf, number, percent, short } from "./words.js";

// *records* are its requests, the newest first; *show* opens one of them.
export function showTurns(records, show) {
  const figure = byId("turns");
  const turns = records.filter(({ n_prompt: whole, confirmed }) => whole !== null && confirmed !== null).reverse();
  figure.hidden = !turns.length;
  if (!turns.length) return;
  const last = turns.at(-1);
  const about = [last.client, last.model, counted(turns.length, "request"), `${number(last.n_prompt)} tokens long`];
  say(figure.querySelector("figcaption .title"), nameOf(last));
  say(figure.querySelector("figcaption .quiet"), about.filter(Boolean).join(" · "));
  showColumns(figure.querySelector(".columns"), turns.map((turn) => ({
    parts: partsOf(turn),
    title: `${clock(turn.at)}: ${percent(turn.confirmed, turn.n_prompt)} of ${counted(turn.n_prompt, "token")} reused, ${turn.cause}`,
    onclick: () => show(turn.id),
  })), { top: short, axis: [clock(turns[0].at), turns.length > 1 ? clock(last.at) : ""] });
}

export const partsOf = ({ n_prompt: whole, confirmed, n_missed: missed }) => [confirmed, missed, whole - confirmed - missed];
