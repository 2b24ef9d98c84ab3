// What the heads of a model do with a text: gates and positions where an encoding counts, attention where none does.

import { at, post } from "../api.js";
import { colourScale, empty, h, LEVELS, replace, section, select, segmented } from "../dom.js";
import { fixed } from "../format.js";

const VIEWS = [["gates", "Gates"], ["positions", "Positions"]];
const ATTENTION = [["attention", "Attention"]];

/** A level 0 … 8 for a gate 0 … 1. */
const level = (gate) => Math.min(Math.floor(gate * LEVELS), LEVELS - 1);

/** Whether a run has an encoding that counts with gates. */
export const hasGates = (run) => run.spec?.model.position.some((each) => each.kind.startsWith("cope"));

/** The layers and heads, with the encodings that have gates; where none has, with their attention. */
const shownHeads = (answer) =>
  answer.heads.flatMap(({ layer, head, encodings, attention }) =>
    attention
      ? [{ layer, head, kind: "attention", marks: {}, attention }]
      : encodings.filter((each) => each.gates).map((each) => ({ layer, head, ...each })),
  );

/** What colours the keys of a query, from 0 to 1, the number below each, and both in words. */
function keysOf({ gates, positions, attention }, query) {
  if (gates) {
    return gates[query].map((gate, i) => ({
      shade: gate,
      text: fixed(positions[query][i], positions[query][i] < 9.95 ? 1 : 0),
      words: `gate ${fixed(gate, 2)}, position ${fixed(positions[query][i], 1)}`,
    }));
  }
  const most = Math.max(...attention[query], 1e-9);
  return attention[query].map((weight) => ({
    shade: weight / most,
    text: weight < 0.005 ? "" : `${fixed(100 * weight, 0)}`,
    words: `attention ${fixed(100 * weight, 1)} %`,
  }));
}

/** The marked tokens that the gates of a head separate best, as text. */
function separation(marks) {
  const found = Object.entries(marks)
    .filter(([, mark]) => mark.auc !== null)
    .sort((a, b) => b[1].auc - a[1].auc);
  if (!found.length) return "";
  const [name, mark] = found[0];
  return `${name}: gate ${fixed(mark.on, 2)} on, ${fixed(mark.off, 2)} off, AUC ${fixed(mark.auc, 2)}`;
}

/** One head at one query: each key with its gate as colour and its position below, or its share of the attention. */
function strip(head, labels, query, onpick) {
  const keys = keysOf(head, query);
  const what = head.gates ? "gates and positions" : "attention";
  return h("div", { class: "strip" },
    h("h4", {},
      `Layer ${head.layer}, head ${head.head}`,
      h("small", {}, ` ${head.kind}${separation(head.marks) && ` · ${separation(head.marks)}`}`),
    ),
    h("div", {
        class: "keys",
        tabindex: 0,
        role: "group",
        "aria-label": `Layer ${head.layer}, head ${head.head}: ${what} of ${query + 1} tokens`,
      },
      labels.map((label, i) =>
        h("button", {
            type: "button",
            tabindex: -1,
            class: i > query ? "key later" : `key g${level(keys[i].shade)}${i === query ? " query" : ""}`,
            "aria-label": `${label.trim()}${i > query ? ", after the query" : `: ${keys[i].words}`}`,
            title: i > query ? "after the query" : `token ${i}: ${keys[i].words}`,
            onclick: () => onpick(i),
          },
          h("span", {}, label.trim() || "␣"),
          h("small", {}, i > query ? "" : keys[i].text),
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
    "aria-label": `${which} of layer ${head.layer}, head ${head.head}, by query (rows) and key (columns)`,
  });
  const most = which === "positions" ? Math.max(1e-9, ...rows.map((row) => row[0])) : 1;
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
      h("small", {}, which === "positions" ? `0 … ${fixed(most, 1)}` : "0 … 1"),
    ),
  );
}

/** From nearly transparent to strong blue; the row of the query is orange. */
const ramp = (shade, marked) => (marked ? [214, 110, 20, 60 + 195 * shade] : [47, 91, 208, 18 + 237 * shade]);

const legend = (run) =>
  colourScale("g", ...(hasGates(run) ? ["gate 0, not counted", "gate 1, counted"] : ["no attention", "the most attention"]));

