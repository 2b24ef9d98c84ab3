// The statuses of runs: signs, dots and progress bars.

import { h } from "./dom.js";
import { integer } from "./format.js";
import { link } from "./route.js";

// A status has a sign, because not everybody can tell colours apart.
const SIGNS = { finished: "✓", running: "›", failed: "×", interrupted: "‖", stopped: "–", pending: "" };
export const STATUSES = Object.keys(SIGNS);
/** Of runs that have started, and have not finished. */
export const UNFINISHED = STATUSES.filter((status) => !["finished", "pending"].includes(status));

/** The sign and the name of a status. */
export const badge = (status) =>
  h("span", { class: "badge" }, h("i", { class: `dot ${status}`, "data-sign": SIGNS[status], "aria-hidden": "true" }), status);

/** A round sign that leads to a run. */
export const dot = (run, label) =>
  h("a", {
    class: `dot ${run.status}`,
    "data-sign": SIGNS[run.status],
    href: link(["runs", run.run_id]),
    "data-key": `dot ${run.run_id}`,
    title: `${label}: ${run.status}`,
    "aria-label": `${label}: ${run.status}`,
  });

/** How far a run is: [name, text, class of its column]. Tables of runs and the page of a run show what is here. */
export const progressOf = (run) => [
  ["step", run.steps ? `${integer(run.step)} / ${integer(run.steps)}` : integer(run.step), "number step"],
  ["tokens/s", run.tokens_per_s ? integer(Math.round(run.tokens_per_s)) : "", "number speed"],
  ["worker", run.worker_id ?? "", null],
];

/** The number of runs that have been started. */
export const begun = (counts) => STATUSES.reduce((sum, status) => sum + (status === "pending" ? 0 : (counts[status] ?? 0)), 0);

/** Whether a run of this status has ended. */
export const hasEnded = (status) => ["finished", "failed", "stopped"].includes(status);

export const total = (counts) => STATUSES.reduce((sum, status) => sum + (counts[status] ?? 0), 0);

/** "12 of 15 finished · 1 running · 2 waiting"; of a sweep that has ended, what is running is so in another one. */
export function summary(counts, { ended = false } = {}) {
  const others = UNFINISHED.filter((status) => counts[status]);
  const named = (status) => (ended && status === "running" ? "running in another sweep" : status);
  return [
    `${integer(counts.finished ?? 0)} of ${integer(total(counts))} finished`,
    ...others.map((status) => `${integer(counts[status])} ${named(status)}`),
    ...(counts.running && counts.pending && !ended ? [`${integer(counts.pending)} waiting`] : []),
  ].join(" · ");
}

/** Whether a sweep has not ended. */
export const isActive = ({ status }) => ["pending", "running"].includes(status);

/** The counts of a sweep with their names. */
export const sweepSummary = (sweep) => summary(sweep.counts, { ended: !isActive(sweep) });

/** The number of runs that a retry of an ended sweep trains; a run that a scheduler has stopped has ended. */
export const left = ({ counts, leave_out: leftOut }) =>
  ["pending", "interrupted", "failed", ...(leftOut.includes("stopped") ? [] : ["stopped"])]
    .reduce((sum, status) => sum + (counts[status] ?? 0), 0);

/** A bar with a part for each status. */
export function progress(counts) {
  const all = Math.max(total(counts), 1);
  const svg = h("svg", {
    class: "progress",
    viewBox: `0 0 ${all} 1`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": summary(counts),
  });
  let start = 0;
  for (const status of STATUSES) {
    svg.append(h("rect", { class: status, x: start, width: counts[status] ?? 0, height: 1 }));
    start += counts[status] ?? 0;
  }
  return svg;
}

/** The name of a scale for people and in addresses: "" and null are the file as it is. */
export const scaleName = (scale) => scale || "base";

/** The scales of an ablation as options: [[value of the address, text], …]. */
export const scaleOptions = (scales) => ["", ...scales].map((scale) => [scaleName(scale), scaleName(scale)]);

/** {scale, sets} of an ablation that the address asks for; else those to open, with their counts if a run has begun. */
export function askedSize(params, ablation) {
  const [asked, sets] = [params.get("scale"), params.getAll("set")];
  if (asked === null && !sets.length) return fullestSize(ablation);
  return { scale: !asked || asked === scaleName("") ? "" : asked, sets };
}

/** The values with which runs of a scale were trained, as options of a select: [[JSON, text], …]; null: only those of the file. */
export function setsOptions(ablation, { scale, sets }) {
  const known = ablation.variants.filter((each) => (each.scale ?? "") === scale).map((each) => each.sets);
  if (sets.length && !known.some((each) => JSON.stringify(each) === JSON.stringify(sets))) known.push(sets);
  return known.length ? [[], ...known].map((each) => [JSON.stringify(each), setsText(each) || "as in the file"]) : null;
}

/**
 * The counts of runs of an ablation by size: [{scale, sets, counts}], the file as it is ("") first, then those with other values.
 * `same_runs`: they are those of the file as it is.
 */
export function sizes({ counts, scales, at_scales: atScales, variants }) {
  const scaled = scales.filter((scale) => atScales[scale]).map((scale) => ({ ...atScales[scale], scale, sets: [] }));
  return [{ scale: "", sets: [], counts }, ...scaled, ...variants.map((each) => ({ ...each, scale: each.scale ?? "" }))];
}

/** The values of `--set` as a text: "train.steps=100, seeds=[0]". */
export const setsText = (sets) => sets.join(", ");

/** Parameters of an address for runs of an ablation at a scale, with values of `--set`. */
export const sizeParams = ({ scale, sets }) => ({ scale: scaleName(scale), set: sets });

/**
 * The size to open: the file as it is if something of it is or was trained, else the scale with the most such runs, else
 * the values with the most; else a scale whose results are kept with the ablation files.
 */
function fullestSize(ablation) {
  const [own, ...others] = sizes(ablation);
  if (begun(own.counts)) return own;
  const fullest = (some) => some.reduce((best, each) => (begun(each.counts) > begun(best.counts) ? each : best), own);
  const scaled = fullest(others.filter((each) => !each.sets.length));
  const found = begun(scaled.counts) ? scaled : fullest(others);
  return begun(found.counts) ? found : { scale: ablation.committed[0] ?? "", sets: [] };
}
