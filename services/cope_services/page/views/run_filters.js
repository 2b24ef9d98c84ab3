// The conditions and columns of the table of runs.

import { checkbox, h, select } from "../dom.js";
import { plural } from "../format.js";
import { change, idsIn, toggled } from "../route.js";
import { askedSize, scaleName, scaleOptions, STATUSES } from "../status.js";

const EXAMPLES = "model.layers>=4, in_dist/loss<0.5";
/** The commas between conditions: a key and an operator follow. Values may have commas, too: train.betas=0.9,0.999. */
const BETWEEN = /,(?=\s*[^\s,=!<>]+\s*[=!<>])/;
const LISTS = ["filter", "ids", "sweep", "scale", "set"]; // parameters that are shown as chips

/** [parameter, text, what remains without it] of each condition that no other control shows. */
function chips(params, hasScales) {
  return LISTS.filter((name) => name !== "scale" || !hasScales).flatMap((name) => {
    const values = params.getAll(name);
    if (name === "ids") return values.length ? [[name, plural(idsIn(params, name).length, "given run"), []]] : [];
    return values.map((each) => [name, name === "filter" ? each : `${name} ${each}`, values.filter((other) => other !== each)]);
  });
}

/** Show the runs of an ablation, at the scale and with the values at which it has most. */
function chooseAblation(ablation) {
  const { scale, sets } = ablation ? askedSize(new URLSearchParams(), ablation) : { scale: "", sets: [] };
  change({ ablation: ablation?.name, scale, set: sets });
}

/** The status, the ablation with its scale, a new condition, and those that hold. */
export function filters(params, ablations) {
  const chosen = ablations.find(({ name }) => name === params.get("ablation"));
  const hasScales = chosen?.scales.length > 0;
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
    const conditions = condition.value
      .split(BETWEEN)
      .map((each) => each.trim())
      .filter(Boolean);
    change({ filter: [...params.getAll("filter"), ...conditions] });
  };
  const chip = ([name, text, rest]) =>
    h("button", {
        type: "button",
        class: "chip",
        "data-key": `chip ${text}`,
        "aria-label": `Remove ${text}`,
        onclick: () => change({ [name]: rest }),
      },
      text,
      h("span", { "aria-hidden": "true" }, " ×"),
    );
  const statuses = [["", "any"], ...STATUSES.filter((each) => each !== "pending")];
  return h("div", { class: "bar controls" },
    select("status", statuses, params.get("status") ?? "", (status) => change({ status })),
    select("ablation", [["", "any"], ...ablations.map(({ name }) => name)], chosen?.name ?? "", (name) =>
      chooseAblation(ablations.find((each) => each.name === name)),
    ),
    hasScales &&
      select("scale", scaleOptions(chosen.scales), scaleName(params.get("scale")), (scale) =>
        change({ scale: scale === scaleName("") ? null : scale, set: [] }),
      ),
    h("form", { class: "field wide", onsubmit: add },
      h("label", { for: "condition" }, "condition"),
      condition,
      h("button", { type: "submit", class: "quiet" }, "Add"),
      h("span", { id: "condition-help", class: "hidden" },
        "A key of the configuration, a final metric or a fact; one of = != < <= > >=; a value.",
      ),
    ),
    h("div", { class: "chips" }, chips(params, hasScales).map(chip)),
  );
}

/** Check boxes of columns, and a field for the key of another. `known` are keys that the field suggests. */
export function columnChooser(columns, metrics, known) {
  const set = (list) => change({ col: list.length ? list : ["none"] }, { replace: true });
  const other = h("input", {
    type: "text",
    "aria-label": "Another key",
    placeholder: "another key: model.dim, facts.device",
    "data-key": "another",
    list: "known-keys",
  });
  const add = (event) => {
    event.preventDefault();
    if (other.value.trim()) set([...columns, other.value.trim()]);
  };
  const choices = [...new Set([...columns, ...metrics])];
  return h("details", { class: "columns" },
    h("summary", { "data-key": "columns summary" }, `Columns (${columns.length})`),
    h("div", { class: "choices" },
      choices.map((key) => checkbox(key, columns.includes(key), () => set(toggled("col", key, columns)), `col ${key}`)),
    ),
    h("form", { class: "field wide", onsubmit: add }, other, h("button", { type: "submit", class: "quiet" }, "Add")),
    h("datalist", { id: "known-keys" }, known.map((key) => h("option", { value: key }))),
  );
}
