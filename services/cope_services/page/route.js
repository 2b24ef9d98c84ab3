// The address: #/ablations/flip_flop?scale=small&metric=…. All state that is worth sharing is in it.

/** A part of a path; as it is written if it has a `%` that begins no escape. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** {path: ["ablations", "flip_flop"], params: URLSearchParams} of the present address. */
export function current() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decoded), params: new URLSearchParams(query) };
}

/** The parts of a path, and parameters: "runs/ID?tab=logs". Empty values are left out, and lists are repeated. */
export function written(path, params = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") search.append(name, each);
    }
  }
  return `${path.map(encodeURIComponent).join("/")}${search.size ? `?${search}` : ""}`;
}

/** The address of a view: link(["runs", id], {tab: "logs"}). */
export const link = (path, params) => `#/${written(path, params)}`;

const DIGITS = 10; // of the id of a run, by which an address names it

/** What names a run in addresses. */
export const shortId = (id) => id.slice(0, DIGITS);

/** Run ids as one text for an address: their first digits, with points between them, which need no escape there. */
export const shortIds = (ids) => ids.map(shortId).join(".");

/** The first digits of the run ids that a parameter of the address names. */
export const idsIn = (params, name) => (params.get(name) ?? "").split(".").filter(Boolean);

/** Change parameters of the present address; null, "" and [] remove one. The view is told, and the back button undoes it. */
export function change(changes, { replace = false } = {}) {
  const { path, params } = current();
  for (const [name, value] of Object.entries(changes)) {
    params.delete(name);
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "" && each !== false) params.append(name, each === true ? "1" : each);
    }
  }
  const target = `#/${path.map(encodeURIComponent).join("/")}${params.size ? `?${params}` : ""}`;
  if (target === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", target);
  dispatchEvent(new Event("routechange"));
}

/**
 * The values of a parameter with `item` added, or without it. They are those of the address, which a choice changes at once:
 * what is drawn may be older. `drawn` are used where the address has none of its own; "none" there means an empty choice.
 */
export function toggled(name, item, drawn = null) {
  const { params } = current();
  const asked = params.getAll(name);
  const list = !drawn ? asked : !params.has(name) ? drawn : asked.filter((each) => each !== "none");
  return list.includes(item) ? list.filter((each) => each !== item) : [...list, item];
}
