// One run: curves and results, configuration, difference, logs and checkpoint.

import { at, download, get } from "../api.js";
import { Chart } from "../chart.js";
import { lines, style } from "../curves.js";
import { changes, checkbox, definitions, empty, h, replace, scrolling, select } from "../dom.js";
import { bytes, count, duration, integer, moment, number } from "../format.js";
import { change, link } from "../route.js";
import { badge } from "../status.js";
import { flatten, shown } from "../values.js";
import { difference } from "./difference.js";

const TABS = [
  ["results", "Results"],
  ["configuration", "Configuration"],
  ["difference", "Difference"],
  ["logs", "Logs"],
  ["checkpoint", "Checkpoint"],
];
const RESTED = new Set(["finished", "failed", "stopped", "damaged"]);
const FACTS = {
  // key → name and text
  peak_memory_bytes: ["peak memory", bytes],
  train_s: ["training time", duration],
  wall_s: ["wall time", duration],
  tokens_per_s: ["tokens per second", (value) => count(Math.round(value))],
};

function failure(run) {
  const trace = run.state.traceback ?? run.state.error;
  if (!run.message && !trace) return null;
  return h(
    "div",
    { class: "error", role: run.status === "failed" || run.status === "damaged" ? "alert" : null },
    h(
      "h2",
      {},
      { failed: "The run failed", damaged: "Files of the run are damaged", stopped: "The run was stopped" }[run.status] ??
        "Message",
    ),
    h("p", {}, run.message),
    trace && h("pre", { tabindex: 0, "aria-label": "Traceback" }, trace),
  );
}

function header(run, tab) {
  const place = run.ablations.map((name) => h("a", { href: link(["ablations", name]) }, name));
  const actions =
    run.status === "finished"
      ? [h("a", { class: "button", href: link(["playground"], { run: run.run_id }) }, "Ask this checkpoint")]
      : [];
  return [
    h(
      "nav",
      { class: "crumbs", "aria-label": "Path" },
      h("a", { href: link(["runs"]) }, "Runs"),
      " / ",
      h("span", { class: "mono" }, run.run_id),
    ),
    h(
      "div",
      { class: "head" },
      h("h1", {}, run.row ?? run.run_id, run.seed === null ? "" : h("span", { class: "light" }, ` seed ${run.seed}`)),
      badge(run.status),
      h("span", { class: "actions" }, actions),
    ),
    definitions([
      ["ablation", place.length ? place.flatMap((each, i) => (i ? [", ", each] : [each])) : null],
      ["step", run.steps ? `${integer(run.step)} of ${integer(run.steps)}` : integer(run.step)],
      ["attempt", run.attempt],
      ["started", moment(run.created_ms)],
      ["last change", moment(run.updated_ms)],
      ["worker", run.worker_id],
      ["sweep", run.sweep_id && h("a", { class: "mono", href: link(["sweeps", run.sweep_id]) }, run.sweep_id)],
      ["continued from", run.parent_id && h("a", { class: "mono", href: link(["runs", run.parent_id]) }, run.parent_id)],
    ]),
    failure(run),
    h(
      "nav",
      { class: "tabs", "aria-label": "Parts of the run" },
      TABS.map(([key, text]) =>
        h(
          "a",
          {
            href: "#",
            "data-key": `tab ${key}`,
            "aria-current": key === tab && "page",
            onclick: (event) => {
              event.preventDefault();
              change({ tab: key === "results" ? null : key });
            },
          },
          text,
        ),
      ),
    ),
  ];
}

function facts(run) {
  const found = flatten(run.facts);
  if (!found.length) return empty("None yet.");
  const list = definitions(
    found.map(([key, value]) =>
      FACTS[key] ? [FACTS[key][0], FACTS[key][1](value)] : [key.replaceAll("_", " "), shown(key, value)],
    ),
  );
  list.classList.add("factgrid");
  return list;
}

/** Rows of a table with two columns. */
const pairs = (label, rows) =>
  scrolling(
    label,
    h(
      "table",
      { class: "pairs" },
      h(
        "tbody",
        {},
        rows.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, value))),
      ),
    ),
  );

function configuration(run) {
  if (!run.spec) return empty("The configuration of this run cannot be read.");
  const groups = Map.groupBy(flatten(run.spec), ([key]) => (key.includes(".") ? key.split(".")[0] : "run"));
  return [
    h("h2", { class: "hidden" }, "Configuration"),
    h(
      "div",
      { class: "groups" },
      [...groups].map(([group, rows]) =>
        h(
          "section",
          {},
          h("h3", {}, group),
          pairs(
            group,
            rows.map(([key, value]) => [
              key.replace(`${group}.`, ""),
              h("span", { class: "mono" }, value === null ? "null" : shown(key, value)),
            ]),
          ),
        ),
      ),
    ),
  ];
}

async function checkpoint(run) {
  if (run.status !== "finished") return empty("A checkpoint can be downloaded when the run is finished.");
  const { files } = await get(at(["runs", run.run_id, "checkpoint"]));
  return [
    h("h2", { class: "hidden" }, "Checkpoint"),
    scrolling(
      "Files",
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["file", "size", "SHA-256", ""].map((text, i) =>
              h(i === 3 ? "td" : "th", { scope: i === 3 ? null : "col", class: i === 1 ? "number" : null }, text),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          files.map((file) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, file.name),
              h("td", { class: "number" }, bytes(file.size_bytes)),
              h("td", { class: "mono" }, file.sha256),
              h(
                "td",
                {},
                h(
                  "button",
                  {
                    type: "button",
                    class: "quiet",
                    "aria-label": `Download ${file.name}`,
                    onclick: () => download(file.url, file.name).catch((error) => alert(error.message)),
                  },
                  "Download",
                ),
              ),
            ),
          ),
        ),
      ),
    ),
    h(
      "p",
      { class: "note" },
      "The same with a tool that resumes: ",
      h("code", {}, `curl -C - -O ${location.origin}/api/v1/runs/${run.run_id}/checkpoint/${files.at(-1).name}`),
    ),
  ];
}

