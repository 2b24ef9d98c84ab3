// All runs: filters, columns, more pages, and the comparison of chosen ones.

import { at, get } from "../api.js";
import { changes, checkbox, empty, h, replace, scrolling, select } from "../dom.js";
import { ago, integer, moment, plural } from "../format.js";
import { change, current, link, toggled } from "../route.js";
import { badge, STATUSES } from "../status.js";
import { flatten, resultsFirst, shown, valueOf } from "../values.js";
import { compareRuns } from "./compare_runs.js";

const PAGE = 100;
const MOST = 1000; // runs in one answer
const EXAMPLES = "model.layers>=4, model.position=cope, in_dist/loss<0.5";

/** The parameters of GET /runs that the address asks for. */
function queryOf(params, columns) {
  return {
    filter: params.getAll("filter"),
    status: params.get("status"),
    ablation: params.get("ablation"),
    sweep: params.get("sweep"),
    scale: params.get("scale"),
    run: params.getAll("ids"),
    sort: params.get("sort") ?? "created_ms",
    order: params.get("order") ?? (params.get("sort") ? "asc" : "desc"),
    fields: columns,
  };
}

/** The chosen columns, or the first metrics of the runs. */
function columnsOf(params, runs) {
  const chosen = params.getAll("col");
  if (chosen.length) return chosen.filter((each) => each !== "none");
  return resultsFirst(new Set(runs.flatMap((run) => Object.keys(run.metrics)))).slice(0, 4);
}

function filters(params, ablations) {
  const condition = h("input", {
    id: "condition",
    type: "text",
    placeholder: EXAMPLES,
    "data-key": "condition",
    spellcheck: "false",
    "aria-describedby": "condition-help",
  });
  const add = (event) => {
    event.preventDefault();
    const text = condition.value.trim();
    if (text) change({ filter: [...params.getAll("filter"), ...text.split(/\s*,\s*/).filter(Boolean)] });
  };
  return h(
    "div",
    { class: "bar controls" },
    select("status", [["", "any"], ...STATUSES.filter((each) => each !== "pending")], params.get("status") ?? "", (status) =>
      change({ status }),
    ),
    select("ablation", [["", "any"], ...ablations], params.get("ablation") ?? "", (ablation) =>
      change({ ablation, scale: null }),
    ),
    h(
      "form",
      { class: "field wide", onsubmit: add },
      h("label", { for: "condition" }, "condition"),
      condition,
      h("button", { type: "submit", class: "quiet" }, "Add"),
      h(
        "span",
        { id: "condition-help", class: "hidden" },
        "A key of the configuration, a final metric or a fact; one of = != < <= > >=; a value.",
      ),
    ),
    h(
      "div",
      { class: "chips" },
      ["filter", "ids", "sweep", "scale"]
        .flatMap((name) =>
          name === "ids" && params.getAll("ids").length
            ? [["ids", plural(params.getAll("ids").length, "chosen run"), []]]
            : params
                .getAll(name)
                .map((each) => [
                  name,
                  name === "filter" ? each : `${name} ${each}`,
                  params.getAll(name).filter((other) => other !== each),
                ]),
        )
        .map(([name, text, rest]) =>
          h(
            "button",
            {
              type: "button",
              class: "chip",
              "data-key": `chip ${text}`,
              "aria-label": `Remove ${text}`,
              onclick: () => change({ [name]: rest }),
            },
            text,
            h("span", { "aria-hidden": "true" }, " ×"),
          ),
        ),
    ),
  );
}

function columnChooser(columns, known) {
  const set = (list) => change({ col: list.length ? list : ["none"] }, { replace: true });
  const other = h("input", {
    type: "text",
    "aria-label": "Another key",
    placeholder: "another key: model.dim, facts.device",
    "data-key": "another",
    list: "known-keys",
  });
  return h(
    "details",
    { class: "columns", "data-key": "columns" },
    h("summary", { "data-key": "columns summary" }, `Columns (${columns.length})`),
    h(
      "div",
      { class: "choices" },
      [...new Set([...columns, ...known])].map((key) =>
        checkbox(key, columns.includes(key), () => set(toggled(columns, key)), `col ${key}`),
      ),
    ),
    h(
      "form",
      {
        class: "field wide",
        onsubmit: (event) => {
          event.preventDefault();
          if (other.value.trim()) set([...columns, other.value.trim()]);
        },
      },
      other,
      h("button", { type: "submit", class: "quiet" }, "Add"),
    ),
  );
}

function heading(key, text, params, attributes = {}) {
  const sort = params.get("sort") ?? "created_ms";
  const order = params.get("order") ?? (params.get("sort") ? "asc" : "desc");
  return h(
    "th",
    { scope: "col", "aria-sort": sort === key ? `${order}ending` : null, ...attributes },
    h(
      "button",
      {
        type: "button",
        class: "sort",
        "data-key": `sort ${key}`,
        onclick: () => change({ sort: key, order: sort === key && order === "asc" ? "desc" : "asc" }),
      },
      text,
    ),
  );
}

