// Values of runs by key: fields of the answer, final metrics, and values of the configuration and facts.

import { integer, moment, number, plain } from "./format.js";

const TIMES = new Set(["created_ms", "updated_ms"]);

/** {"model.layers": 2, …} of a nested configuration, under the keys that filters have. */
export function flatten(value, prefix = "") {
  return Object.entries(value ?? {}).flatMap(([key, each]) => {
    const name = prefix ? `${prefix}.${key}` : key;
    if (Array.isArray(each)) return items(name, each);
    return each !== null && typeof each === "object" ? flatten(each, name) : [[name, each]];
  });
}

/** A list as one text, and the fields of its encodings by their kind, or by their place where several have this kind. */
function items(name, list) {
  const kinds = list.map((item) => item?.kind);
  const isOnly = (kind) => kinds.indexOf(kind) === kinds.lastIndexOf(kind);
  const fields = ({ kind, ...rest }, i) => flatten(rest, `${name}.${isOnly(kind) ? kind : i}`);
  const text = list.map((item) => item?.kind ?? plain(item)).join(" + ") || "none";
  return [[name, text], ...list.flatMap((item, i) => (item?.kind ? fields(item, i) : []))];
}

/** The value of a key for a run of `GET /runs`; undefined if it has none. */
export function valueOf(run, key) {
  if (run.values && key in run.values) return run.values[key];
  if (run.metrics && key in run.metrics) return run.metrics[key];
  return run[key] ?? undefined;
}

/** A value as text for a table. */
export function shown(key, value) {
  if (value === undefined || value === null) return "–";
  if (TIMES.has(key)) return moment(value);
  if (typeof value === "number") return Number.isInteger(value) ? integer(value) : number(value, 5);
  return plain(value);
}

/** Fields of a run that tables of runs need. The API leaves the others out if any field or key is asked for. */
export const SUMMARY = ["ablations", "row", "seed", "step", "steps", "created_ms", "metrics"];

/** Metrics, with training metrics last. */
export const resultsFirst = (metrics) => [...metrics].sort((a, b) => a.startsWith("train/") - b.startsWith("train/"));
