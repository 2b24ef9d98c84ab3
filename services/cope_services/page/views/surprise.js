// The tokens of a text, coloured by their surprise.

import { post } from "../api.js";
import { colourScale, h, LEVELS, replace, table } from "../dom.js";
import { fixed, number } from "../format.js";

const MOST_BITS = 8; // the darkest colour

/** A level 0 … 8 for a surprise in bits. */
const level = (bits) => Math.min(Math.floor((Math.max(bits, 0) / MOST_BITS) * LEVELS), LEVELS - 1);

/** The colours and what they mean. */
export const legend = () => colourScale("s", "0 bits, expected", `${MOST_BITS} bits and more, surprising`);

/** The blanks before the text of a label. They have no colour: at the end of a line they would be an empty box. */
const blanksOf = (label) => label.match(/^ +(?=[^ ])/)?.[0] ?? "";
const visible = (label) => label.replace(/\n/g, "↵\n").replace(/\t/g, "→");

/** The most probable tokens as text: "i 80 %, w 12 %". */
const alternatives = (top, names) =>
  (top ?? [])
    .map(([id, logProbability]) => `${visible(names.get(id) ?? `token ${id}`).trim() || "␣"} ${percent(logProbability)}`)
    .join(", ");

const percent = (logProbability) => `${number(100 * Math.exp(logProbability), 3)} %`;
const bits = (logProbability) => fixed(Math.max(0, -logProbability / Math.LN2), 2);

const MEASURED = [["bits", "number"], ["probability", "number"], "most probable"];

/** Cells of one token under one model. */
const measured = ({ log_probabilities: logs, top }, i, names) =>
  logs[i] === null ? ["not scored", "", ""] : [bits(logs[i]), percent(logs[i]), alternatives(top?.[i], names)];

/** The numbers of each token under each model, as a table. */
function numbersTable(answers, names, nameOf) {
  const rows = answers[0].sequences[0].labels.flatMap((label, i) =>
    answers.map((answer) => [
      [`${i}: `, h("code", {}, visible(label))],
      nameOf(answer.run_id),
      ...measured(answer.sequences[0], i, names),
    ]),
  );
  return table("Tokens as a table", ["token", "checkpoint", ...MEASURED], rows);
}

/** Answers of POST /perplexity whose models read the same tokens: the text under each, and the same as numbers. */
function sheet(answers, nameOf) {
  const sequences = answers.map((answer) => answer.sequences[0]);
  const [{ labels, token_ids: ids }] = sequences;
  const names = new Map(ids.map((id, i) => [id, labels[i]]));
  const pointed = h("div", { class: "pointed" });
  let now = null;
  /** Ask for the texts of the most probable tokens at `i` that do not occur in the text. */
  const learn = async (i) => {
    const found = sequences.flatMap(({ top }) => (top?.[i] ?? []).map(([id]) => id)).filter((id) => !names.has(id));
    if (!found.length) return;
    const text = (id) => post("/detokenize", { model: answers[0].run_id, tokens: [id] }).then(({ prompt }) => names.set(id, prompt));
    await Promise.all([...new Set(found)].map(text));
    if (now === i) draw(i);
  };
  const point = (i) => {
    now = i;
    draw(i);
    learn(i).catch(() => {}); // their ids remain
  };
  const draw = (i) => {
    for (const each of sheets.querySelectorAll(".token")) each.classList.toggle("now", +each.dataset.at === i);
    const rows = answers.map((answer, k) => [nameOf(answer.run_id), ...measured(sequences[k], i, names)]);
    replace(pointed, table("The token pointed at", [`token ${i}: ${visible(labels[i]).trim() || "␣"}`, ...MEASURED], rows));
  };
  const sheets = h("div", {
      class: "sheets",
      onpointerover: (event) => {
        const at = event.target.dataset?.at;
        if (at !== undefined) point(+at);
      },
    },
    answers.map((answer, k) => [
      h("div", { class: "who" }, nameOf(answer.run_id), h("small", {}, ` perplexity ${number(answer.total.perplexity)}`)),
      h("div", {
          class: "tokens",
          role: "img",
          "aria-label": `Text under ${nameOf(answer.run_id)}, coloured by surprise; the table below has the numbers`,
        },
        labels.map((label, i) => [
          blanksOf(label),
          h("span", {
              class:
                sequences[k].log_probabilities[i] === null
                  ? "token input"
                  : `token s${level(-sequences[k].log_probabilities[i] / Math.LN2)}`,
              "data-at": i,
            },
            visible(label.slice(blanksOf(label).length)),
          ),
        ]),
      ),
    ]),
  );
  point(labels.length - 1);
  return h("div", { class: "scored" },
    sheets,
    h("p", { class: "note" }, "Point at a token to see its probability under each checkpoint."),
    pointed,
    h("details", {}, h("summary", {}, "As a table"), numbersTable(answers, names, nameOf)),
  );
}

/** One sheet for each group of models with the same tokens. */
export function surprise(answers, nameOf) {
  const groups = Map.groupBy(answers, (answer) => JSON.stringify([answer.sequences[0].labels, answer.sequences[0].token_ids]));
  return [...groups.values()].map((group) => sheet(group, nameOf));
}
