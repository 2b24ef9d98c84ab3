// A scatter plot and parallel coordinates of runs, in SVG.

import { ticks } from "../axes.js";
import { style } from "../curves.js";
import { empty, h } from "../dom.js";
import { number } from "../format.js";
import { link } from "../route.js";
import { isNumber, valueOf } from "../values.js";

/** The place 0 … 1 of each value: numbers by size, others in the order of their appearance. Also the labels of the axis. */
function axisOf(runs, key) {
  const values = runs.map((run) => valueOf(run, key)).filter((value) => value !== undefined && value !== null);
  if (values.every(isNumber) && values.length) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const marks = low === high ? [low] : ticks(low, high, 5);
    const place = (value) => (low === high ? 0.5 : (value - low) / (high - low));
    return { place, marks: marks.map((value) => [place(value), number(value, 3)]), ends: [number(low, 3), number(high, 3)] };
  }
  const names = [...new Set(values.map(String))];
  const place = (value) => (names.length === 1 ? 0.5 : names.indexOf(String(value)) / (names.length - 1));
  return { place, marks: names.map((name) => [place(name), name.length > 18 ? `${name.slice(0, 17)}…` : name]), ends: null };
}

/** Rows get colours in the order of their appearance. */
function colours(runs) {
  const rows = [...new Set(runs.map((run) => run.row ?? run.run_id))];
  return { rows, of: (run) => `var(${style(rows.indexOf(run.row ?? run.run_id)).colour})` };
}

function legend({ rows }) {
  return h("ul", { class: "keys" },
    rows.slice(0, 32).map((row, i) => h("li", {}, h("i", { style: { background: `var(${style(i).colour})` } }), row)),
  );
}

const has = (run, keys) => keys.every((key) => valueOf(run, key) !== undefined && valueOf(run, key) !== null);
const missing = (n, all) =>
  n < all ? h("p", { class: "note" }, `${all - n} of ${all} runs lack a value and are not drawn.`) : null;

