// The comparison of chosen rows with the first of them: differences, intervals and verdicts.

import { at, get } from "../api.js";
import { h, replace, scrolling, section } from "../dom.js";
import { fixed, number } from "../format.js";
import { change } from "../route.js";

const MARK = { better: "good", worse: "bad" };

function difference(cell, metric) {
  const found = cell.comparison;
  if (!found) return h("td", { class: "number none" }, "–");
  const digits = Math.max(metric.decimals, 2);
  const show = (value) => fixed(value * metric.scale, digits);
  return h(
    "td",
    { class: "number" },
    `${found.difference > 0 ? "+" : ""}${show(found.difference)}`,
    h(
      "span",
      { class: "below" },
      found.ci_low === null ? null : h("span", {}, `${show(found.ci_low)} … ${show(found.ci_high)}`),
      found.p_adjusted === null
        ? null
        : h("span", {}, found.p_adjusted < 0.001 ? "p < 0.001" : `p = ${number(found.p_adjusted, 2)}`),
      h("span", { class: `verdict ${MARK[found.verdict] ?? ""}` }, found.verdict),
    ),
  );
}

/** Draw the comparison of two or more chosen rows; nothing for fewer. */
export async function rowComparison(container, { name, scale, chosen, part }) {
  if (chosen.length < 2) {
    part("comparison", "", () => replace(container));
    return;
  }
  const [first, ...others] = chosen;
  const table = await get(at(["ablations", name, "table"], { format: "json", scale, compare: first }));
  part("comparison", JSON.stringify([table, chosen]), () => {
    const rows = new Map(table.rows.map((row) => [row.row, row]));
    const reference = rows.get(first);
    const body = table.metrics.map((metric) => {
      const { mean } = reference.metrics[metric.name];
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, metric.title),
        h("td", { class: "number" }, mean === null ? "–" : fixed(mean * metric.scale, metric.decimals)),
        others.map((other) => difference(rows.get(other).metrics[metric.name], metric)),
      );
    });
    replace(
      container,
      section(
        `${others.join(", ")} minus ${first}`,
        {
          id: "comparison",
          controls: [h("button", { type: "button", class: "quiet", onclick: () => change({ row: null }) }, "Clear the choice")],
        },
        scrolling(
          "Comparison of the chosen rows",
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
                h("th", { scope: "col", class: "number" }, first),
                others.map((other) => h("th", { scope: "col", class: "number" }, `${other} − ${first}`)),
              ),
            ),
            h("tbody", {}, body),
          ),
        ),
        h(
          "div",
          { class: "notes" },
          (table.compared?.rules ?? []).map((rule) => h("p", { class: "note" }, rule)),
        ),
      ),
    );
  });
}
