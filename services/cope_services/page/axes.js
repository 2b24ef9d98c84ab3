// Ranges and ticks of the value axis.

import { number } from "./format.js";

const ROW = 13; // CSS pixels of a row of the lane below a logarithmic axis, in which the zeros of one group are marked
const EDGE = 14; // of the rest of the lane

/** Round numbers from low to high: about `wanted` of them. */
export function ticks(low, high, wanted = 6) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((each) => each >= rough * 0.999);
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) result.push(+(i * step).toPrecision(12));
  return result;
}

/** A linear axis: {min, max, ticks}, as long as the values. It starts at 0 if they come near it; one value has room on both sides. */
export function linear(values) {
  if (!values.length) return { min: 0, max: 1, ticks: [0, 1] };
  let [low, high] = extent(values);
  if (low === 0 && high === 0) high = 1; // all values are 0: they lie on the bottom edge
  if (low > 0 && low < (high - low) * 0.1) low = 0;
  const room = (high - low || Math.abs(high)) * 0.05;
  const min = low === 0 ? -room / 3 : low - room; // a line at 0 is drawn in full
  return { min, max: high + room, ticks: ticks(low === 0 ? 0 : min, high + room) };
}

/**
 * A logarithmic axis: {min, max, ticks, floor, zeros}. It has no place for 0. With `rows` > 0 it is longer at its lower
 * end, from `min` to `floor`, by a lane with as many rows: `zeros` are their places. The smaller values are ignored.
 */
export function logarithmic(values, height, rows) {
  const positive = values.filter((value) => value > 0);
  let [low, high] = positive.length ? extent(positive).map(Math.log10) : [-1, 0];
  const room = Math.max((high - low) * 0.05, 0.02);
  [low, high] = [low - room, high + room];
  const found = positive.length ? decades(low, high) : [];
  if (!rows) return { min: 10 ** low, max: 10 ** high, ticks: found, floor: null, zeros: [] };
  const pixels = EDGE + ROW * rows;
  const lane = ((high - low) * pixels) / Math.max(height - pixels, pixels);
  const zeros = Array.from({ length: rows }, (_, i) => 10 ** (low - (lane * (EDGE / 2 + ROW * (i + 0.5))) / pixels));
  const apart = low + (high - low) * 0.04; // a label here would touch that of the lane
  return {
    min: 10 ** (low - lane),
    max: 10 ** high,
    ticks: found.filter((tick) => Math.log10(tick) > apart),
    floor: 10 ** low,
    zeros,
  };
}

/** 1, 10, 100 …; with 2 and 5 between them, or linear ticks, on short axes. */
function decades(low, high) {
  const factors = high - low > 3 ? [1] : [1, 2, 5];
  const result = [];
  const every = Math.max(Math.round((high - low) / 6), 1);
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (Math.log10(value) >= low && Math.log10(value) <= high && power % every === 0) result.push(value);
    }
  }
  return result.length > 2 ? result : ticks(10 ** low, 10 ** high, 4);
}

/** The least and the greatest value. As arguments of Math.min, 100,000 values would exceed the stack. */
export function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

/** Ticks of a time axis in seconds. */
export const TIME_STEPS = [
  0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800,
];

/** Ticks of an axis of steps: integers. */
export const STEPS = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();

export const label = (value) => number(value, 3);
