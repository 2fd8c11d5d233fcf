// Overview: what flows, what stands and why, how far workers lag, what is harvested, how near serving is to its promise.

import { ROOT, ask, at } from "../client.js";
import { h } from "../parts/dom.js";
import { Reading } from "../parts/live.js";
import { Plot, figure, spark } from "../parts/plot.js";
import { clock, count, counted, factsText, percent, rate } from "../parts/words.js";
import { sentence } from "./serving.js";

const SPANS = { "1h": [1, "1 hour"], "6h": [6, "6 hours"], "24h": [24, "1 day"], "72h": [72, "3 days"] };
const HISTORY_MS = 20_000;
const IDLE = ["nothing_submitted", "all_consumed", "all_cancelled"]; // a run of which nobody wants anything now
const FEW = 4; // so few runs all have their card, also idle ones
const CARDS_MAX = 60; // more only on request
const EVENTS_SHOWN = 14;
export const CHIP = { moves: "good", waits: "idle", passing: "warn", stuck: "bad" };

export const runHref = (runId) => `${ROOT.href}runs/${encodeURIComponent(runId)}`;

/** Reads what happened, over as many hours as the address wishes. */
export function historyReading(page) {
  const hours = () => (SPANS[page.wishes.get("span")] ?? SPANS["6h"])[0];
  const reading = new Reading(() => ask(at(["history"], { since_ms: Math.round(Date.now() - hours() * 3_600_000), count: 300 })), HISTORY_MS);
  reading.isByWish = true;
  return reading;
}

export const spanChoice = (page) =>
  h("label.span", null, h("span", null, "Over"), " ", h("select", { f: "span", value: page.wishes.get("span") ?? "6h", onchange: (event) => page.wish("span", event.target.value) },
    Object.entries(SPANS).map(([value, [, words]]) => h("option", { value }, words))));

/** Columns of a history for a plot; null while there is none. */
export function columns(reading, ...values) {
  const points = reading.value?.points ?? null;
  return points && [points.map((point) => point.time_ms), ...values.map((value) => points.map((point) => value(point) ?? null))];
}

export const nothingKept = (reading) => reading.error?.message ?? (reading.value ? "No sample yet: one is taken every minute." : "…");

export function overview(page) {
  const history = historyReading(page);
  const flow = new Plot("Tokens per second", [{ name: "all", show: rate }, { name: "harvested", show: rate }], { low: 0 });
  const slots = new Plot("Slots", [{ name: "in use", show: count }, { name: "there", show: count }], { low: 0 });
  const groups = new Plot("Groups waiting for trainers", [{ name: "groups", show: count }], { low: 0 });
  let showAll = false;

  return {
    title: "Overview",
    readings: [history],
    close: () => [flow, slots, groups].forEach((plot) => plot.close()),
    draw(status) {
      const isFolded = (run) => status.runs.length > FEW && isIdle(run);
      const active = status.runs.filter((run) => !isFolded(run)).sort(busiestFirst);
      const idle = status.runs.filter(isFolded);
      const shown = showAll ? active : active.slice(0, CARDS_MAX);
      return [
        h("h1.sr", null, "Overview"),
        tiles(status),
        badRows(status.bad_rows),
        h("section", { "aria-labelledby": "h-runs" },
          head("h-runs", "Runs", idle.length ? `${active.length} at work · ${idle.length} idle` : status.runs.length || ""),
          h("div.cards", { id: "runs" }, shown.map(card)),
          shown.length < active.length && h("p.more", null, h("button", { onclick: () => { showAll = true; page.draw(); } }, `Show all ${active.length} runs at work`)),
          status.runs.length === 0 && h("p.empty.panel", { id: "no-runs" }, "No run yet. A trainer makes one: ", h("code", null, 'rollfab.connect().run("my-run", model=…, environment=…)')),
          idle.length > 0 && idleRuns(idle, active.length === 0),
        ),
        h("section", { "aria-labelledby": "h-flow" },
          h("div.head", null, h("h2", { id: "h-flow" }, "What flowed"), h("span.grow"), spanChoice(page)),
          h("div.plots", null,
            figure(flow, columns(history, (p) => p.tokens_per_s, (p) => p.lent_tokens_per_s), nothingKept(history)),
            figure(slots, columns(history, (p) => p.running_count, (p) => p.slot_count), nothingKept(history)),
            figure(groups, columns(history, (p) => p.groups_waiting), nothingKept(history))),
        ),
        h("div.two", null, workersInShort(status), newest(status)),
      ];
    },
  };
}

