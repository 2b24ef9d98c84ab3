// A scatter plot and parallel coordinates of runs, in SVG. Dragging in them marks runs; the address has the marked ranges.

import { linear, logarithmic } from "../axes.js";
import { style } from "../curves.js";
import { empty, h, table } from "../dom.js";
import { number, plural } from "../format.js";
import { change, link, pack } from "../route.js";
import { isNumber, shown, valueOf } from "../values.js";

const HEIGHT = 380;
const EDGE = 8; // SVG units by which a surface that one drags on is larger than its axes
const MOST_MARKS = 8; // values that are marks themselves; of more, an axis has round numbers
const APART = 0.04; // of an axis, the least distance of marks
const WIDE = 50; // the ratio of values from which an axis is logarithmic
const STEP = 0.1; // of an axis, by which an arrow key moves an end of a range
const ARROWS = { ArrowRight: [0, 0], ArrowLeft: [0, 1], ArrowUp: [1, 0], ArrowDown: [1, 1] }; // to [direction, end]

/**
 * The axis of a key: {of(run), place(number), at(place), marks: [[place, text], …]}. `of` gives a number for each run: the
 * value, or of texts their index in the order of their appearance. Its place on the axis is between 0 and 1.
 */
function axisOf(runs, key) {
  const values = runs.map((run) => valueOf(run, key));
  const numeric = values.every(isNumber);
  const names = [...new Set(values.map(String))];
  const of = (run) => (numeric ? valueOf(run, key) : names.indexOf(String(valueOf(run, key))));
  const numbers = runs.map(of);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const wide = numeric && low > 0 && high / low >= WIDE;
  const [scale, back] = wide ? [Math.log10, (each) => 10 ** each] : [Number, Number];
  const [start, length] = [scale(low), scale(high) - scale(low)];
  const place = (value) => (length ? (scale(value) - start) / length : 0.5);
  const distinct = [...new Set(numbers)].sort((a, b) => a - b);
  const round = () => (wide ? logarithmic(numbers, HEIGHT, 0) : linear(numbers)).ticks.filter((each) => each >= low && each <= high);
  const text = (value) => (numeric ? number(value, 3) : names[value].length > 18 ? `${names[value].slice(0, 17)}…` : names[value]);
  const marks = [];
  for (const value of numeric && distinct.length > MOST_MARKS ? round() : distinct) {
    if (!marks.length || place(value) - marks.at(-1)[0] > APART) marks.push([place(value), text(value)]);
  }
  return { key, of, place, at: (at) => back(start + at * length), marks };
}

/** The marked ranges of the address: key → [low, high], as numbers of `axisOf`. */
function rangesOf(params) {
  const parts = params.getAll("brush").map((each) => each.match(/^(.*):([^:]*):([^:]*)$/) ?? []);
  return new Map(parts.map(([, key, low, high]) => [key, [+low, +high]]).filter(([, ends]) => ends.every(Number.isFinite)));
}

const title = (text) => h("title", {}, text);
const textOf = (run, keys, nameOf) => `${nameOf(run)}: ${keys.map((key) => `${key} ${shown(key, valueOf(run, key))}`).join(", ")}`;
const rowOf = (run) => run.row ?? run.run_id;
const idsOf = (runs) => runs.flatMap((run) => run.seeds ?? [run.run_id]); // of a row, those of its seeds
const addressOf = (run) => (run.seeds ? link(["runs"], { ids: pack(run.seeds) }) : link(["runs", run.run_id]));

/**
 * A plot of runs that have a value for each key. `draw(drawn, axes, colour)` returns {svg, items, surfaces}: the SVG without
 * surfaces, an element for each run, and rectangles {left, right, top, bottom} with the index of the axis across and up.
 */
