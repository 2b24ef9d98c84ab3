// The learning curves of an ablation, with their controls and legend.

import { at, get } from "../api.js";
import { Chart } from "../chart.js";
import { lines, style } from "../curves.js";
import { empty, h, replace, section } from "../dom.js";
import { duration, integer, number } from "../format.js";
import { change, toggled } from "../route.js";
import { CHOICES, chosenCurves, curveControls, entry, keepZoom } from "./curve_controls.js";

const POINTS = 400;
const ROWS = 100;

/** The groups of a chart from the answer of …/curves; by time, with the seconds of /curves. */
async function groupsOf(curves, byTime, metric) {
  const styled = curves.rows.map((row, i) => ({
    name: row.row,
    style: style(i),
    series: row.series.map((each) => ({
      id: each.run_id,
      name: `seed ${each.seed}`,
      points: each.points.map(([step, value]) => [step, NaN, value]),
    })),
  }));
  if (!byTime) return styled;
  const ids = styled.flatMap((group) => group.series.filter((each) => each.points.length).map((each) => each.id));
  const timed = new Map();
  for (let i = 0; i < ids.length; i += 50) {
    const part = await get(at("curves", { run: ids.slice(i, i + 50), metric, points: POINTS }));
    for (const each of part.series) timed.set(each.run_id, each.points);
  }
  return styled.map((group) => ({
    ...group,
    series: group.series.map((each) => ({ ...each, points: timed.get(each.id) ?? [] })),
  }));
}

/** [metric, text] of each metric, with the title that it has in the table. */
const named = (metrics, titles) => metrics.map((name) => [name, titles.has(name) ? `${titles.get(name)}: ${name}` : name]);

/** Buttons to the next and the last rows of an ablation with more rows than are shown at a time. */
function rowPages(curves, offset) {
  if (!offset && curves.next === null) return null;
  const to = (from) => () => change({ from: from || null });
  const shown = curves.rows.length ? `Rows ${integer(offset + 1)} to ${integer(offset + curves.rows.length)}` : "No rows";
  return h("div", { class: "bar", role: "group", "aria-label": "Rows shown" },
    h("span", { class: "note" }, `${shown} of ${integer(curves.total)}`),
    h("button", { type: "button", disabled: !offset, "data-key": "rows before", onclick: to(Math.max(0, offset - ROWS)) }, "Rows before"),
    h("button", { type: "button", disabled: curves.next === null, "data-key": "next rows", onclick: to(curves.next) }, "Next rows"),
  );
}

export function learningCurves(container) {
  const [controls, pages, legend, plot, final] = [
    h("div", { class: "bar controls" }),
    h("div"),
    h("div", { class: "legend", role: "group", "aria-label": "Rows" }),
    h("div"),
    h("div"),
  ];
  let [chart, drawn, outputs, at_] = [null, "", new Map(), h("span", { class: "note", "aria-hidden": "true" })];

  function readout(shown, byTime) {
    return (x, values) => {
      at_.textContent = x === null ? "" : byTime ? duration(x) : `step ${integer(x)}`;
      shown.forEach((line, i) => {
        if (!line.faint) outputs.get(line.group).value = x === null ? "" : number(values[i]);
      });
    };
  }

  function draw(groups, curves, { chosen, params, titles }) {
    const settings = chosenCurves(params);
    replace(controls, curveControls(named(curves.metrics, titles), curves.metric, settings), at_);
    outputs = new Map();
    replace(
      legend,
      groups.map((group) => {
        const { button, output } = entry(group.name, group.style, {
          shown: !chosen.length || chosen.includes(group.name),
          onclick: () => change({ row: toggled(chosen, group.name) }),
        });
        outputs.set(group.name, output);
        return button;
      }),
    );
    const shown = groups
      .filter((group) => (!chosen.length || chosen.includes(group.name)) && group.series.some((each) => each.points.length))
      .map((group) => ({ ...group, series: group.series.filter((each) => each.points.length) }));
    const drawable = lines(shown, settings);
    if (!drawable.some((line) => line.points.length)) {
      chart?.close();
      chart = null;
      replace(plot, empty(`No run has logged ${curves.metric} yet. Curves appear here while runs are trained.`));
      return;
    }
    chart ??= new Chart(plot, { onzoom: keepZoom });
    chart.oncursor = readout(drawable, settings.by === "time");
    chart.draw(drawable, { ...settings, metric: curves.metric, label: titles.get(curves.metric) });
  }

  return {
    close: () => chart?.close(),
    async refresh({ name, scale, detail, chosen, params }) {
      const byTime = params.get("x") === "time";
      const query = { scale, metric: params.get("metric"), offset: params.get("from"), limit: ROWS };
      const curves = await get(at(["ablations", name, "curves"], query));
      if (!controls.isConnected) replace(container, section("Learning curves", { id: "curves" }, controls, pages, legend, plot, final));
      const groups = await groupsOf(curves, byTime, curves.metric).catch((error) => ({ error }));
      const state = JSON.stringify([
        groups.error ? groups.error.message : groups,
        [curves.metrics, curves.total],
        chosen,
        ["from", ...CHOICES].map((each) => params.get(each)),
      ]);
      if (state === drawn) return;
      replace(pages, rowPages(curves, +(params.get("from") ?? 0)));
      const titles = new Map(detail.metrics.map((metric) => [metric.name, metric.title]));
      if (groups.error) {
        const bySteps = new URLSearchParams({ ...Object.fromEntries(params), x: "step" });
        draw(await groupsOf(curves, false), curves, { chosen, params: bySteps, titles });
        const text = `The curves by time cannot be shown, so they are by step: ${groups.error.message}`;
        replace(final, h("p", { class: "bad" }, text));
      } else {
        draw(groups, curves, { chosen, params, titles });
        replace(final);
      }
      drawn = state;
    },
  };
}
