// The live page: reads /v1/status once per second and shows it. Every button is one documented api call.

import { blamedWorkers, fillAgreement } from "./agreement.js";
import { hasKey, lend, readDeadLetters, readStatus, setKey, takeKey } from "./client.js";
import { $, Keyed, age, count, fields, line, percent, rate, show, text, width } from "./draw.js";
import { fillGuard, fillSwitch, renderSharing } from "./lending.js";
import { fillVersion, renderWeights } from "./weights.js";

const POLL_MS = 1000;
const POLL_HIDDEN_MS = 5000;
const ROWS_MAX = 100; // more only on request: a thousand rows per second are nobody's wish
const GENERATING = ["dedicated", "serving"];

const tiles = fields($("tiles"));
const cards = new Keyed($("runs"), $("run-card"));
const rows = new Keyed($("workers"), $("worker-row"));
const badRows = new Keyed($("bad-row-rows"), $("bad-row"));
let lastGoodMs = null;
let showAll = false;
let timer = null;
let polling = false;

// ---------------------------------------------------------------- the loop

async function poll() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  try {
    const status = await readStatus();
    lastGoodMs = performance.now();
    render(status);
    say(status.readiness.is_ready ? "live" : "warn", status.readiness.is_ready ? "live" : "not ready");
    banner("warn", status.readiness.missing.join(" "));
  } catch (error) {
    failed(error);
  } finally {
    polling = false;
    timer = setTimeout(poll, document.hidden ? POLL_HIDDEN_MS : POLL_MS);
  }
}

function failed(error) {
  if (error.status === undefined) throw error; // a mistake of this page, not of the api
  document.body.classList.add("stale");
  const since = lastGoodMs === null ? "" : ` What you see is ${age(performance.now() - lastGoodMs)} old.`;
  if (lastGoodMs !== null) text($("updated"), `${age(performance.now() - lastGoodMs)} old`);
  if (error.status === 401) {
    say("bad", "key needed");
    banner("bad", `${error.message}.${since}`);
    show($("key-button"), true);
    if (!hasKey()) askForKey();
  } else if (error.status === 0) {
    say("bad", "api unreachable");
    banner("bad", `The api does not answer: ${error.message}. Is its process running? Trying again every second.${since}`);
  } else {
    say("bad", error.status === 503 ? "broker unreachable" : "error");
    banner("bad", `The api answers, but has nothing to show: ${error.message}.${since}`);
  }
}

function say(state, words) {
  $("state").dataset.state = state;
  text($("state"), words);
}

function banner(kind, words) {
  $("banner").dataset.kind = kind;
  text($("banner"), words);
  show($("banner"), Boolean(words));
}

function toast(words) {
  text($("toast"), words);
  show($("toast"), true);
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => show($("toast"), false), 6000);
}

// ---------------------------------------------------------------- views

function render(status) {
  document.body.classList.remove("stale");
  text($("updated"), `rollfab ${status.version} · ${new Date(status.time_ms).toLocaleTimeString("en-GB")}`);
  renderTiles(status);
  renderBadRows(status.bad_rows);
  text($("run-count"), status.runs.length || "");
  show($("no-runs"), status.runs.length === 0);
  cards.update(status.runs, (run) => run.run_id, fillRun);
  renderWorkers(status);
  renderWeights(status);
  renderSharing(status);
  renderEvents(status.events);
}

/** What everybody passes over, and what removes it: names and problems are other people's texts. */
function renderBadRows(found) {
  show($("bad-rows"), found.length > 0);
  text($("bad-row-count"), `${found.length} in the broker; everybody passes over them`);
  badRows.update(found, (row) => `${row.table} ${row.row}`, ({ root, f }, row) => {
    root.dataset.table = row.table;
    text(f.table, row.table);
    text(f.row, row.row || "all of it");
    text(f.problem, row.problem);
    text(f.step, row.step);
  });
}

function renderTiles(status) {
  const { totals, rates } = status;
  show($("tiles"), true);
  text(tiles.rollouts, rate(rates.rollouts_per_s));
  text(tiles.tokens, rate(rates.tokens_per_s));
  line(tiles["rollouts-spark"], status.rollouts_per_s_history);
  line(tiles["tokens-spark"], status.tokens_per_s_history);
  text(tiles.running, count(totals.running_count));
  text(tiles.slots, ` of ${count(totals.slot_count)}`);
  width(tiles.meter, totals.running_count / totals.slot_count);
  text(tiles.ready, count(totals.turns.ready ?? 0));
  text(tiles.groups, count(totals.groups_waiting));
  text(tiles.dead, count(totals.dead_count));
  tiles["dead-tile"].classList.toggle("is-bad", totals.dead_count > 0);
}

