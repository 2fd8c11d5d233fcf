// Talking to the api: one place for the key, timeouts and errors.

const KEY = "rollfab.key";
const TIMEOUT_MS = 6000;

export class ApiError extends Error {
  /** status 0: the api itself did not answer. */
  constructor(status, message) {
    super(message);
    this.status = status;
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

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    throw new ApiError(0, error.name === "TimeoutError" ? "it did not answer within 6 s" : "it cannot be reached");
  }
  let body = null;
  try {
    body = await answer.json();
  } catch {
    throw new ApiError(answer.status, `it answered ${answer.status} with something that is not JSON`);
  }
  if (!answer.ok) throw new ApiError(answer.status, body.message ?? `it answered ${answer.status}`);
  return body;
}

export const readStatus = () => ask("v1/status");

export const readDeadLetters = (runId) => ask(`v1/runs/${encodeURIComponent(runId)}/dead-letters?count=50`);

export const readSharing = () => ask("v1/sharing");

/** mode: on, observe or off; bounds and hours stay as they are. */
export const lend = (workerId, mode) =>
  ask(`v1/workers/${encodeURIComponent(workerId)}/lend`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ mode }),
  });
