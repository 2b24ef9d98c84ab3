// The learning curves of an ablation.

import { at, get } from "../api.js";
import { style } from "../curves.js";
import { h, replace, section } from "../dom.js";
import { integer } from "../format.js";
import { change } from "../route.js";
import { CHOICES, chosenCurves, chosenMetrics, curvePanels, curvesOf } from "./curve_panels.js";

const LOSS = "train/loss";
const ROWS = 100;
const MOST_DRAWN = 12; // of more rows with curves, the first are drawn until some are chosen

/** The groups of a chart from the answer of …/curves; by time, with the seconds of /curves. Values are multiplied by `scale`. */
async function groupsOf(curves, byTime, metric, scale) {
  const shown = (value) => (value === null ? null : value * scale);
  const styled = curves.rows.map((row, i) => ({
    name: row.row,
    style: style(i),
    series: row.series.map((each) => ({
      id: each.run_id,
      name: `seed ${each.seed}`,
      points: each.points.map(([step, value]) => [step, NaN, shown(value)]),
    })),
  }));
  if (!byTime) return styled;
  const ids = styled.flatMap((group) => group.series.filter((each) => each.points.length).map((each) => each.id));
  const timed = await curvesOf(ids, metric);
  return styled.map((group) => ({
    ...group,
    series: group.series.map((each) => ({
      ...each,
      points: (timed.get(each.id) ?? []).map(([step, seconds, value]) => [step, seconds, shown(value)]),
    })),
  }));
}

/** [metric, text] of each metric, with the title that it has in the table. */
const named = (metrics, titles) => metrics.map((name) => [name, titles.has(name) ? `${titles.get(name)}: ${name}` : name]);

/** Buttons to the next and the last rows of an ablation with more rows than are shown at a time. */
function rowPages(curves, offset) {
  if (!offset && curves.next === null) return null;
  const to = (from) => () => change({ from: from || null });
  const shown = offset < curves.total ? `Rows ${integer(offset + 1)} to ${integer(curves.next ?? curves.total)}` : "No rows";
  return h("div", { class: "bar", role: "group", "aria-label": "Rows shown" },
    h("span", { class: "note" }, `${shown} of ${integer(curves.total)}`),
    h("button", { type: "button", disabled: !offset, "data-key": "rows before", onclick: to(Math.max(0, offset - ROWS)) }, "Rows before"),
    h("button", { type: "button", disabled: curves.next === null, "data-key": "next rows", onclick: to(curves.next) }, "Next rows"),
  );
}

export function learningCurves(container) {
  const [pages, note] = [h("div"), h("div")];
  const panels = curvePanels({ rows: true });
  let drawn = "";

  return {
    close: panels.close,
    /**
     * `before`: metrics that are drawn before the primary one until others are chosen, if runs have logged them. `only`: the
     * ids of the runs that are drawn.
     */
    async refresh({ name, scale, sets, detail, chosen, params, before = [], only }) {
      async function load(metric) {
        const found = await get(at(["ablations", name, "curves"], { scale, set: sets, metric, offset: params.get("from"), limit: ROWS }));
        if (!only) return found;
        const rows = found.rows.map((row) => ({ ...row, series: row.series.filter((each) => only.has(each.run_id)) }));
        return { ...found, rows: rows.filter((row) => row.series.length) };
      }
      const asked = chosenMetrics(params);
      const primary = asked.length ? null : await load(null);
      // A metric that was evaluated once, at the end, is no curve: the loss is, which every run logs.
      const isCurve = primary?.rows.some((row) => row.series.some(({ points }) => points.length > 1));
      const first = isCurve ? before : [LOSS];
      const others = primary ? first.filter((metric) => primary.metrics.includes(metric)) : asked;
      const answers = [...(await Promise.all(others.map(load))), ...(primary && (isCurve || !others.length) ? [primary] : [])];
      const [shown] = answers;
      const pager = rowPages(shown, +(params.get("from") ?? 0));
      if (!shown.rows.length && !pager) {
        replace(container);
        return;
      }
      if (!pages.isConnected) replace(container, section("Learning curves", { id: "curves" }, pages, panels.nodes, note));
      const scales = new Map(detail.metrics.map((metric) => [metric.name, metric.scale]));
      const grouped = (byTime) => Promise.all(answers.map((each) => groupsOf(each, byTime, each.metric, scales.get(each.metric) ?? 1)));
      let [settings, problem] = [chosenCurves(params), null];
      const groups = await grouped(settings.by === "time").catch((error) => {
        problem = error.message;
        settings = { ...settings, by: "step", zoom: null };
        return grouped(false);
      });
      const begun = groups[0].filter(({ series }) => series.some(({ points }) => points.length)).map(({ name: row }) => row);
      const isCut = !chosen.length && begun.length > MOST_DRAWN;
      const visible = isCut ? begun.slice(0, MOST_DRAWN) : chosen;
      const state = JSON.stringify([
        problem,
        groups,
        [shown.metrics, shown.total],
        visible,
        ["from", ...CHOICES].map((each) => params.getAll(each)),
      ]);
      if (state === drawn) return;
      replace(pages, pager);
      const titles = new Map(detail.metrics.map((metric) => [metric.name, metric.title]));
      const charts = answers.map(({ metric }, i) => ({ metric, title: titles.get(metric) ?? metric, groups: groups[i] }));
      panels.draw({ metrics: named(shown.metrics, titles), charts, settings, chosen: visible });
      const text = `The curves by time cannot be shown, so they are by step: ${problem}`;
      const cut = `The first ${MOST_DRAWN} of ${integer(begun.length)} rows with curves are drawn. Choose rows in the table to draw others.`;
      replace(note, problem && h("p", { class: "bad" }, text), isCut && h("p", { class: "note" }, cut));
      drawn = state;
    },
  };
}
