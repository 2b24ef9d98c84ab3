// The playground: a text under chosen checkpoints. Perplexity, the surprisal of each token, and what heads count.

import { at, get, post } from "../api.js";
import { empty, h, marked, replace, section, table } from "../dom.js";
import { EXAMPLES } from "../examples.js";
import { fixed, number } from "../format.js";
import { change, current, link } from "../route.js";
import { nameOf } from "../values.js";
import { choiceFields, loadChoice, NONE } from "./checkpoint_choice.js";
import { hasGates, heads } from "./heads.js";
import { legend, surprise } from "./surprise.js";

/** A text that a run's task can read; null if there is no example. */
const exampleOf = (run) => EXAMPLES[run?.spec?.task.kind] ?? run?.example ?? null;

const DEFAULT_ROWS = 4; // whose best seeds are chosen at first: rows of one task, which read the same text

function totals(results, nameOfId) {
  const units = results.some((each) => each.total.text);
  const texts = results.map((each) => JSON.stringify([each.scored, each.sequences[0].labels]));
  const comparable = texts.every((each) => each === texts[0]); // perplexities of the same tokens
  const best = comparable && Math.min(...results.map((each) => each.total.perplexity ?? Infinity));
  const names = ["perplexity", "bits per token", "scored tokens", ...(units ? ["word perplexity", "bits per byte"] : [])];
  const rows = results.map(({ run_id: id, total }) => [
    h("a", { href: link(["runs", id]) }, nameOfId(id)),
    h("span", { class: total.perplexity === best ? "best" : null }, number(total.perplexity)),
    fixed(total.bits_per_token, 3),
    `${total.tokens} of ${total.positions}`,
    ...(units ? [number(total.text?.word_perplexity), fixed(total.text?.bits_per_byte, 3)] : []),
  ]);
  return table("Perplexity", ["checkpoint", ...names.map((name) => [name, "number"])], rows);
}

/** What a model of this kind of task reads, and what is scored. */
function helpFor(kind) {
  const marker = kind === "selective_copy" ? " Where the model does not see an answer, `>` stands in its place." : "";
  return `A model without a tokenizer reads the labels of its task's vocabulary, with spaces between them, and is scored on what its task trains; the result says which tokens.${marker} “Insert an example” shows a text of the chosen checkpoint's task.`;
}

/** The form of the text; `measure` is called when it is sent, `insert` to write an example. */
function textForm(area, help, measure, insert) {
  const onsubmit = (event) => {
    event.preventDefault();
    measure();
  };
  return h("form", { class: "prompt", onsubmit },
    h("label", { for: "text" }, "Text"),
    area,
    help,
    h("div", { class: "actions" },
      h("button", { type: "submit", class: "primary" }, "Measure"),
      h("button", { type: "button", class: "quiet", onclick: insert }, "Insert an example"),
    ),
  );
}

