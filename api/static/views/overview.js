// Overview: what flows, what stands and why, how far workers lag, what is harvested, how near serving is to its promise.

import { ROOT, runHref } from "../client.js";
import { eventRow, head, meter } from "../parts/bits.js";
import { h } from "../parts/dom.js";
import { columns, historyReading, nothingKept, spanChoice } from "../parts/history.js";
import { Plot, figure, spark } from "../parts/plot.js";
import { count, counted, percent, rate } from "../parts/words.js";
import { card, chip, lastReward } from "./card.js";
import { sentence } from "./serving.js";

const IDLE = ["nothing_submitted", "all_consumed", "all_cancelled"]; // a run of which nobody wants anything now

const FEW = 4; // so few runs all have their card, also idle ones

const CARDS_MAX = 60; // more only on request

const EVENTS_SHOWN = 14;

export function overview(page) {
  const history = historyReading(page);
  const flow = new Plot(
    "Tokens per second",
    [
      { name: "all", show: rate },
      { name: "harvested", show: rate },
    ],
    { low: 0 },
  );
  const slots = new Plot(
    "Slots",
    [
      { name: "in use", show: count },
      { name: "there", show: count },
    ],
    { low: 0 },
  );
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
        h(
          "section",
          { "aria-labelledby": "h-runs" },
          head(
            "h-runs",
            "Runs",
            idle.length ? `${active.length} at work · ${idle.length} idle` : status.runs.length || "",
          ),
          h("div.cards", { id: "runs" }, shown.map(card)),
          shown.length < active.length &&
            h(
              "p.more",
              null,
              h(
                "button",
                {
                  onclick: () => {
                    showAll = true;
                    page.draw();
                  },
                },
                `Show all ${active.length} runs at work`,
              ),
            ),
          status.runs.length === 0 &&
            h(
              "p.empty.panel",
              { id: "no-runs" },
              "No run yet. A trainer makes one: ",
              h("code", null, 'rollfab.connect().run("my-run", model=…, environment=…)'),
            ),
          idle.length > 0 && idleRuns(idle, active.length === 0),
        ),
        h(
          "section",
          { "aria-labelledby": "h-flow" },
          h("div.head", null, h("h2", { id: "h-flow" }, "What flowed"), h("span.grow"), spanChoice(page)),
          h(
            "div.plots",
            null,
            figure(
              flow,
              columns(
                history,
                (p) => p.tokens_per_s,
                (p) => p.lent_tokens_per_s,
              ),
              nothingKept(history),
            ),
            figure(
              slots,
              columns(
                history,
                (p) => p.running_count,
                (p) => p.slot_count,
              ),
              nothingKept(history),
            ),
            figure(
              groups,
              columns(history, (p) => p.groups_waiting),
              nothingKept(history),
            ),
          ),
        ),
        h("div.two", null, workersInShort(status), newest(status)),
      ];
    },
  };
}

const isIdle = (run) => IDLE.includes(run.causes[0].code) && !run.agreement?.alarms.length && run.dead_count === 0;

const URGENCY = { stuck: 0, moves: 1, passing: 2, waits: 3 };

const busiestFirst = (a, b) =>
  URGENCY[a.causes[0].kind] - URGENCY[b.causes[0].kind] ||
  b.rates.tokens_per_s - a.rates.tokens_per_s ||
  b.depth - a.depth ||
  (a.run_id < b.run_id ? -1 : 1);

function tile(f, title, value, unit, below, { isBad = false, extra = null, href = null } = {}) {
  const name = href ? h("a", { href }, title) : title;
  return h(
    isBad ? "div.tile.is-bad" : "div.tile",
    { key: f },
    h("h2", null, name),
    h("p", null, h("b", { f }, value), unit && h("i", null, unit)),
    extra,
    below && h("small", null, below),
  );
}