function line(run, columns, chosen) {
  const name = run.ablations.length
    ? `${run.ablations[0]}${run.ablations.length > 1 ? ` +${run.ablations.length - 1}` : ""}`
    : "–";
  return h(
    "tr",
    { class: chosen.includes(run.run_id) ? "chosen" : "" },
    h(
      "td",
      { class: "choose" },
      h("input", {
        type: "checkbox",
        checked: chosen.includes(run.run_id),
        "data-key": `choose ${run.run_id}`,
        "aria-label": `Choose run ${run.run_id}`,
        onchange: () => change({ sel: toggled(current().params.getAll("sel"), run.run_id) }, { replace: true }),
      }),
    ),
    h(
      "th",
      { scope: "row" },
      h("a", { class: "mono", href: link(["runs", run.run_id]), "data-key": `run ${run.run_id}` }, run.run_id),
    ),
    h("td", {}, badge(run.status)),
    h("td", { title: run.ablations.join(", ") }, name),
    h("td", {}, run.row ?? "–"),
    h("td", { class: "number" }, run.seed ?? "–"),
    h(
      "td",
      { class: "number" },
      run.steps && run.step < run.steps ? `${integer(run.step)} / ${integer(run.steps)}` : integer(run.step),
    ),
    columns.map((key) => h("td", { class: "number" }, shown(key, valueOf(run, key)))),
    h("td", { class: "number", title: moment(run.created_ms) }, run.created_ms ? ago(run.created_ms) : "–"),
  );
}

const COLUMNS = [
  ["run_id", "run"],
  ["status", "status"],
  [null, "ablation"],
  [null, "row"],
  ["seed", "seed", { class: "number" }],
  ["step", "step", { class: "number" }],
];

export function runs(root) {
  const part = changes();
  const [top, chooser, table, compared] = [h("div"), h("div"), h("div"), h("div")];
  let [started, pages, asked, more, keys] = [false, 1, "", [], []];
  const comparison = compareRuns(compared);

  function draw(params, answer, loaded, columns, view) {
    const chosen = params.getAll("sel");
    const head = h(
      "tr",
      {},
      h("td", { class: "choose" }, h("span", { class: "hidden" }, "Choose")),
      COLUMNS.map(([key, text, attributes]) => (key ? heading(key, text, params, attributes) : h("th", { scope: "col" }, text))),
      columns.map((key) => heading(key, key, params, { class: "number" })),
      heading("created_ms", "started", params, { class: "number" }),
    );
    const next = async () => {
      if (loaded.length < MOST) pages += 1;
      else more.push(...(await get(at("runs", { ...queryOf(params, columns), limit: PAGE, cursor: view.next }))).runs);
      dispatchEvent(new Event("routechange"));
    };
    replace(
      table,
      h(
        "div",
        { class: "bar controls" },
        h("span", { class: "note" }, `${integer(loaded.length)} of ${plural(answer.total, "run")}`),
        chosen.length
          ? h(
              "span",
              { class: "actions" },
              h("b", {}, `${plural(chosen.length, "run")} chosen`),
              h(
                "a",
                {
                  href: "#",
                  onclick: (event) => {
                    event.preventDefault();
                    compared.scrollIntoView();
                  },
                },
                "to the comparison",
              ),
              h("button", { type: "button", class: "quiet", "data-key": "clear", onclick: () => change({ sel: null }) }, "Clear"),
            )
          : h("span", { class: "note" }, "Choose runs to compare their curves, configurations and results."),
      ),
      loaded.length
        ? scrolling(
            "Runs",
            h(
              "table",
              { class: "runs" },
              h("thead", {}, head),
              h(
                "tbody",
                {},
                loaded.map((run) => line(run, columns, chosen)),
              ),
            ),
          )
        : empty(
            answer.total === 0 && (params.getAll("filter").length || params.get("status") || params.get("ablation"))
              ? "No run fits. A run that lacks a key does not match; remove a condition to see more."
              : "No run has been started. `cope-sweep run quickstart` trains the first ones in a minute.",
          ),
      loaded.length < answer.total
        ? h(
            "button",
            { type: "button", class: "more", "data-key": "more", onclick: next },
            `Load ${Math.min(PAGE, answer.total - loaded.length)} more`,
          )
        : null,
    );
  }

  return {
    title: () => "Runs",
    close: () => comparison.close(),
    async refresh(params) {
      const columns = params.getAll("col").filter((each) => each !== "none");
      const query = queryOf(params, columns);
      if (JSON.stringify(query) !== asked) [pages, more] = [1, []];
      asked = JSON.stringify(query);
      const [answer, ablations] = await Promise.all([
        get(at("runs", { ...query, limit: Math.min(pages * PAGE, MOST) })),
        get(at("ablations")),
      ]);
      if (!started) replace(root, h("div", { class: "head" }, h("h1", {}, "Runs")), top, chooser, table, compared);
      started = true;
      const loaded = [...answer.runs, ...more];
      const visible = columnsOf(params, loaded);
      if (!keys.length && loaded.length) {
        const detail = await get(at(["runs", loaded[0].run_id], { curve: false }));
        keys = [...flatten(detail.spec), ...flatten(detail.facts, "facts")].map(([key]) => key);
      }
      part(
        "filters",
        JSON.stringify([
          ablations.map((each) => each.name),
          ["filter", "ids", "sweep", "scale", "status", "ablation"].map((each) => params.getAll(each)),
        ]),
        () =>
          replace(
            top,
            filters(
              params,
              ablations.map((each) => each.name),
            ),
          ),
      );
      const metrics = [...new Set(loaded.flatMap((run) => Object.keys(run.metrics)))];
      part("columns", JSON.stringify([visible, metrics, keys]), () => {
        const opened = chooser.querySelector("details")?.open;
        replace(
          chooser,
          columnChooser(visible, metrics),
          h(
            "datalist",
            { id: "known-keys" },
            keys.map((key) => h("option", { value: key })),
          ),
        );
        chooser.querySelector("details").open = Boolean(opened);
      });
      part("table", JSON.stringify([loaded, visible, params.toString(), answer.total]), () =>
        draw(params, answer, loaded, visible, answer),
      );
      await comparison.refresh({ params, keys });
    },
  };
}
