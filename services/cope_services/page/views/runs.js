// All runs: filters, columns, more pages, and the comparison of chosen ones.

import { at, get } from "../api.js";
import { changes, empty, h, replace, scrolling, searchField } from "../dom.js";
import { ago, integer, moment, plural } from "../format.js";
import { change, current, idsIn, link, shortId, shortIds } from "../route.js";
import { badge } from "../status.js";
import { MOST_RUNS, resultsFirst, shown, SUMMARY, valueOf } from "../values.js";
import { compareRuns } from "./compare_runs.js";
import { columnChooser, filters } from "./run_filters.js";

const PAGE = 100;
const DEFAULT_COLUMNS = 4;
const ROWS_WITH_KEYS = 12; // whose keys are looked up at once
const CONDITIONS = ["filter", "ids", "sweep", "scale", "set", "status", "ablation", "search"];
const NUMBER = { class: "number" };
const COLUMNS = [
  ["run_id", "run"],
  ["status", "status"],
  [null, "ablation"],
  [null, "row"],
  ["seed", "seed", NUMBER],
  ["step", "step", NUMBER],
];

/** [key, order] of the rows: newest first unless the address says otherwise. */
const orderOf = (params) => [params.get("sort") ?? "created_ms", params.get("order") ?? (params.get("sort") ? "asc" : "desc")];

/** The parameters of GET /runs that the address asks for. */
function queryOf(params) {
  const [sort, order] = orderOf(params);
  const keys = params.getAll("col").filter((key) => key !== "none");
  return {
    filter: params.getAll("filter"),
    set: params.getAll("set"),
    run: idsIn(params, "ids"),
    sort,
    descending: order === "desc",
    fields: keys.length ? [...SUMMARY, ...keys].join(",") : null,
    ...Object.fromEntries(["status", "ablation", "sweep", "scale", "search"].map((name) => [name, params.get(name)])),
  };
}

const metricsOf = (runs) => resultsFirst(new Set(runs.flatMap((run) => Object.keys(run.metrics))));

/** The chosen columns; else `primary`, and the first metrics of those that most of the runs with results have. */
function columnsOf(params, runs, primary) {
  const chosen = params.getAll("col");
  if (chosen.length) return chosen.filter((key) => key !== "none");
  const measured = runs.filter((run) => Object.keys(run.metrics).length);
  const all = metricsOf(runs);
  const common = all.filter((key) => 2 * measured.filter((run) => key in run.metrics).length > measured.length);
  return [...new Set([...all.filter((key) => key === primary), ...common])].slice(0, DEFAULT_COLUMNS);
}

function heading(params) {
  const [sort, order] = orderOf(params);
  return ([key, text, attributes]) => {
    if (!key) return h("th", { scope: "col" }, text);
    const sorted = sort === key ? `${order}ending` : null;
    const onclick = () => change({ sort: key, order: sort === key && order === "asc" ? "desc" : "asc" });
    const button = h("button", { type: "button", class: "sort", "data-key": `sort ${key}`, onclick }, text);
    return h("th", { scope: "col", "aria-sort": sorted, ...attributes }, button);
  };
}

/** Choose the runs of these ids, and no others. */
const choose = (ids) => change({ sel: shortIds(ids) }, { replace: true });
const chosenIds = () => idsIn(current().params, "sel");

function line(run, columns, chosen) {
  const { run_id: id, ablations, step, steps } = run;
  const isChosen = chosen.includes(shortId(id));
  const box = h("input", {
    type: "checkbox",
    checked: isChosen,
    "data-key": `choose ${id}`,
    "aria-label": `Choose run ${id}`,
    onchange: (event) => {
      const others = chosenIds().filter((each) => each !== shortId(id));
      choose(event.target.checked ? [...others, id] : others);
    },
  });
  const others = ablations.length > 1 ? ` +${ablations.length - 1}` : "";
  return h("tr", { class: isChosen ? "chosen" : "" },
    h("td", { class: "choose" }, box),
    h("th", { scope: "row" }, h("a", { class: "mono", href: link(["runs", id]), "data-key": `run ${id}`, title: id }, shortId(id))),
    h("td", {}, badge(run.status)),
    h("td", { title: ablations.join(", ") }, ablations.length ? ablations[0] + others : "–"),
    h("td", {}, run.row ?? "–"),
    h("td", NUMBER, run.seed ?? "–"),
    h("td", NUMBER, steps && step < steps ? `${integer(step)} / ${integer(steps)}` : integer(step)),
    columns.map((key) => h("td", NUMBER, shown(key, valueOf(run, key)))),
    h("td", { class: "number", title: moment(run.created_ms) }, run.created_ms ? ago(run.created_ms) : "–"),
  );
}

const button = (key, text, onclick, kind = "quiet") =>
  h("button", { type: "button", class: kind, "data-key": key, onclick }, text);

/** How many runs are chosen, and a button that shows their comparison. */
const selection = (chosen, show) =>
  chosen.length
    ? h("span", { class: "actions" },
        h("b", {}, `${plural(chosen.length, "run")} chosen`),
        button("to comparison", "Show the comparison", show),
        button("clear", "Clear", () => change({ sel: null })),
      )
    : h("span", { class: "note" }, "Choose runs, or all that are listed, to compare their curves and configurations.");

