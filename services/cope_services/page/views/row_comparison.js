// The comparison of chosen rows with the first of them: differences, intervals and verdicts.

import { at, get } from "../api.js";
import { h, replace, section, table } from "../dom.js";
import { fixed, number } from "../format.js";
import { change } from "../route.js";
import { decimals } from "./results_table.js";

const MARK = { better: "good", worse: "bad" };

/** A difference; below it, its interval, p and verdict. */
function difference(cell, metric) {
  const found = cell.comparison;
  if (!found) return "–";
  const digits = Math.max(decimals(found.difference * metric.scale, metric), 2);
  const show = (value) => fixed(value * metric.scale, digits);
  const interval = found.ci_low === null ? null : h("span", {}, `95 % interval ${show(found.ci_low)} … ${show(found.ci_high)}`);
  const p = found.p_adjusted;
  const significance = p === null ? null : h("span", {}, p < 0.001 ? "corrected p < 0.001" : `corrected p = ${number(p, 2)}`);
  return [
    `${found.difference > 0 ? "+" : ""}${show(found.difference)}`,
    h("span", { class: "below" },
      interval,
      significance,
      h("span", { class: `verdict ${MARK[found.verdict] ?? ""}` }, found.verdict),
    ),
  ];
}

/** Draw the comparison of two or more chosen rows; nothing for fewer. */
export async function rowComparison(container, { name, scale, chosen, part }) {
  if (chosen.length < 2) {
    part("comparison", "", () => replace(container));
    return;
  }
  const [first, ...rest] = chosen;
  const compared = await get(at(["ablations", name, "table"], { format: "json", scale, compare: first }));
  part("comparison", JSON.stringify([compared, chosen]), () => {
    const rows = new Map(compared.rows.map((row) => [row.row, row]));
    const columns = ["metric", [first, "number"], ...rest.map((other) => [`${other} − ${first}`, "number"])];
    const cells = compared.metrics.map((metric) => {
      const { mean } = rows.get(first).metrics[metric.name];
      const differences = rest.map((other) => difference(rows.get(other).metrics[metric.name], metric));
      return [metric.title, mean === null ? "–" : fixed(mean * metric.scale, decimals(mean * metric.scale, metric)), ...differences];
    });
    const clear = h("button", { type: "button", class: "quiet", onclick: () => change({ row: null }) }, "Clear the choice");
    const { difference_rule: ofDifference, rules: others } = compared.compared;
    const rules = [ofDifference, ...others].map((rule) => h("p", { class: "note" }, rule));
    replace(
      container,
      section(
        `${rest.join(", ")} minus ${first}`,
        { id: "comparison", controls: [clear] },
        table("Comparison of the chosen rows", columns, cells),
        h("div", { class: "notes" }, rules),
      ),
    );
  });
}