function plot(runs, keys, { params, nameOf, draw }) {
  const drawn = runs.filter((run) => keys.every((key) => (valueOf(run, key) ?? null) !== null));
  if (!drawn.length) return empty(`No chosen run has a value of ${keys.join(" and ")}.`);
  const axes = keys.map((key) => axisOf(drawn, key));
  const rows = [...new Set(drawn.map(rowOf))];
  const colour = (run) => `var(${style(rows.indexOf(rowOf(run))).colour})`;
  const { svg, items, surfaces } = draw(drawn, axes, colour);
  const asked = rangesOf(params);
  const known = axes.flatMap((axis, i) => (asked.has(axis.key) ? [[i, asked.get(axis.key).map(axis.place)]] : []));
  const ranges = new Map(known); // index of an axis → [low, high], places on it

  const isIn = (run) => [...ranges].every(([i, [low, high]]) => {
    const at = axes[i].place(axes[i].of(run));
    return at >= low - 1e-6 && at <= high + 1e-6;
  });
  const mark = () => items.forEach((item, i) => item.classList.toggle("out", !isIn(drawn[i])));
  const text = ([i, ends]) => [keys[i], ...ends.map((end) => +axes[i].at(end).toPrecision(5))].join(":");
  const done = (options) => change({ brush: [...ranges].map(text) }, options);
  const clear = () => {
    ranges.clear();
    done();
  };
  // Items that are not in the SVG yet are links, above the surface.
  svg.append(...surfaces.flatMap((each) => surface(each, axes, ranges, mark, done)), ...items.filter((item) => !item.parentNode));
  svg.addEventListener("keydown", (event) => event.key === "Escape" && clear());
  mark();

  const marked = drawn.filter(isIn);
  const button = (text, onclick) => h("button", { type: "button", class: "quiet", "data-key": text, onclick }, text);
  const line = (run) => [
    h("a", { href: addressOf(run), "data-key": `marked ${run.run_id}` }, nameOf(run)),
    ...keys.map((key) => shown(key, valueOf(run, key))),
  ];
  return [
    h("div", { class: "plot" },
      h("ul", { class: "keys" },
        rows.map((row, i) => h("li", {}, h("i", { style: { background: `var(${style(i).colour})` } }), row)),
      ),
      h("div", { class: "scroll" }, svg),
      h("p", { class: "note" },
        "Drag to mark runs. With the keyboard: the arrow keys cut off an end. A click or Escape unmarks.",
        drawn.length < runs.length && ` ${runs.length - drawn.length} of ${plural(runs.length, "run")} lack a value and are not drawn.`,
      ),
    ),
    h("div", { class: "bar controls" },
      h("span", { role: "status" }, known.length ? `${marked.length} of ${plural(drawn.length, "run")} are marked.` : ""),
      known.length > 0 && [
        marked.length > 0 && button("Choose only these", () => change({ sel: pack(idsOf(marked)), brush: null })),
        marked.length > 0 && button("List only these", () => change({ ids: pack(idsOf(marked)) })),
        button("Unmark", clear),
      ],
    ),
    known.length > 0 && table("Marked runs", ["marked", ...keys.map((key) => [key, "number"])], marked.map(line)),
  ];
}

/** A rectangle on which one drags a range of the axes `across` and `up`; undefined: there is none in this direction. */
function surface({ left, right, top, bottom, across, up }, axes, ranges, mark, done) {
  const own = [across, up]; // indexes of axes
  const frame = h("rect", { class: "brush" });
  const names = own.filter((i) => i !== undefined).map((i) => axes[i].key);
  const area = h("rect", {
    class: names.length > 1 ? "grip area" : "grip",
    x: left - EDGE, width: right - left + 2 * EDGE, y: top - EDGE, height: bottom - top + 2 * EDGE,
    tabindex: 0, role: "button", "aria-label": `Mark runs by ${names.join(" and ")}`, "data-key": `grip ${names}`, "data-axis": names,
  });
  const ends = (i) => (i === undefined ? [0, 1] : ranges.get(i) ?? [0, 1]).map((end) => Math.min(Math.max(end, 0), 1));
  const show = () => {
    const [[x0, x1], [y0, y1]] = own.map(ends);
    const none = !own.some((i) => ranges.has(i));
    frame.setAttribute("x", left + x0 * (right - left) - EDGE / 2);
    frame.setAttribute("y", bottom - y1 * (bottom - top) - EDGE / 2);
    frame.setAttribute("width", none ? 0 : (x1 - x0) * (right - left) + EDGE);
    frame.setAttribute("height", none ? 0 : (y1 - y0) * (bottom - top) + EDGE);
    mark();
  };
  const placesAt = (event) => {
    const box = area.getBoundingClientRect();
    const unit = box.width / (right - left + 2 * EDGE); // pixels of a unit of the SVG
    const [x, y] = [(event.clientX - box.left) / unit - EDGE, (box.bottom - event.clientY) / unit - EDGE];
    return [right > left ? x / (right - left) : 0, y / (bottom - top)];
  };
  let from = null;
  const drag = (event) => {
    if (!from) return;
    const to = placesAt(event);
    const moved = own.some((i, k) => i !== undefined && Math.abs(to[k] - from[k]) > 0.01);
    own.forEach((i, k) => i !== undefined && (moved ? ranges.set(i, [from[k], to[k]].sort((a, b) => a - b)) : ranges.delete(i)));
    show();
  };
  const stop = () => {
    if (from) done();
    from = null;
  };
  area.addEventListener("pointerdown", (event) => {
    area.setPointerCapture(event.pointerId);
    from = placesAt(event);
    drag(event);
  });
  area.addEventListener("pointermove", drag);
  area.addEventListener("pointerup", stop);
  area.addEventListener("pointercancel", stop);
  area.addEventListener("keydown", (event) => {
    const [k, end] = ARROWS[event.key] ?? [];
    if (own[k] === undefined) return;
    event.preventDefault();
    const range = [...ends(own[k])];
    range[end] += end ? -STEP : STEP;
    if (range[1] - range[0] > STEP / 2) ranges.set(own[k], range);
    show();
    done({ replace: true });
  });
  show();
  return [frame, area];
}

