// Prepares learning curves: smoothing, means and bands over seeds. Nothing here draws.

/** Up to 32 distinguishable styles: eight colours, then the same with other dashes. */
export const style = (index) => ({ colour: `--c${index % 8}`, dash: DASHES[Math.floor(index / 8) % DASHES.length] });
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

/**
 * The exponential moving average of points [[x, value], …], corrected for its start; `weight` 0 … 1 is that of the past.
 * A value that is not a number interrupts the curve and is kept.
 */
export function smooth(points, weight) {
  if (!weight) return points;
  let [mean, total] = [0, 0];
  return points.map(([x, value]) => {
    if (!Number.isFinite(value)) return [x, value];
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [x, mean / total];
  });
}

/**
 * Mean, standard deviation and range over seeds, at the steps that at least half of the started seeds have.
 * `series` are lists of [step, x, value]; returns [{x, mean, deviation, low, high}, …] by step. x is averaged, too.
 */
export function overSeeds(series) {
  const started = series.filter((points) => points.length);
  const byStep = new Map();
  for (const points of started) {
    for (const [step, x, value] of points) {
      if (!Number.isFinite(value)) continue;
      if (!byStep.has(step)) byStep.set(step, []);
      byStep.get(step).push([x, value]);
    }
  }
  return [...byStep]
    .filter(([, found]) => 2 * found.length >= started.length)
    .sort((a, b) => a[0] - b[0])
    .map(([, found]) => {
      const [xs, values] = [found.map((each) => each[0]), found.map((each) => each[1])];
      return {
        x: average(xs),
        mean: average(values),
        deviation: deviation(values),
        low: Math.min(...values),
        high: Math.max(...values),
      };
    });
}

const average = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/** The standard deviation (n − 1 in the denominator); 0 for one value. */
function deviation(values) {
  const mean = average(values);
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0;
}

/**
 * The lines of a chart. `groups` are [{name, style, series: [{name, points: [[step, seconds, value], …]}]}].
 * options: by ("step" or "time"), smoothing (0 … 1), spread ("seeds", "range" or "deviation").
 * A line is {group, name, colour, dash, width, faint, points: [[x, value], …], low?, high?}.
 */
export function lines(groups, { by, smoothing, spread }) {
  const at = by === "time" ? 1 : 0;
  const result = [];
  for (const group of groups) {
    const smoothed = group.series.map(({ points }) => {
      const usable = points.filter((point) => Number.isFinite(point[at]));
      const curve = smooth(usable.map((point) => [point[at], point[2]]), smoothing);
      return curve.map(([x, value], i) => [usable[i][0], x, value]);
    });
    const many = group.series.length > 1;
    if (spread === "seeds" || !many) {
      group.series.forEach((series, i) =>
        result.push({
          ...group.style,
          group: group.name,
          name: many ? `${group.name}, ${series.name}` : group.name,
          width: many ? 1 : 1.8,
          faint: many,
          points: smoothed[i].map(([, x, value]) => [x, value]),
        }),
      );
    }
    if (!many) continue;
    const summary = overSeeds(smoothed);
    const floor = summary.every(({ low }) => low >= 0) ? 0 : -Infinity; // an error of less than 0 % cannot be
    const edge = (sign) => (each) => [
      each.x,
      spread === "range" ? (sign < 0 ? each.low : each.high) : Math.max(each.mean + sign * each.deviation, floor),
    ];
    result.push({
      ...group.style,
      group: group.name,
      name: group.name,
      width: 2.2,
      faint: false,
      points: summary.map(({ x, mean }) => [x, mean]),
      ...(spread === "seeds" ? {} : { low: summary.map(edge(-1)), high: summary.map(edge(1)) }),
    });
  }
  return result;
}

/**
 * Columns for uPlot: a common x, and one list per line. A line has `undefined` where only others have a value, which
 * does not interrupt it, and null where its own value cannot be drawn, which does. With `log`, these are values ≤ 0.
 */
export function columns(lists, log) {
  const xs = [...new Set(lists.flatMap((points) => points.map(([x]) => x)))].sort((a, b) => a - b);
  const index = new Map(xs.map((x, i) => [x, i]));
  return [
    xs,
    ...lists.map((points) => {
      const column = new Array(xs.length).fill(undefined);
      for (const [x, value] of points) column[index.get(x)] = Number.isFinite(value) && (!log || value > 0) ? value : null;
      return column;
    }),
  ];
}

const SPARSE = 40;

/** Indices of the values of a column that are drawn as dots: all of a few, else the isolated ones; null if there are none. */
export function dots(column, faint) {
  const finite = column.flatMap((value, i) => (Number.isFinite(value) ? [i] : []));
  const drawn = finite.length <= SPARSE && !faint ? finite : isolated(column);
  return drawn.length ? drawn : null;
}

/** Indices of values without a neighbour to draw a line to: a run with one point, and a point between two gaps. */
export function isolated(column) {
  const own = [];
  column.forEach((value, i) => value !== undefined && own.push(i));
  return own.filter(
    (i, at) => column[i] !== null && (column[own[at - 1]] ?? null) === null && (column[own[at + 1]] ?? null) === null,
  );
}