export function playground() {
  const [chooser, results] = [h("div"), h("div", { "aria-live": "polite" })];
  const runs = new Map(); // id → GET /runs/{id} without its curve
  const area = h("textarea", { id: "text", rows: 4, spellcheck: "false", "data-key": "text", "aria-describedby": "text-help" });
  const help = h("p", { id: "text-help", class: "note" });
  const title = h("div", { class: "head" },
    h("h1", {}, "Playground"),
    h("p", { class: "lead" }, "How well checkpoints of this store predict a text."),
  );
  let [drawn, asked, controller] = ["", "", null];
  let inserted = ""; // the example that this page has written
  let taken = null; // the text of the address, when it was last read: what was typed since stays
  const chosenIds = () => current().params.getAll("run").filter((id) => id !== NONE);
  const nameOfId = (id) => (runs.has(id) ? nameOf(runs.get(id)) : id);

  async function loadRuns(ids) {
    const missing = ids.filter((id) => !runs.has(id));
    await Promise.all(missing.map(async (id) => runs.set(id, await get(at(["runs", id], { curve: false })))));
  }

  function insert() {
    const [first] = chosenIds();
    const example = exampleOf(runs.get(first));
    area.value = example ?? area.value;
    if (!first) replace(results, empty("Choose a checkpoint first: its task decides what it can read."));
    else if (!example) replace(results, empty(`There is no example for the task ${runs.get(first)?.spec.task.kind}.`));
  }

  function measure() {
    taken = area.value;
    change({ text: taken, ask: true });
    ask(true);
  }

  function drawResults(answers, signal) {
    const place = h("div");
    const scored = [...new Set(answers.map((answer) => answer.scored))];
    replace(
      results,
      section("Perplexity", { id: "perplexity" }, totals(answers, nameOfId)),
      section(
        "Surprise of each token",
        { id: "surprise" },
        legend(),
        h("p", { class: "note" }, marked(`Scored: ${scored.join("; ")}. A task trains no other token.`)),
        surprise(answers, nameOfId),
      ),
      place,
    );
    const tokens = new Map(answers.map((answer) => [answer.run_id, answer.sequences[0].input_ids]));
    const asked = answers.map((answer) => runs.get(answer.run_id)).filter(Boolean);
    // Runs that count come first: what gates do is what other tools do not show.
    if (asked.length) heads(place, { tokens, runs: [...asked.filter(hasGates), ...asked.filter((run) => !hasGates(run))], nameOf, signal });
  }

  /** Measure what the address asks for; `again` also if it is what was measured last. */
  async function ask(again) {
    const { params } = current();
    const [text, models] = [params.get("text") ?? "", chosenIds()];
    const state = JSON.stringify([text, models]);
    if (params.get("ask") !== "1" || (!again && state === asked)) return;
    asked = state;
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    if (!models.length || !text.trim()) {
      replace(results, empty(models.length ? "Write or paste a text." : "Choose at least one checkpoint."));
      return;
    }
    replace(results, empty("Computing …"));
    try {
      await loadRuns(models);
      const body = { models, text, log_probabilities: true, token_labels: true, top: 3 };
      drawResults((await post(at("perplexity"), body, { signal })).results, signal);
    } catch (error) {
      if (signal.aborted) return;
      const busy = error.status === 429 && h("p", {}, "The server is busy. Try again in a moment.");
      replace(results, h("div", { class: "error", role: "alert" }, h("p", {}, marked(error.message)), busy));
    }
  }

  return {
    nodes: [title, h("div", { class: "desk" }, h("div", {}, textForm(area, help, measure, insert)), chooser), results],
    still: true,
    title: () => "Playground",
    close: () => controller?.abort(),
    async refresh(params) {
      const address = location.hash;
      await loadRuns(chosenIds()).catch(() => {}); // an unknown id is reported by the measurement
      let chosen = chosenIds();
      const found = await loadChoice(params, runs.get(chosen[0]));
      if (location.hash !== address) return; // it is read again; what follows may change it
      if (!params.has("run") && found.rows.length) {
        const sameTask = found.rows.filter(({ task }) => task === found.rows[0].task);
        chosen = sameTask.slice(0, DEFAULT_ROWS).map((row) => row.runs[0].run_id);
        change({ run: chosen }, { replace: true }); // draws this view again
        return;
      }
      const state = JSON.stringify(found);
      // Boxes that already show what is chosen stay: drawn again, they would lose a click that has begun.
      const checked = [...chooser.querySelectorAll("input:checked")].map((box) => box.dataset.key.replace("run ", ""));
      if (state !== drawn || String(checked.sort()) !== String([...chosen].sort())) {
        replace(chooser, choiceFields(found, chosen, nameOfId));
      }
      replace(help, marked(helpFor(runs.get(chosen[0])?.spec?.task.kind)));
      drawn = state;
      const text = current().params.get("text");
      if (text !== taken && text !== null) area.value = text;
      taken = text;
      if ((!area.value || area.value === inserted) && chosen.length) {
        inserted = exampleOf(runs.get(chosen[0])) ?? "";
        area.value = inserted;
      }
      // It opens measured: with an example, until somebody has chosen something.
      if (inserted && area.value === inserted && !params.has("text") && !params.has("ask") && chosen.length) {
        change({ text: inserted, ask: true }, { replace: true });
        return;
      }
      ask(false); // reports its own errors
    },
  };
}
