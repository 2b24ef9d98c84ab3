// Requests to the service. A body that has not changed (304) is not sent again.

import { written } from "./route.js";

const BASE = "/api/v1";
const KEY = "cope-sweep-key";
const KEPT = 200;
const bodies = new Map(); // path → {etag, text}

/** An answer that is an error. `message` is what the service says. */
class ApiError extends Error {
  constructor(status, problem, fallback) {
    super(problem.detail ?? problem.error?.message ?? problem.title ?? fallback);
    this.status = status;
    this.code = problem.code ?? "";
  }
}

export class Unreachable extends Error {
  message = "The server does not respond.";
}

/** Tell a lost connection, for which fetch() has a TypeError, from an error in a script of the page. */
function lost(error) {
  throw error instanceof TypeError ? new Unreachable() : error;
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The URL of a path of the service: `/api/v1/runs` is below the page, which a proxy may have put below a prefix. */
export const urlOf = (path) => new URL(path.replace(/^\//, ""), document.baseURI).href;

/** fetch() with the key. Throws an ApiError for an error of the service, Unreachable if the server does not respond. */
async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  const response = await fetch(urlOf(path), { ...options, headers }).catch(lost);
  if (response.ok || response.status === 304) return response;
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401) dispatchEvent(new CustomEvent("unauthorised", { detail: problem.detail }));
  throw new ApiError(response.status, problem, `${response.status} ${response.statusText}`);
}

/** The JSON of a GET request. */
export const get = async (path, options) => JSON.parse(await text(path, options));

/** The body of a GET request; the one that was received before, if the server answers 304. */
export async function text(path, { signal } = {}) {
  const before = bodies.get(path);
  const response = await request(path, { signal, headers: before ? { "If-None-Match": before.etag } : {} });
  if (response.status === 304) return before.text;
  const body = await response.text().catch(lost);
  const etag = response.headers.get("ETag");
  bodies.delete(path);
  if (etag) bodies.set(path, { etag, text: body });
  if (bodies.size > KEPT) bodies.delete(bodies.keys().next().value);
  return body;
}

/** Send JSON; the JSON of the answer, or null where it has none. */
export const post = (path, body, { signal } = {}) => send("POST", path, body, signal);

/** The same under a path that is chosen here: what is sent twice is done once. */
export const put = (path, body) => send("PUT", path, body);

async function send(method, path, body, signal) {
  const response = await request(path, {
    method,
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body ?? {}),
  });
  const answer = await response.text().catch(lost);
  return answer ? JSON.parse(answer) : null;
}

/** A file as a data URL, which an image can show although it needs a key. */
export async function dataUrl(path) {
  const blob = await (await request(path)).blob();
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** Save a file under a name, or say why not. A link could not send the key. */
export async function download(path, name) {
  const blob = await request(path).then((response) => response.blob()).catch((error) => alert(error.message));
  if (!blob) return;
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** The server-sent events of a path: yields {event, data}, data parsed as JSON. EventSource could not send the key. */
export async function* events(path, signal) {
  const response = await request(path, { signal, headers: { Accept: "text/event-stream" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let [buffer, event, data] = ["", "message", []];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (buffer + value).split(/\r\n|\n/);
    buffer = lines.pop();
    for (const line of lines) {
      if (line.startsWith("event:")) event = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      else if (line === "" && data.length) {
        yield { event, data: JSON.parse(data.join("\n")) };
        [event, data] = ["message", []];
      }
    }
  }
}

/** The path of a route below /api/v1: at(["runs", id], {curve: false}), at("runs"). */
export const at = (path, query) => `${BASE}/${written(Array.isArray(path) ? path : path.split("/"), query)}`;