const EXPLANATION =
  "A gate decides whether a token is counted. The number under a token is its position: the sum of the gates from it up " +
  "to the query. Of an encoding without gates, it is the percentage of the query's attention. Select a token, or move the " +
  "slider, to look from there.";

/** Whether the answer to a probe of all layers would be too large. */
const isTooLarge = (error) => error.status === 413;

/**
 * Draw the heads of the chosen runs. `tokens` has the token ids of the text for each; a probe of a run is asked for when
 * it is shown, of one layer at a time if all are too many.
 */
export async function heads(container, { tokens, runs, nameOf, signal }) {
  const answers = new Map(); // "id layer" → the probe
  const state = { run: runs[0], layer: null, query: null, which: "gates" };
  const [controls, strips, matrices] = [h("div", { class: "bar controls" }), h("div"), h("div", { class: "matrices" })];
  const kinds = h("div", { class: "bar" });
  let newest = 0; // the number of the newest choice

  async function ask() {
    const { run, layer } = state;
    const key = `${run.run_id} ${layer}`;
    if (!answers.has(key)) {
      const body = { tokens: tokens.get(run.run_id), matrices: hasGates(run) ? ["gates", "positions"] : ["attention"] };
      if (layer !== null) body.layers = [layer];
      answers.set(key, await post(at(["runs", run.run_id, "probe"]), body, { signal }));
    }
    return answers.get(key);
  }

  function drawHeads(found, labels) {
    const pick = (i) => {
      state.query = i;
      const slider = controls.querySelector("input");
      slider.value = i;
      slider.setAttribute("aria-valuetext", `token ${i}, ${labels[i].trim()}`);
      controls.querySelector("output").value = `${i}: ${labels[i].trim() || "␣"}`;
      drawHeads(found, labels);
    };
    const last = labels.length - 1;
    state.query = Math.min(state.query ?? last, last);
    replace(strips, found.map((head) => strip(head, labels, state.query, pick)));
    const views = hasGates(state.run) ? VIEWS : ATTENTION;
    if (!views.some(([which]) => which === state.which)) [[state.which]] = views;
    replace(matrices, found.map((head) => matrix(head, state.which, state.query)));
    replace(kinds, h("h3", {}, "All queries"), segmented("Matrix", views, state.which, (which) => {
      state.which = which;
      drawHeads(found, labels);
    }));
    return pick;
  }

  function drawControls(labels, pick) {
    const names = runs.map((run) => [run.run_id, nameOf(run)]);
    const chooseRun = (id) => load({ run: runs.find((run) => run.run_id === id), layer: null });
    const layers = Array.from({ length: state.run.spec.model.layers }, (_, i) => [String(i), `layer ${i}`]);
    const slider = h("input", {
      type: "range",
      min: 0,
      max: labels.length - 1,
      value: state.query,
      "data-key": "query",
      oninput: (event) => pick(+event.target.value),
    });
    replace(controls,
      runs.length > 1 ? select("checkpoint", names, state.run.run_id, chooseRun) : h("b", {}, nameOf(state.run)),
      state.layer !== null && select("layer", layers, String(state.layer), (layer) => load({ layer: +layer })),
      h("label", { class: "field" }, h("span", {}, "query"), slider, h("output")),
      legend(state.run),
    );
    pick(state.query);
  }

  /** Probe the changed choice and draw the answer, unless another choice has been made by then. */
  async function load(changes) {
    Object.assign(state, changes);
    const mine = (newest += 1);
    try {
      const answer = await ask();
      if (mine !== newest) return;
      const found = shownHeads(answer);
      const pick = drawHeads(found, answer.labels);
      drawControls(answer.labels, pick);
      if (!found.length) replace(strips, empty("No head here has gates or attention to show."));
    } catch (error) {
      if (signal.aborted || mine !== newest) return;
      if (isTooLarge(error) && state.layer === null) await load({ layer: 0 });
      else replace(strips, h("p", { class: "bad" }, error.message));
    }
  }

  replace(strips, empty("Computing …"));
  const explanation = h("p", { class: "prose" }, EXPLANATION);
  replace(container, section("What each head counts, or attends to", { id: "heads" }, explanation, controls, strips, kinds, matrices));
  await load({});
}