/** The box that chooses all listed runs; runs that are chosen and not listed stay so. */
function chooseAll(ids, chosen) {
  const listed = ids.filter((id) => chosen.includes(id)).length;
  const others = () => chosenIds().filter((id) => !ids.includes(id));
  return h("input", {
    type: "checkbox",
    checked: listed > 0 && listed === ids.length,
    indeterminate: listed > 0 && listed < ids.length,
    "data-key": "choose all",
    "aria-label": "Choose all listed runs",
    onchange: (event) => choose(event.target.checked ? [...others(), ...ids] : others()),
  });
}

export function runs() {
  const part = changes();
  const [top, chooser, list, compared] = [h("div"), h("div"), h("div"), h("div")];
  const comparison = compareRuns(compared);
  const find = (search) => change({ search }, { replace: true });
  const search = searchField("Search runs", "id, row, ablation, message", find);
  let [asked, wanted] = ["", PAGE];
  const [keys, learned] = [new Set(), new Set()]; // known keys, and the rows whose keys they are

  /** The runs that are shown, in as many answers as they take: all are read again, because a new run moves the others. */
  async function load(params) {
    const query = queryOf(params);
    const state = JSON.stringify(query);
    if (state !== asked) wanted = PAGE;
    asked = state;
    const loaded = [];
    for (;;) {
      const limit = Math.min(wanted - loaded.length, MOST_RUNS);
      const { runs: some, next, total } = await get(at("runs", { ...query, limit, offset: loaded.length || null }));
      loaded.push(...some);
      if (next === null || loaded.length >= wanted) return { total, loaded };
    }
  }

  function more() {
    wanted += PAGE;
    dispatchEvent(new Event("routechange"));
  }

  function draw(params, { total, loaded }, columns) {
    const chosen = idsIn(params, "sel");
    const heads = [...COLUMNS, ...columns.map((key) => [key, key, NUMBER]), ["created_ms", "started", NUMBER]];
    const filtered = CONDITIONS.some((name) => params.get(name));
    const none = filtered
      ? "No run fits. A run that lacks a key does not match; remove a condition to see more."
      : "No run has been started. `cope-sweep run quickstart` trains the first ones in a few minutes.";
    const all = chooseAll(loaded.map((run) => shortId(run.run_id)), chosen);
    const head = h("tr", {}, h("td", { class: "choose" }, all), heads.map(heading(params)));
    replace(
      list,
      h("div", { class: "bar controls" },
        h("span", { class: "note" }, `${integer(loaded.length)} of ${plural(total, "run")}`),
        selection(chosen, () => compared.scrollIntoView()),
      ),
      loaded.length
        ? scrolling(
            "Runs",
            h("table", { class: "runs" }, h("thead", {}, head), h("tbody", {}, loaded.map((run) => line(run, columns, chosen)))),
          )
        : empty(none),
      loaded.length < total && button("more", `Load ${Math.min(PAGE, total - loaded.length)} more`, more, "more"),
    );
  }

  /** All known keys of the configuration and facts, from one run of each row: only rows with CoPE have its fields. */
  async function learnKeys(some) {
    const begun = some.filter((run) => run.status !== "pending");
    const rowOf = (run) => JSON.stringify([run.ablations[0], run.row ?? run.run_id, run.status === "finished"]); // with facts
    const rows = new Map(begun.map((run) => [rowOf(run), run.run_id]));
    const fresh = [...rows].filter(([row]) => !learned.has(row)).slice(0, ROWS_WITH_KEYS);
    const details = await Promise.allSettled(fresh.map(([, id]) => get(at(["runs", id], { curve: false }))));
    details.forEach(({ value }, i) => {
      if (!value) return; // it is asked for again
      learned.add(fresh[i][0]);
      Object.keys(value.values).forEach((key) => keys.add(key));
    });
    return [...keys];
  }

  return {
    nodes: [h("div", { class: "head" }, h("h1", {}, "Runs"), search), top, chooser, list, compared],
    title: () => "Runs",
    close: () => comparison.close(),
    async refresh(params) {
      const ablations = await get(at("ablations"));
      if (document.activeElement !== search) search.value = params.get("search") ?? "";
      part("filters", JSON.stringify([ablations.map(({ name, scales }) => [name, scales]), CONDITIONS.map((name) => params.getAll(name))]), () =>
        replace(top, filters(params, ablations)),
      );
      let found;
      try {
        found = await load(params);
      } catch (error) {
        if (error.status !== 422) throw error;
        part("list", error.message, () => replace(list, h("div", { class: "error", role: "alert" }, h("p", {}, error.message))));
        return;
      }
      const known = await learnKeys(found.loaded);
      const name = params.get("ablation");
      // A scale may have another one.
      const { primary } = ablations.some((each) => each.name === name) && !params.get("scale") ? await get(at(["ablations", name])) : {};
      const columns = columnsOf(params, found.loaded, primary);
      part("columns", JSON.stringify([columns, metricsOf(found.loaded), known]), () => {
        const open = chooser.querySelector("details")?.open ?? false;
        replace(chooser, columnChooser(columns, metricsOf(found.loaded), known));
        chooser.querySelector("details").open = open;
      });
      part("list", JSON.stringify([found, columns, params.toString()]), () => draw(params, found, columns));
      await comparison.refresh({ params, learnKeys });
    },
  };
}
