// Parts of the view of a run: its head, configuration, logs, checkpoint and difference.

import { at, download, get, urlOf } from "../api.js";
import { crumbs, definitions, empty, h, scrolling, table } from "../dom.js";
import { bytes, moment, number } from "../format.js";
import { change, link } from "../route.js";
import { badge, hasEnded, progressOf } from "../status.js";
import { FACT, shown } from "../values.js";

const TAIL = 500; // lines of a log
const REASONS = { failed: "The run failed", stopped: "The run was stopped" };

/** A table of names and values. */
export const pairs = (label, rows) =>
  scrolling(
    label,
    h("table", { class: "pairs" },
      h("tbody", {}, rows.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", { class: "mono" }, value)))),
    ),
  );

/** Why a run ended early, with the traceback of a failure. */
export function failure({ status, message, failure: failed }) {
  if (!message && !failed) return null;
  const trace = failed?.traceback && h("pre", { tabindex: 0, "aria-label": "Traceback" }, failed.traceback);
  return h("div", { class: "error" }, h("h2", {}, REASONS[status] ?? "Message"), h("p", {}, failed?.message || message), trace);
}

export function head(run) {
  const to = (view, id) => id && h("a", { class: "mono", href: link([view, id]) }, id);
  const actions = [
    run.mlflow_url && h("a", { class: "button", href: run.mlflow_url, rel: "noreferrer" }, "Open in MLflow"),
    run.status === "finished" &&
      h("a", { class: "button", href: link(["playground"], { run: run.run_id }) }, "Open in the playground"),
  ];
  const seed = run.seed === null ? "" : h("span", { class: "light" }, ` seed ${run.seed}`);
  const places = run.ablations.flatMap((name, i) => [i ? ", " : "", h("a", { href: link(["ablations", name]) }, name)]);
  return [
    crumbs(["Runs", link(["runs"])], run.run_id),
    h("div", { class: "head" },
      h("h1", {}, run.row ?? run.run_id, seed),
      badge(run.status),
      h("span", { class: "actions" }, actions),
    ),
    definitions([
      ["ablation", places.length ? places : null],
      ...progressOf(run),
      ["attempt", run.attempt],
      ["started", moment(run.created_ms)],
      ["last change", moment(run.updated_ms)],
      ["sweep", to("sweeps", run.sweep_id)],
    ]),
    failure(run),
  ];
}

/** The values of the configuration, or those of the facts: [[key, value], …]. */
const valuesOf = (run, areFacts) => Object.entries(run.values).filter(([key]) => key.startsWith(FACT) === areFacts);

export function facts(run) {
  const nameOf = (key) => key.replace(FACT, "").replace(/_bytes$/, "").replace(/_per_s$/, "_per_second").replace(/_s$/, "_time");
  const found = valuesOf(run, true).map(([key, value]) => [nameOf(key).replaceAll("_", " "), shown(key, value)]);
  if (!found.length) return empty(hasEnded(run.status) ? "The run ended without facts." : "They appear when the run is finished.");
  const list = definitions(found);
  list.classList.add("factgrid");
  return list;
}

export function configuration(run) {
  if (!run.spec) return empty("The configuration of this run cannot be read.");
  const groups = Map.groupBy(valuesOf(run, false), ([key]) => (key.includes(".") ? key.split(".")[0] : "run"));
  const group = ([name, rows]) =>
    h("section", {},
      h("h3", {}, name),
      pairs(name, rows.map(([key, value]) => [key.replace(`${name}.`, ""), shown(key, value)])),
    );
  return [h("h2", { class: "hidden" }, "Configuration"), h("div", { class: "groups" }, [...groups].map(group))];
}

export async function checkpoint(run) {
  if (run.status !== "finished") return empty("A checkpoint can be downloaded when the run is finished.");
  const { files } = await get(at(["runs", run.run_id, "checkpoint"]));
  const rows = files.map((file) => {
    const save = () => download(file.url, file.name);
    const button = h("button", { type: "button", class: "quiet", "aria-label": `Download ${file.name}`, onclick: save },
      "Download",
    );
    return [file.name, bytes(file.size_bytes), file.sha256, button];
  });
  const command = `curl -C - -O ${urlOf(files.at(-1).url)}`;
  return [
    h("h2", { class: "hidden" }, "Checkpoint"),
    table("Files", ["file", ["size", "number"], ["SHA-256", "mono"], ""], rows),
    h("p", { class: "note" }, "A command that resumes an interrupted download: ", h("code", {}, command)),
  ];
}

export async function logs(run) {
  const { lines, truncated } = await get(at(["runs", run.run_id, "logs"], { tail: TAIL }));
  const attempts = run.attempts.map((each) => [each.number, each.began, each.worker_id, each.text]);
  return [
    h("h2", {}, "Attempts"),
    attempts.length
      ? table("Attempts", ["attempt", "started (UTC)", "worker", "how"], attempts)
      : empty("The log has no record of an attempt."),
    h("h2", {}, "Log"),
    truncated && h("p", { class: "note" }, `The last ${TAIL} lines.`),
    lines.length
      ? h("pre", { class: "file", tabindex: 0, "aria-label": "Log" }, lines.join("\n"))
      : empty("The run has written no log."),
  ];
}

const side = (id) => h("a", { class: "mono", href: link(["runs", id]) }, id);

function values(title, rows, { left, right }) {
  const cells = rows.map((row) => [row.key, row.left ?? "–", row.right ?? "–"]);
  return [h("h3", {}, title), rows.length ? table(title, ["key", side(left), side(right)], cells) : empty("The same.")];
}

/** The answer of GET /diff for two runs as tables. */
function difference(found) {
  const columns = ["metric", ...[side(found.left), side(found.right), "right − left"].map((name) => [name, "number"])];
  const rows = found.metrics.map(({ metric, left, right, difference: change }) => [
    metric,
    ...[left, right, change.difference].map((value) => number(value, 5)),
  ]);
  return [
    values("Configuration", found.spec, found),
    values("Facts", found.facts, found),
    h("h3", {}, "Final metrics"),
    rows.length ? table("Final metrics", columns, rows) : empty("Neither run has final metrics."),
  ];
}

/** The difference to another run, which the address names. */
export async function comparison(run, other) {
  const [ablation] = run.ablations;
  const siblings = ablation ? (await get(at("runs", { ablation, limit: 200 }))).runs : [];
  const usable = siblings.filter((each) => each.run_id !== run.run_id && each.status !== "pending");
  const input = h("input", {
    id: "against",
    type: "text",
    value: other ?? "",
    list: "siblings",
    placeholder: "a run id",
    "data-key": "against",
    spellcheck: "false",
  });
  const submit = (event) => {
    event.preventDefault();
    change({ against: input.value.trim() });
  };
  const options = usable.map((each) => h("option", { value: each.run_id }, `${each.row}, seed ${each.seed}`));
  const form = h("form", { class: "field wide", onsubmit: submit },
    h("label", { for: "against" }, "compare with run"),
    input,
    h("button", { type: "submit", class: "quiet" }, "Compare"),
    h("datalist", { id: "siblings" }, options),
  );
  const title = h("h2", { class: "hidden" }, "Difference");
  if (!other) return [title, form, empty("Choose another run to see what differs in configuration, facts and results.")];
  const found = await get(at("diff", { left: run.run_id, right: other })).then(difference, (error) => h("p", { class: "bad" }, error.message));
  return [title, form, found];
}
