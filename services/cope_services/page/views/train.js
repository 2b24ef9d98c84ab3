// The form that submits a sweep of an ablation.

import { at, get, key, post } from "../api.js";
import { h, replace, select } from "../dom.js";
import { integer, plural } from "../format.js";
import { link } from "../route.js";

let asked = null; // the answer of the service, and for which key

/** Whether the service has a cluster and the key may submit sweeps. */
export async function canSubmit() {
  if (asked?.key !== key.get()) asked = { key: key.get(), answer: (await get(at("version"))).can_submit };
  return asked.answer;
}

/** A key by which the service recognises the same request: the sweep is submitted once, however often it is sent. */
const requestKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/** How many runs of the plan are to do, in words. */
function toDo({ counts, runs }) {
  const left = runs - (counts.finished ?? 0) - (counts.stopped ?? 0) - (counts.running ?? 0);
  if (!left) return "All runs of this plan have ended or are being trained: a sweep of it trains nothing, unless values are replaced.";
  return `${integer(left)} of ${plural(runs, "run")} of this plan ${left === 1 ? "is" : "are"} left to train.`;
}

/** Draw the form into a container. `draft` keeps what was typed while the view is drawn again. */
export function trainForm(container, { name, scale, scales, detail, draft, choose }) {
  const [error, button] = [h("p", { class: "bad", role: "alert" }), h("button", { type: "submit", class: "primary", "data-key": "train" }, "Train")];
  const overrides = h("textarea", {
    id: "overrides",
    rows: 4,
    value: draft.overrides ?? "",
    placeholder: "train.steps=100\nseeds=[0]",
    spellcheck: "false",
    "data-key": "overrides",
    "aria-describedby": "overrides-help",
    oninput: (event) => (draft.overrides = event.target.value),
  });
  const most = h("input", {
    id: "max-runs",
    type: "number",
    min: 1,
    step: 1,
    value: draft.most ?? "",
    placeholder: "all",
    "data-key": "max-runs",
    oninput: (event) => (draft.most = event.target.value),
  });

  async function submit(event) {
    event.preventDefault();
    const body = { ablation: name, set: lines(overrides.value) };
    if (scale) body.scale = scale;
    if (most.value) body.max_runs = +most.value;
    const text = JSON.stringify(body);
    if (draft.sent !== text) Object.assign(draft, { sent: text, request: requestKey() });
    button.disabled = true;
    replace(error);
    try {
      const sweep = await post(at("sweeps"), body, { headers: { "Idempotency-Key": draft.request } });
      for (const each of Object.keys(draft)) delete draft[each]; // the same again is another sweep
      location.hash = link(["sweeps", sweep.sweep_id]);
    } catch (problem) {
      // The service has refused it: what is sent next is another request.
      if (problem.status !== undefined) delete draft.sent;
      const why = problem.status === undefined ? "The service does not answer; send it again: it will not be trained twice." : problem.message;
      replace(error, why);
    } finally {
      button.disabled = false;
    }
  }

  replace(
    container,
    h("h2", {}, "Train"),
    h("form", { class: "train", onsubmit: submit },
      h("p", { class: "note" }, toDo(detail)),
      scales.length ? select("scale", [["own", "own size"], ...scales], scale || "own", choose) : null,
      h("label", { for: "overrides" }, "Replaced values"),
      overrides,
      h("p", { class: "note", id: "overrides-help" },
        "One ", h("code", {}, "KEY=VALUE"), " in each line, as after ", h("code", {}, "--set"),
        ". Other values make other runs, which are added to the store.",
      ),
      h("div", { class: "field" }, h("label", { for: "max-runs" }, "train at most"), most, h("span", {}, "runs")),
      error,
      h("div", { class: "actions" }, button),
    ),
  );
}
