// The controls of a chart of curves, and its legend. What is chosen is in the address.

import { checkbox, h, segmented, select } from "../dom.js";
import { change } from "../route.js";

/** The parameters of the address after which curves are drawn again. `zoom` is none of them: the chart follows the mouse. */
export const CHOICES = ["metric", "x", "log", "smooth", "spread"];
const SPREADS = [["seeds", "each seed"], ["deviation", "mean ± SD"], ["range", "mean, range"]];

/** What the address chooses: {by, log, smoothing, spread, zoom}, as `curves.lines` and `Chart.draw` take them. */
export function chosenCurves(params) {
  const zoom = (params.get("zoom") ?? "").split(":").map(Number);
  return {
    by: params.get("x") ?? "step",
    log: params.get("log") === "1",
    smoothing: +(params.get("smooth") ?? 0),
    spread: params.get("spread") ?? "seeds",
    zoom: zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null,
  };
}

/** Write the part that a person has zoomed to into the address. */
export const keepZoom = (range) =>
  change({ zoom: range && range.map((each) => +each.toPrecision(6)).join(":") }, { replace: true });

/** The controls. `metrics` are names or [name, text]; `seeds`: whether lines are groups of seeds; `time`: whether times are known. */
export function curveControls(metrics, metric, { by, log, smoothing, spread }, { seeds = true, time = true } = {}) {
  return [
    select("metric", metrics, metric, (value) => change({ metric: value })),
    time &&
      segmented("Horizontal axis", [["step", "step"], ["time", "time"]], by, (x) => change({ x: x === "step" ? null : x, zoom: null })),
    seeds && select("seeds as", SPREADS, spread, (value) => change({ spread: value === "seeds" ? null : value })),
    checkbox("logarithmic", log, (value) => change({ log: value })),
    h("label", { class: "field" },
      h("span", {}, "smoothing"),
      h("input", {
        type: "range",
        min: 0,
        max: 0.95,
        step: 0.05,
        value: smoothing,
        "data-key": "smoothing",
        onchange: (event) => change({ smooth: +event.target.value || null }, { replace: true }),
      }),
    ),
  ];
}

/** A line of the legend: the colour and dash of a row, its name, and its value at the cursor. */
export function entry(name, { colour, dash }, { shown, onclick }) {
  const output = h("output", {});
  const button = h("button", { type: "button", "aria-pressed": String(shown), "data-key": `legend ${name}`, onclick },
    h("svg", { viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true", style: { color: `var(${colour})` } },
      h("path", { d: "M0 4H26", stroke: "currentColor", "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") || null }),
    ),
    h("span", {}, name),
    output,
  );
  return { button, output };
}
