// Home: the ablations that are trained here, what the committed results say about the paper's claims, and the library.

import { at, get } from "../api.js";
import { changes, empty, h, replace, searchField, section } from "../dom.js";
import { ago, moment, plural } from "../format.js";
import { change, link } from "../route.js";
import { begun, progress, scaleName, setsText, sizeParams, sizes, summary, sweepSummary, total } from "../status.js";
import { claimsTable } from "./claims.js";

const isTrained = (ablation) => sizes(ablation).some(({ counts }) => begun(counts));

/** Whether an ablation is the reader's: it has runs here, or says of no table or figure that it reproduces it. */
const isOwn = (ablation) => ablation.error || isTrained(ablation) || !ablation.reproduces;

/** `Table 5 (right)` of a text about what is reproduced; `extra` where it is neither a table nor a figure. */
const tagOf = (reproduces) => reproduces.match(/^(Tables?|Figures?) \d[^,]*/)?.[0] ?? "extra";
const tag = ({ reproduces }) => reproduces && h("span", { class: "tag", title: reproduces }, tagOf(reproduces));

function own(ablation) {
  const { name, title, error, newest_ms: newest, scales } = ablation;
  const trained = error ? [] : sizes(ablation).filter(({ counts }) => begun(counts));
  const size = ({ scale, sets, counts }) => {
    const label = [scales.length && scaleName(scale), setsText(sets)].filter(Boolean).join(": ");
    const text = label && h("a", { href: link(["ablations", name], sizeParams({ scale, sets })), "data-key": `${name} ${label}` }, label);
    return h("li", {}, h("span", {}, text), progress(counts), h("small", {}, summary(counts)));
  };
  return h("li", {},
    h("div", { class: "what" },
      h("a", { href: link(["ablations", name]), "data-key": name }, title || name),
      h("small", {}, name, " ", tag(ablation)),
    ),
    error && h("p", { class: "bad" }, error),
    trained.length > 0 && h("ul", { class: "sizes" }, trained.map(size)),
    !error && !trained.length && h("small", {}, `${plural(total(ablation.counts), "run")}, not started`),
    h("small", { class: "when", title: newest ? moment(newest) : null }, newest ? ago(newest) : ""),
  );
}

function shipped(ablation) {
  const { name, title, counts, committed } = ablation;
  const results = (scale, i) => [
    i ? ", " : "",
    h("a", { href: link(["ablations", name], { scale: scaleName(scale) }) }, i ? scale : ["Results of this repository", scale && `: ${scale}`]),
  ];
  return h("li", {},
    h("a", { href: link(["ablations", name]), "data-key": name }, title || name),
    h("small", {}, name, " · ", plural(total(counts), "run"), " ", tag(ablation)),
    committed.length > 0 && h("small", {}, committed.map(results)),
  );
}

/** Newest first; then those with runs; then by name. */
const order = (a, b) =>
  (b.newest_ms ?? 0) - (a.newest_ms ?? 0) || (isTrained(b) ? 1 : 0) - (isTrained(a) ? 1 : 0) || a.name.localeCompare(b.name);

/** Whether all words are in the name, title or table of the paper of an ablation. */
function matches({ name, title, reproduces }, words) {
  const text = [name, title, reproduces].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

export function overview(root) {
  const part = changes();
  const [intro, active, mine, claims, library] = [h("p", { class: "lead" }), h("div"), h("div"), h("div"), h("div")];
  const search = searchField("Search ablations", "name, title, table of the paper", (q) => change({ q }, { replace: true }));
  let started = false;

  async function drawClaims(words) {
    const found = await get(at("claims", { committed: true }));
    const names = new Set(found.map((each) => each.ablation));
    part("claims", JSON.stringify([found, words]), () =>
      replace(
        claims,
        found.length > 0 && !words.length && section(
          "Results of this repository",
          { id: "claims" },
          h("p", { class: "note" },
            `What the paper says, and whether the small models of ${plural(names.size, "ablation")} show it. Their runs are not in your store.`,
          ),
          claimsTable(found, { links: true }),
        ),
      ),
    );
  }

  return {
    title: () => "Ablations",
    async refresh(params) {
      const [ablations, finished, running] = await Promise.all([
        get(at("ablations")),
        get(at("runs", { status: "finished", limit: 1 })), // a run can be in several ablations
        get(at("sweeps", { limit: 20 })).catch(() => ({ sweeps: [] })),
      ]);
      if (!started) replace(root, h("div", { class: "head" }, h("h1", {}, "Ablations"), intro, search), active, mine, claims, library);
      started = true;
      if (document.activeElement !== search) search.value = params.get("q") ?? "";
      const words = (params.get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      part("list", JSON.stringify([words, ablations, finished.total, Math.floor(Date.now() / 60_000)]), () => {
        intro.textContent = `${plural(ablations.length, "ablation")}, ${plural(finished.total, "finished run")}`;
        const sorted = ablations.filter((each) => matches(each, words)).sort(order);
        const [first, rest] = [sorted.filter(isOwn), sorted.filter((each) => !isOwn(each))];
        replace(
          mine,
          !ablations.length &&
            empty(
              "There are no ablation files. Write one into the folder that `cope-sweep serve --ablations` names; this page shows it at once.",
            ),
          ablations.length > 0 && !sorted.length && empty("No ablation has these words in its name, title or table of the paper."),
          first.length > 0 && section("Your ablations", { id: "own" }, h("ul", { class: "ablations" }, first.map(own))),
        );
        replace(library, rest.length > 0 && section("Library", { id: "library" }, h("ul", { class: "library" }, rest.map(shipped))));
      });
      const now = running.sweeps.filter((each) => ["pending", "running"].includes(each.status));
      part("active", JSON.stringify(now), () =>
        replace(
          active,
          now.map((each) =>
            h("a", { class: "active", href: link(["sweeps", each.sweep_id]), "data-key": each.sweep_id },
              h("b", {}, `${each.title || each.ablation} ${each.status === "running" ? "is being trained" : "will be trained"}`),
              progress(each.counts),
              h("small", {}, sweepSummary(each)),
            ),
          ),
        ),
      );
      await drawClaims(words);
    },
  };
}