export const head = (id, words, faint = "", ...more) =>
  h("div.head", null, h("h2", { id }, words), h("span.faint", null, faint), h("span.grow"), more);

const isIdle = (run) => IDLE.includes(run.causes[0].code) && !run.agreement?.alarms.length && run.dead_count === 0;

const URGENCY = { stuck: 0, moves: 1, passing: 2, waits: 3 };
const busiestFirst = (a, b) => URGENCY[a.causes[0].kind] - URGENCY[b.causes[0].kind] || b.rates.tokens_per_s - a.rates.tokens_per_s || b.depth - a.depth || (a.run_id < b.run_id ? -1 : 1);

function tile(f, title, value, unit, below, { isBad = false, extra = null, href = null } = {}) {
  const name = href ? h("a", { href }, title) : title;
  return h(isBad ? "div.tile.is-bad" : "div.tile", { key: f }, h("h3", null, name), h("p", null, h("b", { f }, value), unit && h("i", null, unit)), extra, below && h("small", null, below));
}

function tiles(status) {
  const { totals, rates, sharing } = status;
  const fresh = status.workers.filter((worker) => worker.is_fresh);
  const lags = fresh.map((worker) => worker.versions_behind).filter((value) => value !== null);
  const margins = fresh.filter((worker) => worker.role === "serving" && worker.headroom_fraction !== null).map((worker) => worker.headroom_fraction);
  const made = fresh.reduce((sum, worker) => sum + worker.tokens_per_s, 0);
  const lent = fresh.filter((worker) => worker.role === "serving").reduce((sum, worker) => sum + worker.tokens_per_s, 0);
  const use = totals.slot_count ? totals.running_count / totals.slot_count : 0;
  return h("section.tiles", { id: "tiles", "aria-label": "Totals" },
    tile("rollouts", "Rollouts", rate(rates.rollouts_per_s), "/s", null, { extra: spark(status.rollouts_per_s_history) }),
    tile("tokens", "Tokens", rate(rates.tokens_per_s), "/s", null, { extra: spark(status.tokens_per_s_history) }),
    tile("running", "Slots in use", count(totals.running_count), ` of ${count(totals.slot_count)}`, `${count(totals.turns.ready ?? 0)} turns ready`, { extra: meter(use), href: `${ROOT.href}workers` }),
    tile("groups", "Groups waiting", count(totals.groups_waiting), "", "complete, for trainers"),
    tile("lag", "Version lag", lags.length ? count(Math.max(...lags)) : "–", "", "behind the head, at most"),
    tile("harvested", "Harvested", made > 0 ? percent(lent / made) : "–", "", sharing.worker_count ? `${count(sharing.token_count)} tokens so far` : "of tokens, by serving", { href: `${ROOT.href}serving` }),
    tile("margin", "SLO margin", margins.length ? percent(Math.min(...margins)) : "–", "", "of the tightest worker", { href: `${ROOT.href}serving`, isBad: margins.some((value) => value < 0) }),
    tile("dead", "Dead letters", count(totals.dead_count), "", "given up, kept to retry", { isBad: totals.dead_count > 0, href: `${ROOT.href}dead` }),
  );
}

export const meter = (fraction) => h("div.meter", null, h("div", { style: { width: `${Math.round(1000 * Math.max(0, Math.min(1, fraction || 0))) / 10}%` } }));

/** What everybody passes over, and what removes it. */
function badRows(found) {
  return found.length > 0 && h("section", { key: "bad-rows", id: "bad-rows", "aria-labelledby": "h-bad-rows" },
    head("h-bad-rows", "Rows that cannot be read", `${found.length} in the broker; everybody passes over them`),
    h("div.panel", null, found.map((row) =>
      h("div.bad-row", { key: `${row.table} ${row.row}`, "data-table": row.table },
        h("p", null, h("b", { f: "table" }, row.table), " ", h("span", { f: "row" }, row.row || "all of it"), " ", h("span.bad", { f: "problem" }, row.problem)),
        h("code", { f: "step" }, row.step)))));
}

