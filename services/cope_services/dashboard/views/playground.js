// The playground: a text under chosen checkpoints. Perplexity, the surprise of each token, and what heads count.

import { at, get, post } from "../api.js";
import { checkbox, empty, h, replace, scrolling, section, select } from "../dom.js";
import { EXAMPLES } from "../examples.js";
import { fixed, number } from "../format.js";
import { change, current, link, toggled } from "../route.js";
import { fullestScale } from "../status.js";
import { heads } from "./heads.js";
import { legend, surprise } from "./surprise.js";

const MOST = 8; // checkpoints at once

/** Whether an encoding of the run counts with gates. */
const counts = (run) => run.spec?.model.position.some((each) => each.kind.startsWith("cope"));

const nameOf = (run) => `${run.row ?? run.run_id}${run.seed === null ? "" : `, seed ${run.seed}`}`;

function totals(results, runs) {
  const units = results.some((each) => each.total.text);
  const best = Math.min(...results.map((each) => each.total.perplexity ?? Infinity));
  const head = ["checkpoint", "perplexity", "bits per token", "tokens", ...(units ? ["word perplexity", "bits per byte"] : [])];
  return scrolling(
    "Perplexity",
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((name, i) => h("th", { scope: "col", class: i ? "number" : null }, name)),
        ),
      ),
      h(
        "tbody",
        {},
        results.map(({ run_id: id, total }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, h("a", { href: link(["runs", id]) }, nameOf(runs.get(id)))),
            h("td", { class: `number${total.perplexity === best ? " best" : ""}` }, number(total.perplexity)),
            h("td", { class: "number" }, fixed(total.bits_per_token, 3)),
            h("td", { class: "number" }, total.tokens),
            units && [
              h("td", { class: "number" }, number(total.text?.word_perplexity)),
              h("td", { class: "number" }, total.text ? fixed(total.text.bits_per_byte, 3) : "–"),
            ],
          ),
        ),
      ),
    ),
  );
}

