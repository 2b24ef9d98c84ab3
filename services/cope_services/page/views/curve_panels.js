// Curves of runs: controls, a legend, and a panel for each chosen metric. What is chosen is in the address.

import { at, get } from "../api.js";
import { Chart } from "../chart.js";
import { lines } from "../curves.js";
import { checkbox, empty, h, replace, segmented, select } from "../dom.js";
import { change, toggled } from "../route.js";

/** The parameters of the address after which curves are drawn again. `zoom` is none of them: the charts follow the mouse. */
export const CHOICES = ["metric", "x", "log", "smooth", "spread"];
const SPREADS = [["deviation", "mean ± SD"], ["range", "mean, range"], ["seeds", "each seed"]];
const MOST = 6; // panels
const [RUNS, POINTS] = [50, 400]; // in one answer: runs, and points of a run
const [ALONE, BESIDE] = [340, 230]; // heights of a panel

/** The chosen metrics, or the first that there is. */
export function chosenMetrics(params, first) {
  const asked = [...new Set(params.getAll("metric"))].slice(0, MOST);
  return asked.length || first === undefined ? asked : [first];
}

/** The curves of a metric: id of a run → [[step, seconds, value], …]. */
export async function curvesOf(ids, metric) {
  const found = new Map();
  for (let i = 0; i < ids.length; i += RUNS) {
    const part = await get(at("curves", { run: ids.slice(i, i + RUNS), metric, points: POINTS }));
    for (const each of part.series) found.set(each.run_id, each.points);
  }
  return found;
}

/** What the address chooses: {by, log, smoothing, spread, zoom}, as `curves.lines` and `Chart.draw` take them. */
export function chosenCurves(params) {
  const zoom = (params.get("zoom") ?? "").split(":").map(Number);
  return {
    by: params.get("x") ?? "step",
    log: params.get("log") === "1",
    smoothing: +(params.get("smooth") ?? 0),
    spread: params.get("spread") ?? SPREADS[0][0],
    zoom: zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null,
  };
}

/** The controls. `seeds`: whether lines are groups of seeds; `time`: whether times are known. */
function controlsOf(metrics, shown, { by, log, smoothing, spread }, { seeds, time }) {
  const others = metrics.filter(([name]) => !shown.includes(name));
  return [
    select("metric", metrics, shown[0], (value) => change({ metric: [value, ...shown.slice(1).filter((each) => each !== value)] })),
    others.length && shown.length < MOST
      ? select("beside it", [["", "one more metric …"], ...others], "", (value) => value && change({ metric: [...shown, value] }))
      : null,
    time &&
      segmented("Horizontal axis", [["step", "step"], ["time", "time"]], by, (x) => change({ x: x === "step" ? null : x, zoom: null })),
    seeds && select("seeds as", SPREADS, spread, (value) => change({ spread: value === SPREADS[0][0] ? null : value })),
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

/** A line of the legend: the colour and dash of a row, and its name. */
function entry(name, { colour, dash }, { shown, onclick }) {
  const button = { type: "button", "aria-pressed": String(shown), "data-key": `legend ${name}`, onclick };
  return h(onclick ? "button" : "span", { class: "entry", ...(onclick && button) },
    h("svg", { viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true", style: { color: `var(${colour})` } },
      h("path", { d: "M0 4H26", stroke: "currentColor", "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") || null }),
    ),
    h("span", {}, name),
  );
}

/** `rows`: whether groups are rows that a click in the legend chooses. The nodes belong in this order into a section. */
export function curvePanels({ seeds = true, time = true, rows = false } = {}) {
  const [controls, legend, grid] = [
    h("div", { class: "bar controls" }),
    h("div", { class: "legend", role: "group", "aria-label": "Rows" }),
    h("div", { class: "multiples" }),
  ];
  const panels = new Map(); // metric → {node, plot, chart}
  let [zoomed, height] = [null, ALONE];

  function close(metric) {
    panels.get(metric)?.chart?.close();
    panels.delete(metric);
  }

  /** One zoom for all panels. */
  function zoom(range) {
    const text = range && range.map((each) => +each.toPrecision(6)).join(":");
    if (text === zoomed) return;
    zoomed = text;
    for (const { chart } of panels.values()) chart?.show(range);
    change({ zoom: text }, { replace: true });
  }

  /** The node of a metric's panel. */
  function panelOf(metric) {
    if (!panels.has(metric)) panels.set(metric, { node: h("figure", {}), plot: h("div"), chart: null });
    return panels.get(metric).node;
  }

  function drawPanel({ metric, title, groups }, shown, settings) {
    const panel = panels.get(metric);
    const remove = { type: "button", class: "quiet", "aria-label": `Remove ${title}`, "data-key": `remove ${metric}` };
    const without = () => change({ metric: shown.filter((each) => each !== metric) });
    const caption = h("figcaption", {}, title, h("button", { ...remove, onclick: without }, "×"));
    replace(panel.node, shown.length > 1 ? caption : null, panel.plot);
    const drawable = lines(groups, settings);
    if (!drawable.some((line) => line.points.length)) {
      panel.chart?.close();
      panel.chart = null;
      replace(panel.plot, empty(`No run has logged ${metric} yet. Curves appear here while runs are trained.`));
      return;
    }
    panel.chart ??= new Chart(panel.plot, { onzoom: zoom, height });
    panel.chart.draw(drawable, { ...settings, metric, label: title });
  }

  return {
    nodes: [controls, legend, grid],
    close: () => [...panels.keys()].forEach(close),
    /**
     * `metrics` are [name, text] of all that could be shown. `charts` are [{metric, title, groups}, …] of those that are, with
     * groups as `curves.lines` takes them. `chosen` are the names of the groups that are drawn; none: all.
     */
    draw({ metrics, charts, settings, chosen = [] }) {
      const shown = charts.map(({ metric }) => metric);
      const isChosen = ({ name }) => !chosen.length || chosen.includes(name);
      replace(controls, controlsOf(metrics, shown, settings, { seeds, time }));
      const groups = [...new Map(charts.flatMap((each) => each.groups).map((group) => [group.name, group])).values()];
      const onclick = (group) => (rows ? () => change({ row: toggled("row", group.name) }) : null);
      replace(legend, groups.map((group) => entry(group.name, group.style, { shown: isChosen(group), onclick: onclick(group) })));
      const own = shown.length > 1 ? BESIDE : ALONE;
      for (const metric of panels.keys()) if (!shown.includes(metric) || own !== height) close(metric);
      height = own;
      zoomed = settings.zoom && settings.zoom.join(":");
      grid.classList.toggle("many", shown.length > 1);
      replace(grid, shown.map(panelOf)); // before anything is drawn: a chart takes its width and colours from the page
      for (const each of charts) {
        const drawn = each.groups
          .filter(isChosen)
          .map((group) => ({ ...group, series: group.series.filter(({ points }) => points.length) }));
        drawPanel({ ...each, groups: drawn.filter((group) => group.series.length) }, shown, settings);
      }
    },
  };
}
