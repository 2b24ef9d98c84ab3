// Home: the ablations that are trained here, what the committed results say about the paper's claims, and the library.

import { at, get } from "../api.js";
import { extent } from "../axes.js";
import { changes, empty, h, replace, searchField, section } from "../dom.js";
import { ago, hasWords, moment, number, plural, withMinus } from "../format.js";
import { change, link } from "../route.js";
import { askedSize, begun, isActive, progress, scaleName, setsText, sizeParams, sizes, summary, sweepSummary, total } from "../status.js";
import { primaryOf } from "../values.js";
import { claimsTable } from "./claims.js";
import { bestFirst, groupsOf, verdictText } from "./results_table.js";
import { askField } from "./tried.js";

const isTrained = (ablation) => sizes(ablation).some(({ counts }) => begun(counts));

/** Whether an ablation is the reader's: it has runs here, or says of no table or figure that it reproduces it. */
const isOwn = (ablation) => ablation.error || isTrained(ablation) || !ablation.reproduces;

/** `Table 5 (right)` of a text about what is reproduced; `extra` where it is neither a table nor a figure. */
const tagOf = (reproduces) => reproduces.match(/^(Tables?|Figures?) \d[^,]*/)?.[0] ?? "extra";
const tag = ({ reproduces }) => reproduces && h("span", { class: "tag", title: reproduces }, tagOf(reproduces));

/** What a size is at; a word, because a bar does not tell them apart. `active`: sweeps that have not ended. */
function stateOf({ name }, scales, { sets, counts }, active) {
  if (counts.running) return "training";
  if ((counts.finished ?? 0) + (counts.stopped ?? 0) === total(counts)) return "finished";
  const isOf = (each) => each.ablation === name && scales.includes(each.scale ?? "") && JSON.stringify(each.sets) === JSON.stringify(sets);
  return active.some(isOf) ? "waiting" : "incomplete";
}

/** A line for each size: its name, how far it is, and the verdicts on its claims. `others`: the names of scales with the same runs. */
function sizeLine(ablation, size, others, claims, active) {
  const [{ name, scales }, { scale, sets, counts }, state] = [ablation, size, stateOf(ablation, [size.scale, ...others], size, active)];
  const label = [scales.length && [scaleName(scale), ...others].join(", "), setsText(sets)].filter(Boolean).join(": ");
  const text = label && h("a", { href: link(["ablations", name], sizeParams({ scale, sets })), "data-key": `${name} ${label}` }, label);
  return h("li", {},
    h("span", {}, text, " ", h("span", { class: `stage ${state}` }, state)),
    progress(counts),
    h("small", {}, summary(counts), claims.length > 0 && ` · ${shownOf(byClaim(claims))}`),
  );
}

/** The results by claim: a statement about a task is one claim, however many reports make it. */
const byClaim = (results) => [...Map.groupBy(results, ({ claim, task }) => JSON.stringify([claim, task])).values()];

/** Those of the results of a claim that decide about it. */
const deciding = (results) => results.filter((each) => !each.decided_by.length);

/** `2 of 3 claims shown`; `3 claims: too few seeds` where all have this verdict. */
function shownOf(claims) {
  const decided = claims.flatMap(deciding);
  const [{ verdict }] = decided;
  if (verdict !== "shown" && decided.every((each) => each.verdict === verdict)) return `${plural(claims.length, "claim")}: ${verdict}`;
  const shown = claims.filter((results) => deciding(results).every((each) => each.verdict === "shown"));
  return `${shown.length} of ${plural(claims.length, "claim")} shown`;
}

const BEST = 3; // rows on a card

/** The best rows of a table by the primary metric, with their verdicts: of a table in groups, the best of each. */
function bestRows({ metrics, rows, axes, against }) {
  const metric = primaryOf(metrics);
  const groups = groupsOf({ rows, axes }, against)
    .map(([, group]) => bestFirst(group.filter((row) => row.metrics[metric.name].n), metrics))
    .filter((group) => group.length);
  const all = groups.length > 1 ? groups.map(([first]) => first) : groups.flat();
  const what = groups.length > 1 ? `best of each ${Object.values(axes)[0]}` : all.length > BEST && `best of ${plural(all.length, "row")}`;
  return all.length > 0 && h("dl", { class: "leaders", "aria-label": `The best rows by ${metric.title}` },
    h("dt", {}, metric.title), h("dd", {}, what && h("small", {}, what, all.length > BEST && groups.length > 1 && `: ${BEST} of ${all.length}`)),
    all.slice(0, BEST).flatMap((row) => {
      const { text, comparison } = row.metrics[metric.name];
      return [h("dt", {}, row.row), h("dd", {}, h("b", {}, withMinus(text)), " ", h("small", {}, verdictText(comparison)))];
    }),
  );
}

const LOSS = "train/loss";
const [WIDTH, HEIGHT] = [220, 40];

