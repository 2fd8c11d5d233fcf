// Buttons that change something: a second look where it gives away, one click where it takes back, and a way back.

import { ApiError, at, tell } from "../client.js";
import { $, h, patch } from "./dom.js";

const TOAST_MS = 12_000;

const busy = new Set(); // what is under way
let after = () => {};
let unlock = () => {};

/** changed: called after a change; refused: called where the key is not enough. */
export function install({ changed, refused }) {
  after = changed;
  unlock = refused;
}

/** Call, once at a time for a name, however often a button is pressed. Says what was done, and the way back from it. */
export async function act(name, call, { done = null, undo = null } = {}) {
  if (busy.has(name)) return;
  busy.add(name);
  document.body.classList.add("busy");
  try {
    const answer = await call();
    if (done) {
      toast(done(answer), { kind: "good", undo });
      after();
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    toast(error.status === 0 ? `The api does not answer: ${error.message}.` : error.message, { kind: "bad" });
    if (error.status === 401 || error.status === 403) unlock();
  } finally {
    busy.delete(name);
    document.body.classList.toggle("busy", busy.size > 0);
  }
}

function toast(words, { kind, undo = null }) {
  const element = $("toast");
  element.dataset.kind = kind;
  const back =
    undo &&
    h(
      "button",
      {
        id: "undo",
        onclick: () => {
          element.hidden = true;
          undo();
        },
      },
      "Undo",
    );
  const close = h("button.quiet", { "aria-label": "Close", onclick: () => (element.hidden = true) }, "×");
  patch(element, h("span", { role: kind === "bad" ? "alert" : "status" }, words), back, close);
  element.hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => (element.hidden = true), TOAST_MS);
}

/** A second look: what will happen, line by line, before it does. */
export function confirm({ title, lines, verb, danger = false, run }) {
  const dialog = $("ask");
  const go = (event) => {
    event.preventDefault();
    dialog.close();
    run();
  };
  patch(
    dialog,
    h(
      "form",
      { method: "dialog", onsubmit: go },
      h("h2", null, title),
      lines.filter(Boolean).map((line) => h("p", null, line)),
      h(
        "div.row",
        null,
        h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
        h(danger ? "button.danger" : "button.main", { id: "ask-go", type: "submit" }, verb),
      ),
    ),
  );
  dialog.showModal();
}

// ---------------------------------------------------------------- the lending switch

const IN_WORDS = { on: "lends", observe: "only observes", off: "was taken back", clear: "is as before" };

/** Say a mode of a worker, pool:NAME or * (all); bounds and hours stay as they are. */
function lend(subject, mode, before) {
  const call = () => tell(lendPath(subject), { mode, future: mode === "clear" });
  const name = subject === "*" ? "Every serving worker" : subject;
  const done = (answer) => {
    const taken = answer.taken_ids.length ? `; ${answer.turn_count} turns were handed on` : "";
    const by = answer.setting ? `, said by ${answer.setting.said_by}` : "";
    return `${name} ${IN_WORDS[mode]}${taken}${by}.`;
  };
  return act(`${subject} ${mode}`, call, { done, undo: mode === before ? null : () => lend(subject, before, mode) });
}

const lendPath = (subject) =>
  subject.startsWith("pool:") ? at(["pools", subject.slice(5), "lend"]) : at(["workers", subject, "lend"]);

/** Press a mode: what lends is shown first, what takes back is done at once, and both can be undone. */
export function press(status, subject, mode) {
  const before = status.lending.find((setting) => setting.subject === subject)?.mode ?? "clear";
  if (mode !== "on") return void lend(subject, mode, before);
  const isMeant = (worker) =>
    worker.lend_terms && (subject === "*" || [worker.worker_id, `pool:${worker.pool}`].includes(subject));
  const workers = status.workers.filter(isMeant);
  const slots = workers.reduce((sum, worker) => sum + worker.slot_count, 0);
  const turns = workers.reduce((sum, worker) => sum + worker.running_count, 0);
  confirm({
    title: subject === "*" ? "Lend what every serving worker can spare?" : `Lend what ${subject} can spare?`,
    lines: [
      `${workers.length} serving worker${workers.length === 1 ? "" : "s"}, ${slots} slots; ${turns} turns run there now.`,
      "Guards decide from moment to moment; whatever was said more strictly of a worker or its pool still holds.",
      "Take back, in one click, ends it at once.",
    ],
    verb: "Lend",
    run: () => lend(subject, mode, before),
  });
}

const MODES = [
  ["lend", "on", "On"],
  ["lend_observe", "observe", "Observe"],
  ["lend_off", "off", "Off"],
];

/** The team's switch of one worker: what it said of this worker itself is pressed; what holds, and whose word that is. */
export function lendSwitch(status, worker) {
  const terms = worker.lend_terms;
  if (!terms) return null;
  const own = status.lending.find((setting) => setting.subject === worker.worker_id)?.mode;
  const shares = [
    ["compute", terms.compute_fraction_max],
    ["KV cache", terms.memory_fraction_max],
  ];
  const bounds = shares
    .filter(([, share]) => share !== null)
    .map(([name, share]) => `${Math.round(100 * share)} % of ${name}`);
  return [
    h(
      "span.modes",
      { role: "group", f: "modes" },
      MODES.map(([f, mode, word]) =>
        h(
          mode === "off" ? "button.danger" : "button",
          {
            f,
            "aria-pressed": String(own === mode),
            "aria-label": `${mode} ${worker.worker_id}`,
            onclick: () => press(status, worker.worker_id, mode),
          },
          word,
        ),
      ),
    ),
    h(
      "small",
      null,
      h("b", { f: "limit" }, ["on", "observe", "off"].includes(worker.lend) ? worker.lend : `max ${worker.lend}`),
      " ",
      h("span", { f: "why" }, [terms.reason, ...bounds].join(" · ")),
    ),
  ];
}
