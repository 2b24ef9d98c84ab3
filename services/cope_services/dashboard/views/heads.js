// What the heads of a CoPE model count: gates and positions over the text.

import { at, post } from "../api.js";
import { empty, h, replace, section, select, segmented } from "../dom.js";
import { fixed } from "../format.js";

const VIEWS = [["gates", "Gates"], ["positions", "Positions"]];
const LEVELS = 9;

/** A level 0 … 8 for a gate 0 … 1. */
const level = (gate) => Math.min(Math.floor(gate * LEVELS), LEVELS - 1);

/** The layers, heads and encodings with gates. */
const counting = (answer) =>
  answer.heads.flatMap(({ layer, head, encodings }) =>
    encodings.filter((each) => each.gates).map((each) => ({ layer, head, ...each })),
  );

/** The marked tokens that the gates of a head separate best, as text. */
function separation(marks) {
  const found = Object.entries(marks)
    .filter(([, mark]) => mark.auc !== null)
    .sort((a, b) => b[1].auc - a[1].auc);
  if (!found.length) return "";
  const [name, mark] = found[0];
  return `${name}: gate ${fixed(mark.on, 2)} on, ${fixed(mark.off, 2)} off, AUC ${fixed(mark.auc, 2)}`;
}

/** One head at one query: each key with its gate as colour, and its position below. */
function strip(head, labels, query, onpick) {
  const [gates, positions] = [head.gates[query], head.positions[query]];
  return h("div", { class: "strip" },
    h("h4", {},
      `Layer ${head.layer}, head ${head.head}`,
      h("small", {}, ` ${head.kind}${separation(head.marks) && ` · ${separation(head.marks)}`}`),
    ),
    h("div", {
        class: "keys",
        tabindex: 0,
        role: "group",
        "aria-label": `Layer ${head.layer}, head ${head.head}: gates and positions of ${query + 1} tokens`,
      },
      labels.map((label, i) =>
        h("button", {
            type: "button",
            tabindex: -1,
            class: i > query ? "key later" : `key g${level(gates[i])}${i === query ? " query" : ""}`,
            "aria-label":
              i > query
                ? `${label.trim()}, after the query`
                : `${label.trim()}: gate ${fixed(gates[i], 2)}, position ${fixed(positions[i], 1)}`,
            title: i > query ? "after the query" : `token ${i}: gate ${fixed(gates[i], 3)}, position ${fixed(positions[i], 2)}`,
            onclick: () => onpick(i),
          },
          h("span", {}, label.trim() || "␣"),
          h("small", {}, i > query ? "" : fixed(positions[i], positions[i] < 9.95 ? 1 : 0)),
        ),
      ),
    ),
  );
}

/** All queries of a head: a square for each pair of tokens, on a canvas. */
function matrix(head, which, query) {
  const rows = head[which];
  const size = rows.length;
  const canvas = h("canvas", {
    width: size,
    height: size,
    role: "img",
    "aria-label": `${which} of layer ${head.layer}, head ${head.head}: rows are queries, columns are keys; the strip above has the numbers of one query`,
  });
  const most = which === "gates" ? 1 : Math.max(1e-9, ...rows.map((row) => row[0]));
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  rows.forEach((row, i) =>
    row.forEach((value, j) => {
      const shade = Math.min(Math.max(value / most, 0), 1);
      image.data.set(ramp(shade, i === query), (i * size + j) * 4);
    }),
  );
  context.putImageData(image, 0, 0);
  return h("figure", { class: "matrix" },
    canvas,
    h("figcaption", {},
      `Layer ${head.layer}, head ${head.head}`,
      h("small", {}, which === "gates" ? "0 … 1" : `0 … ${fixed(most, 1)}`),
    ),
  );
}

/** From nearly transparent to strong blue; the row of the query is orange. */
const ramp = (shade, marked) => (marked ? [214, 110, 20, 60 + 195 * shade] : [47, 91, 208, 18 + 237 * shade]);

function legend() {
  return h("div", { class: "scale", role: "img", "aria-label": "Colours of gates from 0, not counted, to 1, counted" },
    h("span", {}, "gate 0, not counted"),
    h("span", { class: "steps" }, Array.from({ length: LEVELS }, (_, i) => h("i", { class: `g${i}` }))),
    h("span", {}, "gate 1, counted"),
  );
}

/** Draw the heads of the chosen runs. `tokens` has the token ids of the text for each; a probe of a run is asked for when it is shown. */
export async function heads(container, { tokens, runs, nameOf, signal }) {
  const answers = new Map();
  let [chosen, query, which] = [runs[0].run_id, null, "gates"];
  const body = h("div");
  const controls = h("div", { class: "bar controls" });

  async function answerOf(id) {
    if (!answers.has(id))
      answers.set(
        id,
        await post(at(["runs", id, "probe"]), { tokens: tokens.get(id), matrices: ["gates", "positions"] }, { signal }),
      );
    return answers.get(id);
  }

  async function draw() {
    try {
      const answer = await answerOf(chosen);
      const found = counting(answer);
      const { labels } = answer;
      const at_ = Math.min(query ?? labels.length - 1, labels.length - 1);
      const pick = (i) => {
        query = i;
        draw();
      };
      replace(
        controls,
        runs.length > 1
          ? select(
              "checkpoint",
              runs.map((run) => [run.run_id, nameOf(run)]),
              chosen,
              (id) => {
                chosen = id;
                draw();
              },
            )
          : h("b", {}, nameOf(runs[0])),
        h("label", { class: "field" },
          h("span", {}, "query"),
          h("input", {
            type: "range",
            min: 0,
            max: labels.length - 1,
            step: 1,
            value: at_,
            "data-key": "query",
            "aria-valuetext": `token ${at_}, ${labels[at_].trim()}`,
            oninput: (event) => pick(+event.target.value),
          }),
          h("output", {}, `${at_}: ${labels[at_].trim() || "␣"}`),
        ),
        legend(),
      );
      replace(
        body,
        found.length
          ? [
              found.map((head) => strip(head, labels, at_, pick)),
              h("div", { class: "bar" },
                h("h3", {}, "All queries"),
                segmented("Matrix", VIEWS, which, (value) => {
                  which = value;
                  draw();
                }),
              ),
              h("div", { class: "matrices" }, found.map((head) => matrix(head, which, at_))),
            ]
          : empty("This checkpoint has no head with gates."),
      );
    } catch (error) {
      if (!signal.aborted) replace(body, h("p", { class: "bad" }, error.status ? error.message : "The server does not respond."));
    }
  }

  replace(
    container,
    section(
      "What each head counts",
      { id: "heads" },
      h("p", { class: "prose" },
        "A gate decides whether a token is counted. The number under a token is its position: the sum of the gates from it up to the query. Select a token, or move the slider, to ask from there.",
      ),
      controls,
      body,
    ),
  );
  replace(body, empty("Computing …"));
  await draw();
}
