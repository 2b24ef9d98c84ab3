// Parts of the view of a sweep: live numbers, failures, its runs, and what it recorded.

import { definitions, empty, h, section, table } from "../dom.js";
import { count, duration, integer, moment, plural } from "../format.js";
import { link } from "../route.js";
import { badge, progressOf, setsText, sizeParams } from "../status.js";

const known = (value, show) => (value === null || value === undefined ? "–" : show(value));

/** What the last event `progress` said, but for the counts, which stand above. */
export function liveNumbers({ eta_s: eta, steps_per_s: speed, groups, nodes }) {
  const tile = ([label, value]) => h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value));
  return h("dl", { class: "tiles" },
    [
      ["remaining time", known(eta, duration)],
      ["steps per second", known(speed, (value) => (value < 10 ? value.toFixed(1) : count(Math.round(value))))],
      ["worker groups", known(groups, integer)],
      ["nodes", known(nodes, integer)],
    ].map(tile),
  );
}

/** The runs that failed, by message. */
export function failures(list) {
  if (!list.length) return null;
  const name = (run) => (run.seed === undefined ? run.row : `${run.row}, seed ${run.seed}`); // events have no seeds
  const one = (run) => h("a", { href: link(["runs", run.run_id]), "data-key": `failed ${run.run_id}` }, name(run));
  const line = ([message, runs]) =>
    h("li", {}, h("p", {}, message), h("div", { class: "who" }, runs.map(one)));
  const groups = [...Map.groupBy(list, (run) => run.message ?? "no message")].sort((a, b) => b[1].length - a[1].length);
  return section("Failures", { id: "failures" }, h("ul", { class: "failures" }, groups.map(line)));
}

/** How many runs wait, and why: "10 runs: waits for a free worker (2 in training)"; rows that a search has still to choose. */
function waiting(runs, toSuggest) {
  const reasons = [...Map.groupBy(runs.filter((run) => run.reason), (run) => run.reason)].sort((a, b) => b[1].length - a[1].length);
  const lines = reasons.map(([reason, some]) => `${plural(some.length, "run")}: ${reason}`);
  if (toSuggest) lines.push(`${plural(toSuggest, "row")} not chosen yet: the search chooses by the results so far`);
  return lines.length > 0 && h("ul", { class: "waiting", "aria-label": "What waits" }, lines.map((line) => h("li", {}, line)));
}

const SHOWN = 100; // runs, until all are asked for

/** The runs, the first of them unless `all`; `onall` is called to show the others. */
export function members({ members: runs, to_suggest: toSuggest }, all, onall) {
  if (!runs.length) return section("Runs", { id: "members" }, waiting([], toSuggest) || empty("The sweep has no runs."));
  const messages = runs.some((run) => run.message || run.reason);
  const used = progressOf(runs[0]).map((_, i) => runs.some((run) => progressOf(run)[i][1]));
  const progress = (run) => progressOf(run).filter((_, i) => used[i]);
  const columns = [
    "row",
    ["seed", "number seed"],
    "status",
    ...progress(runs[0]).map(([name, , kind]) => [name, kind]),
    ...(messages ? [["message", "message"]] : []),
  ];
  const rows = (all ? runs : runs.slice(0, SHOWN)).map((run) => [
    h("a", { href: link(["runs", run.run_id]), "data-key": run.run_id }, run.row),
    run.seed,
    [badge(run.status), run.reused ? " reused" : ""],
    ...progress(run).map(([, text]) => text),
    ...(messages ? [[run.message, run.reason].filter(Boolean).join("; ")] : []),
  ]);
  return section("Runs", { id: "members" }, waiting(runs, toSuggest), table("Runs of the sweep", columns, rows, { class: "members" }),
    rows.length < runs.length && h("p", {}, h("button", { type: "button", "data-key": "all runs", onclick: onall }, `Show all ${integer(runs.length)} runs`)),
  );
}

export function facts(sweep) {
  const { machine, started_ms: start, ended_ms: end } = sweep;
  return definitions([
    ["ablation", h("a", { href: link(["ablations", sweep.ablation], sizeParams(sweep)) }, sweep.ablation)],
    ["scale", sweep.scale],
    ["values", setsText(sweep.sets)],
    ["started", moment(start)],
    ["ended", end ? `${moment(end)}, ${sweep.status}` : null],
    ["duration", end ? duration((end - start) / 1000) : null],
    ["executor", sweep.executor],
    ["reused runs", sweep.reused],
    ["commit", sweep.git_commit?.slice(0, 12)],
    [
      "machine",
      [machine.host, machine.cpu, machine.cpus && plural(machine.cpus, "core"), machine.gpu].filter(Boolean).join(" · "),
    ],
  ]);
}

/** Its command, versions and ablation file. */
export function record(sweep) {
  const versions = Object.entries(sweep.versions).map(([name, version]) => `${name} ${version}`);
  const text = (label, content) => h("pre", { class: "file", tabindex: 0, "aria-label": label }, content);
  return [
    section(
      "Record",
      { id: "record" },
      h("details", {},
        h("summary", {}, "Command and versions"),
        text("Command and versions", [sweep.command.join(" "), ...versions].join("\n")),
      ),
      h("details", {}, h("summary", {}, "Ablation file"), text("Ablation file", sweep.file_text)),
    ),
  ];
}