/** The losses of the runs that are trained now, as small curves. */
function sparkline(rows) {
  const series = rows.flatMap((row) => row.series).map(({ points }) => points.filter(([, value]) => Number.isFinite(value)));
  const points = series.flat();
  if (points.length < 2) return null;
  const [[, last], [low, high]] = [extent(points.map(([step]) => step)), extent(points.map(([, value]) => value))];
  const x = (step) => ((step / last) * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - 1 - ((value - low) / (high - low || 1)) * (HEIGHT - 2)).toFixed(1);
  const path = (each) => each.map(([step, value], i) => `${i ? "L" : "M"}${x(step)} ${y(value)}`).join("");
  return h("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `Training loss, from ${number(high, 3)} to ${number(low, 3)}` },
    series.filter((each) => each.length > 1).map((each) => h("path", { d: path(each) })),
  );
}

const CARDS = 6; // the newest ablations, whose results are read before a card is drawn; those of others when they are seen
const MOST_CURVES = 20; // rows of a small curve

/** The losses of the first rows; null before a run has logged one. */
async function lossesOf(path, asked) {
  const { metrics } = await get(at(path, { ...asked, limit: 1 }));
  return metrics.includes(LOSS) ? get(at(path, { ...asked, metric: LOSS })) : null;
}

/** What a card shows beside its counts: {size, table, curves, claims} of the size that opens with it. */
async function resultsOf(ablation) {
  const { scale, sets, counts = {} } = askedSize(new URLSearchParams(), ablation);
  const own = { scale, set: sets };
  const [table, curves, claims] = await Promise.all([
    counts.finished
      ? get(at(["ablations", ablation.name], own)).then(async ({ reference }) => {
          const found = await get(at(["ablations", ablation.name, "table"], { ...own, format: "json", compare: reference }));
          return { ...found, against: reference ?? "" };
        })
      : null,
    counts.running ? lossesOf(["ablations", ablation.name, "curves"], { ...own, limit: MOST_CURVES }) : null,
    get(at("claims", { ablation: ablation.name, ...own })),
  ]);
  return { size: JSON.stringify([scale, sets]), table, curves, claims };
}

