// One run: curves and results, configuration, difference, logs and checkpoint.

import { at, get } from "../api.js";
import { Chart } from "../chart.js";
import { lines, style } from "../curves.js";
import { changes, empty, h, replace, tabs } from "../dom.js";
import { integer, number } from "../format.js";
import { change } from "../route.js";
import { chosenCurves, CHOICES, curveControls, keepZoom } from "./curve_controls.js";
import { checkpoint, comparison, configuration, facts, head, logs, pairs } from "./run_parts.js";

const RESULTS = "results";
const TABS = [
  [RESULTS, "Results"],
  ["configuration", "Configuration"],
  ["difference", "Difference"],
  ["logs", "Logs"],
  ["checkpoint", "Checkpoint"],
];
const ENDED = new Set(["finished", "failed", "stopped", "damaged"]);

export function run(root, id) {
  const part = changes();
  const [top, body] = [h("div"), h("div")];
  let [started, chart, title] = [false, null, id];

  function closeChart() {
    chart?.close();
    chart = null;
  }

  function drawResults(found, params) {
    closeChart();
    const keys = new Set([...Object.keys(found.metrics), ...found.curve.flatMap((row) => Object.keys(row))]);
    const logged = [...keys].filter((key) => key !== "step" && found.curve.some((row) => key in row));
    const [metric, settings] = [params.get("metric") ?? logged[0], { ...chosenCurves(params), by: "step", spread: "seeds" }];
    const points = found.curve.filter((row) => metric in row).map((row) => [row.step, NaN, row[metric]]);
    const [plot, reading] = [h("div"), h("output", { class: "note" })];
    const metrics = Object.entries(found.metrics).map(([key, value]) => [key, number(value, 5)]);
    const none = ENDED.has(found.status) ? "The run ended without results." : "They appear when the run is finished.";
    const controls = h("div", { class: "bar controls" },
      h("h2", {}, "Curve"),
      logged.length ? curveControls(logged, metric, settings, { seeds: false, time: false }) : null,
      reading,
    );
    replace(
      body,
      h("div", { class: "columns2" },
        h("section", {}, controls, plot, h("h2", {}, "Facts"), facts(found)),
        h("section", {}, h("h2", {}, "Final metrics"), metrics.length ? pairs("Final metrics", metrics) : empty(none)),
      ),
    );
    if (!points.length) return replace(plot, empty("No values have been logged."));
    chart = new Chart(plot, {
      onzoom: keepZoom,
      oncursor: (x, [value]) => {
        reading.value = x === null ? "" : `step ${integer(x)}: ${number(value)}`;
      },
    });
    const group = { name: metric, style: style(0), series: [{ name: "", points }] };
    return chart.draw(lines([group], settings), { ...settings, metric });
  }

  async function drawPart(tab, found, params) {
    const parts = { configuration, checkpoint, logs, difference: () => comparison(found, params.get("against")) };
    const make = parts[tab] ?? (() => empty("There is no such part of a run."));
    const nodes = await Promise.resolve(make(found)).catch((error) => h("p", { class: "bad" }, error.message));
    closeChart();
    const text = [nodes]
      .flat(3)
      .map((node) => node?.textContent ?? "")
      .join("\n");
    part("body", `${tab} ${text}`, () => replace(body, nodes));
  }

  return {
    title: () => title,
    close: closeChart,
    async refresh(params) {
      const found = await get(at(["runs", id]));
      const tab = params.get("tab") ?? RESULTS;
      title = `${found.row ?? id}${found.seed === null ? "" : `, seed ${found.seed}`}`;
      if (!started) replace(root, top, body);
      started = true;
      const { curve, ...rest } = found;
      part("top", JSON.stringify([rest, tab]), () =>
        replace(top, head(found), tabs("Parts of the run", TABS, tab, (value) => change({ tab: value }))),
      );
      if (tab !== RESULTS) await drawPart(tab, found, params);
      else
        part("body", `${RESULTS} ${JSON.stringify([rest, curve.length, CHOICES.map((each) => params.get(each))])}`, () =>
          drawResults(found, params),
        );
    },
  };
}
