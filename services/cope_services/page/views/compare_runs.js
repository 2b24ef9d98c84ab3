// The comparison of chosen runs: curves, parallel coordinates, a scatter plot, and what differs between their rows.

import { at, get } from "../api.js";
import { average, deviation, style } from "../curves.js";
import { checkbox, empty, h, replace, section, segmented, select, table } from "../dom.js";
import { integer, number, plural } from "../format.js";
import { change, packed, toggled } from "../route.js";
import { isNumber, resultsFirst, shown, SUMMARY, valueOf } from "../values.js";
import { CHOICES, chosenCurves, chosenMetrics, curvePanels, curvesOf } from "./curve_panels.js";
import { parallel, scatter } from "./plots.js";

const WAYS = [
  ["curves", "Curves"],
  ["parallel", "Parallel coordinates"],
  ["scatter", "Scatter plot"],
  ["difference", "Differences"],
];
const FIELDS = "model.position."; // the beginning of keys of fields of encodings
const SECTIONS = ["model", "train", "task"]; // of the configuration, in this order
const MOST = 1000; // runs that are compared, as GET /runs takes them
const FRAME = 28; // CSS pixels around a plot

const nameOf = (run) => [run.row ?? run.run_id, run.seed === null ? null : `seed ${run.seed}`].filter(Boolean).join(", ");

/** The runs that have begun: of others, the answer has no configuration. */
const begun = (runs, keys) =>
  runs.filter((run) => keys.some((key) => SECTIONS.includes(key.split(".")[0]) && (valueOf(run, key) ?? null) !== null));

/** Keys of the configuration in which the runs differ; of fields of encodings, those runs that have the encoding. */
function differing(runs, keys) {
  const known = begun(runs, keys);
  const found = keys.filter((key) => {
    const values = known.map((run) => valueOf(run, key));
    return new Set(values.filter((value) => value !== undefined || !key.startsWith(FIELDS)).map(String)).size > 1;
  });
  const section = (key) => SECTIONS.indexOf(key.split(".")[0]);
  return found.filter((key) => section(key) >= 0).sort((a, b) => section(a) - section(b));
}

/** The runs with names of their rows that no other row has: those of several ablations have the names of these, too. */
function named(runs) {
  const several = new Set(runs.map((run) => run.ablations?.[0])).size > 1;
  return runs.map((run) => {
    const row = run.row ?? run.run_id;
    return { ...run, row: several && run.ablations?.length ? `${run.ablations[0]}: ${row}` : row };
  });
}

/** The runs by row: [[name, runs], …]. */
const grouped = (runs) => [...Map.groupBy(runs, (run) => run.row)];

/** One entry for each row, with the means of its seeds' metrics, where the address asks for it. */
function seeds(runs, params) {
  if (params.get("fold") !== "1") return runs;
  return grouped(runs).map(([row, members]) => {
    const values = (key) => members.map((run) => run.metrics[key]).filter(isNumber);
    const common = Object.keys(members[0].metrics).filter((key) => values(key).length === members.length);
    const metrics = Object.fromEntries(common.map((key) => [key, average(values(key))]));
    return { ...members[0], row, seed: null, seeds: members.map((run) => run.run_id), metrics };
  });
}

/** Mean ± standard deviation of a metric over the runs that have it. */
function averaged(runs, metric) {
  const values = runs.map((run) => run.metrics[metric]).filter(isNumber);
  if (!values.length) return "–";
  return number(average(values)) + (values.length > 1 ? ` ± ${number(deviation(values), 2)}` : "");
}

/** What differs between rows: their configuration and final metrics, one column for each row. */
function differences(runs, axes, metrics) {
  const groups = grouped(runs);
  const columns = groups.map(([name, members]) => [`${name}, ${plural(members.length, "run")}`, "number"]);
  const values = (members, key) => [...new Set(begun(members, axes).map((run) => shown(key, valueOf(run, key))))];
  const texts = (members, key) => values(members, key).join(", ") || "–";
  const line = (key, text) => [key, ...groups.map(([, members]) => text(members, key))];
  const part = (title, keys, text, none) => [
    h("h3", {}, title),
    keys.length ? table(title, ["key", ...columns], keys.map((key) => line(key, text))) : empty(none),
  ];
  return [
    part("Configuration", differing(runs, axes), texts, "The same in all chosen runs, seeds aside."),
    part("Final metrics, mean ± standard deviation over runs", metrics, averaged, "No chosen run has metrics yet."),
  ];
}

