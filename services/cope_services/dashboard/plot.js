"use strict";

// A line plot in SVG: a thin line for each seed, and a thick line for their mean.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element: element("a", {href: "#"}, "text", child). SVG tags give SVG elements. */
function element(tag, attributes = {}, ...children) {
  const inSvg = ["svg", "g", "path", "line", "text", "rect"].includes(tag);
  const node = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** About `count` round numbers between low and high. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) result.push(+(i * step).toPrecision(12));
  return result;
}

const formatNumber = (value) =>
  value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(4));

/** The mean over seeds, at the steps that all started seeds have. */
function meanOf(series) {
  const started = series.filter((s) => s.points.length);
  const valuesByStep = new Map();
  for (const { points } of started) {
    for (const [step, value] of points) valuesByStep.set(step, [...(valuesByStep.get(step) ?? []), value]);
  }
  return [...valuesByStep].filter(([, values]) => values.length >= started.length)
    .map(([step, values]) => [step, values.reduce((a, b) => a + b, 0) / values.length])
    .sort((a, b) => a[0] - b[0]);
}

/** Draw `curves` (from GET …/curves) into `container`. `hidden` is the set of the rows that the user has hidden. */
function drawCurves(container, curves, { log, hidden }) {
  const rows = curves.rows.map((row, index) => ({ ...row, colour: `c${index % 8}`, mean: meanOf(row.series) }));
  const visible = rows.filter((row) => !hidden.has(row.row));
  const usable = ([, value]) => Number.isFinite(value) && (!log || value > 0);
  const points = visible.flatMap((row) => row.series.flatMap((s) => s.points)).filter(usable);
  const legend = element("div", { class: "legend" });
  const readouts = new Map();
  for (const row of rows) {
    const readout = element("output");
    readouts.set(row, readout);
    const toggle = () => {
      hidden.has(row.row) ? hidden.delete(row.row) : hidden.add(row.row);
      drawCurves(container, curves, { log, hidden });
    };
    legend.append(element("button", { type: "button", class: row.colour, "aria-pressed": String(!hidden.has(row.row)), onclick: toggle },
      element("i"), element("span", {}, row.row), readout));
  }
  if (!points.length) {
    container.replaceChildren(legend, element("p", { class: "empty" }, "No values have been logged."));
    return;
  }

  const [width, height, left, bottom, top, right] = [900, 340, 56, 34, 10, 12];
  const scale = log ? Math.log10 : (value) => value;
  const last = points.reduce((maximum, [step]) => Math.max(maximum, step), 1);
  let [low, high] = points.reduce(([a, b], [, v]) => [Math.min(a, scale(v)), Math.max(b, scale(v))], [Infinity, -Infinity]);
  if (!log && low > 0 && low < high * 0.6) low = 0;
  if (low === high) [low, high] = [low - 1, high + 1];
  const x = (step) => left + (step / last) * (width - left - right);
  const y = (value) => height - bottom - ((scale(value) - low) / (high - low)) * (height - bottom - top);
  const path = (line) => line.filter(usable).map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");

  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${curves.metric} by step` });
  for (const tick of ticks(low, high, 5)) {
    const value = log ? 10 ** tick : tick;
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, formatNumber(value)));
  }
  for (const tick of ticks(0, last, 7)) {
    svg.append(element("text", { x: x(tick), y: height - bottom + 18, "text-anchor": "middle" }, formatNumber(tick)));
  }
  svg.append(element("text", { x: width - right, y: height - 2, "text-anchor": "end" }, "step"));
  for (const row of visible) {
    const lines = row.series.map((s) => element("path", { class: "seed", d: path(s.points) }));
    svg.append(element("g", { class: row.colour }, ...lines, element("path", { class: "mean", d: path(row.mean) })));
  }
  const cursor = element("line", { class: "cursor off", y1: top, y2: height - bottom });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * last;
    const near = (line) => line.reduce((best, p) => (Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best));
    const means = visible.map((row) => row.mean).filter((mean) => mean.length);
    if (!means.length) return;
    const nearest = near(means.flat());
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("x1", x(nearest[0]));
    cursor.setAttribute("x2", x(nearest[0]));
    for (const row of visible) readouts.get(row).value = row.mean.length ? formatNumber(near(row.mean)[1]) : "";
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("class", "cursor off");
    for (const readout of readouts.values()) readout.value = "";
  });
  container.replaceChildren(legend, svg);
}
