// The comparison of chosen runs: their curves, and what differs between their rows. MLflow plots runs in other ways.

import { at, get } from "../api.js";
import { style } from "../curves.js";
import { empty, h, replace, section, table } from "../dom.js";
import { integer, plural } from "../format.js";
import { idsIn } from "../route.js";
import { MOST_RUNS, nameOf, resultsFirst, shown, SUMMARY, valueOf } from "../values.js";
import { CHOICES, chosenCurves, chosenMetrics, curvePanels, curvesOf } from "./curve_panels.js";

const FIELDS = "model.position."; // the beginning of keys of fields of encodings
const SECTIONS = ["model", "train", "task"]; // of the configuration, in this order

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

const ablationsOf = (runs) => [...new Set(runs.flatMap((run) => run.ablations?.[0] ?? []))];

/** The runs with names of their rows that no other row has: those of several ablations have the names of these, too. */
function named(runs) {
  const several = ablationsOf(runs).length > 1;
  return runs.map((run) => {
    const row = run.row ?? run.run_id;
    return { ...run, row: several && run.ablations?.length ? `${run.ablations[0]}: ${row}` : row };
  });
}

/** The runs by row: [[name, runs], …]. */
const grouped = (runs) => [...Map.groupBy(runs, (run) => run.row)];

/** The values of the configuration that differ, one column for each row. */
function differences(runs, keys) {
  const groups = grouped(runs);
  const columns = groups.map(([name, members]) => [`${name}, ${plural(members.length, "run")}`, "number"]);
  const values = (members, key) => [...new Set(begun(members, keys).map((run) => shown(key, valueOf(run, key))))];
  const line = (key) => [key, ...groups.map(([, members]) => values(members, key).join(", ") || "–")];
  const found = differing(runs, keys);
  const title = "Differences in configuration";
  const isKnown = begun(runs, keys).length > 0;
  const none = isKnown ? "The same in all chosen runs, seeds aside." : "The configuration of the chosen runs is not known yet.";
  return [h("h3", {}, title), found.length ? table(title, ["key", ...columns], found.map(line)) : empty(none)];
}

/** The metrics that a run has logged: no run that is compared has ended. */
async function logged(run) {
  if (!run) return [];
  const rows = await get(at(["runs", run.run_id, "curve"], { points: 100 }));
  return resultsFirst(new Set(rows.flatMap((row) => Object.keys(row).filter((key) => key !== "step"))));
}

export function compareRuns(container) {
  const [links, note, curves, values] = [h("span", { class: "actions" }), h("p", { class: "note" }), h("div"), h("div")];
  const body = h("div", { class: "comparison" }, curves, values);
  const whole = section("Comparison", { id: "comparison", controls: links }, note, body); // once: the focus stays
  const panels = curvePanels();
  const pages = new Map(); // ablation → the URL of its page in MLflow, or null
  let drawn = "";

  /** Links to the ablations of the runs in MLflow. */
  async function mlflow(runs) {
    const names = ablationsOf(runs);
    const fresh = names.filter((name) => !pages.has(name));
    const answers = await Promise.all(fresh.map((name) => get(at(["ablations", name, "mlflow"]))));
    fresh.forEach((name, i) => pages.set(name, answers[i].url));
    return names
      .filter((name) => pages.get(name))
      .map((name) => h("a", { class: "button", href: pages.get(name), rel: "noreferrer" }, `Plot ${name} in MLflow`));
  }

  /** The charts of the chosen metrics, and all metrics. */
  async function chartsOf(runs, params) {
    const results = resultsFirst(new Set(runs.flatMap((run) => Object.keys(run.metrics))));
    const metrics = results.length ? results : await logged(runs.find((run) => run.step));
    const ids = runs.map((run) => run.run_id);
    const shown = chosenMetrics(params, metrics[0]);
    const answers = await Promise.all(shown.map((metric) => curvesOf(ids, metric)));
    const charts = answers.map((points, i) => {
      const series = (run) => ({ name: nameOf(run), points: points.get(run.run_id) ?? [] });
      const groups = grouped(runs).map(([name, members], at) => ({ name, style: style(at), series: members.map(series) }));
      return { metric: shown[i], title: shown[i], groups };
    });
    return { charts, metrics: metrics.map((each) => [each, each]) };
  }

  /** Read what is drawn of runs; returns a function that draws it. */
  async function load(runs, keys, params) {
    const [{ charts, metrics }, others] = await Promise.all([chartsOf(runs, params), mlflow(runs)]);
    return () => {
      replace(links, others);
      replace(curves, charts.length ? panels.nodes : empty("No chosen run has logged a metric yet."));
      if (charts.length) panels.draw({ metrics, charts, settings: chosenCurves(params) });
      replace(values, runs.length ? differences(runs, keys) : null);
    };
  }

  return {
    close: panels.close,
    /** `learnKeys` returns the keys that runs of any page have, those of these runs among them. */
    async refresh({ params, learnKeys }) {
      const chosen = idsIn(params, "sel");
      const ids = chosen.slice(0, MOST_RUNS);
      if (!ids.length) {
        panels.close();
        replace(container);
        drawn = "";
        return;
      }
      let [state, draw] = ["", null];
      try {
        const read = (fields) => get(at("runs", { run: ids, limit: MOST_RUNS, fields: fields.join(",") }));
        const keys = await learnKeys((await read(SUMMARY)).runs);
        const found = await read([...SUMMARY, ...keys]);
        state = JSON.stringify([found, keys, CHOICES.map((each) => params.getAll(each))]);
        if (state === drawn) return;
        const runs = named(found.runs.filter((run) => run.status !== "pending")); // which have nothing to compare
        draw = await load(runs, keys, params);
      } catch (error) {
        state = ""; // it is read again
        draw = () => {
          replace(curves, h("p", { class: "bad" }, error.message));
          replace(values);
        };
      }
      if (!whole.isConnected) replace(container, whole);
      note.textContent = chosen.length > MOST_RUNS ? `The first ${integer(MOST_RUNS)} of ${plural(chosen.length, "chosen run")}.` : "";
      draw();
      drawn = state;
    },
  };
}
