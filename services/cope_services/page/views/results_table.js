// The table of an ablation: ours, what the paper published, verdicts, and the runs of a cell.
// Cells come with their texts: nothing is rounded here.

import { h, replace, scrolling, section, select } from "../dom.js";
import { integer, withMinus } from "../format.js";
import { change, link, shortIds, toggled } from "../route.js";
import { badge } from "../status.js";

const SPACE = "\u2007"; // as wide as a digit
const CLASSES = { agrees: "good", better: "good", differs: "bad", worse: "bad" };

/** The mean and the standard deviation of `3.40 ± 4.72`; the mean alone without one. */
const parts = (text) => withMinus(text).split(" ± ");

function withSpread(text, width) {
  const [mean, spread] = parts(text);
  return [mean, spread && h("span", { class: "spread" }, ` ± ${spread.padStart(width, SPACE)}`)];
}

/** Characters of the widest standard deviation of a column, so that the means are aligned. */
const widest = (rows, { name }) =>
  Math.max(0, ...rows.map(({ metrics }) => parts(metrics[name].text)[1]?.length ?? 0));

/** `worse than CoPE`, `agrees with the paper`: a verdict that says against what. */
function verdictText({ verdict: text, against }) {
  if (["better", "worse"].includes(text)) return `${text} than ${against}`;
  return { agrees: "agrees with the paper", differs: "differs from the paper" }[text] ?? text;
}

function verdict(comparison) {
  if (!comparison || comparison.verdict === "descriptive") return null;
  return h("span", { class: `verdict ${CLASSES[comparison.verdict] ?? ""}` }, verdictText(comparison));
}

/** The numbers of a comparison in a sentence. */
function comparisonText({ texts, ci_low: low, p_adjusted: p, against }) {
  const numbers = [
    `Against ${against}: difference ${withMinus(texts.difference)}`,
    low !== null && `95 % interval of this comparison alone ${withMinus(texts.interval)}`,
    p !== null && `corrected p = ${texts.p}`,
  ];
  return `${numbers.filter(Boolean).join(", ")}.`;
}

function cell(row, metric, context) {
  const { params, published, widths, committed } = context;
  const found = row.metrics[metric.name];
  const paper = found.published ?? published?.get(row.row)?.[metric.name]?.published;
  const id = `${row.row}|${metric.name}`;
  const open = params.get("open") === id;
  const mark = found.mostly_stuck && h("sup", { class: "mark", title: STUCK }, "†");
  const ours =
    found.n === 0
      ? h("span", { class: "none" }, "–")
      : committed // its runs are not in this store
        ? h("span", { class: `value${found.best ? " best" : ""}`, title: `${found.n} of ${row.seeds} seeds` },
            withSpread(found.text, widths.get(metric.name)),
            mark,
          )
      : h("button", {
            type: "button",
            class: `value${found.best ? " best" : ""}`,
            "aria-expanded": String(open),
            "data-key": `cell ${id}`,
            title: `${row.row}, ${metric.title}: ${found.n} of ${row.seeds} seeds. Show the runs`,
            onclick: () => change({ open: open ? null : id }),
          },
          withSpread(found.text, widths.get(metric.name)),
          mark,
          found.n !== row.counts.finished && h("sup", {}, `n=${found.n}`),
        );
  const below = [
    paper &&
      h("span", { class: "published", title: paper.source ?? "" },
        "paper ",
        withSpread(paper.text, 0),
      ),
    verdict(found.comparison),
  ];
  return h("td", { class: "number" }, ours, below.some(Boolean) && h("span", { class: "below" }, below));
}

const STUCK = "† Most seeds are stuck: they do no better than a simple rule that does not solve the task.";

/** The runs behind a cell, with their values. */
function runsOfCell(row, metric, width) {
  const { values, comparison } = row.metrics[metric.name];
  const ids = values.map((each) => each.run_id);
  const stuck = values.some((each) => each.stuck);
  return h("tr", { class: "detail" },
    h("td", { colspan: width },
      h("div", { class: "cellruns" },
        h("b", {}, `${row.row}: ${metric.title} by seed`),
        h("ul", {},
          values.map((each) =>
            h("li", {},
              h("a", { href: link(["runs", each.run_id]), "data-key": `run ${each.run_id}` }, `seed ${each.seed}`),
              " ",
              h("span", { class: "mono" }, withMinus(each.text)),
              each.stuck ? h("span", { class: "verdict bad" }, "stuck") : null,
            ),
          ),
        ),
        stuck ? h("p", { class: "note" }, "Stuck: the run does no better than a simple rule that does not solve the task.") : null,
        comparison && h("p", {}, comparisonText(comparison)),
        h("p", {},
          h("a", { href: link(["runs"], { ids: shortIds(ids), sel: shortIds(ids) }) }, "Compare these runs"),
          " · ",
          h("a", { href: link(["playground"], { run: ids[0] }) },
            "Open the first one's checkpoint in the playground",
          ),
        ),
      ),
    ),
  );
}

