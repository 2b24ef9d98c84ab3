// One sweep: its runs, and live progress by server-sent events while it runs.

import { at, events, get, post } from "../api.js";
import { changes, crumbs, h, replace } from "../dom.js";
import { plural } from "../format.js";
import { REFRESH_MS } from "../poll.js";
import { link } from "../route.js";
import { badge, isActive, left, progress, sweepSummary } from "../status.js";
import { learningCurves } from "./learning_curves.js";
import { facts, failures, liveNumbers, members, record } from "./sweep_parts.js";

const TROUBLED = ["failed", "interrupted"];

/** A dialog that asks before something happens; resolves to true or false. */
function confirmed(title, text, action) {
  return new Promise((resolve) => {
    const answer = (value, name, label) => h("button", { value, class: name }, label);
    const dialog = h("dialog", { "aria-labelledby": "confirm-title" },
      h("form", { method: "dialog" },
        h("h2", { id: "confirm-title" }, title),
        h("p", {}, text),
        h("div", { class: "actions" }, answer("no", "quiet", "Cancel"), answer("yes", "primary", action)),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** What stops a sweep or trains its rest: a function that makes the buttons, and a notice of what came of it. */
function sweepActions(id) {
  const notice = h("p", { class: "note", role: "status" });

  async function act(what, [title, text, verb], done) {
    if (!(await confirmed(title, text, verb))) return;
    try {
      const answer = await post(at(["sweeps", id, what]));
      const other =
        answer.sweep_id === id ? null : h("a", { href: link(["sweeps", answer.sweep_id]) }, `Sweep ${answer.sweep_id}`);
      replace(notice, done, " ", other);
    } catch (error) {
      notice.textContent = error.message;
    }
    dispatchEvent(new Event("routechange"));
  }

  function buttons(found) {
    if (isActive(found)) {
      const text = "Runs in progress write a checkpoint and can be continued. Other runs stay pending.";
      const done = "The sweep has been asked to stop. Its runs write checkpoints first.";
      const stop = () => act("stop", ["Stop this sweep?", text, "Stop the sweep"], done);
      return h("button", { type: "button", class: "danger", "data-key": "stop", onclick: stop }, "Stop");
    }
    const [runs, rows] = [left(found), found.to_suggest];
    if (!runs && !rows) return null;
    const rest = [runs && plural(runs, "run"), rows && `${plural(rows, "row")} of the search`].filter(Boolean).join(" and ");
    const text = "Failed runs are trained, too. Runs continue from their last checkpoint if they have one. Limits of the sweep on runs and time hold again.";
    const retry = () => act("retry", [`Train ${rest}?`, text, "Retry"], "A new sweep trains them.");
    return h("button", { type: "button", "data-key": "retry", onclick: retry }, `Retry ${rest}`);
  }

  return { notice, buttons };
}

export function sweep(id) {
  const part = changes();
  const [head, live, failed, curves, list, written] = Array.from({ length: 6 }, () => h("div"));
  const plot = learningCurves(curves);
  const counted = h("div", { class: "counts" });
  const [actions, { notice, buttons }] = [h("div", { class: "actions" }), sweepActions(id)];
  const leaving = new AbortController();
  let [listening, all] = [false, false];

  const drawCounts = (found) => replace(counted, progress(found.counts), h("small", {}, sweepSummary(found)));

  function show({ event, data }) {
    if (event === "progress" || event === "end") replace(failed, failures(data.failures));
    replace(live, event === "progress" ? liveNumbers(data) : null);
    if (event === "progress") drawCounts(data); // the same numbers above and below
    if (event === "end") dispatchEvent(new Event("routechange")); // reads the rest of the view again
    return event === "end";
  }

  /** Follow the events until the sweep ends or the view closes; connect again after an interruption. */
  async function listen() {
    listening = true;
    while (!leaving.signal.aborted) {
      try {
        for await (const each of events(at(["sweeps", id, "events"]), leaving.signal)) if (show(each)) return;
      } catch (error) {
        if (leaving.signal.aborted) return;
        if (error.status !== undefined) {
          replace(
            live,
            h("p", { class: "note" }, `There is no live progress: ${error.message}. The rest is read every few seconds.`),
          );
          if (error.status < 500 && error.status !== 429) return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    }
  }

  /** The loss and the primary metric of its runs, as the ablation's page draws them. */
  async function drawCurves({ ablation: name, scale, sets, metrics, members: runs }, params) {
    if (!runs.some((run) => run.step)) return;
    const titles = metrics.map((each) => ({ ...each, title: `${each.label ?? each.name}${each.unit ? ` (${each.unit})` : ""}` }));
    const rows = [...new Set(runs.map((run) => run.row))];
    const asked = params.getAll("row").filter((row) => rows.includes(row));
    const chosen = asked.length ? asked : rows;
    // The ablation may be gone, or have other rows by now: its sweep is shown all the same.
    const only = new Set(runs.map((run) => run.run_id)); // the ablation's rows of these names may have other runs by now
    await plot.refresh({ name, scale, sets, detail: { metrics: titles }, before: ["train/loss"], chosen, params, only }).catch(() => replace(curves));
  }

  function drawHead(found) {
    // Of a sweep that is followed, the last event has the newest counts, which the tiles show, too.
    if (!live.querySelector(".tiles") || !isActive(found)) drawCounts(found);
    replace(actions, buttons(found));
    replace(
      head,
      crumbs(["Sweeps", link(["sweeps"])], id),
      h("div", { class: "head" }, h("h1", {}, found.title || found.ablation), badge(found.status), actions),
      notice,
      counted,
      facts(found),
      found.error && h("div", { class: "error", role: "alert" }, h("p", {}, found.error)),
      found.notes.map((note) => h("p", { class: "note" }, note)),
    );
  }

  return {
    nodes: [head, live, failed, curves, list, written],
    title: () => `Sweep ${id}`,
    close() {
      leaving.abort();
      plot.close();
    },
    async refresh(params) {
      const found = await get(at(["sweeps", id]));
      part("head", JSON.stringify([found.status, found.counts, found.to_suggest, found.ended_ms]), () => drawHead(found));
      if (isActive(found)) {
        if (!listening) listen();
      } else {
        const ended = found.members.filter((run) => run.message && TROUBLED.includes(run.status));
        part("failed", JSON.stringify(ended), () => replace(failed, failures(ended)));
        replace(live);
      }
      const drawList = () =>
        replace(list, members(found, all, () => {
          all = true;
          drawList();
        }));
      part("list", JSON.stringify([found.members, found.to_suggest]), drawList);
      part("record", JSON.stringify(found.command), () => replace(written, record(found)));
      await drawCurves(found, params); // last: it asks the service again, and the rest need not wait for it
    },
  };
}