/** Why a run does or does not move: the one line an operator wants. */
export function why(run, isWhole = false) {
  const [first, ...others] = run.causes;
  return h("div.why", { "data-kind": CHIP[first.kind], f: "why", role: "status", "aria-label": "Why the run does or does not move" },
    h("span", { f: "cause" }, first.text),
    first.step && h("code", { f: "next" }, first.step),
    others.length > 0 && !isWhole && h("small", { f: "also" }, `and then: ${others.map((cause) => cause.text).join("; ")}`),
    isWhole && others.map((cause) => h("p", null, cause.text, cause.step && h("code", null, cause.step))),
  );
}

export const chip = (run) => h("span.chip", { f: "waits", "data-kind": CHIP[run.causes[0].kind] }, run.causes[0].code.replaceAll("_", " "));

export const lastReward = (run) => run.reward_curve.map((point) => point.reward_mean).filter((value) => value !== null);

function card(run) {
  const alarms = run.agreement?.alarms ?? [];
  return h("article.panel.card", { key: run.run_id, "data-run": run.run_id },
    h("div.card-head", null,
      h("div", null, h("h3", { f: "name" }, h("a", { href: runHref(run.run_id) }, run.run_id)), h("p.faint", { f: "what" }, `${run.environment} · ${run.model}`)),
      chip(run)),
    why(run),
    alarms.length > 0 && h("p.alarm.bad", { f: "alarm", role: "alert" }, `Log-probabilities disagree: ${alarms[0].text}`),
    h("div.card-body", null, rewardFigure(run), h("dl", null, facts(run))),
    stack(run),
  );
}

function rewardFigure(run) {
  const rewards = lastReward(run);
  const last = run.reward_curve.at(-1);
  const step = run.training?.step ?? null;
  const isUnit = rewards.every((value) => value >= 0 && value <= 1);
  const range = isUnit ? { low: 0, high: 1 } : { low: Math.min(...rewards), high: Math.max(...rewards) };
  return h("figure", null,
    h("figcaption", null, h("span", null, "Reward"), h("b", { f: "reward" }, rewards.length ? rewards.at(-1).toFixed(2) : "–"),
      h("i.faint", { f: "step" }, step !== null ? `step ${step}` : last && last.policy_version !== null ? `version ${last.policy_version}` : "")),
    h("div.plot", null,
      spark(rewards, { ...range, f: "curve", dot: true, label: "Mean reward by policy version" }),
      rewards.length > 0 && [h("span.top", null, String(+range.high.toFixed(2))), h("span.bottom", null, String(+range.low.toFixed(2)))],
      rewards.length === 0 && h("em", null, "no rollout yet")));
}

const fact = (name, f, value) => h("div", null, h("dt", null, name), h("dd", { f }, value));

export function facts(run) {
  const { counters } = run;
  const letters = `${ROOT.href}dead?run=${encodeURIComponent(run.run_id)}`;
  return [
    fact("Policy version", "head_version", run.head_version < 0 ? "none" : run.head_version),
    fact("Rollouts/s", "rollouts_per_s", rate(run.rates.rollouts_per_s)),
    fact("Tokens/s", "tokens_per_s", rate(run.rates.tokens_per_s)),
    h("div", null, h("dt", null, "Turns claimed / ready"), h("dd", null, h("span", { f: "claimed" }, count(run.turns.claimed ?? 0)), " / ", h("span", { f: "ready" }, count(run.turns.ready ?? 0)))),
    fact("Groups waiting", "groups_waiting", count(run.groups_waiting)),
    fact("Groups consumed", "groups_consumed", count(counters.groups_consumed ?? 0)),
    fact("Rollouts in all", "completed", count(counters.trajectories_completed ?? 0)),
    h(run.dead_count ? "div.is-bad" : "div", null, h("dt", null, "Dead letters"), h("dd", { f: "dead_count" }, run.dead_count ? h("a", { href: letters }, count(run.dead_count)) : "0")),
  ];
}

