// The live page: an address picks a view, /v1/status is read once per second, and the view is drawn from it.
//
// A view is {title, readings, draw(status), close?}: `draw` answers trees (parts/dom.js), `readings` are what it reads
// besides the status. Every button is one documented api call.

import { ApiError, ROOT, ask, at, hasKey, setKey, takeKey } from "./client.js";
import * as actions from "./parts/act.js";
import { $, h, patch } from "./parts/dom.js";
import { age, clock, count } from "./parts/words.js";
import { dead } from "./views/dead.js";
import { events } from "./views/events.js";
import { overview } from "./views/overview.js";
import { run } from "./views/run.js";
import { serving } from "./views/serving.js";
import { trajectory } from "./views/trajectory.js";
import { workers } from "./views/workers.js";

const POLL_MS = 1000;
const POLL_HIDDEN_MS = 5000;
const SLOW_MS = 2000; // then the page says that it waits
const SHARE = 4; // a status that takes long is asked for less often: at most a quarter of the time is spent on it
const PLACES = [
  ["", "Overview"],
  ["workers", "Workers"],
  ["serving", "Serving"],
  ["dead", "Dead letters"],
  ["events", "Events"],
];
const VIEWS = { "": overview, workers, serving, dead, events };

let view = null;
let status = null;
let lastGoodMs = null;
let timer = null;
let polling = false;
let isAskedAgain = false; // while a status was under way, which may be from before
let drawing = false;

// ---------------------------------------------------------------- addresses

/** The names in the address, below the page's own; null: they cannot be read. */
function names() {
  try {
    return location.pathname.slice(ROOT.pathname.length).split("/").map(decodeURIComponent);
  } catch {
    return null;
  }
}

function find(parts) {
  const [place, ...rest] = parts ?? ["?"];
  if (place === "runs" && rest.length === 1 && rest[0]) return [run, rest];
  if (place === "runs" && rest.length === 3 && rest[1] === "trajectories" && rest[2])
    return [trajectory, [rest[0], rest[2]]];
  return rest.length === 0 && Object.hasOwn(VIEWS, place) ? [VIEWS[place], []] : [nowhere, []];
}

const nowhere = () => ({
  title: "Not found",
  readings: [],
  draw: () =>
    h("p.empty.panel", null, "There is nothing at this address. ", h("a", { href: ROOT.href }, "To the overview")),
});

function open() {
  view?.close?.();
  const [make, params] = find(names());
  const page = {
    wishes: new URLSearchParams(location.search),
    draw: () => draw(),
    go,
    /** Change what is searched for or chosen; it is kept in the address. */
    wish(name, value) {
      if (value) page.wishes.set(name, value);
      else page.wishes.delete(name);
      history.replaceState(null, "", `${location.pathname}${page.wishes.size ? `?${page.wishes}` : ""}`);
      for (const reading of view.readings) if (reading.isByWish) reading.renew();
      draw();
      refresh();
    },
  };
  view = make(page, ...params);
  document.title = view.title === "Overview" ? "rollfab" : `${view.title} · rollfab`;
  $("view").replaceChildren();
  $("view").dataset.view = make.name;
  draw();
  refresh();
}

function go(address) {
  if (address !== location.href) history.pushState(null, "", address);
  open();
  scrollTo(0, 0);
  $("view").focus({ preventScroll: true });
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
  if (!link || !isPlain || link.target || link.hasAttribute("download") || link.dataset.out) return;
  if (!link.href.startsWith(ROOT.href)) return;
  event.preventDefault();
  go(link.href);
});
addEventListener("popstate", open);
addEventListener("hashchange", () => takeKey() && poll()); // the same tab, led to an address with a newer key

// ---------------------------------------------------------------- the loop

async function poll() {
  isAskedAgain = polling;
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  const start = performance.now();
  const slow = setTimeout(waits, SLOW_MS);
  let spent = 0; // of an answer; where none came, there may be one in a second
  try {
    status = await ask(at(["status"]));
    lastGoodMs = performance.now();
    spent = SHARE * (lastGoodMs - start);
    document.body.classList.remove("stale");
    const { is_ready, missing } = status.readiness;
    say(is_ready ? "live" : "warn", is_ready ? "live" : "not ready");
    banner("warn", missing.join(" "));
  } catch (error) {
    failed(error);
  } finally {
    clearTimeout(slow);
    polling = false;
    timer = setTimeout(poll, isAskedAgain ? 0 : Math.max(spent, document.hidden ? POLL_HIDDEN_MS : POLL_MS));
  }
  draw();
  refresh();
}

