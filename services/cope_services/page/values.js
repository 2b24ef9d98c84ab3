// Values of runs by key: fields of the answer, final metrics, and values of the configuration and facts.

import { bytes, count, duration, integer, moment, number, plain } from "./format.js";

const TIMES = new Set(["created_ms", "updated_ms"]);
export const FACT = "facts."; // the beginning of keys of facts
const UNITS = [["_bytes", bytes], ["_per_s", (value) => count(Math.round(value))], ["_s", duration]]; // of facts, by suffix

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
  const unit = key.startsWith(FACT) && UNITS.find(([suffix]) => key.endsWith(suffix));
  if (unit) return unit[1](value);
  if (typeof value === "number") return Number.isInteger(value) ? integer(value) : number(value, 5);
  return plain(value);
}

/** The name of a run for people: "CoPE, seed 1". */
export const nameOf = (run) => `${run.row ?? run.run_id}${run.seed === null ? "" : `, seed ${run.seed}`}`;

/** Runs of one request or answer, as GET /runs takes them. */
export const MOST_RUNS = 1000;

/** Fields of a run that tables of runs need. The API leaves the others out if any field or key is asked for. */
export const SUMMARY = ["ablations", "row", "seed", "step", "steps", "created_ms", "metrics"];

/** The metric by which rows are compared. */
export const primaryOf = (metrics) => metrics.find((each) => each.primary) ?? metrics[0];

/** Metrics, with training metrics last. */
export const resultsFirst = (metrics) => [...metrics].sort((a, b) => a.startsWith("train/") - b.startsWith("train/"));