export function stack(run) {
  const { queued = 0, running = 0, scoring = 0 } = run.trajectories;
  const done = Math.max(0, run.depth - queued - running - scoring);
  const open = { queued, running, scoring, done };
  const sum = queued + running + scoring + done;
  return [
    h("div.stack", { f: "stack" }, Object.entries(open).map(([name, value]) => h("div", { "data-s": name, style: { width: `${sum ? (100 * value) / sum : 0}%` } }))),
    h("p.legend", null,
      Object.entries(open).map(([name, value]) => h("span", { "data-s": name, title: name === "done" ? "finished, but their group is not consumed yet" : null }, `${name} `, h("b", { f: name }, count(value)))),
      h("span.grow"), h("span.faint", null, h("b", { f: "depth" }, count(run.depth)), ` open of ${count(run.trajectory_count_max)}`)),
  ];
}

function idleRuns(idle, isOpen) {
  return h("details.panel.idle", { key: "idle", ...(isOpen ? { open: true } : {}) },
    h("summary", null, `${counted(idle.length, "idle run")}: nothing is submitted, or all is consumed`),
    h("ul", null, idle.slice(0, 500).map((run) => {
      const rewards = lastReward(run);
      return h("li", { key: run.run_id, "data-run": run.run_id },
        h("a", { href: runHref(run.run_id), f: "name" }, run.run_id), " ",
        h("span.faint", { f: "what" }, `${run.environment} · ${run.model}`), h("span.grow"),
        h("span", null, rewards.length ? `reward ${rewards.at(-1).toFixed(2)}` : "no rollout"), " ",
        chip(run));
    })));
}

function workersInShort(status) {
  const roles = new Map();
  for (const worker of status.workers) {
    const found = roles.get(worker.role) ?? { role: worker.role, all: 0, bad: [], tokens: 0, running: 0, slots: 0 };
    roles.set(worker.role, found);
    found.all += 1;
    found.tokens += worker.tokens_per_s;
    found.running += worker.running_count;
    found.slots += worker.slot_count;
    if (!worker.is_fresh || worker.state === "failed" || worker.error) found.bad.push(worker);
  }
  return h("section", { "aria-labelledby": "h-workers" },
    head("h-workers", "Workers", "", h("a", { href: `${ROOT.href}workers` }, "All workers")),
    h("div.panel", null,
      roles.size === 0 && h("p.empty", { id: "no-workers" }, "No worker is connected. ", h("code", null, "rollfab up"), " starts one of each on this machine."),
      [...roles.values()].map((found) => h("div.role-row", { key: found.role },
        h("b.role", { "data-role": found.role }, found.role), h("span", null, count(found.all)),
        h("span.grow"),
        found.slots > 0 && h("span.faint", null, `${count(found.running)} of ${count(found.slots)} ${found.role === "agent" ? "places" : "slots"}`),
        ["dedicated", "serving"].includes(found.role) && h("span.faint", null, `${rate(found.tokens)} tokens/s`),
        found.bad.slice(0, 5).map((worker) => h("p.bad", { key: worker.worker_id }, `${worker.worker_id}: ${worker.is_fresh ? worker.error ?? worker.state : "silent"}`)),
        found.bad.length > 5 && h("p.bad", null, `and ${found.bad.length - 5} more`))),
      status.sharing.worker_count > 0 && h("div.role-row", { key: "sharing" }, h("p.faint", null, h("a", { href: `${ROOT.href}serving` }, "Sharing with serving"), ": ", sentence(status.sharing))),
    ));
}

export const eventRow = (event) =>
  h("li", { key: event.event_id, same: event.event_id },
    h("time", null, clock(event.time_ms)), h("b", { "data-kind": event.kind.split(".")[0] }, event.kind),
    h("span", { title: JSON.stringify(event.facts) }, factsText(event.facts)));

function newest(status) {
  return h("section", { "aria-labelledby": "h-events" },
    head("h-events", "Events", "", h("a", { href: `${ROOT.href}events` }, "All events")),
    h("div.panel", null, h("ol.events", { id: "events" }, status.events.slice(0, EVENTS_SHOWN).map(eventRow)),
      status.events.length === 0 && h("p.empty", null, "Nothing has happened yet.")));
}
