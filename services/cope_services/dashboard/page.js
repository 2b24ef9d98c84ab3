"use strict";

// The page: a list of ablations, and the one that the address names (#quickstart). Everything is read from the API,
// again every few seconds; what has not changed comes back as 304 and is not drawn again.

const API = "/api/v1/ablations";
const REFRESH_MS = 5000;
const STATUSES = ["finished", "running", "failed", "interrupted", "pending"];
const by = (id) => document.getElementById(id);
const view = { name: null, scale: "", metric: "", hidden: new Set(), drawn: {}, turn: 0 };

/** Body of a GET; throws the service's own message. */
async function get(path) {
  const response = await fetch(path);
  const text = await response.text();
  if (response.ok) return text;
  let message = `${response.status} ${response.statusText}`;
  try { message = JSON.parse(text).error.message; } catch { /* not one of ours */ }
  throw Object.assign(new Error(message), { answered: true });
}

/** Draw into a place only what differs from what stands there. */
function unlessDrawn(key, text, draw) {
  if (view.drawn[key] === text) return;
  draw(text);
  view.drawn[key] = text;
}

function query(extra = {}) {
  const given = Object.entries({ scale: view.scale, ...extra }).filter(([, value]) => value);
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

function progress(counts, runs) {
  const svg = el("svg", { class: "progress", viewBox: `0 0 ${Math.max(runs, 1)} 1`, preserveAspectRatio: "none" });
  let start = 0;
  for (const status of STATUSES) {
    const count = counts[status] ?? 0;
    svg.append(el("rect", { class: status, x: start, width: count, height: 1 }));
    start += count;
  }
  return svg;
}

function card(ablation) {
  const { name, title, counts, runs, error } = ablation;
  const rest = STATUSES.filter((s) => s !== "finished" && counts[s]).map((s) => `${counts[s]} ${s}`);
  const done = `${counts.finished ?? 0} of ${runs} runs${rest.length ? ` · ${rest.join(" · ")}` : ""}`;
  return el("a", { class: "card", href: `#${encodeURIComponent(name)}`, "aria-current": name === view.name && "true" },
    el("b", {}, title || name),
    ...(error ? [el("small", { class: "bad" }, error)] : [progress(counts, runs), el("small", {}, done)]));
}

async function refreshList() {
  const text = await get(API);
  const ablations = JSON.parse(text);
  if (view.name === null && ablations.length) view.name = (ablations.find((a) => !a.error) ?? ablations[0]).name;
  unlessDrawn("list", text + view.name, () => {
    const cards = ablations.map(card);
    by("ablations").replaceChildren(...(cards.length ? cards : [el("p", { class: "empty" }, "No ablation files yet.")]));
  });
}

function describe(ablation) {
  by("title").textContent = ablation.title || ablation.name;
  by("about").textContent = [ablation.name, ablation.reproduces].filter(Boolean).join(" · ");
  by("hypothesis").textContent = ablation.hypothesis;
  by("error").textContent = ablation.error ?? "";
  by("error").hidden = !ablation.error;
  by("results").hidden = Boolean(ablation.error);
  by("scales").hidden = !ablation.scales.length;
  by("scale").replaceChildren(...["", ...ablation.scales].map((s) => new Option(s || "as declared", s, false, s === view.scale)));
  by("runs").replaceChildren(...ablation.plan.map(({ row, runs }) => el("div", { class: "row" }, el("span", {}, row),
    ...runs.map((run) => el("a", {
      class: `dot ${run.status}`, href: `/api/v1/runs/${run.run_id}`,
      title: `${run.run_id}, seed ${run.seed}: ${run.status}`, "aria-label": `${row}, seed ${run.seed}: ${run.status}`,
    })))));
}

function drawPlot(text) {
  const curves = JSON.parse(text);
  by("metric").replaceChildren(...curves.metrics.map((m) => new Option(m, m, false, m === curves.metric)));
  drawCurves(by("plot"), curves, { log: by("log").checked, hidden: view.hidden });
}

async function refreshDetail() {
  if (view.name === null) return;
  const turn = ++view.turn; // an answer that was overtaken by a later question is dropped
  const path = `${API}/${encodeURIComponent(view.name)}`;
  const text = await get(path + query());
  if (turn !== view.turn) return;
  unlessDrawn("about", text, () => describe(JSON.parse(text)));
  by("detail").hidden = false;
  if (JSON.parse(text).error) return;
  unlessDrawn("downloads", path + query(), () => by("downloads").replaceChildren(
    ...["csv", "markdown", "latex", "json"].map((format) => el("a", { href: `${path}/table${query({ format })}` }, format)),
    el("a", { href: `${path}/table${query({ format: "csv", runs: true })}` }, "all runs")));
  const [table, curves] = await Promise.all([
    get(`${path}/table${query({ format: "html" })}`), get(`${path}/curves${query({ metric: view.metric })}`)]);
  if (turn !== view.turn) return;
  unlessDrawn("table", table, () => by("table").replaceChildren(
    ...new DOMParser().parseFromString(table, "text/html").body.children));
  unlessDrawn("plot", curves + by("log").checked, () => drawPlot(curves));
}

async function refresh() {
  const live = by("live");
  try {
    await refreshList();
    await refreshDetail();
    live.className = "";
    live.textContent = `as of ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    live.className = "lost";
    live.textContent = error.answered ? error.message : "the server does not answer; trying again";
  }
}

function choose() {
  const name = decodeURIComponent(location.hash.slice(1)) || null;
  by("detail").hidden = true;
  Object.assign(view, { name, scale: "", metric: "", hidden: new Set(), drawn: {} });
  refresh();
}

by("scale").addEventListener("change", (event) => { view.scale = event.target.value; refresh(); });
by("metric").addEventListener("change", (event) => { view.metric = event.target.value; refresh(); });
by("log").addEventListener("change", refresh);
addEventListener("hashchange", choose);
setInterval(() => document.hidden || refresh(), REFRESH_MS);
choose();
