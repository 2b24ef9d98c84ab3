// One sweep: its runs, and live progress by server-sent events while it runs.

import { at, events, get, post } from "../api.js";
import { changes, definitions, empty, h, replace, scrolling, section } from "../dom.js";
import { count, duration, integer, moment, plural } from "../format.js";
import { link } from "../route.js";
import { badge, progress, STATUSES, summary } from "../status.js";

const RETRY_MS = 5000;
const RETRYABLE = ["failed", "interrupted", "damaged"];

/** A value of an event as text: a number, or the names or numbers of a list or an object. */
function described(value) {
  if (value === null || value === undefined) return null;
  if (Array.isArray(value)) return value.length ? `${value.length}: ${value.map(described).join(", ")}` : "0";
  if (typeof value === "object")
    return (
      value.name ??
      value.id ??
      Object.entries(value)
        .map(([key, each]) => `${key} ${described(each)}`)
        .join(", ")
    );
  return typeof value === "number" ? integer(value) : String(value);
}

function tile(label, value) {
  return h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value));
}

function liveTiles(data) {
  return h(
    "dl",
    { class: "tiles" },
    tile(
      "finished",
      `${integer(data.counts.finished ?? 0)} / ${integer(STATUSES.reduce((sum, each) => sum + (data.counts[each] ?? 0), 0))}`,
    ),
    tile("remaining", data.eta_s === null || data.eta_s === undefined ? "–" : duration(data.eta_s)),
    tile(
      "steps per second",
      data.steps_per_s === null || data.steps_per_s === undefined ? "–" : count(Math.round(data.steps_per_s * 10) / 10),
    ),
    tile("worker groups", described(data.groups) ?? "–"),
    tile("nodes", described(data.nodes) ?? "–"),
  );
}

function failures(list) {
  if (!list?.length) return null;
  return section(
    "Failures",
    { id: "failures" },
    h(
      "ul",
      { class: "failures" },
      list.map((each) =>
        h(
          "li",
          {},
          each.run_id ? h("a", { class: "mono", href: link(["runs", each.run_id]) }, each.run_id) : null,
          " ",
          each.row ? `${each.row}: ` : "",
          each.message ?? described(each),
        ),
      ),
    ),
  );
}

/** A dialog that asks before something happens; resolves to true or false. */
function confirmed(title, text, action) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      {
        "aria-labelledby": "confirm-title",
        onclose: () => {
          dialog.remove();
          resolve(dialog.returnValue === "yes");
        },
      },
      h(
        "form",
        { method: "dialog" },
        h("h2", { id: "confirm-title" }, title),
        h("p", {}, text),
        h(
          "div",
          { class: "actions" },
          h("button", { value: "no", class: "quiet" }, "Cancel"),
          h("button", { value: "yes", class: "primary" }, action),
        ),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}

function members(sweep) {
  const messages = sweep.members.some((run) => run.message);
  const head = ["row", "seed", "status", "step", "worker", ...(messages ? ["message"] : [])];
  return section(
    "Runs",
    { id: "members" },
    sweep.members.length
      ? scrolling(
          "Runs of the sweep",
          h(
            "table",
            {},
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                head.map((name) => h("th", { scope: "col", class: ["seed", "step"].includes(name) ? "number" : null }, name)),
              ),
            ),
            h(
              "tbody",
              {},
              sweep.members.map((run) =>
                h(
                  "tr",
                  {},
                  h("th", { scope: "row" }, h("a", { href: link(["runs", run.run_id]), "data-key": run.run_id }, run.row)),
                  h("td", { class: "number" }, run.seed),
                  h("td", {}, badge(run.status), run.reused ? " reused" : ""),
                  h("td", { class: "number" }, run.steps ? `${integer(run.step)} / ${integer(run.steps)}` : integer(run.step)),
                  h("td", {}, run.worker_id ?? ""),
                  messages && h("td", { class: "message" }, run.message ?? ""),
                ),
              ),
            ),
          ),
        )
      : empty("The sweep has no runs."),
  );
}

