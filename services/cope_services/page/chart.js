// A line chart: uPlot with zeros on logarithmic axes, single points, bands, values at the pointer, a keyboard cursor and
// the page's colours.

import { label, linear, logarithmic, STEPS, TIME_STEPS } from "./axes.js";
import { columns, dots } from "./curves.js";
import { h } from "./dom.js";
import { duration, integer, number } from "./format.js";

const HEIGHT = 340;
const BELOW = 1e-300; // lies below every logarithmic axis
const MOST_ROWS = 6; // groups whose zeros have a row of their own; others share the last
const MOST_READ = 12; // lines in the box at the pointer: those nearest to it

export class Chart {
  /** `onzoom([min, max])` hears of the part that a person has chosen; null: all. */
  constructor(container, { onzoom = () => {}, height = HEIGHT } = {}) {
    Object.assign(this, { container, onzoom, height, plot: null, lines: [], zoomed: false, drawing: false });
    this.frame = h("div", {
      class: "chart",
      tabindex: 0,
      role: "slider",
      "aria-valuemin": 0,
      onkeydown: (event) => this.#press(event),
    });
    this.box = h("div", { class: "readout", "aria-hidden": "true", hidden: true });
    this.note = h("p", { class: "note" });
    this.reset = h("button", { type: "button", class: "quiet reset", hidden: true, onclick: () => this.unzoom() }, "Reset zoom");
    container.replaceChildren(h("div", { class: "plotarea" }, this.frame, this.box, this.reset), this.note);
    this.observer = new ResizeObserver(() => this.plot?.setSize({ width: this.frame.clientWidth, height: this.height }));
    this.observer.observe(this.frame);
    this.recolour = () => this.lines.length && this.draw(this.lines, { ...this.options, zoom: this.#zoom() });
    addEventListener("themechange", this.recolour);
  }

  close() {
    this.observer.disconnect();
    removeEventListener("themechange", this.recolour);
    this.plot?.destroy();
  }

  /** Draw lines as `curves.lines` makes them. options: {log, by, metric, label of the value axis, zoom: [min, max]}. */
  draw(lines, options) {
    this.drawing = true;
    Object.assign(this, { lines, options });
    this.values = lines.map(({ points }) => columns([points], false));
    const lists = lines.flatMap(({ points, low, high }) => (low ? [points, low, high] : [points]));
    const own = lines.flatMap(({ points }) => points.map(([, value]) => value)).filter(Number.isFinite);
    this.zeros = options.log ? own.filter((value) => value <= 0).length : 0;
    this.groups = options.log
      ? [...new Set(lines.filter(({ points }) => points.some(([, value]) => value <= 0)).map(({ group }) => group))]
      : [];
    this.lists = lists;
    const data = columns(lists, options.log);
    if (options.log) this.#floor(data);
    this.plot?.destroy();
    this.plot = new uPlot(this.#options(), data, this.frame);
    this.setZoomed(false);
    if (options.zoom) this.show(options.zoom);
    this.drawing = false;
    this.#describe(own.length);
  }

  /** The value axis for the part of the lines between two x; for all of them if there is nothing between. */
  #fit(low, high) {
    const usable = this.lists.flat().filter(([, value]) => Number.isFinite(value));
    const within = low === null ? [] : usable.filter(([x]) => x >= low && x <= high); // null: the x axis is not made yet
    const values = (within.length ? within : usable).map(([, value]) => value);
    const rows = Math.min(this.groups.length, MOST_ROWS);
    this.axis = this.options.log ? logarithmic(values, this.height - 60, rows) : linear(values);
    return [this.axis.min, this.axis.max];
  }

  /** Bands that reach 0 or less are filled to the lower end of the axis. */
  #floor(data) {
    let column = 0;
    for (const { low, high } of this.lines) {
      column += 1;
      if (!low) continue;
      for (const edge of [column + 1, column + 2]) data[edge] = data[edge].map((value) => (value === null ? BELOW : value));
      column += high ? 2 : 0;
    }
  }

  #describe(count) {
    const { log, metric } = this.options;
    const negative = this.lines.some(({ points }) => points.some(([, value]) => value < 0));
    const zeros = `◆ marks values of 0${negative ? " or less" : ""}, for which a logarithmic axis has no place. `;
    const keys = "Drag to zoom; double-click to reset. With the keyboard: ← → move the cursor, + − zoom.";
    this.note.replaceChildren(log && this.zeros ? zeros : "", h("span", { class: "keyhelp" }, keys));
    this.container.dataset.zeros = this.zeros;
    this.container.dataset.values = count;
    const last = this.plot.data[0].length - 1;
    for (const [name, value] of [
      ["aria-label", `${metric}: the cursor of the plot`],
      ["aria-valuemax", Math.max(last, 0)],
      ["aria-valuenow", 0],
      ["aria-valuetext", "No position"],
    ]) {
      this.frame.setAttribute(name, value);
    }
  }

