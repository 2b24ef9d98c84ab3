// The checkpoints to choose in the playground: those of one ablation, in each row the best seed first.

import { at, get } from "../api.js";
import { checkbox, empty, h, select } from "../dom.js";
import { change, toggled } from "../route.js";
import { askedSize, scaleName, scaleOptions, setsOptions, sizes } from "../status.js";
import { primaryOf } from "../values.js";

export const MOST = 8; // checkpoints at once
export const NONE = "none"; // instead of runs: none is chosen, and none shall be

const finishedRuns = (ablation) => sizes(ablation).reduce((sum, { counts }) => sum + (counts.finished ?? 0), 0);

/** The rows of an ablation with their finished runs. The address names it; else it is that of the chosen run, or the newest. */
export async function loadChoice(params, run) {
  const ablations = (await get(at("ablations"))).filter((each) => !each.error && finishedRuns(each));
  const usable = ablations.sort((a, b) => (b.newest_ms ?? 0) - (a.newest_ms ?? 0) || finishedRuns(b) - finishedRuns(a));
  const asked = params.get("ablation");
  const name = asked ?? run?.ablations[0];
  const ablation = usable.find((each) => each.name === name) ?? usable[0];
  if (!ablation) return { usable, rows: [] };
  const { scale, sets } = askedSize(ablation.name === name ? params : new URLSearchParams(), ablation);
  const table = await get(at(["ablations", ablation.name, "table"], { format: "json", scale, set: sets }));
  const metric = primaryOf(table.metrics);
  const sign = metric.goal === "min" ? 1 : -1;
  const ordered = (row) => [...row.metrics[metric.name].values].sort((a, b) => sign * (a.value - b.value));
  const rows = table.rows.map((row) => ({ row: row.row, task: row.labels.task, runs: ordered(row) })).filter((row) => row.runs.length);
  const lacking = asked !== null && asked !== ablation.name ? asked : "";
  return { usable, lacking, name: ablation.name, scale, sets, scales: ablation.scales, values: setsOptions(ablation, { scale, sets }), rows, metric };
}

/** Its check boxes. `nameOf` gives the names of chosen runs of other ablations. */
export function choiceFields({ usable, lacking, name, scale, sets, scales, values, rows, metric }, chosen, nameOf) {
  if (!usable.length) {
    return empty(
      "No ablation here has a finished run, so there is no checkpoint to choose. `cope-sweep run quickstart` trains some in a few minutes. To use a run with other settings, open it, and from there the playground.",
    );
  }
  const choose = (ids) => change({ run: ids.length ? ids.slice(-MOST) : NONE });
  const box = (id, text) => checkbox(text, chosen.includes(id), () => choose(toggled("run", id, chosen)), `run ${id}`);
  const own = new Set(rows.flatMap((row) => row.runs.map((run) => run.run_id)));
  const others = chosen.filter((id) => !own.has(id));
  const titles = usable.map((each) => [each.name, each.title || each.name]);
  const none = h("button", { type: "button", class: "quiet", "data-key": "none", onclick: () => choose([]) },
    "Choose none",
  );
  const lines = rows.map((row) =>
    h("div", { class: "checkrow" },
      h("b", {}, row.row),
      row.runs.map((run, i) => box(run.run_id, `seed ${run.seed}${i ? "" : " (best)"}`)),
    ),
  );
  const controls = [
    select("ablation", titles, name, (value) => change({ ablation: value, scale: null, set: [], run: null, text: null, ask: null })),
    scales.length ? select("scale", scaleOptions(scales), scaleName(scale), (value) => change({ ablation: name, scale: value, set: [], run: null })) : null,
    values && select("values", values, JSON.stringify(sets), (value) => change({ ablation: name, scale: scaleName(scale), set: JSON.parse(value), run: null })),
    none,
  ];
  return [
    h("div", { class: "bar controls" }, controls),
    lacking && h("p", { class: "note" }, `${lacking} has no checkpoint here; these are of ${name}.`),
    h("fieldset", { class: "checkpoints" },
      h("legend", {}, `Checkpoints, up to ${MOST}; in each row the best seed by ${metric.title} first`),
      rows.length ? lines : empty("No run of this scale is finished."),
      others.length
        ? h("div", { class: "checkrow" },
            h("b", {}, "others"),
            others.map((id) => box(id, nameOf(id))),
          )
        : null,
    ),
  ];
}
