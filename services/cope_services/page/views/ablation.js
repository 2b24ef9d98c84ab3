// One ablation: its results, figures, runs and file.

import { at, download, get } from "../api.js";
import { changes, crumbs, empty, h, marked, replace, section, segmented, select, table, tabs } from "../dom.js";
import { change, link } from "../route.js";
import { askedSize, badge, begun, dot, progress, scaleName, scaleOptions, setsOptions, setsText, STATUSES, summary } from "../status.js";
import { claimsTable } from "./claims.js";
import { figures } from "./figures.js";
import { learningCurves } from "./learning_curves.js";
import { PAPER, resultsTable } from "./results_table.js";
import { canSubmit, trainForm } from "./train.js";

const TABS = [["results", "Results"], ["figures", "Figures"], ["runs", "Runs"], ["file", "File"]];
const FORMATS = [
  ["CSV", "csv", "csv"],
  ["LaTeX", "latex", "tex"],
  ["Markdown", "markdown", "md"],
  ["Runs (CSV)", "csv", "csv", { runs: true }],
];

const COMMITTED = "Results of this repository; you have not trained this yet.";

const hasPublished = (table) => table.rows.some((row) => Object.values(row.metrics).some((cell) => cell.published));

/** The claims with their verdicts, below what they say about the hypothesis. */
function claimsSection(claims) {
  if (!claims.length) return null;
  const [{ hypothesis }] = claims;
  const isTrained = claims.some((each) => each.verdict !== "not trained");
  return section("Claims", { id: "claims" },
    isTrained && h("p", { class: "prose" }, "The hypothesis is ", h("b", {}, hypothesis), "."),
    claimsTable(claims),
  );
}

/** The table, compared as the address says (with `alone`: not at all), or as its report is: against `detail.reference`. */
async function loadTable(detail, { scale, sets }, params, committed) {
  const own = committed ? null : detail.reference; // committed results are compared as their report is
  const asked = params.get("compare");
  const known = asked === PAPER || asked === detail.reference || detail.plan.some(({ row }) => row === asked);
  const compare = known ? asked : own;
  const against = params.has("alone") && !committed ? "" : compare;
  const table = await get(at(["ablations", detail.name, "table"], { format: "json", scale, set: sets, compare: against, committed }));
  return { table, against: against ?? table.compared?.against ?? "", canPaper: hasPublished(table) };
}

/** Show the runs of another scale, or with other values: `size` are parameters of the address. */
const choose = (size) => change({ ...size, open: null, row: null, compare: null, alone: null, from: null });
const chooseScale = (scale) => choose({ scale, set: [] });

function header(detail, { scale, sets }, tab, pages, mlflowUrl) {
  const values = setsOptions(detail, { scale, sets });
  const chooseValues = (value) => choose({ scale: scaleName(scale), set: JSON.parse(value) });
  const counted = sets.length ? `Runs with ${setsText(sets)}: ` : "";
  const state = h("div", { class: "bar state" },
    detail.scales.length ? segmented("Scale", scaleOptions(detail.scales), scaleName(scale), chooseScale) : null,
    values && select("Values", values, JSON.stringify(sets), chooseValues),
    h("div", { class: "counts" }, progress(detail.counts), h("small", {}, counted, summary(detail.counts))),
  );
  const error = h("div", { class: "error", role: "alert" },
    h("h2", {}, "The file is invalid"),
    h("pre", { tabindex: 0 }, detail.error),
  );
  return [
    crumbs(["Ablations", link(["ablations"])], detail.name),
    h("div", { class: "head" },
      h("h1", {}, detail.title || detail.name),
      h("p", { class: "lead" }, detail.reproduces),
      mlflowUrl && h("span", { class: "actions" }, h("a", { class: "button", href: mlflowUrl, rel: "noreferrer" }, "Open in MLflow")),
    ),
    detail.hypothesis && h("p", { class: "prose" }, marked(detail.hypothesis)),
    detail.error ? error : [state, tabs("Parts of the ablation", pages, tab, (value) => change({ tab: value }))],
  ];
}

function runsTab(detail, { scale, sets }) {
  if (!detail.plan.length) return empty("The plan of this ablation has no runs.");
  const rows = detail.plan.map(({ row, runs }) => [
    row,
    h("span", { class: "dots" }, runs.map((run) => dot(run, `${row}, seed ${run.seed}`))),
    `${runs.filter((run) => run.status === "finished").length} / ${runs.length}`,
  ]);
  const all = h("a", { href: link(["runs"], { ablation: detail.name, scale, set: sets }) }, "Runs that have started");
  return [
    h("h2", { class: "hidden" }, "Runs"),
    h("p", {}, all, " can be filtered and compared in the table of runs."),
    h("p", { class: "note statuses" }, STATUSES.map(badge)),
    table("Runs by row", ["row", "runs, by seed", ["finished", "number"]], rows),
  ];
}