function fillRun({ root, f }, run) {
  root.dataset.run = run.run_id;
  text(f.name, run.run_id);
  text(f.what, `${run.environment} · ${run.model}`);
  fillCauses(f, run);

  text(f.head_version, run.head_version < 0 ? "none" : run.head_version);
  text(f.rollouts_per_s, rate(run.rates.rollouts_per_s));
  text(f.tokens_per_s, rate(run.rates.tokens_per_s));
  text(f.claimed, count(run.turns.claimed ?? 0));
  text(f.ready, count(run.turns.ready ?? 0));
  text(f.groups_waiting, count(run.groups_waiting));
  text(f.groups_consumed, count(run.counters.groups_consumed ?? 0));
  text(f.completed, count(run.counters.trajectories_completed ?? 0));
  text(f.dead_count, count(run.dead_count));
  f.dead_count.disabled = run.dead_count === 0;
  f.dead_count.onclick = () => control(f.dead_count, () => showDeadLetters(run.run_id));
  f["dead-cell"].classList.toggle("is-bad", run.dead_count > 0);

  const { queued = 0, running = 0, scoring = 0 } = run.trajectories;
  const done = Math.max(0, run.depth - queued - running - scoring);
  const open = { queued, running, scoring, done };
  const sum = queued + running + scoring + done;
  for (const part of f.stack.children) width(part, open[part.dataset.s] / sum);
  for (const [name, value] of Object.entries(open)) text(f[name], count(value));
  text(f.depth, count(run.depth));
  text(f.limit, count(run.trajectory_count_max));

  fillReward(f, run);
  fillAgreement(f, run);
}

function fillReward(f, run) {
  const rewards = run.reward_curve.map((point) => point.reward_mean).filter((value) => value !== null);
  const last = run.reward_curve.at(-1);
  text(f.reward, rewards.length ? rewards.at(-1).toFixed(2) : "–");
  const step = run.training?.step ?? null;
  text(f.step, step !== null ? `step ${step}` : last && last.policy_version !== null ? `version ${last.policy_version}` : "");
  show(f["no-curve"], rewards.length === 0);
  const isUnit = rewards.every((value) => value >= 0 && value <= 1);
  const range = isUnit ? { low: 0, high: 1 } : { low: Math.min(...rewards), high: Math.max(...rewards) };
  line(f.curve, rewards, { ...range, dot: true });
  text(f.top, rewards.length ? +range.high.toFixed(2) : "");
  text(f.bottom, rewards.length ? +range.low.toFixed(2) : "");
}

const CHIP = { moves: "good", waits: "idle", passing: "warn", stuck: "bad" };

/** Why the run does or does not move: the one line an operator wants. */
function fillCauses(f, run) {
  const [first, ...others] = run.causes;
  f.waits.dataset.kind = CHIP[first.kind];
  text(f.waits, first.code.replaceAll("_", " "));
  f.why.dataset.kind = CHIP[first.kind];
  text(f.cause, first.text);
  text(f.next, first.step);
  show(f.next, Boolean(first.step));
  text(f.also, others.length ? `and then: ${others.map((cause) => cause.text).join("; ")}` : "");
  show(f.also, others.length > 0);
}

function renderWorkers(status) {
  const { workers } = status;
  const roles = new Map();
  for (const worker of workers) roles.set(worker.role, (roles.get(worker.role) ?? 0) + 1);
  text($("worker-count"), [...roles].map(([role, number]) => `${number} ${role}`).join(" · "));
  show($("no-workers"), workers.length === 0);
  show($("lend-all"), roles.has("serving"));
  const blamed = blamedWorkers(status.runs);
  const shown = showAll ? workers : workers.slice(0, ROWS_MAX);
  const words = new Map(status.lending.map((setting) => [setting.subject, setting.mode]));
  rows.update(shown, (worker) => worker.worker_id, (row, worker) => fillWorker(row, worker, blamed, words));
  show($("more-workers"), workers.length > shown.length);
  text($("show-all"), `Show all ${workers.length} workers`);
}