async function logs(run) {
  const { lines: text, truncated } = await get(at(["runs", run.run_id, "logs"], { tail: 500 }));
  return [
    h("h2", { class: "hidden" }, "Logs"),
    truncated && h("p", { class: "note" }, "The last 500 lines."),
    text.length
      ? h("pre", { class: "file", tabindex: 0, "aria-label": "Log lines" }, text.join("\n"))
      : empty("The run has written no log lines."),
  ];
}

async function against(run, params) {
  const other = params.get("against");
  const siblings = run.ablations.length
    ? (await get(at("runs", { ablation: run.ablations[0], limit: 200 })).catch(() => ({ runs: [] }))).runs
    : [];
  const input = h("input", {
    id: "against",
    type: "text",
    value: other ?? "",
    list: "siblings",
    placeholder: "a run id",
    "data-key": "against",
    spellcheck: "false",
  });
  const form = h(
    "form",
    {
      class: "field wide",
      onsubmit: (event) => {
        event.preventDefault();
        change({ against: input.value.trim() });
      },
    },
    h("label", { for: "against" }, "compare with run"),
    input,
    h("button", { type: "submit", class: "quiet" }, "Compare"),
    h(
      "datalist",
      { id: "siblings" },
      siblings
        .filter((each) => each.run_id !== run.run_id && each.status !== "pending")
        .map((each) => h("option", { value: each.run_id }, `${each.row}, seed ${each.seed}`)),
    ),
  );
  if (!other)
    return [
      h("h2", { class: "hidden" }, "Difference"),
      form,
      empty("Choose another run to see what differs in configuration, facts and results."),
    ];
  const found = await get(at("diff", { left: run.run_id, right: other })).catch((error) => error);
  return [
    h("h2", { class: "hidden" }, "Difference"),
    form,
    found instanceof Error ? h("p", { class: "bad" }, found.message) : difference(found),
  ];
}

export function run(root, id) {
  const part = changes();
  const [head, body] = [h("div"), h("div")];
  let [started, chart, title] = [false, null, id];

  function closeChart() {
    chart?.close();
    chart = null;
  }

  function results(found, params) {
    closeChart();
    const logged = [...new Set([...Object.keys(found.metrics), ...found.curve.flatMap((row) => Object.keys(row))])].filter(
      (key) => key !== "step",
    );
    const [metric, log] = [params.get("metric") ?? logged[0], params.get("log") === "1"];
    const points = found.curve.filter((row) => metric in row).map((row) => [row.step, NaN, row[metric]]);
    const [plot, reading] = [h("div"), h("output", { class: "note" })];
    const metrics = Object.entries(found.metrics);
    replace(
      body,
      h(
        "div",
        { class: "columns2" },
        h(
          "section",
          {},
          h(
            "div",
            { class: "bar controls" },
            h("h2", {}, "Curve"),
            logged.length ? select("metric", logged, metric, (value) => change({ metric: value })) : null,
            checkbox("logarithmic", log, (value) => change({ log: value })),
            reading,
          ),
          plot,
          h("h2", {}, "Facts"),
          facts(found),
        ),
        h(
          "section",
          {},
          h("h2", {}, "Final metrics"),
          metrics.length
            ? pairs(
                "Final metrics",
                metrics.map(([key, value]) => [key, h("span", { class: "mono" }, number(value, 5))]),
              )
            : empty(RESTED.has(found.status) ? "The run ended without results." : "They appear when the run is finished."),
        ),
      ),
    );
    if (!points.length) return replace(plot, empty("No values have been logged."));
    chart = new Chart(plot, {
      oncursor: (x, values) => {
        reading.value = x === null ? "" : `step ${integer(x)}: ${number(values[0])}`;
      },
    });
    chart.draw(
      lines([{ name: metric, style: style(0), series: [{ name: "", points }] }], { by: "step", smoothing: 0, spread: "seeds" }),
      { log, by: "step", metric },
    );
  }

  return {
    title: () => title,
    close: closeChart,
    async refresh(params) {
      const found = await get(at(["runs", id]));
      const tab = params.get("tab") ?? "results";
      title = `${found.row ?? id}${found.seed === null ? "" : `, seed ${found.seed}`}`;
      if (!started) replace(root, head, body);
      started = true;
      const { curve, ...rest } = found;
      part("head", JSON.stringify([rest, tab]), () => replace(head, ...header(found, tab)));
      if (tab === "results") {
        part("body", `results ${JSON.stringify([rest, curve.length, params.get("metric"), params.get("log")])}`, () =>
          results(found, params),
        );
        return;
      }
      const make = {
        configuration: () => configuration(found),
        checkpoint: () => checkpoint(found),
        logs: () => logs(found),
        difference: () => against(found, params),
      }[tab];
      const state = `${tab} ${found.updated_ms} ${params.get("against")}`;
      if (tab !== "logs" && body.dataset.state === state) return;
      const drawn = await Promise.resolve(make?.() ?? empty("There is no such part.")).catch((error) =>
        h("p", { class: "bad" }, error.message),
      );
      closeChart();
      part(
        "body",
        `${state} ${tab === "logs" ? JSON.stringify([drawn].flat().map((each) => each?.textContent ?? "")) : ""}`,
        () => replace(body, drawn),
      );
      body.dataset.state = state;
    },
  };
}