/** Buttons that save the table, compared as it is shown: `against` a row, or "" for nothing. */
function downloads(name, { scale, sets }, against, committed) {
  const save = (format, suffix, extra) => () =>
    download(
      at(["ablations", name, "table"], { format, scale, set: sets, compare: extra?.runs ? null : against, committed, ...extra }),
      `${name}${scale ? `_${scale}` : ""}${extra ? "_runs" : ""}.${suffix}`,
    );
  return h("div", { class: "actions downloads", role: "group", "aria-label": "Download the table" },
    FORMATS.map(([text, format, suffix, extra]) => {
      const title = extra && "CSV with a line for each run";
      return h("button", { type: "button", class: "quiet", "data-key": text, title, onclick: save(format, suffix, extra) }, text);
    }),
  );
}

export function ablation(name) {
  const part = changes();
  const [head, banner, claims, main, curves, other] = Array.from({ length: 6 }, () => h("div"));
  const plot = learningCurves(curves);
  const drawTable = resultsTable(main);
  let [title, mlflowUrl] = [name, undefined];
  const form = trainForm(name, chooseScale);

  /** Draw the results, and return where they are from. */
  async function results(detail, size, params, committed) {
    const { scale, sets } = size;
    let notice = committed ? COMMITTED : "";
    const load = () => loadTable(detail, size, params, committed);
    const loaded = await load().catch((error) => {
      if (!committed || error.status !== 409) throw error;
      committed = null; // stale or damaged
      notice = `The results of this repository cannot be shown: ${error.message}`;
      return load();
    });
    const chosen = params.getAll("row").filter((row) => loaded.table.rows.some((each) => each.row === row));
    part("table", JSON.stringify([loaded.table, loaded.against, params.toString()]), () =>
      drawTable({ ...loaded, chosen, params, downloads: downloads(name, size, loaded.against, committed), detail, committed }),
    );
    const found = await get(at("claims", { ablation: name, scale, set: sets, committed }));
    part("claims", JSON.stringify(found), () => replace(claims, claimsSection(found)));
    curves.hidden = Boolean(committed);
    if (committed) return notice;
    if (detail.plan.length) await plot.refresh({ name, scale, sets, detail, chosen, params });
    return notice;
  }

  return {
    nodes: [head, banner, h("div", { class: "beside" }, main, curves), claims, other],
    title: () => title,
    close() {
      plot.close();
    },
    async refresh(params) {
      const base = await get(at(["ablations", name]));
      const size = base.error ? { scale: "", sets: [] } : askedSize(params, base);
      const { scale, sets } = size;
      const detail = scale || sets.length ? await get(at(["ablations", name], { scale, set: sets })) : base;
      if (mlflowUrl === undefined) mlflowUrl = (await get(at(["ablations", name, "mlflow"]))).url;
      const pages = (await canSubmit()) ? [...TABS, ["train", "Train"]] : TABS;
      const chosenTab = params.get("tab") ?? "results";
      const tab = pages.some(([each]) => each === chosenTab) ? chosenTab : "results";
      title = detail.title || name;
      part("head", JSON.stringify([detail, size, tab, pages, mlflowUrl]), () =>
        replace(head, ...header({ ...detail, scales: base.scales, variants: base.variants }, size, tab, pages, mlflowUrl)),
      );
      // Where nothing is started here, what is kept with the ablation files.
      const committed = (!detail.error && !sets.length && !begun(detail.counts) && detail.committed.includes(scale)) || null;
      let notice = "";
      for (const each of [main, claims, curves]) each.hidden = tab !== "results" || Boolean(detail.error);
      other.hidden = tab === "results" && !detail.error;
      if (detail.error || tab === "file") {
        part("other", `file ${detail.text}`, () =>
          replace(
            other,
            h("h2", {}, `${name}.yaml`),
            detail.recorded_by &&
              h("p", { class: "note" }, "This service has no such file; it is as ",
                h("a", { href: link(["sweeps", detail.recorded_by]) }, `sweep ${detail.recorded_by}`), " has recorded it."),
            h("pre", { class: "file", tabindex: 0 }, detail.text),
          ),
        );
      } else if (tab === "runs") {
        part("other", `runs ${JSON.stringify(detail.plan)}`, () => replace(other, runsTab(detail, size)));
      } else if (tab === "train") {
        part("other", `train ${JSON.stringify([size, detail.counts, base.scales])}`, () => {
          if (!other.contains(form.node)) replace(other, h("h2", {}, "Train"), form.node);
          form.update({ scale, sets, scales: base.scales });
        });
      } else if (tab === "figures") {
        if (committed) notice = COMMITTED;
        await figures(other, { name, scale, sets, counts: detail.counts, rows: detail.plan.length, committed, part });
      } else {
        notice = await results(detail, size, params, committed);
      }
      part("banner", notice, () => replace(banner, notice && h("p", { class: "committed", role: "note" }, notice)));
    },
  };
}
