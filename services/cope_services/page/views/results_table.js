// The table of an ablation: ours, what the paper published, verdicts, and the runs of a cell.
// Cells come with their texts: nothing is rounded here.

import { empty, h, replace, scrolling, searchField, section, select } from "../dom.js";
import { hasWords, integer, plural, withMinus } from "../format.js";
import { change, link, shortIds, toggled } from "../route.js";
import { badge, UNFINISHED } from "../status.js";
import { primaryOf } from "../values.js";

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

/** `worse than CoPE`, `agrees with the paper`: a verdict that says against what; empty without one. */
export function verdictText(comparison) {
  if (!comparison || comparison.verdict === "descriptive") return "";
  const { verdict: text, against } = comparison;
  if (["better", "worse"].includes(text)) return `${text} than ${against}`;
  return { agrees: "agrees with the paper", differs: "differs from the paper" }[text] ?? text;
}

/** The verdict, and the interval of the difference, which says how large it is. */
function verdict(comparison) {
  if (!comparison || comparison.verdict === "descriptive") return [];
  const { verdict: text, ci_low: low, texts } = comparison;
  return [
    h("span", { class: `verdict ${CLASSES[text] ?? ""}` }, verdictText(comparison)),
    low !== null && h("span", { title: `95 % interval of the difference from ${comparison.against}` }, withMinus(texts.interval)),
  ];
}

/** How many of the seeds have learned the task, where the metric says what that is. */
const learned = (found) =>
  found.learned && found.learned.n > 1 && h("span", { title: "seeds that have learned the task" }, `${found.learned.k}/${found.learned.n} learned`);

/** How many of the seeds are stuck, where it is not most of them. */
function stuck({ values, n, mostly_stuck: isMarked }) {
  const number = values.filter((each) => each.stuck).length;
  return number > 0 && !isMarked && h("span", { title: STUCK_SEED }, `${number}/${n} stuck`);
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
  const { params, widths, committed, shades } = context;
  const found = row.metrics[metric.name];
  const paper = found.published;
  const id = `${row.row}|${metric.name}`;
  const open = params.get("open") === id;
  const mark = found.mostly_stuck && h("sup", { class: "mark", title: STUCK }, "†");
  const content = [
    withSpread(found.text, widths.get(metric.name)),
    mark,
    found.n !== row.counts.finished && h("sup", {}, `n=${found.n}`),
  ];
  const shown = { class: `value${found.best ? " best" : ""}`, title: `${found.n} of ${row.seeds} seeds` };
  const ours =
    found.n === 0
      ? h("span", { class: "none" }, "–")
      : committed // its runs are not in this store
        ? h("span", shown, content)
        : h("button", {
            ...shown,
            type: "button",
            "aria-expanded": String(open),
            "data-key": `cell ${id}`,
            title: `${row.row}, ${metric.title}: ${shown.title}. Show the runs`,
            onclick: () => change({ open: open ? null : id }),
          }, content);
  const below = [
    paper &&
      h("span", { class: "published", title: paper.source ?? "" },
        "paper ",
        withSpread(paper.text, 0),
      ),
    learned(found),
    stuck(found),
    ...verdict(found.comparison),
  ];
  const shade = shades.get(metric.name)?.get(row.row) ?? "";
  return h("td", { class: `number ${shade}` }, ours, below.some(Boolean) && h("span", { class: "below" }, below));
}

const SHADES = 5;

/** Most seeds have not learned the task, or are stuck at a rule that does not solve it. */
const isUnlearned = ({ mostly_stuck: stuck, learned: share }) => stuck || (share !== null && 2 * share.k < share.n);

/** Row → the class of its cell: the better the value among rows that have learned the task, the more colour; else grey. */
function shadesOf(rows, { name, goal }) {
  const isGrey = (row) => isUnlearned(row.metrics[name]);
  const coloured = rows.filter((row) => row.metrics[name].n && !isGrey(row));
  const sign = goal === "min" ? 1 : -1;
  const values = [...new Set(coloured.map((row) => row.metrics[name].mean))].sort((a, b) => sign * (a - b));
  const most = Math.max(values.length - 1, 1);
  const shades = new Map(values.map((value, i) => [value, `heat${SHADES - 1 - Math.round((i / most) * (SHADES - 1))}`]));
  const shade = (row) => [row.row, shades.get(row.metrics[name].mean)];
  return new Map([...(rows.length > 1 ? coloured.map(shade) : []), ...rows.filter(isGrey).map((row) => [row.row, "unlearned"])]);
}

