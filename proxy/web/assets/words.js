// Numbers and times as people read them.

const NUMBER = new Intl.NumberFormat("en");
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const MINUTE = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact" });
const DAY = new Intl.DateTimeFormat("en", { month: "short", day: "numeric" });

export const number = (n) => NUMBER.format(n);
export const short = (n) => COMPACT.format(n);
export const hour = (at) => MINUTE.format(new Date(at * 1000));
export const day = (at) => DAY.format(new Date(at * 1000));

// What people know a request's conversation by.
export const nameOf = ({ title, client, path, conversation }) => title || client || path || `Conversation ${conversation}`;

export const energy = (wattHours) => (wattHours < 999.5 ? `${wattHours.toPrecision(2) / 1} Wh` : `${(wattHours / 1000).toFixed(1)} kWh`);

export const counted = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;

export function percent(part, whole) {
  if (!whole) return "0%";
  const share = (100 * part) / whole;
  // What is nearly all is not all, and a little is not nothing.
  if (part < whole && share > 99) return `${Math.floor(share * 10) / 10}%`;
  return part && share < 1 ? "<1%" : `${Math.round(share)}%`;
}

export function seconds(n) {
  const size = Math.abs(n);
  if (size < 0.9995) return `${Math.round(n * 1000)} ms`;
  if (size < 99.95) return `${n.toFixed(size < 9.995 ? 2 : 1)} s`;
  return span(n);
}

// A long time in its two largest units.
export function span(n) {
  const whole = Math.round(n);
  if (Math.abs(whole) < 60) return `${whole} s`;
  if (Math.abs(whole) < 3600) return `${Math.trunc(whole / 60)} min ${Math.abs(whole % 60)} s`;
  if (Math.abs(whole) < 86400) return `${Math.trunc(whole / 3600)} h ${Math.trunc(Math.abs(whole % 3600) / 60)} min`;
  return `${Math.trunc(whole / 86400)} d ${Math.trunc(Math.abs(whole % 86400) / 3600)} h`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 999.5 && i < units.length - 1; i++) n /= 1024;
  return `${i && n < 9.95 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

export function clock(at) {
  const date = new Date(at * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return today ? CLOCK.format(date) : `${DAY.format(date)}, ${CLOCK.format(date)}`;
}

export function ago(at) {
  const n = Date.now() / 1000 - at;
  if (n < 5) return "just now";
  if (n < 60) return `${Math.floor(n)} s ago`;
  if (n < 3600) return `${Math.floor(n / 60)} min ago`;
  if (n < 86400) return `${Math.floor(n / 3600)} h ago`;
  return `${Math.floor(n / 86400)} d ago`;
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