function fillWorker({ root, f }, worker, blamed, words) {
  root.dataset.worker = worker.worker_id;
  root.classList.toggle("silent", !worker.is_fresh);
  const generates = GENERATING.includes(worker.role);
  text(f.name, worker.worker_id);
  text(f.role, worker.role);
  f.role.dataset.role = worker.role;
  text(f.host, worker.host);
  fillEngine(f, worker);
  const state = worker.is_fresh ? worker.state : "silent";
  f.state.dataset.state = state;
  text(f.state, state);
  text(f.error, worker.error ?? "");
  text(f.waits_for, worker.waits_for ? `waits for ${worker.waits_for}` : "");
  show(f.disagrees, blamed.has(worker.worker_id));
  text(f.run, worker.run_id ?? "–");
  text(f.slots, worker.slot_count ? `${worker.running_count}/${worker.slot_count}` : "–");
  f.meter.parentElement.classList.toggle("none", !worker.slot_count);
  width(f.meter, worker.running_count / worker.slot_count);
  text(f.tokens, generates ? rate(worker.tokens_per_s) : "–");
  fillVersion(f, worker);
  fillGuard(f, worker);
  text(f.lease, leaseText(worker.lease));
  text(f.age, age(worker.heartbeat_age_ms));
  fillSwitch(f, worker, words.get(worker.worker_id), (button, mode) => control(button, () => lend(worker.worker_id, mode)));
}

function fillEngine(f, worker) {
  text(f.engine, worker.engine ?? "");
  text(f.hits, worker.prefix_hit_fraction === null ? "" : `${percent(worker.prefix_hit_fraction)} cached`);
  text(f.rest, worker.sleep_note !== null ? "cannot sleep" : worker.wake_ms !== null ? `woke in ${age(worker.wake_ms)}` : "");
  f.rest.title = worker.sleep_note ?? "";
}

function leaseText(lease) {
  if (!lease) return "–";
  const until = lease.is_standing ? "standing" : age(lease.remaining_ms);
  return `${lease.slot_count} slots · ${until}`;
}

async function control(button, call) {
  button.disabled = true;
  try {
    await call();
    await poll();
  } catch (error) {
    if (error.status === undefined) throw error;
    toast(error.status === 0 ? `The api does not answer: ${error.message}.` : error.message);
    if (error.status === 401 || error.status === 403) show($("key-button"), true);
  } finally {
    button.disabled = false;
  }
}

function renderEvents(events) {
  show($("no-events"), events.length === 0);
  const list = $("events");
  const key = events[0]?.event_id ?? "";
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...events.map(eventRow));
}

function eventRow(event) {
  const row = document.createElement("li");
  const [time, kind, what] = ["time", "b", "span"].map((name) => document.createElement(name));
  time.textContent = new Date(event.time_ms).toLocaleTimeString("en-GB");
  kind.textContent = event.kind;
  kind.dataset.kind = event.kind.split(".")[0];
  what.textContent = factsText(event.facts);
  what.title = JSON.stringify(event.facts);
  row.append(time, kind, what);
  return row;
}

const PLAIN = ["worker_id", "run_id", "group_id", "trajectory_id", "role", "value", "said_by", "reason", "error", "text", "code", "step"]; // say themselves what they are
const UNSAID = ["lease_epoch", "source"];

function factsText(facts) {
  const parts = [];
  for (const [name, value] of Object.entries(facts)) {
    if (value === null || value === "" || UNSAID.includes(name)) continue;
    const shown = typeof value === "number" ? +value.toPrecision(4) : typeof value === "object" ? JSON.stringify(value) : value;
    parts.push(PLAIN.includes(name) ? shown : `${name.replaceAll("_", " ")} ${shown}`);
  }
  return parts.join(" · ");
}

// ---------------------------------------------------------------- buttons

async function showDeadLetters(runId) {
  const { dead_count, dead_letters } = await readDeadLetters(runId);
  const shown = dead_letters.length < dead_count ? `, ${dead_letters.length} of them here` : "";
  text($("dead-count"), `${runId}: ${dead_count}${shown}`);
  $("dead-letters").replaceChildren(...dead_letters.map(deadLetter));
  $("dead-dialog").showModal();
}

function deadLetter(letter) {
  const [fold, summary, name, reason, facts, trace] = ["details", "summary", "b", "span", "small", "pre"].map((tag) => document.createElement(tag));
  name.textContent = letter.trajectory_id;
  reason.textContent = letter.reason;
  facts.textContent = `attempt ${letter.attempt} on ${letter.worker_id}`;
  trace.textContent = letter.traceback || "no traceback";
  summary.append(name, reason, facts);
  fold.append(summary, trace);
  return fold;
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
for (const mode of ["on", "observe", "off"]) {
  $(`lend-all-${mode}`).addEventListener("click", () => control($(`lend-all-${mode}`), () => lend("*", mode)));
}
$("show-all").addEventListener("click", () => {
  showAll = true;
  poll();
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
window.addEventListener("hashchange", () => takeKey() && poll()); // the same tab, led to an address with a newer key
takeKey();
poll();
