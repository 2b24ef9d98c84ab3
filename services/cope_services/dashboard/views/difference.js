// What differs between two runs: configuration, facts and metrics.

import { empty, h, scrolling } from "../dom.js";
import { number } from "../format.js";
import { link } from "../route.js";

const side = (id) => h("th", { scope: "col" }, h("a", { class: "mono", href: link(["runs", id]) }, id));

function values(title, rows, { left, right }) {
  if (!rows.length) return [h("h3", {}, title), empty("The same.")];
  return [
    h("h3", {}, title),
    scrolling(
      title,
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), side(left), side(right))),
        h(
          "tbody",
          {},
          rows.map((row) =>
            h("tr", {}, h("th", { scope: "row" }, row.key), h("td", {}, row.left ?? "–"), h("td", {}, row.right ?? "–")),
          ),
        ),
      ),
    ),
  ];
}

/** The answer of GET /diff for two runs as tables. */
export function difference(found) {
  const metrics = found.metrics.map(({ metric, left, right, difference: change }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, metric),
      [left, right, change?.difference].map((value) => h("td", { class: "number" }, number(value, 5))),
    ),
  );
  return [
    values("Configuration", found.spec, found),
    values("Facts", found.facts, found),
    h("h3", {}, "Final metrics"),
    metrics.length
      ? scrolling(
          "Final metrics",
          h(
            "table",
            {},
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                h("th", { scope: "col" }, "metric"),
                [found.left, found.right].map((id) =>
                  h("th", { scope: "col", class: "number" }, h("a", { class: "mono", href: link(["runs", id]) }, id)),
                ),
                h("th", { scope: "col", class: "number" }, "right − left"),
              ),
            ),
            h("tbody", {}, metrics),
          ),
        )
      : empty("Neither run has final metrics."),
  ];
}
