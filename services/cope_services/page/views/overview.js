// The ablations: newest first, those without any run last.

import { at, get } from "../api.js";
import { changes, empty, h, replace, section } from "../dom.js";
import { ago, moment, plural } from "../format.js";
import { link } from "../route.js";
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
      newest ? ago(newest) : ablation.loading ? "counting …" : "",
    ),
  );
}

function unstarted(ablation) {
  const { name, title, reproduces, counts } = ablation;
  return h("li", {},
    h("a", { href: link(["ablations", name]), "data-key": name }, title || name),
    h("small", {}, [name, plural(total(counts), "run"), reproduces].filter(Boolean).join(" · ")),
  );
}

const isTrained = (ablation) => !ablation.error && sizes(ablation).some(({ counts }) => begun(counts));

/** Newest first; then those with runs; then by name. */
const order = (a, b) => (b.newest_ms ?? 0) - (a.newest_ms ?? 0) || isTrained(b) - isTrained(a) || a.name.localeCompare(b.name);

export function overview(root) {
  const part = changes();
  const [intro, list, active] = [h("p", { class: "lead" }), h("div"), h("div")];
  let started = false;
  return {
    title: () => "Ablations",
    async refresh() {
      const [ablations, finished, running] = await Promise.all([
        get(at("ablations")),
        get(at("runs", { status: "finished", limit: 1 })), // a run can be in several ablations
        get(at("sweeps", { limit: 20 })).catch(() => ({ sweeps: [] })),
      ]);
      if (!started) replace(root, h("div", { class: "head" }, h("h1", {}, "Ablations"), intro), active, list);
      started = true;
      part("list", JSON.stringify([ablations, finished.total, Math.floor(Date.now() / 60_000)]), () => {
        intro.textContent = `${plural(ablations.length, "ablation")}, ${plural(finished.total, "finished run")}`;
        const sorted = [...ablations].sort(order);
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
          first.length > 0 && h("ul", { class: "ablations" }, first.map(card)),
          rest.length > 0 && section("Not started", { id: "unstarted" }, h("ul", { class: "unstarted" }, rest.map(unstarted))),
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
