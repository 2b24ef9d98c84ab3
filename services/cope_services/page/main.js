// Opens the view that the address names, and opens another when the address changes.

import { key, Unreachable } from "./api.js";
import { empty, h, marked, replace } from "./dom.js";
import { poll, REFRESH_MS } from "./poll.js";
import { current, link } from "./route.js";
import { ablation } from "./views/ablation.js";
import { overview } from "./views/overview.js";
import { playground } from "./views/playground.js";
import { run } from "./views/run.js";
import { runs } from "./views/runs.js";
import { sweep } from "./views/sweep.js";
import { sweeps } from "./views/sweeps.js";
import { tried } from "./views/tried.js";

const byId = (id) => document.getElementById(id);
const live = byId("live");
const message = h("div"); // below the view until it is drawn; instead of it if it cannot be

/**
 * A view is a function of a name that returns {nodes, title, refresh, close}: `nodes` are its parts. `refresh(params)` reads
 * the service and draws what has changed into them; it is called when the parameters change, and every few seconds unless
 * `still` is set.
 */
const VIEWS = {
  ablations: [overview, ablation],
  runs: [runs, run],
  sweeps: [sweeps, sweep],
  playground: [playground, playground],
  tried: [tried, tried],
};

let asked = false; // whether this key was refused, and the dialog opened for it
let open = null; // {at, view, poller}

function report(error) {
  live.className = "offline";
  if (error.status !== undefined) live.textContent = `${error.status}: ${error.message}`;
  else if (error instanceof Unreachable) live.textContent = `${error.message} Trying again …`;
  else {
    live.textContent = `An error of this page: ${error.message}`;
    console.error(error);
  }
  if (!open.drawn) showError(error);
}

/** Write into the header what screen readers need not say: it changes every few seconds. */
function note(text) {
  live.className = "";
  replace(live, h("span", { "aria-hidden": "true" }, text));
}

const ERRORS = { 401: "This server requires an API key", 404: "Not found" }; // status → title

function showError(error) {
  const title = ERRORS[error.status] ?? "This view cannot be shown";
  document.title = `${title} · cope-sweep`;
  open.root.classList.add("unshown");
  replace(
    message,
    h("div", { class: "error", role: "alert" },
      h("h1", {}, title),
      h("p", {},
        error instanceof Unreachable
          ? marked(`${error.message} It may have stopped; start it with \`cope-sweep serve\`. This page tries again by itself.`)
          : error.message,
      ),
      h("p", {},
        error.status === 401
          ? h("button", { type: "button", class: "primary", onclick: () => askKey() }, "Enter a key")
          : h("a", { href: link(["ablations"]) }, "All ablations"),
      ),
    ),
  );
}

async function refresh() {
  const { view } = open;
  await view.refresh(current().params);
  if (open.view !== view) return;
  open.drawn = true;
  open.root.classList.remove("unshown");
  replace(message);
  note(`updated ${new Date().toLocaleTimeString("en-GB")}`);
  document.title = `${view.title()} · cope-sweep`;
}

function show() {
  const { path } = current();
  const at = path.join("/");
  if (open?.at === at) {
    note("Loading …"); // until then, what is shown may be of the address before
    open.poller.now();
    return;
  }
  const moved = open !== null;
  open?.poller.stop();
  open?.view.close?.();
  const name = path[0] ?? "ablations";
  const [list, one] = Object.hasOwn(VIEWS, name) ? VIEWS[name] : [];
  const factory = path.length > 1 ? one : list;
  const view = factory ? factory(path[1]) : { nodes: [], refresh: unknown };
  const root = h("div", { class: `view-${name}` }, view.nodes);
  replace(message, empty("Loading …"));
  byId("main").replaceChildren(root, message);
  for (const each of document.querySelectorAll("header nav a")) {
    if (each.hash === `#/${name}`) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  open = { at, view, root, drawn: false };
  live.textContent = "";
  open.poller = poll(refresh, view.still ? 1e9 : REFRESH_MS, report);
  if (moved) {
    scrollTo(0, 0);
    byId("main").focus({ preventScroll: true });
  }
}

function unknown() {
  throw Object.assign(new Error(`There is no view ${current().path.join("/")}.`), { status: 404 });
}

function askKey(why) {
  if (byId("keys").open) return;
  byId("keys-why").textContent = why ?? "";
  byId("keys-why").hidden = !why;
  byId("keys-value").value = key.get() ?? "";
  byId("keys").returnValue = "";
  byId("keys").showModal();
}

byId("key").addEventListener("click", () => askKey());
byId("keys-cancel").addEventListener("click", () => byId("keys").close());
byId("keys").addEventListener("close", () => {
  if (byId("keys").returnValue !== "save") return;
  key.set(byId("keys-value").value.trim());
  asked = false;
  open.at = null; // open the view again
  show();
});
addEventListener("unauthorised", (event) => {
  if (asked) return; // the button "API key" remains
  asked = true;
  askKey(event.detail);
});
document.querySelector('nav a[href="#/playground"]').addEventListener("click", (event) => {
  const { path, params } = current();
  if (path[0] !== "ablations" || !path[1]) return;
  event.preventDefault(); // with the checkpoints of the ablation at hand
  location.hash = link(["playground"], { ablation: path[1], scale: params.get("scale"), set: params.getAll("set") });
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address belongs to the view
  byId("main").focus();
});
addEventListener("hashchange", show);
addEventListener("popstate", show);
addEventListener("routechange", show);
show();