/** Have the view read what it needs besides, and be drawn again as soon as anything has come. */
function refresh() {
  if (document.body.classList.contains("stale")) return;
  for (const reading of view.readings) {
    reading.refresh().then((hasCome) => hasCome && draw());
  }
}

function draw() {
  if (!status || drawing) return;
  drawing = true;
  try {
    chrome();
    patch($("view"), view.draw(status));
  } finally {
    drawing = false;
  }
}

/** Say that an answer is late, unless something worse is said already. */
function waits() {
  if (document.body.classList.contains("stale")) return;
  say("warn", "waiting for the api");
  banner("warn", `The api has not answered for ${SLOW_MS / 1000} s. Still waiting; it is asked again after 6 s.`);
}

function failed(error) {
  if (!(error instanceof ApiError)) throw error; // a mistake of this page, not of the api
  document.body.classList.add("stale");
  const since = lastGoodMs === null ? "" : ` What you see is ${age(performance.now() - lastGoodMs)} old.`;
  if (lastGoodMs !== null) patch($("updated"), `${age(performance.now() - lastGoodMs)} old`);
  if (error.status === 401) {
    say("bad", "key needed");
    banner("bad", `${error.message}.${since}`);
    $("key-button").hidden = false;
    if (!hasKey()) askForKey();
  } else if (error.status === 0) {
    say("bad", "api unreachable");
    banner(
      "bad",
      `The api does not answer: ${error.message}. Is its process running? Trying again every second.${since}`,
    );
  } else {
    say("bad", error.status === 503 ? "broker unreachable" : "error");
    banner("bad", `The api answers, but has nothing to show: ${error.message}. Trying again every second.${since}`);
  }
}

function say(state, words) {
  $("state").dataset.state = state;
  patch($("state"), words);
}

function banner(kind, words) {
  $("banner").dataset.kind = kind;
  patch($("banner"), words);
  $("banner").hidden = !words;
}

// ---------------------------------------------------------------- around the views

/** What stands above every view: where one can go, and the switch that takes everything back. */
function chrome() {
  patch($("updated"), `rollfab ${status.version} · ${clock(status.time_ms)}`);
  const here = (names() ?? ["?"])[0];
  const isHere = (place) => here === place || (here === "runs" && place === "");
  patch(
    $("nav"),
    PLACES.map(([place, words]) =>
      h(
        "a",
        { href: new URL(place, ROOT).href, "aria-current": isHere(place) ? "page" : null },
        words,
        place === "dead" && status.totals.dead_count > 0 && h("b.badge", null, count(status.totals.dead_count)),
      ),
    ),
  );
  const serving = status.workers.filter((worker) => worker.lend_terms);
  const lent = serving.filter((worker) => worker.lend_terms.mode === "on");
  const words = lent.length ? `Take all back (${lent.length})` : "Take all back";
  const hint = "Every serving worker takes its GPU back at once, until somebody lends again";
  patch(
    $("kill"),
    serving.length > 0 &&
      h("button.danger", { id: "lend-all-off", title: hint, onclick: () => actions.press(status, "*", "off") }, words),
  );
}

function askForKey() {
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue === "ok" && $("key-input").value) {
    setKey($("key-input").value.trim());
    $("key-input").value = "";
    poll();
  }
});
$("key-button").addEventListener("click", askForKey);

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

function theme(name) {
  document.documentElement.dataset.theme = name;
  patch($("theme"), `◐ ${THEMES[name]}`);
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[name]}`);
}

$("theme").addEventListener("click", () => {
  const all = Object.keys(THEMES);
  const next = all[(all.indexOf(document.documentElement.dataset.theme) + 1) % all.length];
  if (next === "auto") localStorage.removeItem("rollfab.theme");
  else localStorage.setItem("rollfab.theme", next);
  theme(next);
  draw();
});

let isScrolling = false;
addEventListener(
  "scroll",
  () => {
    if (isScrolling || !document.querySelector("table.long")) return;
    isScrolling = true;
    requestAnimationFrame(() => {
      isScrolling = false;
      draw();
    });
  },
  { passive: true },
);
addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => document.hidden || poll());

const kept = localStorage.getItem("rollfab.theme");
theme(Object.hasOwn(THEMES, kept) ? kept : "auto");
actions.install({ changed: poll, refused: () => ($("key-button").hidden = false) });
takeKey();
open();
poll();
