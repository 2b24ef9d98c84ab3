// The history of sweeps.

import { at, get } from "../api.js";
import { changes, empty, h, replace, scrolling, select } from "../dom.js";
import { duration, moment, plural } from "../format.js";
import { change, link } from "../route.js";
import { badge, progress, summary } from "../status.js";

const LIMIT = 200;

function line(sweep) {
  const { sweep_id: id, started_ms: start, ended_ms: end } = sweep;
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("a", { class: "mono", href: link(["sweeps", id]), "data-key": id }, id)),
    h("td", {}, badge(sweep.status)),
    h(
      "td",
      {},
      h("a", { href: link(["ablations", sweep.ablation]), "data-key": `ablation ${id}` }, sweep.title || sweep.ablation),
    ),
    h(
      "td",
      { class: "bars" },
      progress(sweep.counts),
      h("small", {}, summary(sweep.counts), sweep.reused ? ` · ${sweep.reused} reused` : ""),
    ),
    h("td", {}, sweep.executor),
    h("td", { class: "number" }, moment(start)),
    h(
      "td",
      { class: "number" },
      end ? duration((end - start) / 1000) : sweep.status === "running" ? duration((Date.now() - start) / 1000) : "–",
    ),
  );
}

export function sweeps(root) {
  const part = changes();
  const [controls, table] = [h("div", { class: "bar controls" }), h("div")];
  let started = false;
  return {
    title: () => "Sweeps",
    async refresh(params) {
      const ablation = params.get("ablation") ?? "";
      const [page, ablations] = await Promise.all([get(at("sweeps", { ablation, limit: LIMIT })), get(at("ablations"))]);
      if (!started)
        replace(
          root,
          h(
            "div",
            { class: "head" },
            h("h1", {}, "Sweeps"),
            h("p", { class: "lead" }, "Each is one call of `cope-sweep run` or one submission."),
          ),
          controls,
          table,
        );
      started = true;
      part("controls", JSON.stringify([ablation, ablations.map((each) => each.name)]), () =>
        replace(
          controls,
          select("ablation", [["", "any"], ...ablations.map((each) => each.name)], ablation, (value) =>
            change({ ablation: value }),
          ),
        ),
      );
      const names = ["sweep", "status", "ablation", "runs", "executor", "started", "duration"];
      const clock = page.sweeps.some((each) => each.status === "running") ? Math.floor(Date.now() / 5000) : 0;
      part("table", JSON.stringify([page, clock]), () =>
        replace(
          table,
          page.sweeps.length
            ? [
                scrolling(
                  "Sweeps",
                  h(
                    "table",
                    { class: "sweeps" },
                    h(
                      "thead",
                      {},
                      h(
                        "tr",
                        {},
                        names.map((name, i) => h("th", { scope: "col", class: i > 4 ? "number" : null }, name)),
                      ),
                    ),
                    h("tbody", {}, page.sweeps.map(line)),
                  ),
                ),
                page.total > LIMIT && h("p", { class: "note" }, `The newest ${LIMIT} of ${plural(page.total, "sweep")}.`),
              ]
            : empty("No sweep has been started. `cope-sweep run quickstart` starts one."),
        ),
      );
    },
  };
}