const canvas = (width, label, scaled) =>
  h("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, style: { "min-width": `${scaled}px` }, role: "group", "aria-label": label });

/** A dot per run, which leads to the run. `width` is that of the page. */
export function scatter(runs, [x, y], { width, params, nameOf }) {
  const [left, right, top, bottom] = [70, width - 28, 30, HEIGHT - 54];
  const draw = (drawn, [xs, ys], colour) => {
    const px = (place) => left + place * (right - left);
    const py = (place) => bottom - place * (bottom - top);
    const svg = canvas(width, `${y} against ${x}, ${plural(drawn.length, "run")}`, 0);
    svg.append(
      ...ys.marks.flatMap(([place, text]) => [
        h("line", { class: "grid", x1: left - EDGE, x2: right + EDGE, y1: py(place), y2: py(place) }),
        h("text", { x: left - 14, y: py(place) + 4, "text-anchor": "end" }, text),
      ]),
      ...xs.marks.map(([place, text]) => h("text", { x: px(place), y: bottom + 26, "text-anchor": "middle" }, text)),
      h("text", { class: "title", x: right, y: HEIGHT - 8, "text-anchor": "end" }, x),
      h("text", { class: "title", x: 4, y: 12 }, y),
    );
    const items = drawn.map((run) =>
      h("svg:a", { href: addressOf(run), "aria-label": textOf(run, [x, y], nameOf) },
        h("circle", { cx: px(xs.place(xs.of(run))), cy: py(ys.place(ys.of(run))), r: 5, fill: colour(run) }),
        title(textOf(run, [x, y], nameOf)),
      ),
    );
    return { svg, items, surfaces: [{ left, right, top, bottom, across: 0, up: 1 }] };
  };
  return plot(runs, [x, y], { params, nameOf, draw });
}

/** A line per run through its values on parallel axes. */
export function parallel(runs, keys, { width, params, nameOf }) {
  const [left, top, bottom] = [70, 44, HEIGHT - 16];
  const wide = Math.max(width, left * 2 + 150 * (keys.length - 1));
  const x = (i) => left + (i * (wide - 2 * left)) / (keys.length - 1);
  const draw = (drawn, axes, colour) => {
    const y = (place) => bottom - place * (bottom - top);
    const svg = canvas(wide, `Parallel coordinates of ${plural(drawn.length, "run")}: ${keys.join(", ")}`, wide);
    const items = drawn.map((run) =>
      h("polyline", {
          points: axes.map((axis, i) => `${x(i)},${y(axis.place(axis.of(run))).toFixed(1)}`).join(" "),
          stroke: colour(run),
          fill: "none",
        },
        title(textOf(run, keys, nameOf)),
      ),
    );
    svg.append(...items);
    axes.forEach(({ key, marks }, i) =>
      svg.append(
        h("line", { class: "axis", x1: x(i), x2: x(i), y1: y(0), y2: y(1) }),
        h("text", { class: "title", x: x(i), y: i % 2 ? 28 : 12, "text-anchor": "middle" }, key),
        ...marks.map(([place, text]) => h("text", { class: "halo", x: x(i) + 6, y: y(place) + 4 }, text)),
      ),
    );
    return { svg, items, surfaces: keys.map((_, i) => ({ left: x(i) - EDGE, right: x(i) + EDGE, top, bottom, up: i })) };
  };
  return plot(runs, keys, { params, nameOf, draw });
}