/** A dot per run; each leads to its run. */
export function scatter(runs, x, y, nameOf) {
  const drawn = runs.filter((run) => has(run, [x, y]));
  if (!drawn.length) return empty(`No chosen run has both ${x} and ${y}.`);
  const [width, height, left, bottom, top, right] = [900, 380, 70, 46, 14, 20];
  const [xs, ys, key] = [axisOf(drawn, x), axisOf(drawn, y), colours(drawn)];
  const px = (place) => left + 8 + place * (width - left - right - 16);
  const py = (place) => height - bottom - 8 - place * (height - bottom - top - 16);
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${y} against ${x}, ${drawn.length} runs` },
    ys.marks.map(([place, text]) => [
      h("line", { class: "grid", x1: left, x2: width - right, y1: py(place), y2: py(place) }),
      h("text", { x: left - 8, y: py(place) + 4, "text-anchor": "end" }, text),
    ]),
    xs.marks.map(([place, text]) => h("text", { x: px(place), y: height - bottom + 18, "text-anchor": "middle" }, text)),
    h("text", { class: "title", x: width - right, y: height - 6, "text-anchor": "end" }, x),
    h("text", { class: "title", x: left, y: 10 }, y),
  );
  for (const run of drawn) {
    const label = `${nameOf(run)}: ${x} ${shownValue(valueOf(run, x))}, ${y} ${shownValue(valueOf(run, y))}`;
    const anchor = document.createElementNS("http://www.w3.org/2000/svg", "a");
    anchor.setAttribute("href", run.seeds ? link(["runs"], { ids: run.seeds }) : link(["runs", run.run_id]));
    anchor.setAttribute("aria-label", label);
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = label;
    anchor.append(
      h("circle", { cx: px(xs.place(valueOf(run, x))), cy: py(ys.place(valueOf(run, y))), r: 5, fill: key.of(run) }),
      title,
    );
    svg.append(anchor);
  }
  return h("div", { class: "plot" },
    legend(key),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Scatter plot" }, svg),
    missing(drawn.length, runs.length),
  );
}

const shownValue = (value) => (isNumber(value) ? number(value) : String(value));

/** A line per run through its values on parallel axes. Dragging along an axis marks runs; `choose(runs)` takes these alone. */
export function parallel(runs, keys, nameOf, choose) {
  const drawn = runs.filter((run) => has(run, keys));
  if (!drawn.length) return empty("No chosen run has a value on every axis. Remove an axis.");
  const [height, left, top, bottom] = [340, 90, 40, 16];
  const gap = Math.max(150, 1100 / (keys.length - 1));
  const width = left * 2 + gap * (keys.length - 1);
  const [axes, key] = [keys.map((each) => axisOf(drawn, each)), colours(drawn)];
  const x = (i) => left + i * gap;
  const y = (place) => height - bottom - place * (height - top - bottom);
  const places = drawn.map((run) => keys.map((each, i) => axes[i].place(valueOf(run, each))));
  const svg = h("svg", {
    viewBox: `0 0 ${width} ${height}`,
    style: { "min-width": `${Math.round(width * 0.75)}px` },
    role: "img",
    "aria-label": `Parallel coordinates of ${drawn.length} runs: ${keys.join(", ")}`,
  });
  const polylines = drawn.map((run, at) => {
    const line = h("polyline", {
      points: places[at].map((place, i) => `${x(i)},${y(place).toFixed(1)}`).join(" "),
      stroke: key.of(run),
      fill: "none",
    });
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = `${nameOf(run)}: ${keys.map((each) => `${each} ${shownValue(valueOf(run, each))}`).join(", ")}`;
    line.append(title);
    svg.append(line);
    return line;
  });

  const brushes = new Map(); // index of an axis → [low, high], places on it
  const note = h("p", { class: "note" });
  const isIn = (at) => [...brushes].every(([i, [low, high]]) => places[at][i] >= low && places[at][i] <= high);
  function mark() {
    const inside = drawn.filter((_, at) => isIn(at));
    polylines.forEach((line, at) => line.classList.toggle("out", !isIn(at)));
    const take = h("button", { type: "button", class: "quiet", onclick: () => choose(inside) }, "Choose only these");
    if (!brushes.size) note.replaceChildren("Drag along an axis to mark runs; click it to unmark.");
    else note.replaceChildren(`${inside.length} of ${drawn.length} are marked. `, inside.length && inside.length < drawn.length ? take : "");
  }
  /** A strip along axis i on which one drags. */
  function grip(i) {
    const shown = h("rect", { class: "brush", x: x(i) - 9, width: 18, y: 0, height: 0 });
    const strip = h("rect", { class: "grip", x: x(i) - 16, width: 32, y: y(1) - 8, height: y(0) - y(1) + 16, "data-axis": keys[i] });
    let from = null;
    const placeAt = (event) => {
      const box = strip.getBoundingClientRect();
      const within = (event.clientY - box.top) / box.height * (y(0) - y(1) + 16) - 8;
      return 1 - within / (y(0) - y(1));
    };
    const drag = (event) => {
      if (from === null) return;
      const ends = [from, placeAt(event)].sort((a, b) => a - b);
      const small = ends[1] - ends[0] < 0.01; // a click
      if (small) brushes.delete(i);
      else brushes.set(i, ends);
      shown.setAttribute("y", y(Math.min(ends[1], 1.02)));
      shown.setAttribute("height", small ? 0 : y(Math.max(ends[0], -0.02)) - y(Math.min(ends[1], 1.02)));
      mark();
    };
    strip.addEventListener("pointerdown", (event) => {
      strip.setPointerCapture(event.pointerId);
      from = placeAt(event);
      drag(event);
    });
    strip.addEventListener("pointermove", drag);
    strip.addEventListener("pointerup", () => (from = null));
    return [shown, strip];
  }

  keys.forEach((each, i) => {
    const [first, last] = axes[i].ends ?? [];
    const marks = axes[i].ends ? [[0, first], [1, last]] : axes[i].marks;
    svg.append(
      h("line", { class: "axis", x1: x(i), x2: x(i), y1: y(0), y2: y(1) }),
      h("text", { class: "title", x: x(i), y: i % 2 ? 26 : 12, "text-anchor": "middle" }, each),
      ...(first !== undefined && first === last ? [[0.5, first]] : marks).map(([place, text]) =>
        h("text", { class: "halo", x: x(i) + 6, y: y(place) + 4 }, text),
      ),
      ...grip(i),
    );
  });
  mark();
  return h("div", { class: "plot" },
    legend(key),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Parallel coordinates" }, svg),
    note,
    missing(drawn.length, runs.length),
  );
}