function tiles(status) {
  const { totals, rates, sharing } = status;
  const fresh = status.workers.filter((worker) => worker.is_fresh);
  const lags = fresh.map((worker) => worker.versions_behind).filter((value) => value !== null);
  const margins = fresh
    .filter((worker) => worker.role === "serving" && worker.headroom_fraction !== null)
    .map((worker) => worker.headroom_fraction);
  const made = fresh.reduce((sum, worker) => sum + worker.tokens_per_s, 0);
  const lent = fresh
    .filter((worker) => worker.role === "serving")
    .reduce((sum, worker) => sum + worker.tokens_per_s, 0);
  const use = totals.slot_count ? totals.running_count / totals.slot_count : 0;
  return h(
    "section.tiles",
    { id: "tiles", "aria-label": "Totals" },
    tile("rollouts", "Rollouts", rate(rates.rollouts_per_s), "/s", null, {
      extra: spark(status.rollouts_per_s_history),
    }),
    tile("tokens", "Tokens", rate(rates.tokens_per_s), "/s", null, { extra: spark(status.tokens_per_s_history) }),
    tile(
      "running",
      "Slots in use",
      count(totals.running_count),
      ` of ${count(totals.slot_count)}`,
      `${count(totals.turns.ready ?? 0)} turns ready`,
      { extra: meter(use), href: `${ROOT.href}workers` },
    ),
    tile("groups", "Groups waiting", count(totals.groups_waiting), "", "complete, for trainers"),
    tile("lag", "Version lag", lags.length ? count(Math.max(...lags)) : "–", "", "behind the head, at most"),
    tile(
      "harvested",
      "Harvested",
      made > 0 ? percent(lent / made) : "–",
      "",
      sharing.worker_count ? `${count(sharing.token_count)} tokens so far` : "of tokens, by serving",
      { href: `${ROOT.href}serving` },
    ),
    tile("margin", "SLO margin", margins.length ? percent(Math.min(...margins)) : "–", "", "of the tightest worker", {
      href: `${ROOT.href}serving`,
      isBad: margins.some((value) => value < 0),
    }),
    tile("dead", "Dead letters", count(totals.dead_count), "", "given up, kept to retry", {
      isBad: totals.dead_count > 0,
      href: `${ROOT.href}dead`,
    }),
  );
}

/** What everybody passes over, and what removes it. */
function badRows(found) {
  return (
    found.length > 0 &&
    h(
      "section",
      { key: "bad-rows", id: "bad-rows", "aria-labelledby": "h-bad-rows" },
      head("h-bad-rows", "Rows that cannot be read", `${found.length} in the broker; everybody passes over them`),
      h(
        "div.panel",
        null,
        found.map((row) =>
          h(
            "div.bad-row",
            { key: `${row.table} ${row.row}`, "data-table": row.table },
            h(
              "p",
              null,
              h("b", { f: "table" }, row.table),
              " ",
              h("span", { f: "row" }, row.row || "all of it"),
              " ",
              h("span.bad", { f: "problem" }, row.problem),
            ),
            h("code", { f: "step" }, row.step),
          ),
        ),
      ),
    )
  );
}

function idleRuns(idle, isOpen) {
  return h(
    "details.panel.idle",
    { key: "idle", ...(isOpen ? { open: true } : {}) },
    h("summary", null, `${counted(idle.length, "idle run")}: nothing is submitted, or all is consumed`),
    h(
      "ul",
      null,
      idle.slice(0, 500).map((run) => {
        const rewards = lastReward(run);
        return h(
          "li",
          { key: run.run_id, "data-run": run.run_id },
          h("a", { href: runHref(run.run_id), f: "name" }, run.run_id),
          " ",
          h("span.faint", { f: "what" }, `${run.environment} · ${run.model}`),
          h("span.grow"),
          h("span", null, rewards.length ? `reward ${rewards.at(-1).toFixed(2)}` : "no rollout"),
          " ",
          chip(run),
        );
      }),
    ),
  );
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
  return h(
    "section",
    { "aria-labelledby": "h-workers" },
    head("h-workers", "Workers", "", h("a", { href: `${ROOT.href}workers` }, "All workers")),
    h(
      "div.panel",
      null,
      roles.size === 0 &&
        h(
          "p.empty",
          { id: "no-workers" },
          "No worker is connected. ",
          h("code", null, "rollfab up"),
          " starts one of each on this machine.",
        ),
      [...roles.values()].map((found) =>
        h(
          "div.role-row",
          { key: found.role },
          h("b.role", { "data-role": found.role }, found.role),
          h("span", null, count(found.all)),
          h("span.grow"),
          found.slots > 0 &&
            h(
              "span.faint",
              null,
              `${count(found.running)} of ${count(found.slots)} ${found.role === "agent" ? "places" : "slots"}`,
            ),
          ["dedicated", "serving"].includes(found.role) && h("span.faint", null, `${rate(found.tokens)} tokens/s`),
          found.bad
            .slice(0, 5)
            .map((worker) =>
              h(
                "p.bad",
                { key: worker.worker_id },
                `${worker.worker_id}: ${worker.is_fresh ? (worker.error ?? worker.state) : "silent"}`,
              ),
            ),
          found.bad.length > 5 && h("p.bad", null, `and ${found.bad.length - 5} more`),
        ),
      ),
      status.sharing.worker_count > 0 &&
        h(
          "div.role-row",
          { key: "sharing" },
          h(
            "p.faint",
            null,
            h("a", { href: `${ROOT.href}serving` }, "Sharing with serving"),
            ": ",
            sentence(status.sharing),
          ),
        ),
    ),
  );
}

function newest(status) {
  return h(
    "section",
    { "aria-labelledby": "h-events" },
    head("h-events", "Events", "", h("a", { href: `${ROOT.href}events` }, "All events")),
    h(
      "div.panel",
      null,
      h("ol.events", { id: "events" }, status.events.slice(0, EVENTS_SHOWN).map(eventRow)),
      status.events.length === 0 && h("p.empty", null, "Nothing has happened yet."),
    ),
  );
}
