// The form that submits a sweep of an ablation.

import { at, get, key, post, put, Unreachable } from "../api.js";
import { h, replace, select } from "../dom.js";
import { bytes, duration, integer, plural } from "../format.js";
import { link } from "../route.js";
import { scaleName, scaleOptions, UNFINISHED } from "../status.js";
import { MOST_RUNS } from "../values.js";

let asked = null; // the answer of the service, and for which key

/** Whether the service has a cluster and the key may submit sweeps. */
export async function canSubmit() {
  if (asked?.key !== key.get()) asked = { key: key.get(), answer: (await get(at("version"))).can_submit };
  return asked.answer;
}

/** The id of a sweep that is submitted now, as in 20261121-101500-3f2a: the time in UTC, and random digits. */
function newSweepId() {
  const time = new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-");
  const digits = [...crypto.getRandomValues(new Uint8Array(2))].map((byte) => byte.toString(16).padStart(2, "0"));
  return `${time}-${digits.join("")}`;
}

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

const PAUSE_MS = 500;
const ENDED = ["finished", "stopped"]; // statuses of runs that are not trained again, unless they are to do
/** The fields of numbers: key of the request, what stands before and after it, and its unit in those of the request. */
const LIMITS = [
  ["max_runs", "train at most", "runs", 1],
  ["time_budget_s", "for at most", "minutes", 60],
  ["max_failures", "stop after", "failed runs", 1],
];

/** Which of the runs of a plan are those of other ablations, too, in words. */
async function sharedRuns(cost) {
  const ids = cost.runs.slice(0, MOST_RUNS).map((run) => run.run_id);
  if (!ids.length) return "";
  const { runs } = await get(at("runs", { run: ids, limit: MOST_RUNS, fields: "ablations" }));
  const others = runs.map((run) => run.ablations.filter((name) => name !== cost.ablation)).filter((names) => names.length);
  const names = [...new Set(others.flat())].join(", ");
  return others.length ? `${plural(others.length, "run")} of the plan ${others.length === 1 ? "is" : "are"} shared with ${names}.` : "";
}

/** What a sweep would train, in words; `cost` is the answer of the service. */
async function previewed(cost) {
  const total = cost.runs.length + cost.to_suggest;
  const left = cost.runs.filter((run) => run.to_do);
  const ended = cost.runs.filter((run) => !run.to_do && ENDED.includes(run.status)).length;
  const shared = await sharedRuns(cost);
  if (!cost.to_do) return `Nothing to train: all of ${plural(total, "run")} have ended. ${shared}`;
  const [least, most] = [cost.least_s, cost.estimated_s].map(duration);
  const memory = Math.max(0, ...cost.runs.map((run) => run.estimated_memory_bytes));
  const counts = UNFINISHED.map((status) => [status, left.filter((run) => run.status === status).length]);
  const begun = counts.filter(([, number]) => number).map(([status, number]) => `${integer(number)} ${status}`);
  const tooLarge = cost.runs.filter((run) => !run.fits).length;
  const known = ended ? `; ${integer(ended)} ${ended === 1 ? "has" : "have"} ended and will not be trained again` : "";
  return [
    `${integer(cost.to_do)} of ${plural(total, "run")} would be trained${begun.length ? ` (${begun.join(", ")})` : ""}${known}.`,
    shared,
    `About ${least === most ? least : `${least}, or ${most} if it stays as busy as now,`} on the machine of this service, ${plural(cost.worker_groups, "run")} at a time` +
      (memory ? `, up to ${bytes(memory)} of memory each.` : "."),
    tooLarge ? `${plural(tooLarge, "run")} of the plan may need more memory than there is here.` : "",
    cost.lacks_gpu ? "The runs may use GPUs; this machine has none, so a cluster with GPUs is faster." : "",
  ].filter(Boolean).join(" ");
}

/**
 * The form of an ablation. It is made once and updated, so that what is typed, what is selected and a composition of an
 * input method last while the view changes around it.
 */
export function trainForm(name, choose) {
  const [error, button] = [h("p", { class: "bad", role: "alert" }), h("button", { type: "submit", class: "primary", "data-key": "train" }, "Train")];
  const overrides = h("textarea", {
    id: "overrides",
    rows: 4,
    placeholder: "train.steps=100\nseeds=[0]",
    spellcheck: "false",
    "data-key": "overrides",
    "aria-describedby": "overrides-help",
    oninput: later,
  });
  const limits = LIMITS.map(([id, , , unit]) =>
    h("input", { id, type: "number", min: 1, step: 1, placeholder: "no limit", "data-key": id, "data-unit": unit, oninput: later }),
  );
  const preview = h("p", { class: "note", role: "status" }, "…");
  const scales = h("div");
  let [scale, timer, newest, sent] = ["", null, 0, {}]; // sent: what was sent without an answer, and its id

  function request() {
    const body = { ablation: name, set: lines(overrides.value) };
    if (scale) body.scale = scale;
    for (const each of limits) if (each.value) body[each.id] = +each.value * +each.dataset.unit;
    return body;
  }

  /** Ask what would be trained. What the service refuses is said there; the answer to an older question is dropped. */
  async function show() {
    const mine = (newest += 1);
    const text = await post(at("sweeps/preview"), request()).then(previewed, (problem) => problem.message);
    if (mine === newest) replace(preview, text);
  }

  function later() {
    clearTimeout(timer);
    timer = setTimeout(show, PAUSE_MS);
  }

  async function submit(event) {
    event.preventDefault();
    const body = request();
    const text = JSON.stringify(body);
    if (sent.text !== text) sent = { text, id: newSweepId() };
    button.disabled = true;
    replace(error);
    try {
      const sweep = await put(at(`sweeps/${sent.id}`), body);
      sent = {}; // the same again is another sweep
      form.reset();
      location.hash = link(["sweeps", sweep.sweep_id]);
    } catch (problem) {
      // The service has refused it: what is sent next is another request.
      if (problem.status !== undefined) sent = {};
      replace(error, problem.message, problem instanceof Unreachable && " Send it again: it will not be trained twice.");
    } finally {
      button.disabled = false;
    }
  }

  const form = h("form", { class: "train", onsubmit: submit },
    preview,
    scales,
    h("label", { for: "overrides" }, "Overrides"),
    overrides,
    h("p", { class: "note", id: "overrides-help" },
      "One ", h("code", {}, "KEY=VALUE"), " per line, as with ", h("code", {}, "--set"),
      ". Changed values make new runs, which are added to the store.",
    ),
    LIMITS.map(([id, before, after], index) =>
      h("div", { class: "field" }, h("label", { for: id }, before), limits[index], h("span", {}, after)),
    ),
    error,
    h("div", { class: "actions" }, button),
  );
  return {
    node: form,
    /** Show another scale, or the counts that have changed. */
    update(asked) {
      scale = asked.scale;
      overrides.defaultValue = asked.sets.join("\n"); // shown until something is typed
      scales.hidden = !asked.scales.length;
      replace(scales, asked.scales.length ? select("scale", scaleOptions(asked.scales), scaleName(scale), choose) : null);
      show();
    },
  };
}
