// One run: why it moves or not, what it learns, what holds it up, its groups, and which weights are where.

import { ROOT, ask, at, trajectoryHref } from "../client.js";
import { head, moreOf, notice } from "../parts/bits.js";
import { h } from "../parts/dom.js";
import { columns, historyReading, nothingKept, spanChoice } from "../parts/history.js";
import { Pages, Reading } from "../parts/live.js";
import { Plot, figure, histogram } from "../parts/plot.js";
import { holds, sieve, table } from "../parts/table.js";
import { age, bytes, count, counted, figure as inShort, percent, rate } from "../parts/words.js";
import { agreement } from "./agreement.js";
import { chip, facts, stack, why } from "./card.js";
import { groupList } from "./groups.js";

const OPEN_MS = 2000;

const REST_MS = 10_000;

export function run(page, runId) {
  const list = (kind, state, size) => (cursor) => ask(at(["runs", runId, kind], { state, count: size, cursor }));
  const groupState = () => page.wishes.get("groups") ?? "open";
  const whole = new Reading(() => ask(at(["runs", runId])), 5000);
  const open = new Pages(list("trajectories", "open", 15), (answer) => answer.trajectories, OPEN_MS);
  const groups = new Pages(
    (cursor) => list("groups", groupState(), 8)(cursor),
    (answer) => answer.groups,
    OPEN_MS,
  );
  let headVersion = null; // as of the last status
  const kept = new Reading(async () => {
    const head = headVersion; // of now: beside a later one, what is read here would look stale, and may have ended
    const found = await Promise.all(
      ["open", "waiting", "finished"].map((state) => list("trajectories", state, state === "open" ? 50 : 12)(null)),
    );
    return { head: head ?? headVersion, rows: found.flatMap((answer) => answer.trajectories) };
  }, REST_MS);
  const history = historyReading(page);
  groups.reading.isByWish = true;
  const plots = new Plots();

  return {
    title: runId,
    readings: [whole, open.reading, groups.reading, kept, history],
    close: () => plots.close(),
    draw(status) {
      const found = status.runs.find((each) => each.run_id === runId);
      if (!found) return missing(runId, whole);
      headVersion = found.head_version;
      const curve = whole.value?.reward_curve ?? found.reward_curve;
      return [
        h(
          "section.run-head",
          { "data-run": runId },
          h(
            "div.head",
            null,
            h("h1", { f: "name" }, runId),
            chip(found),
            h("span.grow"),
            h("span.faint", { f: "what" }, `${found.environment} · ${found.model}`),
          ),
          why(found, true),
          h("div.panel.pad", null, h("dl.wide", null, facts(found), settings(found)), stack(found)),
          agreement(found),
        ),
        h(
          "section",
          { "aria-labelledby": "h-learns" },
          head("h-learns", "What it learns", curve.length ? `${counted(curve.length, "point")} by policy version` : ""),
          h("div.plots", null, plots.learning(curve), distributions(kept)),
        ),
        stragglers(page, runId, open, found),
        groupList(page, runId, groups, groupState()),
        versions(status, found),
        h(
          "section",
          { "aria-labelledby": "h-flow" },
          h("div.head", null, h("h2", { id: "h-flow" }, "What flowed"), h("span.grow"), spanChoice(page)),
          h("div.plots", null, plots.flow(history, runId)),
        ),
      ];
    },
  };
}

function missing(runId, whole) {
  const isGone = !whole.error || whole.error.status === 404;
  const text = isGone ? `There is no run ${runId} here. ` : `${whole.error.message} `;
  return h("p.empty.panel", null, text, h("a", { href: ROOT.href }, "To the overview"));
}

const fact = (name, value) => h("div", null, h("dt", null, name), h("dd", null, value));

function settings(run) {
  return [
    fact("Staleness allowed", run.staleness),
    fact("Reward", run.reward ?? "the environment's"),
    fact("Share of the pool", inShort(run.weight)),
    fact("Held on the broker", `${bytes(run.memory_bytes)} of ${bytes(run.memory_bytes_max)}`),
  ];
}

// ---------------------------------------------------------------- plots

