// Numbers, times and sizes as text for people.

/** About `digits` significant digits: 0.1235, 12.35, 1.2e−5. */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(Math.max(digits - 3, 1)) : String(+value.toPrecision(digits));
  return text.replaceAll("-", "−").replace("e+", "e");
}

/** With a fixed number of decimals and a minus sign. Cells of tables have their text: `withMinus`. */
export const fixed = (value, decimals) =>
  value === null || value === undefined ? "–" : withMinus(value.toFixed(decimals));

/** The text of numbers from the service, with minus signs instead of hyphens; names in it, as Flip-Flop, keep theirs. */
export const withMinus = (text) => text.replaceAll(/(?<!\w)-(?=[\d.])/g, "−");

export const integer = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));

/** 850 ms, 12.3 s, 4 min 5 s, 2 h 14 min, 3 d 4 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${+seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
}

/** 512 B, 1.2 KiB, 759 MiB. */
export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = size > 0 ? Math.min(Math.floor(Math.log2(size) / 10), units.length - 1) : 0;
  return `${+(size / 1024 ** power).toPrecision(3)} ${units[power]}`;
}

/** 3.3 M, 512 k. */
export function count(value) {
  if (!(value >= 1e4)) return integer(value);
  const [factor, unit] = value >= 1e9 ? [1e9, "G"] : value >= 1e6 ? [1e6, "M"] : [1e3, "k"];
  return `${+(value / factor).toPrecision(3)} ${unit}`;
}

/** 2026-11-22 03:14 in the time zone of the browser. */
export function moment(ms) {
  if (!ms) return "–";
  const time = new Date(ms);
  const two = (value) => String(value).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${two(time.getHours())}:${two(time.getMinutes())}`;
}

/** "5 min ago"; the exact time is the element's title. */
export function ago(ms) {
  const seconds = (Date.now() - ms) / 1000;
  if (seconds < 60) return "just now";
  const [unit, size] = seconds < 3600 ? ["min", 60] : seconds < 86400 ? ["h", 3600] : ["d", 86400];
  return `${Math.floor(seconds / size)} ${unit} ago`;
}

/** 1 run, 12 runs. */
export const plural = (n, one, many = `${one}s`) => `${integer(n)} ${n === 1 ? one : many}`;

/** Whether a text has all words of a search, in whichever order. */
export const hasWords = (text, search) => search.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word));

/** A value of a configuration as text. */
export const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));