/** Of seeds that have learned the task, the better row may have fewer. */
const isRanked = (metric) => metric.compared && !metric.name.startsWith("of_learned/");

/**
 * The rows by the labels of the first axis, if it groups them: [[label, rows], …]. The axis along which rows are compared
 * does not: its rows belong beside one another.
 */
export function groupsOf({ rows, axes }, against) {
  const [first] = Object.keys(axes);
  const labels = [...new Set(rows.map((row) => row.labels[first]))];
  const groups = Object.keys(axes).length > 1 && labels.length > 1 && rows.length >= 2 * labels.length && !against.startsWith(`${first}=`);
  return groups ? labels.map((label) => [label, rows.filter((row) => row.labels[first] === label)]) : [[null, rows]];
}

const STUCK_SEED = "A stuck seed makes at least 85 % of the errors of a simple rule that does not solve the task.";
const STUCK = `†: most seeds are stuck. ${STUCK_SEED}`;

/** The runs behind a cell, with their values. */
function runsOfCell(row, metric, width) {
  const { values, comparison } = row.metrics[metric.name];
  const ids = values.map((each) => each.run_id);
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
              each.stuck && [" ", h("span", { class: "verdict bad" }, "stuck")],
            ),
          ),
        ),
        values.some((each) => each.stuck) && h("p", { class: "note" }, STUCK_SEED),
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

/** Rows in the order of the address: by a column, by name, as in the file; else by the primary metric, best first, not learned last. */
function sorted(rows, metrics, params) {
  const asked = params.get("sort");
  if (asked === "file") return rows;
  const primary = primaryOf(metrics);
  const key = asked ?? primary.name;
  const descending = asked ? params.get("order") === "desc" : primary.goal === "max";
  const value = (row) => (key === "row" ? row.row : key === "parameters" ? row.parameters : row.metrics[key]?.mean) ?? null;
  const part = (row) => (value(row) === null ? 2 : Number(!asked && isUnlearned(row.metrics[key])));
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return part(a) - part(b) || order * (descending ? -1 : 1);
  });
}

/** Rows by the primary metric, best first, not learned last. */
export const bestFirst = (rows, metrics) => sorted(rows, metrics, new URLSearchParams());

/** A header that sorts: ascending, descending, best first. */
function heading(key, text, params, group, attributes) {
  const own = params.get("sort") === key;
  const descending = own && params.get("order") === "desc";
  const next = !own ? { sort: key, order: null } : descending ? { sort: null, order: null } : { sort: key, order: "desc" };
  return h("th", { scope: "col", "aria-sort": own ? (descending ? "descending" : "ascending") : null, ...attributes },
    h("button", { type: "button", class: "sort", "data-key": ["sort", group, key].filter(Boolean).join(" "), onclick: () => change(next) }, text),
  );
}

/** `Lower is better.`, with the exceptions of a table of both kinds. */
function goals(metrics) {
  const [lower, higher] = ["min", "max"].map((goal) => metrics.filter((metric) => metric.goal === goal));
  if (!lower.length) return "Higher is better.";
  return `Lower is better${higher.length ? `; of ${higher.map((metric) => metric.title).join(", ")}, higher` : ""}.`;
}

/** One table: the rows of a group, without the columns that none of them has. */
function groupTable(label, rows, context) {
  const { table, chosen, params, committed } = context;
  const isUsed = ({ name }) => rows.some((row) => row.metrics[name].n || row.metrics[name].published);
  const used = table.metrics.filter(isUsed);
  const metrics = used.length ? used : table.metrics; // nothing is trained yet
  const parameters = rows.some((row) => row.parameters !== null) && !metrics.some(({ name }) => name === "facts.parameters");
  const widths = new Map(metrics.map((metric) => [metric.name, widest(rows, metric)]));
  const shades = new Map(metrics.filter(isRanked).map((metric) => [metric.name, shadesOf(rows, metric)]));
  const titles = Object.values(table.axes);
  const columns = [
    ["row", (label === null ? titles : titles.slice(1)).join(" · ") || "row", {}],
    ...metrics.map((metric) => [metric.name, metric.title, { class: "number" }]),
    ...(parameters ? [["parameters", "parameters", { class: "number" }]] : []),
  ];
  const nameOf = ({ row, labels }) => (label === null ? row : Object.entries(labels).slice(1).map(([, each]) => each).join(" · ") || row);
  const body = sorted(rows, metrics, params).flatMap((row) => {
    const [openRow, openMetric] = splitOpen(params.get("open"));
    const metric = row.row === openRow ? metrics.find((each) => each.name === openMetric) : null;
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
      h("th", { scope: "row", title: row.row },
        nameOf(row),
        row.counts.finished < row.seeds
          ? h("small", {}, `${row.counts.finished} of ${row.seeds} seeds`, problems(row.counts))
          : null,
      ),
      metrics.map((each) => cell(row, each, { ...context, widths, shades })),
      parameters && h("td", { class: "number" }, integer(row.parameters)),
    );
    return metric && row.metrics[metric.name].n ? [line, runsOfCell(row, metric, columns.length + 1)] : [line];
  });
  return scrolling(
    label === null ? "Result table" : `Result table: ${label}`,
    h("table", { class: "results" },
      h("thead", {},
        h("tr", {},
          !committed && h("td", { class: "choose" }, h("span", { class: "hidden" }, "Choose")),
          columns.map(([key, text, attributes]) => heading(key, text, params, label, attributes)),
        ),
      ),
      h("tbody", {}, body),
    ),
  );
}