class Plots {
  constructor() {
    this.reward = new Plot(
      "Reward: mean, ± one deviation, least and most",
      [
        { name: "mean", show: inShort },
        { show: inShort },
        { show: inShort },
        { name: "least", show: inShort, color: "--faint", dash: [2, 3] },
        { name: "most", show: inShort, color: "--faint", dash: [7, 4] },
      ],
      { isTime: false, bands: [[1, 2]] },
    );
    this.length = new Plot("Completion tokens, mean", [{ name: "tokens", show: count }], { isTime: false, low: 0 });
    this.rollouts = new Plot("Rollouts by version", [{ name: "rollouts", show: count }], { isTime: false, low: 0 });
    this.tokens = new Plot("Tokens per second", [{ name: "tokens", show: rate }], { low: 0 });
    this.waiting = new Plot("Groups waiting for the trainer", [{ name: "groups", show: count }], { low: 0 });
    this.heads = new Plot("Head version", [{ name: "version", show: count }], {});
  }

  learning(points) {
    const curve = points.filter((point) => point.policy_version !== null && point.reward_mean !== null);
    const xs = curve.map((point) => point.policy_version);
    const edge = (sign) => curve.map((point) => point.reward_mean + sign * (point.reward_deviation ?? 0));
    const column = (name) => curve.map((point) => point[name]);
    const nothing = "No rollout yet.";
    return [
      figure(
        this.reward,
        [xs, column("reward_mean"), edge(1), edge(-1), column("reward_min"), column("reward_max")],
        nothing,
      ),
      figure(this.length, [xs, column("completion_tokens_mean")], nothing),
      figure(this.rollouts, [xs, column("rollout_count")], nothing),
    ];
  }

  flow(history, runId) {
    const of = (name) => columns(history, (point) => point.runs[runId]?.[name]);
    return [
      figure(this.tokens, of("tokens_per_s"), nothingKept(history)),
      figure(this.waiting, of("groups_waiting"), nothingKept(history)),
      figure(this.heads, of("head_version"), nothingKept(history)),
    ];
  }

  close() {
    Object.values(this).forEach((plot) => plot.close());
  }
}

function distributions(kept) {
  const { head, rows } = kept.value ?? { head: null, rows: [] };
  const ended = rows.filter((row) => ["completed", "finished"].includes(row.state));
  const nothing = kept.error?.message ?? "No trajectory has ended yet.";
  const behind = rows.filter((row) => row.ended_ms === null && row.policy_version !== null && head !== null);
  const lags = behind.map((row) => Math.max(0, head - row.policy_version));
  return [
    histogram(
      "Rewards of the newest trajectories",
      ended.map((row) => row.reward),
      { show: inShort, nothing },
    ),
    histogram(
      "Their lengths, in tokens",
      ended.map((row) => row.completion_token_count),
      { show: count, isWhole: true, nothing },
    ),
    histogram("Staleness, in versions, of what is open or waits", lags, {
      show: count,
      isWhole: true,
      nothing: kept.error?.message ?? "Nothing that is open has a version yet.",
    }),
  ];
}

// ---------------------------------------------------------------- what holds it up

function stragglers(page, runId, open, run) {
  const { value, error } = open.reading;
  const rows = (value?.rows ?? []).filter((row) =>
    holds(page.wishes, row.trajectory_id, row.task_id, row.place, row.state, row.worker_id ?? ""),
  );
  const oldest = Math.max(1, ...rows.map((row) => row.age_ms ?? 0));
  return h(
    "section",
    { key: "stragglers", "aria-labelledby": "h-open" },
    head(
      "h-open",
      "Open trajectories",
      value ? `${count(value.counts.open)} taken by agents, the oldest first: they hold up a step` : "",
    ),
    sieve(page, { hint: "Search id, task, place, worker", more: goTo(page, runId) }),
    notice(error),
    value &&
      h(
        "div.panel",
        null,
        table("open", openColumns(runId, run.head_version, oldest), rows, {
          key: (row) => row.trajectory_id,
          label: "Open trajectories",
          mark: (row) => ({ "data-trajectory": row.trajectory_id }),
        }),
        rows.length === 0 && h("p.empty", null, value.rows.length ? "None of these match." : "No trajectory is open."),
      ),
    moreOf(open, page),
  );
}

function goTo(page, runId) {
  const go = (event) => {
    event.preventDefault();
    const id = new FormData(event.target).get("id").trim();
    if (id) page.go(trajectoryHref(runId, id));
  };
  return h(
    "form.go",
    { onsubmit: go },
    h("input", {
      name: "id",
      f: "go",
      placeholder: "Trajectory id",
      "aria-label": "Trajectory id",
      autocomplete: "off",
    }),
    " ",
    h("button", null, "Open"),
  );
}

