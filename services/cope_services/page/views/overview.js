// The ablations: newest first, those without any run last.

import { at, get } from "../api.js";
import { changes, empty, h, replace, searchField, section } from "../dom.js";
import { ago, moment, plural } from "../format.js";
import { change, link } from "../route.js";
import { begun, fullestScale, progress, sizes, summary, total } from "../status.js";

const OWN = "own size";

function card(ablation) {
  const { name, title, error, reproduces, newest_ms: newest } = ablation;
  const trained = error ? [] : sizes(ablation).filter(({ counts }) => begun(counts));
  return h("li", {},
    h("div", { class: "what" },
      h("a", { href: link(["ablations", name], { scale: error ? "" : fullestScale(ablation) }), "data-key": name },
        title || name,
      ),
      h("small", {}, [name, reproduces].filter(Boolean).join(" · ")),
    ),
    error
      ? h("p", { class: "bad" }, error)
      : h("ul", { class: "sizes" },
          trained.map(({ scale, counts }) =>
            h("li", {},
              h("a", { href: link(["ablations", name], { scale: scale || "own" }), "data-key": `${name} ${scale}` },
                scale || OWN,
              ),
              progress(counts),
              h("small", {}, summary(counts)),
            ),
          ),
        ),
    h("small", { class: "when", title: newest ? moment(newest) : null },
      newest ? ago(newest) : "",
    ),
  );
}

function unstarted(ablation) {
  const { name, title, reproduces, counts } = ablation;
  return h("li", {},
    h("a", { href: link(["ablations", name]), "data-key": name }, title || name),
    h("small", {}, [name, plural(total(counts), "run"), reproduces].filter(Boolean).join(" · ")),
    ablation.committed.length > 0 && h("small", { class: "committed" }, `committed results: ${ablation.committed.map((scale) => scale || OWN).join(", ")}`),
  );
}

const isTrained = (ablation) => !ablation.error && sizes(ablation).some(({ counts }) => begun(counts));

/** Newest first; then those with runs; then by name. */
const order = (a, b) => (b.newest_ms ?? 0) - (a.newest_ms ?? 0) || isTrained(b) - isTrained(a) || a.name.localeCompare(b.name);

/** Whether all words are in the name, title or table of the paper of an ablation. */
function matches({ name, title, reproduces }, words) {
  const text = [name, title, reproduces].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

export function overview(root) {
  const part = changes();
  const [intro, list, active] = [h("p", { class: "lead" }), h("div"), h("div")];
  const search = searchField("Search ablations", "name, title, table of the paper", (q) => change({ q }, { replace: true }));
  let started = false;
  return {
    title: () => "Ablations",
    async refresh(params) {
      const [ablations, finished, running] = await Promise.all([
        get(at("ablations")),
        get(at("runs", { status: "finished", limit: 1 })), // a run can be in several ablations
        get(at("sweeps", { limit: 20 })).catch(() => ({ sweeps: [] })),
      ]);
      if (!started) replace(root, h("div", { class: "head" }, h("h1", {}, "Ablations"), intro, search), active, list);
      started = true;
      if (document.activeElement !== search) search.value = params.get("q") ?? "";
      const words = (params.get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      part("list", JSON.stringify([words, ablations, finished.total, Math.floor(Date.now() / 60_000)]), () => {
        intro.textContent = `${plural(ablations.length, "ablation")}, ${plural(finished.total, "finished run")}`;
        const sorted = ablations.filter((each) => matches(each, words)).sort(order);
        const [first, rest] = [
          sorted.filter((each) => isTrained(each) || each.error),
          sorted.filter((each) => !isTrained(each) && !each.error),
        ];
        replace(
          list,
          !ablations.length &&
            empty(
              "There are no ablation files. Write one into the folder that `cope-sweep serve --ablations` names; this page shows it at once.",
            ),
          ablations.length > 0 && !sorted.length && empty("No ablation has these words in its name, title or table of the paper."),
          first.length > 0 && h("ul", { class: "ablations" }, first.map(card)),
          rest.length > 0 && section("Not started in this store", { id: "unstarted" }, h("ul", { class: "unstarted" }, rest.map(unstarted))),
        );
      });
      const now = running.sweeps.filter((each) => ["pending", "running"].includes(each.status));
      part("active", JSON.stringify(now), () =>
        replace(
          active,
          now.map((each) =>
            h("a", { class: "active", href: link(["sweeps", each.sweep_id]), "data-key": each.sweep_id },
              h("b", {}, `${each.title || each.ablation} ${each.status === "running" ? "is being trained" : "will be trained"}`),
              progress(each.counts),
              h("small", {}, summary(each.counts)),
            ),
          ),
        ),
      );
    },
  };
}