  /** A colour of the page, as a canvas takes it. */
  #colour(name, opacity = 1) {
    this.frame.style.color = `color-mix(in srgb, var(${name}) ${100 * opacity}%, transparent)`;
    const { color } = getComputedStyle(this.frame);
    this.frame.style.removeProperty("color");
    return color;
  }

  #options() {
    const { by, log } = this.options;
    const [ink, line] = [this.#colour("--quiet"), this.#colour("--line")];
    const font = "12px system-ui, sans-serif";
    const common = { stroke: ink, font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    const series = [{}];
    const bands = [];
    for (const each of this.lines) {
      series.push(this.#series(each));
      if (!each.low) continue;
      const edge = { stroke: "transparent", width: 0, points: { show: false } };
      bands.push({ series: [series.length + 1, series.length], fill: this.#colour(each.colour, 0.18) });
      series.push(edge, edge);
    }
    return {
      width: this.frame.clientWidth,
      height: this.height,
      series,
      bands,
      legend: { show: false },
      padding: [10, 24, 0, 0],
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: log ? 3 : 1, range: (u) => this.#fit(u.scales.x.min, u.scales.x.max) },
      },
      axes: [
        {
          ...common,
          grid: { show: false },
          size: 30,
          label: by === "time" ? "wall time" : "step",
          labelSize: 18,
          labelFont: font,
          ...(by === "time" ? { incrs: TIME_STEPS, space: 80 } : { incrs: STEPS }),
          values: (u, splits) => splits.map(by === "time" ? duration : label),
        },
        {
          ...common,
          size: 58,
          label: this.options.label ?? this.options.metric,
          labelSize: 20,
          labelFont: font,
          splits: () => [...(this.axis.zeros ?? []).toReversed(), ...this.axis.ticks],
          filter: (u, splits) => splits,
          values: (u, splits) =>
            splits.map((value) =>
              this.axis.zeros?.includes(value)
                ? value === this.axis.zeros[this.axis.zeros.length >> 1]
                  ? "0"
                  : ""
                : label(value),
            ),
        },
      ],
      cursor: {
        y: false,
        points: { size: 6 },
        move: (u, left, top) => [left < 0 ? left : u.valToPos(u.data[0][u.posToIdx(left)], "x"), top], // at the nearest step
        drag: { x: true, y: false, dist: 4 },
        dataIdx: (u, i, at) => nearest(u.data[i], at),
      },
      hooks: {
        draw: [(u) => this.#drawZeros(u)],
        setCursor: [(u) => this.#cursor(u)],
        setScale: [(u, key) => key === "x" && this.setZoomed(u.scales.x.min > u.data[0][0] || u.scales.x.max < u.data[0].at(-1))],
      },
    };
  }

  #series({ colour: name, dash, width, faint }) {
    const colour = this.#colour(name);
    return {
      stroke: faint ? this.#colour(name, 0.5) : colour,
      width,
      dash,
      spanGaps: false,
      points: {
        show: false,
        size: 6,
        width: 1,
        fill: colour,
        stroke: colour,
        filter: (u, i) => dots(u.data[i], faint),
      },
    };
  }

  /** Diamonds in the lane below a logarithmic axis, one for each value that is 0 or less; each group has its row. */
  #drawZeros(u) {
    if (!this.groups.length) return;
    const { ctx } = u;
    const [top, size] = [u.valToPos(this.axis.floor, "y", true), 4.5 * devicePixelRatio];
    ctx.save();
    ctx.strokeStyle = this.#colour("--quiet");
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(u.bbox.left, top);
    ctx.lineTo(u.bbox.left + u.bbox.width, top);
    ctx.stroke();
    for (const { colour, points, group } of this.lines) {
      const row = Math.min(this.groups.indexOf(group), this.axis.zeros.length - 1);
      if (row < 0) continue;
      const y = u.valToPos(this.axis.zeros[row], "y", true);
      ctx.fillStyle = this.#colour(colour);
      for (const [at, value] of points) {
        if (!(value <= 0) || at < u.scales.x.min || at > u.scales.x.max) continue;
        const x = u.valToPos(at, "x", true);
        ctx.beginPath();
        ctx.moveTo(x, y - size);
        for (const [dx, dy] of [[size, 0], [0, size], [-size, 0]])
          ctx.lineTo(x + dx, y + dy);
        ctx.fill();
      }
    }
    ctx.restore();
  }

  #cursor(u) {
    const at = u.cursor.idx;
    this.box.hidden = at === null || at === undefined;
    if (this.box.hidden) return;
    const x = u.data[0][at];
    const read = this.lines.map((line, i) => ({ ...line, value: valueAt(this.values[i], x) })).filter(({ faint }) => !faint);
    const place = this.options.by === "time" ? duration(x) : `step ${integer(x)}`;
    this.frame.setAttribute("aria-valuenow", at);
    this.frame.setAttribute("aria-valuetext", `${place}: ${read.map(({ name, value }) => `${name} ${number(value)}`).join("; ")}`);
    this.#showBox(u, place, read.filter(({ value }) => Number.isFinite(value)));
  }

  /** The values of the lines beside the cursor: of many, those nearest to the pointer. */
  #showBox(u, place, read) {
    const distance = ({ value }) => Math.abs(u.valToPos(Math.max(value, u.scales.y.min), "y") - u.cursor.top);
    const nearest = read.toSorted((a, b) => distance(a) - distance(b)).slice(0, MOST_READ);
    const line = ({ name, colour, value }) =>
      h("tr", { class: value === nearest[0].value ? "nearest" : null },
        h("td", {}, h("i", { style: { background: `var(${colour})` } }), name),
        h("td", { class: "number" }, number(value)),
      );
    this.box.replaceChildren(h("b", {}, place), h("table", {}, nearest.toSorted((a, b) => b.value - a.value).map(line)));
    const [left, width] = [u.over.offsetLeft + u.cursor.left, this.frame.clientWidth];
    const isRight = left > width / 2; // the box is on the side with more room
    this.box.style.setProperty("left", isRight ? "auto" : `${left + 16}px`);
    this.box.style.setProperty("right", isRight ? `${width - left + 16}px` : "auto");
  }

  #press(event) {
    const u = this.plot;
    const xs = u?.data[0] ?? [];
    if (!xs.length) return;
    const { min, max } = u.scales.x;
    const [first, last] = [closest(xs, min), closest(xs, max)];
    const now = u.cursor.idx ?? (event.key === "ArrowLeft" ? last + 1 : first - 1);
    const target = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: first, End: last }[event.key];
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (target !== undefined) {
      const i = Math.min(Math.max(target, first), last);
      u.setCursor({ left: u.valToPos(xs[i], "x"), top: u.over.clientHeight / 2 });
    } else if (factor) {
      const [middle, half] = [
        u.cursor.idx === null || u.cursor.idx === undefined ? (min + max) / 2 : xs[u.cursor.idx],
        ((max - min) / 2) * factor,
      ];
      u.setScale("x", { min: Math.max(middle - half, xs[0]), max: Math.min(middle + half, xs.at(-1)) });
    } else if (event.key === "Escape") this.unzoom();
    else return;
    event.preventDefault();
  }

  /** The part of the x axis that is shown; null: all. */
  #zoom() {
    const { min, max } = this.plot.scales.x;
    return this.zoomed ? [min, max] : null;
  }

  setZoomed(zoomed) {
    const changed = zoomed || this.zoomed;
    this.zoomed = zoomed;
    this.reset.hidden = !zoomed;
    if (changed && !this.drawing) this.onzoom(this.#zoom());
  }

  /** Show the part [min, max] of the x axis; null: all. */
  show(range) {
    if (range) this.plot.setScale("x", { min: range[0], max: range[1] });
    else this.unzoom();
  }

  unzoom() {
    const xs = this.plot.data[0];
    this.plot.setScale("x", { min: xs[0], max: xs.at(-1) });
  }
}

/** The index nearest to `at` at which a column has a value; `at` itself before the first and after the last one. */
function nearest(column, at) {
  let [before, after] = [at, at];
  while (before >= 0 && !Number.isFinite(column[before])) before -= 1;
  while (after < column.length && !Number.isFinite(column[after])) after += 1;
  if (before < 0 || after === column.length) return at;
  return at - before <= after - at ? before : after;
}

/** The value nearest to x of columns [xs, values]; null before the first and after the last one. */
function valueAt([xs, values], x) {
  return xs.length && x >= xs[0] && x <= xs.at(-1) ? values[closest(xs, x)] : null;
}

/** The index of the sorted number nearest to x. */
function closest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}