const openColumns = (runId, headVersion, oldest) => [
  {
    name: "Trajectory",
    width: "minmax(0, 1.8fr)",
    cell: (row) => [
      h("a", { href: trajectoryHref(runId, row.trajectory_id) }, row.trajectory_id),
      row.task_id && h("small", null, `task ${row.task_id}`),
    ],
  },
  {
    name: "Age",
    width: "minmax(0, 1.2fr)",
    cell: (row) => [
      age(row.age_ms),
      h("div.meter", null, h("div", { style: { width: `${(100 * (row.age_ms ?? 0)) / oldest}%` } })),
    ],
  },
  {
    name: "Place",
    width: "minmax(0, 2fr)",
    cell: (row) => [
      h("span", { f: "place" }, row.place),
      h("small", null, row.attempt ? `${counted(row.attempt, "attempt")} failed before` : row.state),
    ],
  },
  { name: "Turns", num: true, width: "minmax(0, .6fr)", cell: (row) => count(row.turn_count) },
  { name: "Tokens", num: true, width: "minmax(0, .7fr)", cell: (row) => count(row.completion_token_count) },
  { name: "Version", num: true, width: "minmax(0, .8fr)", cell: (row) => versionText(row, headVersion) },
  { name: "Made by", cell: (row) => row.worker_ids.join(", ") || "–" },
];

const versionText = (row, headVersion) =>
  row.policy_version === null
    ? "–"
    : [
        row.policy_version,
        headVersion > row.policy_version && h("small", null, `${headVersion - row.policy_version} behind`),
      ];

// ---------------------------------------------------------------- weights

/** The version of a run that a worker generates with, also as a guest; -1: none. */
const versionOf = (worker, runId) =>
  worker.run_id === runId ? worker.active_version : (worker.guest_versions[runId] ?? -1);

function versions(status, run) {
  const weights = status.weights.find((each) => each.run_id === run.run_id);
  const rows = [...(weights?.versions ?? [])].reverse();
  const holders = status.workers
    .filter((worker) => worker.is_fresh)
    .map((worker) => ({ worker_id: worker.worker_id, version: versionOf(worker, run.run_id) }))
    .filter((holder) => holder.version >= 0);
  const shown = new Set(rows.map((row) => row.version));
  const older = holders.filter((worker) => !shown.has(worker.version));
  const held =
    weights && weights.head_version >= 0
      ? `${weights.held_count} held${weights.held_bytes === null ? "" : `, ${bytes(weights.held_bytes)}`} · head ${weights.head_version}`
      : "";
  return h(
    "section",
    { key: "versions", "aria-labelledby": "h-versions" },
    head("h-versions", "Versions", held),
    h(
      "div.panel",
      null,
      table("versions", versionColumns(holders, run.head_version), rows, {
        key: (row) => `${row.version} ${row.kind}`,
        label: "Versions",
        mark: (row) => ({ "data-version": row.version }),
      }),
      rows.length === 0 && h("p.empty", { id: "no-weights" }, "Nothing published yet."),
      older.length > 0 &&
        h(
          "p.pad.faint",
          null,
          "On older ones: ",
          older.map((worker) => `${worker.worker_id} (v${worker.version})`).join(", "),
        ),
    ),
  );
}

const versionColumns = (holders, headVersion) => [
  {
    name: "Version",
    num: false,
    width: "minmax(0, .7fr)",
    cell: (row) => [h("b", null, row.version), row.version === headVersion && h("small", null, "head")],
  },
  { name: "Kind", width: "minmax(0, .8fr)", cell: (row) => row.kind },
  { name: "Size", num: true, cell: (row) => bytes(row.payload_bytes) },
  {
    name: "Of dense",
    num: true,
    cell: (row) => (row.dense_bytes ? percent(row.payload_bytes / row.dense_bytes) : "–"),
  },
  { name: "Changed", num: true, cell: (row) => (typeof row.density === "number" ? percent(row.density) : "–") },
  {
    name: "B/change",
    hint: "Bytes for every changed element",
    num: true,
    cell: (row) => (typeof row.bytes_per_changed === "number" ? row.bytes_per_changed.toFixed(2) : "–"),
  },
  { name: "Behind", num: true, cell: (row) => Math.max(0, headVersion - row.version) },
  { name: "Held by", width: "minmax(0, 2.4fr)", cell: (row) => holdersOf(row, holders) },
];

function holdersOf(row, holders) {
  const found = holders.filter((worker) => worker.version === row.version).map((worker) => worker.worker_id);
  const shown = found.slice(0, 6).join(", ");
  return found.length
    ? [`${count(found.length)}: ${shown}${found.length > 6 ? ", …" : ""}`]
    : row.holder_count
      ? `${row.holder_count} said so`
      : "–";
}
