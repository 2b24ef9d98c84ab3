// The comparison of chosen runs: curves, parallel coordinates, scatter plot, and the difference of two.

import { at, get } from "../api.js";
import { Chart } from "../chart.js";
import { lines, style } from "../curves.js";
import { checkbox, empty, h, replace, section, segmented, select } from "../dom.js";
import { number } from "../format.js";
import { change, toggled } from "../route.js";
import { isNumber, resultsFirst, SUMMARY, valueOf } from "../values.js";
import { CHOICES, chosenCurves, curveControls, entry, keepZoom } from "./curve_controls.js";
import { difference } from "./difference.js";
import { parallel, scatter } from "./plots.js";

const WAYS = [
  ["curves", "Curves"],
  ["parallel", "Parallel coordinates"],
  ["scatter", "Scatter plot"],
  ["difference", "Difference of two"],
];
const SECTIONS = ["model", "train", "task"]; // of the configuration, in this order
const MOST = 200; // runs that are compared

const nameOf = (run) => [run.row ?? run.run_id, run.seed === null ? null : `seed ${run.seed}`].filter(Boolean).join(", ");

/** Keys of the configuration in which the runs differ. */
function differing(runs, keys) {
  const found = keys.filter((key) => new Set(runs.map((run) => String(valueOf(run, key)))).size > 1);
  const section = (key) => SECTIONS.indexOf(key.split(".")[0]);
  return found.filter((key) => section(key) >= 0).sort((a, b) => section(a) - section(b));
}

/** The runs by row: [[name, runs], …]. Rows of several ablations have the names of these, too. */
function grouped(runs) {
  const ablations = new Set(runs.map((run) => run.ablations?.[0]));
  const groups = new Map();
  for (const run of runs) {
    const row = run.row ?? run.run_id;
    const name = ablations.size > 1 && run.ablations?.length ? `${run.ablations[0]}: ${row}` : row;
    groups.set(name, [...(groups.get(name) ?? []), run]);
  }
  return [...groups];
}

export function compareRuns(container) {
  const [controls, body] = [h("div", { class: "bar controls" }), h("div", { class: "comparison" })];
  let [chart, drawn] = [null, ""];

  function closeChart() {
    chart?.close();
    chart = null;
  }

  async function curves(runs, metrics, params) {
    const metric = params.get("metric") ?? metrics[0];
    if (!metric) return () => replace(body, empty("No chosen run has metrics yet."));
    const answer = await get(at("curves", { run: runs.map((run) => run.run_id), metric, points: 400 }));
    const settings = chosenCurves(params);
    const points = new Map(answer.series.map((each) => [each.run_id, each.points]));
    const groups = grouped(runs).map(([name, members], i) => ({
      name,
      style: style(i),
      series: members.map((run) => ({ name: nameOf(run), points: points.get(run.run_id) ?? [] })).filter((each) => each.points.length),
    }));
    return () => {
      replace(controls, curveControls(metrics, metric, settings));
      const entries = new Map(groups.map((group) => [group.name, entry(group.name, group.style, { shown: true })]));
      const plot = h("div");
      replace(body, h("div", { class: "legend" }, [...entries.values()].map(({ button }) => button)), plot);
      const drawable = lines(groups, settings);
      if (!drawable.length) return replace(plot, empty(`No chosen run has logged ${metric}.`));
      chart = new Chart(plot, {
        onzoom: keepZoom,
        oncursor: (x, values) =>
          drawable.forEach((line, i) => {
            if (!line.faint) entries.get(line.group).output.value = x === null ? "" : number(values[i]);
          }),
      });
      return chart.draw(drawable, { ...settings, metric });
    };
  }

  function coordinates(runs, axes, metrics, params) {
    const chosen = params.getAll("axis");
    const used = chosen.length ? chosen : [...differing(runs, axes).slice(0, 5), ...metrics.slice(0, 2)];
    return () => {
      replace(
        controls,
        h("details", { class: "columns" },
          h("summary", { "data-key": "axes" }, `Axes (${used.length})`),
          h("div", { class: "choices" },
            [...axes, ...metrics].map((key) =>
              checkbox(key, used.includes(key), () => change({ axis: toggled(used, key) }, { replace: true }), `axis ${key}`),
            ),
          ),
        ),
      );
      replace(body, used.length < 2 ? empty("Choose at least two axes.") : parallel(runs, used, nameOf));
    };
  }

  function points(runs, axes, metrics, params) {
    const keys = [...axes, ...metrics];
    const varied = differing(runs, axes);
    const [x, y] = [
      params.get("sx") ?? varied.find((key) => isNumber(valueOf(runs[0], key))) ?? varied[0] ?? keys[0],
      params.get("sy") ?? metrics[0] ?? keys[0],
    ];
    return () => {
      replace(
        controls,
        select("horizontal", keys, x, (sx) => change({ sx }, { replace: true })),
        select("vertical", keys, y, (sy) => change({ sy }, { replace: true })),
      );
      replace(body, scatter(runs, x, y, nameOf));
    };
  }

  async function compute(way, ids, keys, params) {
    if (way === "difference") {
      if (ids.length !== 2)
        return () => {
          replace(controls);
          replace(body, empty(`Choose exactly two runs to see what differs between them; ${ids.length} are chosen.`));
        };
      const found = await get(at("diff", { left: ids[0], right: ids[1] }));
      return () => {
        replace(controls);
        replace(body, difference(found));
      };
    }
    const { runs } = await get(at("runs", { run: ids, limit: MOST, fields: [...SUMMARY, ...keys].join(",") }));
    const metrics = resultsFirst(new Set(runs.flatMap((run) => Object.keys(run.metrics))));
    if (way === "curves") return curves(runs, metrics, params);
    const axes = keys.filter((key) => runs.some((run) => valueOf(run, key) !== undefined));
    return way === "parallel" ? coordinates(runs, axes, metrics, params) : points(runs, axes, metrics, params);
  }

  return {
    close: closeChart,
    async refresh({ params, keys }) {
      const ids = params.getAll("sel").slice(0, MOST);
      const way = params.get("way") ?? "curves";
      const state = JSON.stringify([
        ids,
        way,
        keys,
        [...CHOICES, "axis", "sx", "sy"].map((each) => params.getAll(each)),
      ]);
      if (state === drawn) return;
      if (!ids.length) {
        closeChart();
        replace(container);
      } else {
        const draw = await compute(way, ids, keys, params).catch((error) => () => {
          replace(controls);
          replace(body, h("p", { class: "bad" }, error.message));
        });
        closeChart();
        replace(
          container,
          section(
            "Comparison",
            { id: "comparison", controls: [segmented("Compare by", WAYS, way, (value) => change({ way: value }))] },
            controls,
            body,
          ),
        );
        draw();
      }
      drawn = state;
    },
  };
}
