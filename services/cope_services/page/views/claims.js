// The claims of ablations, each with what the runs say about it.

import { h, table } from "../dom.js";
import { withMinus } from "../format.js";
import { link } from "../route.js";
import { scaleName } from "../status.js";

const CLASSES = { shown: "good", opposite: "bad" };
const LONG = 160; // characters of values
const DECLARED = { after: "declared after its runs had started", "not recorded": "not recorded when declared" };

const verdict = ({ verdict: text, meaning, texts, p, q }) => [
  h("span", { class: `verdict ${CLASSES[text] ?? ""}`, title: meaning }, texts.verdict),
  " ",
  h("small", {}, [p !== null && `p = ${texts.p}`, q !== null && `q = ${texts.q}`].filter(Boolean).join(", ")),
];

/** The smallest difference with its interval, the number of seeds, and the size that a margin gives it. */
const difference = ({ texts, n, size, difference: value }) => [
  h("span", { class: "difference" }, value === null ? "–" : withMinus(texts.difference)),
  " ",
  h("small", {}, [n !== null && `n = ${texts.n}`, size && `${size} (margin ${texts.margin})`].filter(Boolean).join(", ")),
];

/** Values of rows, folded where there are many. */
const values = (text, pairs) => (text.length > LONG ? h("details", {}, h("summary", {}, `${pairs} pairs of rows`), text) : text || "–");

/** Whether rows were tuned, the size of the models, which report decides otherwise, and when the claim was declared. */
function origin({ recipe, model, hardware_follows_rows: hardware, decided_by: deciding, declared }) {
  const setting = [recipe, model, hardware && "hardware follows the row"].filter(Boolean).join(", ");
  const declaredText = declared && (DECLARED[declared] ?? `declared ${declared}`);
  return [deciding.length ? `${setting}: ${deciding.join(", ")} decides` : setting, declaredText].filter(Boolean).join(" · ");
}

/** A line for each answer of GET /claims. `links`: whether each leads to its ablation. */
export function claimsTable(claims, { links = false } = {}) {
  const hasPublished = claims.some((each) => each.published);
  const claim = ({ claim: text, ablation, scale }) =>
    links ? h("a", { href: link(["ablations", ablation], { scale: scaleName(scale) }), "data-key": `claim ${ablation} ${text}` }, text) : text;
  const line = (each) => [
    [
      claim(each),
      h("small", {}, [each.source, links && each.ablation, links && each.scale, origin(each)].filter(Boolean).join(" · ")),
      each.note && h("details", {}, h("summary", {}, "note"), each.note),
    ],
    verdict(each),
    [h("small", {}, each.measure, ": "), values(each.ours, each.pairs)],
    difference(each),
    ...(hasPublished ? [each.published && [h("small", {}, "paper: "), values(each.published, each.pairs)]] : []),
  ];
  const columns = ["claim", "verdict", ["ours", "values"], ["difference", "numbers"], ...(hasPublished ? [["published", "values"]] : [])];
  return table("Claims", columns, claims.map(line), { class: "claims" });
}
