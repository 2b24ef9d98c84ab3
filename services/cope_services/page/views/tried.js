// What was already tried: all runs with some values of a key, in whichever ablation.

import { at, get } from "../api.js";
import { changes, empty, h, replace, select, table } from "../dom.js";
import { plural, withMinus } from "../format.js";
import { change, link, shortIds } from "../route.js";

const EXAMPLE = "model.position=cope,rope task.kind=flip_flop";

/** The field of the question: a key with its values, then conditions. A view makes it once. */
export const askField = () =>
  h("form", {
      class: "ask",
      role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        const q = new FormData(event.target).get("q").trim();
        if (q) location.hash = link(["tried"], { q });
      },
    },
    h("input", { type: "search", name: "q", placeholder: EXAMPLE, "aria-label": "What was tried", "data-key": "tried", title: "A key and its values, then conditions as in the filter of runs" }),
    h("button", { type: "submit" }, "What was tried?"),
  );

/** The spaces before a key and an operator: values may have spaces, too, as in tags.row=CoPE + RoPE. */
const BETWEEN = /\s+(?=[^\s=!<>]+\s*[=!<>])/;

const short = (key) => key.split(".").at(-1);

/** `37 runs`; `the first 20 of 37 runs` where the answer, and so the link, has no more. */
function runsText({ n, unfinished, run_ids: ids }) {
  const text = plural(n + unfinished, "run");
  return ids.length < n + unfinished ? `the first ${ids.length} of ${text}` : text;
}

function group({ settings, ablations, values }, { key, metric }) {
  const lines = values.map((each) => [
    each.value,
    [withMinus(each.text), each.unfinished > 0 && h("small", {}, ` +${each.unfinished} not finished`)],
    h("a", { href: link(["runs"], { ids: shortIds(each.run_ids) }) }, runsText(each)),
  ]);
  const where = Object.entries(settings).map(([name, value]) => `${short(name)} ${value}`).join(", ");
  return h("section", { class: "group" },
    h("p", { class: "note" }, ablations.map((name) => [h("a", { href: link(["ablations", name]) }, name), " "]), where),
    table(`In ${ablations.join(", ")}`, [key, metric ?? "metric", ""], lines),
  );
}

export function tried() {
  const part = changes();
  const [controls, found] = [h("div", { class: "bar controls" }), h("div")];
  const field = askField();
  const lead = "All runs with some values of a key, in whichever ablation, grouped by the settings that differ otherwise. An overview, and no test: the table of an ablation says which differences are real.";
  const head = h("div", { class: "head" }, h("h1", {}, "What was tried"), h("p", { class: "lead" }, lead));
  return {
    nodes: [head, field, controls, found],
    title: () => "What was tried",
    async refresh(params) {
      const q = params.get("q") ?? "";
      if (!field.contains(document.activeElement)) field.elements.q.value = q;
      const [values, ...filter] = q.split(BETWEEN).filter(Boolean);
      if (!values) {
        return part("found", "", () => {
          replace(controls);
          replace(found, empty(`Ask for a key and its values, then conditions: \`${EXAMPLE}\`.`));
        });
      }
      const metric = params.get("metric");
      let answer;
      try {
        answer = await get(at("tried", { values, filter, metric, limit: params.get("limit") ?? 50 }));
      } catch (error) {
        if (error.status !== 422 && error.status !== 400) throw error;
        replace(controls);
        part("found", error.message, () => replace(found, h("p", { class: "bad", role: "alert" }, error.message)));
        return null;
      }
      return part("found", JSON.stringify([q, answer]), () => {
        replace(controls, answer.metric && select("metric", answer.metrics, answer.metric, (value) => change({ metric: value })));
        if (!answer.groups.length) return replace(found, empty("No run matches. Conditions are written as in `runs --filter`."));
        const more = answer.next !== null && h("button", { type: "button", onclick: () => change({ limit: 1000 }) }, `Show all ${answer.total} groups`);
        return replace(
          found,
          h("p", { class: "note" }, `${plural(answer.runs, "run")} in ${plural(answer.total, "group")}; mean ± standard deviation (finished seeds).`),
          h("div", { class: "groups" }, answer.groups.map((each) => group(each, answer))),
          more,
        );
      });
    },
  };
}