export function playground(root) {
  const [chooser, form, results] = [h("div"), h("div"), h("div", { "aria-live": "polite" })];
  const runs = new Map(); // id → GET /runs/{id} without its curve
  let [started, drawnChoice, asked, controller] = [false, "", "", null];
  const area = h("textarea", { id: "text", rows: 5, spellcheck: "false", "data-key": "text", "aria-describedby": "text-help" });

  const chosenIds = () => current().params.getAll("run");

  /** The finished runs to choose from: those of one ablation, best seed first in each row. */
  async function choice(params) {
    const ablations = (await get(at("ablations"))).filter((each) => !each.error);
    const finished = (each) =>
      (each.counts.finished ?? 0) + Object.values(each.at_scales).reduce((sum, scale) => sum + scale.finished, 0);
    const usable = ablations
      .filter(finished)
      .sort((a, b) => (b.newest_ms ?? 0) - (a.newest_ms ?? 0) || finished(b) - finished(a));
    const of = chosenIds().length ? runs.get(chosenIds()[0])?.ablations[0] : null;
    const name = params.get("ablation") ?? of ?? usable[0]?.name;
    const ablation = usable.find((each) => each.name === name);
    if (!ablation) return { usable, rows: [] };
    const asked = params.get("scale");
    const scale = asked === null ? fullestScale(ablation) : asked === "own" ? "" : asked;
    const table = await get(at(["ablations", name, "table"], { format: "json", scale }));
    const [metric] = table.metrics;
    const sign = metric.goal === "min" ? 1 : -1;
    const rows = table.rows
      .map((row) => ({ row: row.row, runs: [...row.metrics[metric.name].values].sort((a, b) => sign * (a.value - b.value)) }))
      .filter((row) => row.runs.length);
    return { usable, name, scale, scales: ablation.scales, rows, metric };
  }

  async function loadRuns(ids) {
    await Promise.all(
      ids.filter((id) => !runs.has(id)).map(async (id) => runs.set(id, await get(at(["runs", id], { curve: false })))),
    );
  }

  function drawChoice({ usable, name, scale, scales, rows, metric }, chosen) {
    if (!usable.length)
      return replace(
        chooser,
        empty("No run is finished, so there is no checkpoint to ask. `cope-sweep run quickstart` trains some in a minute."),
      );
    const pick = (id) => change({ run: toggled(chosen, id).slice(-MOST) });
    const strangers = chosen.filter((id) => !rows.some((row) => row.runs.some((run) => run.run_id === id)));
    replace(
      chooser,
      h(
        "div",
        { class: "bar controls" },
        select(
          "ablation",
          usable.map((each) => [each.name, each.title || each.name]),
          name,
          (value) => change({ ablation: value, scale: null }),
        ),
        scales.length
          ? select("scale", [["own", "own size"], ...scales], scale || "own", (value) => change({ scale: value }))
          : null,
        chosen.length
          ? h(
              "button",
              { type: "button", class: "quiet", "data-key": "none", onclick: () => change({ run: null }) },
              "Choose none",
            )
          : null,
      ),
      h(
        "fieldset",
        { class: "checkpoints" },
        h("legend", {}, `Checkpoints, up to ${MOST}; in each row the best seed by ${metric.title} first`),
        rows.length
          ? rows.map((row) =>
              h(
                "div",
                { class: "checkrow" },
                h("b", {}, row.row),
                row.runs.map((run, i) =>
                  checkbox(
                    i ? `seed ${run.seed}` : `seed ${run.seed} (best)`,
                    chosen.includes(run.run_id),
                    () => pick(run.run_id),
                    `run ${run.run_id}`,
                  ),
                ),
              ),
            )
          : empty("No run of this scale is finished."),
        strangers.length
          ? h(
              "div",
              { class: "checkrow" },
              h("b", {}, "others"),
              strangers.map((id) =>
                checkbox(
                  runs.get(id) ? `${runs.get(id).ablations[0] ?? ""} ${nameOf(runs.get(id))}` : id,
                  true,
                  () => pick(id),
                  `run ${id}`,
                ),
              ),
            )
          : null,
      ),
    );
  }

  function drawForm() {
    const example = () => {
      const kind = runs.get(chosenIds()[0])?.spec?.task.kind;
      area.value = exampleOf(runs.get(chosenIds()[0])) ?? area.value;
      if (!kind) replace(results, empty("Choose a checkpoint first: examples depend on its task."));
    };
    replace(
      form,
      h(
        "form",
        {
          class: "ask",
          onsubmit: (event) => {
            event.preventDefault();
            change({ text: area.value, ask: "1" });
            ask(true);
          },
        },
        h("label", { for: "text" }, "Text"),
        area,
        h(
          "p",
          { id: "text-help", class: "note" },
          "A model of a task without a tokenizer reads the labels of its vocabulary, with blanks between them: ",
          h("code", {}, "w 0 i 1 r 0"),
          ".",
        ),
        h(
          "div",
          { class: "actions" },
          h("button", { type: "submit", class: "primary" }, "Measure"),
          h("button", { type: "button", class: "quiet", onclick: example }, "Insert an example"),
        ),
      ),
    );
  }

  async function ask(again) {
    const { params } = current();
    const [text, ids] = [params.get("text") ?? "", params.getAll("run")];
    const state = JSON.stringify([text, ids]);
    if (params.get("ask") !== "1" || (!again && state === asked)) return;
    asked = state;
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    if (!ids.length || !text.trim())
      return replace(results, empty(ids.length ? "Write or paste a text." : "Choose at least one checkpoint."));
    replace(results, empty("Computing …"));
    try {
      await loadRuns(ids);
      const { results: answers } = await post(
        at("perplexity"),
        { models: ids, text, log_probabilities: true, token_labels: true, top: 3 },
        { signal },
      );
      replace(
        results,
        section("Perplexity", { id: "perplexity" }, totals(answers, runs)),
        section(
          "Surprise of each token",
          { id: "surprise" },
          legend(),
          answers.every((answer) => !answer.total.text) &&
            h(
              "p",
              { class: "note" },
              "Tasks such as this one may train only the answers in a sequence. Other tokens can then be surprising.",
            ),
          surprise(answers, (id) => nameOf(runs.get(id))),
        ),
        h("div", { class: "heads" }),
      );
      const tokens = new Map(answers.map((answer) => [answer.run_id, answer.sequences[0].token_ids]));
      const counting = ids.filter((id) => counts(runs.get(id)));
      if (counting.length)
        heads(results.querySelector(".heads"), { tokens, runs: counting.map((id) => runs.get(id)), nameOf, signal });
    } catch (error) {
      if (signal.aborted) return;
      replace(
        results,
        h(
          "div",
          { class: "error", role: "alert" },
          h("p", {}, error.status ? error.message : "The server does not respond."),
          error.status === 429 ? h("p", {}, "The server is busy. Try again in a moment.") : null,
        ),
      );
    }
  }

  return {
    still: true,
    title: () => "Playground",
    close: () => controller?.abort(),
    async refresh(params) {
      await loadRuns(chosenIds()).catch(() => {}); // an unknown id is reported by the measurement
      const found = await choice(params);
      if (!started) {
        replace(
          root,
          h(
            "div",
            { class: "head" },
            h("h1", {}, "Playground"),
            h("p", { class: "lead" }, "What checkpoints make of your text."),
          ),
          h("div", { class: "desk" }, h("div", {}, form), chooser),
          results,
        );
        drawForm();
        area.value = params.get("text") ?? "";
      }
      started = true;
      const chosen = chosenIds();
      const state = JSON.stringify([found, chosen]);
      if (state !== drawnChoice) drawChoice(found, chosen);
      drawnChoice = state;
      if (document.activeElement !== area && params.get("text") !== null) area.value = params.get("text");
      if (!area.value && chosen.length) area.value = exampleOf(runs.get(chosen[0])) ?? "";
      ask(false); // reports its own errors
    },
  };
}

/** A text that a run's task can read; null if there is no example. */
function exampleOf(run) {
  return run?.spec ? (EXAMPLES[run.spec.task.kind] ?? null) : null;
}