function sorted(rows, params) {
  const [key, descending] = [params.get("sort"), params.get("order") === "desc"];
  if (!key) return rows;
  const value = (row) => (key === "row" ? row.row : key === "parameters" ? row.parameters : row.metrics[key]?.mean) ?? null;
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return (typeof x === "string" ? x.localeCompare(y) : x - y) * (descending ? -1 : 1);
  });
}

/** A header that sorts: ascending, descending, the order of the file. */
function heading(key, text, params, attributes = {}) {
  const own = params.get("sort") === key;
  const descending = own && params.get("order") === "desc";
  const next = !own ? { sort: key, order: null } : descending ? { sort: null, order: null } : { sort: key, order: "desc" };
  return h("th", { scope: "col", "aria-sort": own ? (descending ? "descending" : "ascending") : null, ...attributes },
    h("button", { type: "button", class: "sort", "data-key": `sort ${key}`, onclick: () => change(next) }, text),
  );
}

/** `Lower is better.`, with the exceptions of a table of both kinds. */
function goals(metrics) {
  const [lower, higher] = ["min", "max"].map((goal) => metrics.filter((metric) => metric.goal === goal));
  if (!lower.length) return "Higher is better.";
  return `Lower is better${higher.length ? `; of ${higher.map((metric) => metric.title).join(", ")}, higher` : ""}.`;
}

/** Draw the table. `published` has the published values where this scale is not compared with them. */
export function resultsTable(container, context) {
  const { table, against, canPaper, chosen, params, published, downloads, detail, committed } = context;
  const widths = new Map(table.metrics.map((metric) => [metric.name, widest(table.rows, metric)]));
  const parameters = table.rows.some((row) => row.parameters !== null);
  const columns = [
    ["row", Object.values(table.axes).join(" · ") || "row", {}],
    ...table.metrics.map((metric) => [metric.name, metric.title, { class: "number" }]),
    ...(parameters ? [["parameters", "parameters", { class: "number" }]] : []),
  ];
  const body = sorted(table.rows, params).flatMap((row) => {
    const [openRow, openMetric] = splitOpen(params.get("open"));
    const metric = row.row === openRow ? table.metrics.find((each) => each.name === openMetric) : null;
    const line = h("tr", { class: chosen.includes(row.row) ? "chosen" : "" },
      !committed && h("td", { class: "choose" },
        h("input", {
          type: "checkbox",
          checked: chosen.includes(row.row),
          "data-key": `choose ${row.row}`,
          "aria-label": `Draw the curves of ${row.row}`,
          onchange: () => change({ row: toggled("row", row.row) }),
        }),
      ),
      h("th", { scope: "row" },
        row.row,
        row.counts.finished < row.seeds
          ? h("small", {}, `${row.counts.finished} of ${row.seeds} seeds`, problems(row.counts))
          : null,
      ),
      table.metrics.map((each) => cell(row, each, { params, published, widths, committed })),
      parameters && h("td", { class: "number" }, integer(row.parameters)),
    );
    return metric && row.metrics[metric.name].n ? [line, runsOfCell(row, metric, columns.length + 1)] : [line];
  });
  const options = [
    ["none", "nothing"],
    ...(canPaper ? [["paper", "the paper"]] : []),
    ...table.rows.map((row) => [row.row, row.row]),
  ];
  for (const key of [detail.reference, against])
    if (key && !options.some(([known]) => known === key)) options.push([key, key.replace("=", " = ")]);
  const shown = published && [...published.values()].some((metrics) => Object.values(metrics).some((each) => each.published));
  replace(
    container,
    section(
      "Results",
      {
        id: "results",
        controls: [select("verdicts against", options, against, (value) => change({ compare: value })), downloads],
      },
      table.compared?.answer && h("p", { class: "prose" }, table.compared.answer),
      scrolling(
        "Result table",
        h("table", { class: "results" },
          h("thead", {},
            h("tr", {},
              !committed && h("td", { class: "choose" }, h("span", { class: "hidden" }, "Choose")),
              columns.map(([key, text, attributes]) => heading(key, text, params, attributes)),
            ),
          ),
          h("tbody", {}, body),
        ),
      ),
      h("div", { class: "notes" },
        [
          `Mean ± standard deviation over seeds. ${goals(table.metrics)}${committed ? "" : " Select a number to see its runs, and the numbers of its comparison. Choose rows to draw their curves alone."}`,
          table.rows.some((row) => Object.values(row.metrics).some((each) => each.mostly_stuck)) && STUCK,
          shown &&
            "The paper's numbers are of models and training of another size, so there is no verdict against the paper.",
          table.scaled.length ? `These runs have other values of ${table.scaled.join(", ")} than the file.` : null,
          ...(table.compared?.rules ?? []),
          ...table.warnings,
        ]
          .filter(Boolean)
          .map((text) => h("p", { class: "note" }, text)),
      ),
    ),
  );
}

function problems(counts) {
  return ["running", "failed", "interrupted", "stopped"]
    .filter((status) => counts[status])
    .map((status) => h("span", { class: "problem" }, badge(status)));
}

function splitOpen(value) {
  const at = value?.lastIndexOf("|") ?? -1;
  return at < 0 ? [null, null] : [value.slice(0, at), value.slice(at + 1)];
}