function own(ablation, { size: shown, table, curves, claims = [] } = {}, active) {
  const { name, title, error, newest_ms: newest } = ablation;
  const all = error ? [] : sizes(ablation);
  const trained = all.filter(({ counts, same_runs: isSame }) => begun(counts) && !isSame);
  const same = all.filter((size) => size.same_runs).map(({ scale }) => scale);
  return h("li", { "data-name": trained.length > 0 && name },
    h("div", { class: "what" },
      h("a", { href: link(["ablations", name]), "data-key": name }, title || name),
      h("small", {}, name, " ", tag(ablation)),
      h("small", { class: "when", title: newest ? moment(newest) : null }, newest ? ago(newest) : ""),
    ),
    error && h("p", { class: "bad" }, error),
    table && bestRows(table),
    curves && sparkline(curves.rows),
    trained.length > 0 && h("ul", { class: "sizes" }, trained.map((size) => sizeLine(ablation, size, size === all[0] ? same : [], shown === JSON.stringify([size.scale, size.sets]) ? claims : [], active))),
    !error && !trained.length && h("small", {}, `${plural(total(ablation.counts), "run")}, not started`),
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

const BEYOND = "Beyond the paper";

/** The claims by the table or figure of the paper: [["Table 2", claims], …]; those of the project last. */
function bySource(results) {
  const placeOf = ({ source }) => source.match(/^(Table|Figure) \d+/)?.[0] ?? BEYOND;
  const places = [...new Set(results.map(placeOf))].sort((a, b) => (a === BEYOND) - (b === BEYOND));
  const claims = byClaim(results); // with their results in all reports, whatever tables these name
  return places.map((place) => [place, claims.filter((each) => each.some((result) => placeOf(result) === place))]);
}

/** The values of the first claim by task, as in ablations/results/README.md: "OOD (%): CoPE 1.4, best other RoPE 7.1". */
function headline(claims) {
  const leading = claims.map((results) => deciding(results)[0]).filter((each) => each.headline);
  const [first] = leading.sort((a, b) => (a.task < b.task ? -1 : Number(a.task > b.task)));
  return first ? `${first.measure}: ${first.headline}` : "";
}

/** The results of claims; of each claim, those that decide come first. */
const inOrder = (claims) => claims.flatMap((results) => [...results].sort((a, b) => a.decided_by.length - b.decided_by.length));

/** The guide, if the service has the documents. */
const guide = document.querySelector('nav a[href^="documents/"]:not([hidden])')?.href;

/** What a person sees who has trained nothing yet. */
const WELCOME = h("div", { class: "welcome" },
  h("p", {}, "Which position encoding helps, on which task, at which size? An ", h("b", {}, "ablation"), " is a file that says what varies; each combination is a row, trained with several seeds, and the table says which differences are real."),
  h("p", {}, "Train one with ", h("code", {}, "cope-sweep run quickstart"), " (six small models, a few minutes), or write a file of your own. It appears here while it trains."),
  h("p", {}, "Below are the results that come with the files. The ", h("a", { href: link(["playground"]) }, "playground"), " shows what a trained model's heads count in your text; ", h("a", { href: "docs" }, "the API"), " answers the same questions to programs.",
    guide && [" The ", h("a", { href: guide }, "documentation"), " has a tutorial, recipes and the reference."]),
);

export function overview() {
  const part = changes();
  const [intro, active, mine, claims, library] = [h("p", { class: "lead" }), h("div"), h("div"), h("div"), h("div")];
  const search = searchField("Search ablations", "name, title, table of the paper", (q) => change({ q }, { replace: true }));
  const ask = askField();
  ask.hidden = true; // until something was tried
  const results = new Map(); // name of an ablation → what its card shows
  let changed = 0; // how often these have changed
  const inView = new Set(); // the names of those whose cards are on the screen
  const watched = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) inView[isIntersecting ? "add" : "delete"](target.dataset.name);
    if ([...inView].some((name) => !results.has(name))) dispatchEvent(new Event("routechange")); // which reads them
  });

  /** The verdicts that come with the files: a line for each table of the paper, which opens. */
  async function drawClaims(query) {
    const found = await get(at("claims", { committed: true }));
    const names = new Set(found.map((each) => each.ablation));
    part("claims", JSON.stringify([found, query]), () =>
      replace(
        claims,
        found.length > 0 && !query && section(
          "Results of this repository",
          { id: "claims" },
          h("p", { class: "note" },
            `Claims of the paper and of this project, and what the reports of ${plural(names.size, "ablation")} say about them. The reports come with the files.`,
          ),
          bySource(found).map(([source, about]) =>
            h("details", { class: "folded" },
              h("summary", {}, h("b", {}, source), " ", h("span", {}, shownOf(about)), h("small", {}, headline(about))),
              claimsTable(inOrder(about), { links: true }),
            ),
          ),
        ),
      ),
    );
  }

  return {
    nodes: [h("div", { class: "head" }, h("h1", {}, "Ablations"), intro, search, ask), active, mine, claims, library],
    title: () => "Ablations",
    async refresh(params) {
      const [ablations, finished, running] = await Promise.all([
        get(at("ablations")),
        get(at("runs", { status: "finished", limit: 1 })), // a run can be in several ablations
        get(at("sweeps", { limit: 20 })).catch(() => ({ sweeps: [] })),
      ]);
      if (document.activeElement !== search) search.value = params.get("q") ?? "";
      const query = (params.get("q") ?? "").trim();
      const sorted = ablations.filter(({ name, title, reproduces }) => hasWords([name, title, reproduces].join(" "), query)).sort(order);
      const [first, rest] = [sorted.filter(isOwn), sorted.filter((each) => !isOwn(each))];
      const trained = first.filter((each) => !each.error && isTrained(each));
      const cards = results.size ? trained.filter(({ name }) => inView.has(name)) : trained.slice(0, CARDS);
      // A card without its results is better than none: what is wrong stands on the page of the ablation.
      const drawn = await Promise.all(cards.map((each) => resultsOf(each).catch(() => ({}))));
      cards.forEach(({ name }, i) => {
        if (JSON.stringify(drawn[i]) === JSON.stringify(results.get(name))) return;
        results.set(name, drawn[i]);
        changed += 1;
      });
      const now = running.sweeps.filter(isActive);
      const ids = now.map((each) => each.sweep_id);
      part("list", JSON.stringify([query, ablations, changed, finished.total, ids, Math.floor(Date.now() / 60_000)]), () => {
        ask.hidden = !finished.total;
        intro.textContent = `${plural(ablations.length, "ablation")}, ${plural(finished.total, "finished run")}`;
        replace(
          mine,
          !ablations.length &&
            empty(
              "There are no ablation files. Write one into the folder that `cope-sweep serve --ablations` names; this page shows it at once.",
            ),
          ablations.length > 0 && !sorted.length && empty("No ablation has these words in its name, title or table of the paper."),
          !finished.total && !trained.length && !query && ablations.length > 0 && WELCOME,
          first.length > 0 && section("Your ablations", { id: "own" },
            h("ul", { class: "ablations" },
              first.map((each) => own(each, results.get(each.name), now)),
            ),
          ),
        );
        watched.disconnect();
        inView.clear(); // until the new cards are seen
        mine.querySelectorAll("li[data-name]").forEach((card) => watched.observe(card));
        replace(library, rest.length > 0 && section("Library", { id: "library" }, h("ul", { class: "library" }, rest.map(shipped))));
      });
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
      await drawClaims(query);
    },
    close: () => watched.disconnect(),
  };
}