/** The metrics that a run has logged: no run that is compared has ended. */
async function logged(run) {
  if (!run) return [];
  const rows = await get(at(["runs", run.run_id, "curve"], { points: 100 }));
  return resultsFirst(new Set(rows.flatMap((row) => Object.keys(row).filter((key) => key !== "step"))));
}

const folding = (params) => checkbox("means over seeds", params.get("fold") === "1", (fold) => change({ fold }, { replace: true }));

export function compareRuns(container) {
  const [ways, note] = [h("span"), h("p", { class: "note" })];
  const [controls, body] = [h("div", { class: "bar controls" }), h("div", { class: "comparison" })];
  const whole = section("Comparison", { id: "comparison", controls: ways }, note, controls, body); // once: the focus stays
  const panels = curvePanels();
  let drawn = "";
  const resized = () => dispatchEvent(new Event("routechange"));
  addEventListener("resize", resized); // a plot has the width of the page
  const around = (params) => ({ width: Math.max(container.clientWidth - FRAME, 300), params, nameOf });

  async function curves(runs, results, params) {
    const ids = runs.map((run) => run.run_id);
    const metrics = results.length ? results : await logged(runs.find((run) => run.step));
    const shown = chosenMetrics(params, metrics[0]);
    const answers = await Promise.all(shown.map((metric) => curvesOf(ids, metric)));
    const charts = answers.map((points, i) => {
      const series = (run) => ({ name: nameOf(run), points: points.get(run.run_id) ?? [] });
      const groups = grouped(runs).map(([name, members], at) => ({ name, style: style(at), series: members.map(series) }));
      return { metric: shown[i], title: shown[i], groups };
    });
    return () => {
      replace(controls);
      if (!charts.length) return replace(body, empty("No chosen run has logged a metric yet."));
      replace(body, panels.nodes);
      return panels.draw({ metrics: metrics.map((each) => [each, each]), charts, settings: chosenCurves(params) });
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
              checkbox(key, used.includes(key), () => change({ axis: toggled("axis", key, used) }, { replace: true }), `axis ${key}`),
            ),
          ),
        ),
        folding(params),
      );
      replace(body, used.length < 2 ? empty("Choose at least two axes.") : parallel(seeds(runs, params), used, around(params)));
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
        folding(params),
      );
      replace(body, scatter(seeds(runs, params), [x, y], around(params)));
    };
  }

  async function compute(way, ids, keys, params) {
    const found = await get(at("runs", { run: ids, limit: MOST, fields: [...SUMMARY, ...keys].join(",") }));
    const runs = named(found.runs.filter((run) => run.status !== "pending")); // which have nothing to compare
    const metrics = resultsFirst(new Set(runs.flatMap((run) => Object.keys(run.metrics))));
    if (way === "curves") return curves(runs, metrics, params);
    if (!runs.length) return () => replace(body, empty("No chosen run has been started."));
    const axes = keys.filter((key) => runs.some((run) => valueOf(run, key) !== undefined));
    if (way === "difference")
      return () => {
        replace(controls);
        replace(body, differences(runs, axes, metrics));
      };
    return way === "parallel" ? coordinates(runs, axes, metrics, params) : points(runs, axes, metrics, params);
  }

  return {
    close() {
      removeEventListener("resize", resized);
      panels.close();
    },
    async refresh({ params, keys }) {
      const chosen = packed(params, "sel");
      const ids = chosen.slice(0, MOST);
      const way = params.get("way") ?? "curves";
      const state = JSON.stringify([
        ids,
        way,
        keys,
        [...CHOICES, "axis", "sx", "sy", "fold", "brush"].map((each) => params.getAll(each)),
        container.clientWidth,
      ]);
      if (state === drawn) return;
      if (!ids.length) {
        panels.close();
        replace(container);
      } else {
        const draw = await compute(way, ids, keys, params).catch((error) => () => {
          replace(controls);
          replace(body, h("p", { class: "bad" }, error.message));
        });
        if (way !== "curves") panels.close();
        if (!whole.isConnected) replace(container, whole);
        replace(ways, segmented("Compare by", WAYS, way, (value) => change({ way: value })));
        note.textContent = chosen.length > MOST ? `The first ${integer(MOST)} of ${plural(chosen.length, "chosen run")}.` : "";
        draw();
      }
      drawn = state;
    },
  };
}
