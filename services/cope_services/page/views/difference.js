// What differs between two runs: configuration, facts and metrics.

import { empty, h, table } from "../dom.js";
import { number } from "../format.js";
import { link } from "../route.js";

const side = (id) => h("a", { class: "mono", href: link(["runs", id]) }, id);

function values(title, rows, { left, right }) {
  const cells = rows.map((row) => [row.key, row.left ?? "–", row.right ?? "–"]);
  return [h("h3", {}, title), rows.length ? table(title, ["key", side(left), side(right)], cells) : empty("The same.")];
}

/** The answer of GET /diff for two runs as tables. */
export function difference(found) {
  const columns = ["metric", ...[side(found.left), side(found.right), "right − left"].map((name) => [name, "number"])];
  const rows = found.metrics.map(({ metric, left, right, difference: change }) => [
    metric,
    ...[left, right, change.difference].map((value) => number(value, 5)),
  ]);
  return [
    values("Configuration", found.spec, found),
    values("Facts", found.facts, found),
    h("h3", {}, "Final metrics"),
    rows.length ? table("Final metrics", columns, rows) : empty("Neither run has final metrics."),
  ];
}