/** The published numbers, as a value of `compare`: for the service, too, a row of this name comes first. */
export const PAPER = "paper";

/** What the rows are compared with: [[value of `compare`, text], …]; the value is empty for nothing. */
function references({ table, detail, against, canPaper, committed }) {
  const rows = table.rows.map((row) => [row.row, row.row]);
  const paper = canPaper && !rows.some(([name]) => name === PAPER) ? [[PAPER, "the paper"]] : [];
  const nothing = committed ? [] : [["", "nothing"]]; // committed results are always compared
  const options = [...nothing, ...paper, ...rows];
  for (const key of [detail.reference, against])
    if (key && !options.some(([known]) => known === key)) options.push([key, key.replace("=", " = ")]);
  return options;
}

const FILTERED = 10; // rows from which a filter helps

/** A function that draws the table. The field of its filter is made once: it is typed in while the view changes. */
export function resultsTable(container) {
  const filter = searchField("Filter rows", "the name of the row", (only) => change({ only }, { replace: true }));
  const [controls, answer, tables, notes] = [h("div", { class: "bar controls" }), h("div"), h("div", { class: "tables" }), h("div", { class: "notes" })];
  return (context) => {
    const { table, against, params, canPaper, downloads, committed } = context;
    const only = params.get("only") ?? "";
    if (document.activeElement !== filter) filter.value = only;
    const kept = table.rows.filter(({ row }) => hasWords(row, only));
    const orders = [["", "best first"], ["file", "as in the file"]];
    if (!controls.isConnected) replace(container, section("Results", { id: "results" }, answer, controls, tables, notes));
    replace(answer, table.compared?.answer && h("p", { class: "prose" }, table.compared.answer));
    if (!filter.isConnected) controls.append(filter, h("div", { class: "bar choices" }));
    filter.hidden = table.rows.length < FILTERED && !only;
    replace(controls.lastChild,
      h("span", { class: "note" }, kept.length < table.rows.length ? `${kept.length} of ${plural(table.rows.length, "row")}` : plural(kept.length, "row")),
      select("rows", orders, params.get("sort") === "file" ? "file" : "", (sort) => change({ sort: sort || null, order: null })),
      select("verdicts against", references(context), against, (value) => change({ compare: value, alone: !value })),
      downloads,
    );
    replace(tables,
      groupsOf({ ...table, rows: kept }, against).map(([label, rows]) =>
        h("div", {}, label !== null && h("h3", {}, label), groupTable(label, rows, context)),
      ),
      !kept.length && empty("No row has these words in its name."),
    );
    replace(notes,
      [
        `Mean ± standard deviation over seeds. ${goals(table.metrics)} Stronger colour: better in its column; grey: not learned.${committed ? "" : " Select a number to see its runs, and the numbers of its comparison. Select rows to draw only their curves."}`,
        table.rows.some((row) => Object.values(row.metrics).some((each) => each.values.some((value) => value.stuck))) && STUCK,
        canPaper && table.scaled.length > 0 &&
          "The paper's numbers are of models and training of another size, so only the order of rows is compared with the paper's.",
        table.scaled.length ? `These runs have other values of ${table.scaled.join(", ")} than the file without a scale or --set.` : null,
        ...(table.compared?.rules ?? []),
        ...table.warnings,
      ]
        .filter(Boolean)
        .map((text) => h("p", { class: "note" }, text)),
    );
  };
}

function problems(counts) {
  return UNFINISHED.filter((status) => counts[status]).map((status) => h("span", { class: "problem" }, badge(status)));
}

function splitOpen(value) {
  const at = value?.lastIndexOf("|") ?? -1;
  return at < 0 ? [null, null] : [value.slice(0, at), value.slice(at + 1)];
}
