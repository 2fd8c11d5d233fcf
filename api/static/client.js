// Talking to the api: one place for addresses, the key, timeouts and errors.

const KEY = "rollfab.key";
const TIMEOUT_MS = 6000;
const NO_KEY = /[^!-~]/; // as api/access/keys.py has it; a browser sends no header with such a sign

/** silentMs: an api sends at least a comment every 15 s; whoever sends none for so long is gone. Tests shorten it. */
export const patience = { silentMs: 45_000 };

/** Where the page lives, behind whatever prefix a proxy gives it: this file's folder's parent. */
export const ROOT = new URL("../", import.meta.url);

export class ApiError extends Error {
  /** status 0: the api itself did not answer. */
  constructor(status, message) {
    super(message);
    this.status = status;
    this.isPassing = status === 0 || status >= 500; // it may go well the next time, as it is
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

/** Take the key of an address like /#key=…, which no server is sent, and leave none in the address bar; whether there was one. */
export function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return false;
  setKey(key);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

/** The address of a place below v1: each part is one name, whatever is in it; undefined wishes are left out. */
export function at(parts, wishes = {}) {
  const pairs = Object.entries(wishes).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const query = new URLSearchParams(pairs.filter(([, value]) => value !== undefined && value !== null));
  return `v1/${parts.map(encodeURIComponent).join("/")}${query.size ? `?${query}` : ""}`;
}

async function send(path, options) {
  const key = sessionStorage.getItem(KEY);
  if (key && NO_KEY.test(key)) throw new ApiError(401, `this key is not known here, it is cut or more than a key: ${GIVE}`);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  try {
    return await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw unreached(error);
  }
}

const GIVE = "give one with the button Key, above";

/** The error for an answer that refuses. The api tells who sends requests what to do; here somebody looks at a page. */
function refused(status, body) {
  if (body.error === "RunUnknown")
    return new ApiError(status, "this run was deleted, or never created: Overview, above, lists those that there are");
  if (status !== 401) return new ApiError(status, body.message ?? `it answered ${status}`);
  return new ApiError(status, `${hasKey() ? "this key is not known here" : "a key is needed"}: ${GIVE}`);
}

const unreached = (error) =>
  new ApiError(0, error.name === "TimeoutError" ? "it did not answer within 6 s" : "it cannot be reached");

export async function ask(path, options = {}) {
  const answer = await send(path, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS) });
  let body = null;
  try {
    body = await answer.json();
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw unreached(error); // it broke off, or stood still, in mid-answer
    throw new ApiError(answer.status, `it answered ${answer.status} with something that is not JSON`);
  }
  if (!answer.ok) throw refused(answer.status, body);
  return body;
}

export const tell = (path, body) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/** Server-sent events after an id, each as soon as it comes, none when it begins, until `signal`; a key fits into no EventSource. */
export async function follow(after, signal, take) {
  const answer = await send(at(["events"], { after }), { signal });
  if (!answer.ok) throw refused(answer.status, await answer.json().catch(() => ({})));
  take([]);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const silent = setTimeout(() => reader.cancel().catch(() => {}), patience.silentMs);
    const { value, done } = await reader.read().finally(() => clearTimeout(silent));
    if (done) throw new ApiError(0, "the stream broke off");
    const messages = (rest + value).split("\n\n");
    rest = messages.pop();
    const lines = messages.map((message) => message.split("\n").find((line) => line.startsWith("data: ")));
    const events = lines.filter(Boolean).map((line) => JSON.parse(line.slice(6)));
    if (events.length) take(events);
  }
}

// ---------------------------------------------------------------- addresses of views

export const runHref = (runId) => `${ROOT.href}runs/${encodeURIComponent(runId)}`;
export const trajectoryHref = (runId, id) => `${runHref(runId)}/trajectories/${encodeURIComponent(id)}`;
