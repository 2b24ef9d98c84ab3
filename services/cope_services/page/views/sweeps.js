// The history of sweeps.

import { at, get } from "../api.js";
import { changes, empty, h, replace, select, table } from "../dom.js";
import { duration, moment, plural } from "../format.js";
import { change, link } from "../route.js";
import { badge, progress, setsText, sizeParams, sweepSummary } from "../status.js";

const LIMIT = 200;
const COLUMNS = ["sweep", "status", "ablation", ["runs", "bars"], "executor", ["started", "number"], ["duration", "number"]];

function line(sweep) {
  const { sweep_id: id, started_ms: start, ended_ms: end, status } = sweep;
  const until = end ?? (status === "running" ? Date.now() : null);
  return [
    h("a", { class: "mono", href: link(["sweeps", id]), "data-key": id }, id),
    badge(status),
    [
      h("a", { href: link(["ablations", sweep.ablation], sizeParams(sweep)), "data-key": `ablation ${id}` }, sweep.title || sweep.ablation),
      " ",
      h("small", {}, [sweep.scale, setsText(sweep.sets)].filter(Boolean).join(": ")),
    ],
    [progress(sweep.counts), h("small", {}, sweepSummary(sweep), sweep.reused ? ` · ${sweep.reused} reused` : "")],
    sweep.executor,
    moment(start),
    until ? duration((until - start) / 1000) : "–",
  ];
}

export function sweeps() {
  const part = changes();
  const [controls, list] = [h("div", { class: "bar controls" }), h("div")];
  const head = h("div", { class: "head" },
    h("h1", {}, "Sweeps"),
    h("p", { class: "lead" }, "Each is one execution of an ablation, with its settings, machine and results."),
  );
  return {
    nodes: [head, controls, list],
    title: () => "Sweeps",
    async refresh(params) {
      const ablation = params.get("ablation") ?? "";
      const [page, ablations] = await Promise.all([get(at("sweeps", { ablation, limit: LIMIT })), get(at("ablations"))]);
      const names = ablations.map((each) => each.name);
      part("controls", JSON.stringify([ablation, names]), () =>
        replace(controls, select("ablation", [["", "any"], ...names], ablation, (value) => change({ ablation: value }))),
      );
      const clock = page.sweeps.some((each) => each.status === "running") ? Math.floor(Date.now() / 5000) : 0;
      part("list", JSON.stringify([page, clock]), () => {
        if (!page.sweeps.length)
          return replace(list, empty("No sweep has been started. `cope-sweep run quickstart` starts one."));
        const more = page.total > LIMIT && h("p", { class: "note" }, `The newest ${LIMIT} of ${plural(page.total, "sweep")}.`);
        return replace(list, table("Sweeps", COLUMNS, page.sweeps.map(line), { class: "sweeps" }), more);
      });
    },
  };
}
