// The comparison of chosen runs: curves, parallel coordinates, scatter plot, and the difference of two.

import { at, get } from "../api.js";
import { Chart } from "../chart.js";
import { lines, style } from "../curves.js";
import { checkbox, empty, h, replace, section, segmented, select } from "../dom.js";
import { number } from "../format.js";
import { change, toggled } from "../route.js";
import { isNumber, resultsFirst, SUMMARY, valueOf } from "../values.js";
import { difference } from "./difference.js";
import { entry } from "./learning_curves.js";
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

export function compareRuns(container) {
  const [controls, body] = [h("div", { class: "bar controls" }), h("div", { class: "comparison" })];
  let [chart, drawn] = [null, ""];

  function closeChart() {
    chart?.close();
    chart = null;
  }

  async function curves(runs, metrics, params) {
    const metric = params.get("metric") ?? metrics[0];
    const answer = await get(at("curves", { run: runs.map((run) => run.run_id), metric, points: 400 }));
    const settings = {
      by: params.get("x") ?? "step",
      log: params.get("log") === "1",
      smoothing: +(params.get("smooth") ?? 0),
      spread: "seeds",
    };
    const points = new Map(answer.series.map((each) => [each.run_id, each.points]));
    const groups = runs.map((run, i) => ({
      name: `${nameOf(run)} (${run.run_id.slice(0, 4)})`,
      style: style(i),
      series: [{ name: "", points: points.get(run.run_id) ?? [] }],
    }));
    return () => {
      replace(
        controls,
        select("metric", metrics, metric, (value) => change({ metric: value })),
        segmented(
          "Horizontal axis",
          [["step", "step"], ["time", "time"]],
          settings.by,
          (x) => change({ x: x === "step" ? null : x }),
        ),
        checkbox("logarithmic", settings.log, (log) => change({ log })),
      );
      const entries = groups.map((group) => entry(group.name, group.style, { shown: true }));
      const plot = h("div");
      replace(body, h("div", { class: "legend" }, entries.map(({ button }) => button)), plot);
      const drawable = lines(groups, settings);
      chart = new Chart(plot, {
        oncursor: (x, values) =>
          values.forEach((value, i) => {
            entries[i].output.value = x === null ? "" : number(value);
          }),
      });
      chart.draw(drawable, { log: settings.log, by: settings.by, metric });
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
        ["metric", "x", "log", "axis", "sx", "sy"].map((each) => params.getAll(each)),
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
