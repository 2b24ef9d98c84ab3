// One run: curves and results, configuration, difference, logs and checkpoint.

import { at, get } from "../api.js";
import { style } from "../curves.js";
import { changes, empty, h, replace, tabs } from "../dom.js";
import { number } from "../format.js";
import { change } from "../route.js";
import { hasEnded } from "../status.js";
import { nameOf } from "../values.js";
import { CHOICES, chosenCurves, chosenMetrics, curvePanels } from "./curve_panels.js";
import { checkpoint, comparison, configuration, facts, head, logs, pairs } from "./run_parts.js";

const RESULTS = "results";
const TABS = [
  [RESULTS, "Results"],
  ["configuration", "Configuration"],
  ["difference", "Difference"],
  ["logs", "Logs"],
  ["checkpoint", "Checkpoint"],
];

export function run(id) {
  const part = changes();
  const [top, body] = [h("div"), h("div")];
  const panels = curvePanels({ seeds: false, time: false });
  let title = id;

  function drawResults(found, params) {
    const keys = new Set([...Object.keys(found.metrics), ...found.curve.flatMap((row) => Object.keys(row))]);
    const logged = [...keys].filter((key) => key !== "step" && found.curve.some((row) => key in row));
    const settings = { ...chosenCurves(params), by: "step", spread: "seeds" };
    const charts = chosenMetrics(params, logged[0]).map((metric) => {
      const points = found.curve.filter((row) => metric in row).map((row) => [row.step, NaN, row[metric]]);
      return { metric, title: metric, groups: [{ name: title, style: style(0), series: [{ name: title, points }] }] };
    });
    const metrics = Object.entries(found.metrics).map(([key, value]) => [key, number(value, 5)]);
    const heading = metrics.length && found.status !== "finished" ? "Newest metrics" : "Final metrics";
    const none = hasEnded(found.status) ? "The run ended without results." : "They appear when the run is finished.";
    replace(
      body,
      h("div", { class: "columns2" },
        h("section", {},
          h("h2", {}, "Curves"),
          charts.length ? panels.nodes : empty("No values have been logged."),
          h("h2", {}, "Facts"),
          facts(found),
        ),
        h("section", {}, h("h2", {}, heading), metrics.length ? pairs(heading, metrics) : empty(none)),
      ),
    );
    if (charts.length) panels.draw({ metrics: logged.map((key) => [key, key]), charts, settings });
  }

  async function drawPart(tab, found, params) {
    const parts = { configuration, checkpoint, logs, difference: () => comparison(found, params.get("against")) };
    const make = parts[tab] ?? (() => empty("There is no such part of a run."));
    const nodes = await Promise.resolve(make(found)).catch((error) => h("p", { class: "bad" }, error.message));
    panels.close();
    const text = [nodes]
      .flat(3)
      .map((node) => node?.textContent ?? "")
      .join("\n");
    part("body", `${tab} ${text}`, () => replace(body, nodes));
  }

  return {
    nodes: [top, body],
    title: () => title,
    close: panels.close,
    async refresh(params) {
      const found = await get(at(["runs", id]));
      const tab = params.get("tab") ?? RESULTS;
      title = nameOf(found);
      const { curve, ...rest } = found;
      part("top", JSON.stringify([rest, tab]), () =>
        replace(top, head(found), tabs("Parts of the run", TABS, tab, (value) => change({ tab: value }))),
      );
      if (tab !== RESULTS) await drawPart(tab, found, params);
      else
        part("body", `${RESULTS} ${JSON.stringify([rest, curve.length, CHOICES.map((each) => params.getAll(each))])}`, () =>
          drawResults(found, params),
        );
    },
  };
}
