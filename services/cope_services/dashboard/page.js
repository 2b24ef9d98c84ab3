"use strict";

// The page: a list of ablations, and the details of the one in the address (#quickstart). The page reads the API again
// every few seconds. The server answers 304 to an unchanged request, and unchanged parts are not drawn again.

const API = "/api/v1/ablations";
const REFRESH_MS = 5000;
// A status has a sign, because not everybody can tell colours apart.
const SIGNS = { finished: "✓", running: "›", failed: "×", damaged: "!", interrupted: "‖", stopped: "–", pending: "" };
const STATUSES = Object.keys(SIGNS);
const byId = (id) => document.getElementById(id);
const view = { name: null, scale: "", metric: "", hidden: new Set(), drawn: {}, request: 0 };

/** The body of a GET response. Throws an error with the message of the service. */
async function get(path) {
  const response = await fetch(path);
  const text = await response.text();
  if (response.ok) return text;
  let message = `${response.status} ${response.statusText}`;
  try { message = JSON.parse(text).detail ?? text; } catch { /* not an error body of the service */ }
  throw Object.assign(new Error(message), { answered: true });
}

/** Draw a part of the page if its text has changed. */
function drawIfChanged(key, text, draw) {
  if (view.drawn[key] === text) return;
  draw(text);
  view.drawn[key] = text;
}

function query(extra = {}) {
  const given = Object.entries({ scale: view.scale, ...extra }).filter(([, value]) => value);
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

function progress(counts, runs) {
  const svg = element("svg", { class: "progress", viewBox: `0 0 ${Math.max(runs, 1)} 1`, preserveAspectRatio: "none" });
  let start = 0;
  for (const status of STATUSES) {
    const count = counts[status] ?? 0;
    svg.append(element("rect", { class: status, x: start, width: count, height: 1 }));
    start += count;
  }
  return svg;
}

function card(ablation) {
  const { name, title, counts, runs, error } = ablation;
  const rest = STATUSES.filter((s) => s !== "finished" && counts[s]).map((s) => `${counts[s]} ${s}`);
  const done = `${counts.finished ?? 0} of ${runs} runs${rest.length ? ` · ${rest.join(" · ")}` : ""}`;
  return element("a", { class: "card", href: `#${encodeURIComponent(name)}`, "aria-current": name === view.name && "true" },
    element("b", {}, title || name),
    ...(error ? [element("small", { class: "bad" }, error)] : [progress(counts, runs), element("small", {}, done)]));
}

async function refreshList() {
  const text = await get(API);
  const ablations = JSON.parse(text);
  if (view.name === null && ablations.length) view.name = (ablations.find((a) => !a.error) ?? ablations[0]).name;
  drawIfChanged("list", text + view.name, () => {
    const cards = ablations.map(card);
    byId("ablations").replaceChildren(...(cards.length ? cards : [element("p", { class: "empty" }, "There are no ablation files.")]));
  });
}

function describe(ablation) {
  byId("title").textContent = ablation.title || ablation.name;
  byId("about").textContent = [ablation.name, ablation.reproduces].filter(Boolean).join(" · ");
  byId("hypothesis").textContent = ablation.hypothesis;
  byId("error").textContent = ablation.error ?? "";
  byId("error").hidden = !ablation.error;
  byId("results").hidden = Boolean(ablation.error);
  byId("scales").hidden = !ablation.scales.length;
  byId("scale").replaceChildren(...["", ...ablation.scales].map((s) => new Option(s || "default", s, false, s === view.scale)));
  byId("runs").replaceChildren(...ablation.plan.map(({ row, runs }) => element("div", { class: "row" }, element("span", {}, row),
    ...runs.map((run) => element("a", {
      class: `dot ${run.status}`, "data-sign": SIGNS[run.status], href: `/api/v1/runs/${run.run_id}`,
      title: `${run.run_id}, seed ${run.seed}: ${run.status}`, "aria-label": `${row}, seed ${run.seed}: ${run.status}`,
    })))));
}

function drawPlot(text) {
  const curves = JSON.parse(text);
  byId("metric").replaceChildren(...curves.metrics.map((m) => new Option(m, m, false, m === curves.metric)));
  drawCurves(byId("plot"), curves, { log: byId("log").checked, hidden: view.hidden });
}

async function refreshDetail() {
  if (view.name === null) return;
  const request = ++view.request; // a response is ignored after a newer request
  const path = `${API}/${encodeURIComponent(view.name)}`;
  const text = await get(path + query());
  if (request !== view.request) return;
  drawIfChanged("about", text, () => describe(JSON.parse(text)));
  byId("detail").hidden = false;
  if (JSON.parse(text).error) return;
  drawIfChanged("downloads", path + query(), () => byId("downloads").replaceChildren(
    ...["csv", "markdown", "latex", "json"].map((format) => element("a", { href: `${path}/table${query({ format })}` }, format)),
    element("a", { href: `${path}/table${query({ format: "csv", runs: true })}` }, "all runs")));
  const [table, curves] = await Promise.all([
    get(`${path}/table${query({ format: "html" })}`), get(`${path}/curves${query({ metric: view.metric })}`)]);
  if (request !== view.request) return;
  drawIfChanged("table", table, () => byId("table").replaceChildren(
    ...new DOMParser().parseFromString(table, "text/html").body.children));
  drawIfChanged("plot", curves + byId("log").checked, () => drawPlot(curves));
}

async function refresh() {
  const live = byId("live");
  try {
    await refreshList();
    await refreshDetail();
    live.className = "";
    live.textContent = `updated ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    live.className = "offline";
    live.textContent = error.answered ? error.message : "The server does not respond. Trying again …";
  }
}

function openAblation() {
  const name = decodeURIComponent(location.hash.slice(1)) || null;
  byId("detail").hidden = true;
  Object.assign(view, { name, scale: "", metric: "", hidden: new Set(), drawn: {} });
  refresh();
}

byId("scale").addEventListener("change", (event) => { view.scale = event.target.value; refresh(); });
byId("metric").addEventListener("change", (event) => { view.metric = event.target.value; refresh(); });
byId("statuses").append(...STATUSES.map((status) => element("span", {}, element("i", { class: `dot ${status}`, "data-sign": SIGNS[status] }), status)));
byId("log").addEventListener("change", refresh);
addEventListener("hashchange", openAblation);
setInterval(() => document.hidden || refresh(), REFRESH_MS);
openAblation();