export function sweep(root, id) {
  const part = changes();
  const [head, actions, live, failed, list, record] = [
    h("div"),
    h("div", { class: "actions" }),
    h("div", { "aria-live": "polite" }),
    h("div"),
    h("div"),
    h("div"),
  ];
  const leaving = new AbortController();
  const notice = h("p", { class: "note", role: "status" });
  let [started, listening] = [false, false];

  /** Follow the events until the sweep ends or the view closes; connect again after an interruption. */
  async function listen() {
    listening = true;
    while (!leaving.signal.aborted) {
      try {
        for await (const { event, data } of events(at(["sweeps", id, "events"]), leaving.signal)) {
          if (event === "progress") {
            replace(live, liveTiles(data));
            replace(failed, failures(data.failures));
          } else if (event === "end") {
            listening = false;
            replace(live);
            dispatchEvent(new Event("routechange"));
            return;
          }
        }
      } catch (error) {
        if (leaving.signal.aborted) return;
        if (error.status) {
          replace(
            live,
            h(
              "p",
              { class: "note" },
              `There is no live progress: ${error.message} The numbers below are read every few seconds.`,
            ),
          );
          return; // `listening` stays, so this is not asked again
        }
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  async function act(what, title, text, verb) {
    if (!(await confirmed(title, text, verb))) return;
    try {
      const answer = await post(
        at(["sweeps", id, what]),
        {},
        { headers: { "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()) } },
      );
      const next = answer?.sweep_id && answer.sweep_id !== id ? answer.sweep_id : null;
      replace(
        notice,
        what === "stop"
          ? "The sweep has been asked to stop. Runs in progress save a checkpoint first."
          : "The runs are trained again. ",
        next && h("a", { href: link(["sweeps", next]) }, `Sweep ${next}`),
      );
    } catch (error) {
      notice.textContent = error.message;
    }
    dispatchEvent(new Event("routechange"));
  }

  function buttons(found) {
    const again = RETRYABLE.reduce((sum, status) => sum + (found.counts[status] ?? 0), 0);
    return [
      found.status === "running" &&
        h(
          "button",
          {
            type: "button",
            class: "danger",
            "data-key": "stop",
            onclick: () =>
              act(
                "stop",
                "Stop this sweep?",
                "Runs in progress save a checkpoint and can be continued. Runs that have not started stay pending.",
                "Stop the sweep",
              ),
          },
          "Stop",
        ),
      found.status !== "running" &&
        again > 0 &&
        h(
          "button",
          {
            type: "button",
            "data-key": "retry",
            onclick: () =>
              act(
                "retry",
                `Train ${plural(again, "run")} again?`,
                "Runs that failed or were interrupted continue from their last checkpoint. Finished runs stay as they are.",
                "Retry",
              ),
          },
          `Retry ${plural(again, "run")}`,
        ),
    ];
  }

  return {
    title: () => `Sweep ${id}`,
    close: () => leaving.abort(),
    async refresh() {
      const found = await get(at(["sweeps", id]));
      if (!started) replace(root, head, live, failed, list, record);
      started = true;
      part("head", JSON.stringify([found.status, found.counts, found.ended_ms]), () => {
        replace(actions, buttons(found));
        replace(
          head,
          h(
            "nav",
            { class: "crumbs", "aria-label": "Path" },
            h("a", { href: link(["sweeps"]) }, "Sweeps"),
            " / ",
            h("span", { class: "mono" }, id),
          ),
          h("div", { class: "head" }, h("h1", {}, found.title || found.ablation), badge(found.status), actions),
          notice,
          h("div", { class: "counts" }, progress(found.counts), h("small", {}, summary(found.counts))),
          definitions([
            ["ablation", h("a", { href: link(["ablations", found.ablation]) }, found.ablation)],
            ["started", moment(found.started_ms)],
            ["ended", found.ended_ms ? moment(found.ended_ms) : null],
            ["duration", found.ended_ms ? duration((found.ended_ms - found.started_ms) / 1000) : null],
            ["executor", found.executor],
            ["reused runs", found.reused],
            ["commit", found.git_commit?.slice(0, 12)],
            [
              "machine",
              [found.machine.host, found.machine.cpu, found.machine.cpus && plural(found.machine.cpus, "core"), found.machine.gpu]
                .filter(Boolean)
                .join(" · "),
            ],
          ]),
          found.error && h("div", { class: "error", role: "alert" }, h("p", {}, found.error)),
          found.notes.map((note) => h("p", { class: "note" }, note)),
        );
      });
      if (found.status === "running" && !listening) listen();
      if (found.status !== "running")
        part("failed", JSON.stringify(found.members), () =>
          replace(failed, failures(found.members.filter((run) => run.message && RETRYABLE.includes(run.status)))),
        );
      part("list", JSON.stringify(found.members), () => replace(list, members(found)));
      part("record", found.file_text + found.command.join(" "), () =>
        replace(
          record,
          found.table?.markdown &&
            section("Table at the end", { id: "table" }, h("pre", { class: "file", tabindex: 0 }, found.table.markdown)),
          section(
            "Record",
            { id: "record" },
            h(
              "details",
              {},
              h("summary", {}, "Command and versions"),
              h(
                "pre",
                { class: "file", tabindex: 0 },
                [found.command.join(" "), ...Object.entries(found.versions).map(([name, version]) => `${name} ${version}`)].join(
                  "\n",
                ),
              ),
            ),
            h("details", {}, h("summary", {}, "Ablation file"), h("pre", { class: "file", tabindex: 0 }, found.file_text)),
          ),
        ),
      );
    },
  };
}
