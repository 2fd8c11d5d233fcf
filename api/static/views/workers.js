// Workers: what each is, does and may do; thousands of them, of which the rows in sight are drawn.

import { h } from "../parts/dom.js";
import { lendSwitch, press } from "../parts/act.js";
import { ask, at, runHref } from "../client.js";
import { meter } from "../parts/bits.js";
import { Reading } from "../parts/live.js";
import { holds, sieve, table } from "../parts/table.js";
import { age, bytes, count, milliseconds, percent, rate } from "../parts/words.js";
import { blamedWorkers } from "./agreement.js";
import { LeaseTimes } from "./leases.js";

const GENERATING = ["dedicated", "serving"];
const SHOWN = [
  ["", "what they do now"],
  ["leases", "leases over time"],
];
const STATES = ["ready", "loading", "waiting", "asleep", "draining", "failed", "silent"];

export const stateOf = (worker) => (worker.is_fresh ? worker.state : "silent");

export function workers(page) {
  const sharing = new Reading(() => ask(at(["sharing"])), 5000);
  const times = new LeaseTimes(page);
  return {
    title: "Workers",
    readings: [sharing, times.reading],
    draw(status) {
      const all = status.workers;
      const roles = [...new Set(all.map((worker) => worker.role))].sort();
      const { wishes } = page;
      const shown = all.filter(
        (worker) =>
          (!wishes.get("role") || worker.role === wishes.get("role")) &&
          (!wishes.get("state") || stateOf(worker) === wishes.get("state")) &&
          holds(
            wishes,
            worker.worker_id,
            worker.role,
            worker.host,
            worker.run_id ?? "",
            worker.pool,
            worker.engine ?? "",
            stateOf(worker),
            worker.error ?? "",
          ),
      );
      const isTimes = wishes.get("show") === "leases";
      const number = (role) => all.filter((worker) => worker.role === role).length;
      return [
        h(
          "div.head",
          null,
          h("h1", null, "Workers"),
          h("span.faint", { id: "worker-count" }, roles.map((role) => `${number(role)} ${role}`).join(" · ")),
          h("span.grow"),
          roles.includes("serving") && lendAll(status),
        ),
        sieve(page, {
          hint: "Search name, host, run, pool, engine, error",
          choices: [
            { name: "show", label: "Show", options: SHOWN },
            { name: "role", label: "Role", options: [["", "all"], ...roles.map((role) => [role, role])] },
            { name: "state", label: "State", options: [["", "all"], ...STATES.map((state) => [state, state])] },
          ],
          more:
            shown.length < all.length &&
            h("span.faint", { f: "found" }, `${count(shown.length)} of ${count(all.length)}`),
        }),
        times.draw(isTimes ? shown.filter((worker) => GENERATING.includes(worker.role)) : null, status.time_ms),
        !isTimes && h(
          "div.panel",
          { key: "now" },
          table("workers", workerColumns(status, errorsOf(sharing)), shown, {
            key: (worker) => worker.worker_id,
            height: heightOf,
            label: "Workers",
            mark: rowMark,
          }),
          all.length === 0 &&
            h(
              "p.empty",
              { id: "no-workers" },
              "No worker is connected. ",
              h("code", null, "rollfab up"),
              " starts one of each on this machine.",
            ),
          all.length > 0 && shown.length === 0 && h("p.empty", null, "None of these match."),
        ),
      ];
    },
  };
}

/** Of a row in a long table: as much as a worker of its role has to say. */
function heightOf(worker, isNarrow) {
  if (isNarrow) return worker.lend_terms ? 510 : GENERATING.includes(worker.role) ? 320 : 210;
  return worker.lend_terms ? 120 : 84;
}

export const lendAll = (status) =>
  h(
    "span",
    { id: "lend-all" },
    h(
      "button",
      {
        id: "lend-all-on",
        title:
          "Every serving worker that is known now lends what it can spare, unless something stricter is said of it or its pool; later ones only observe",
        onclick: () => press(status, "*", "on"),
      },
      "Lend all",
    ),
    " ",
    h(
      "button",
      {
        id: "lend-all-observe",
        title: "Nothing is lent; what could be lent is measured",
        onclick: () => press(status, "*", "observe"),
      },
      "Observe all",
    ),
  );

export const rowMark = (worker) => ({ "data-worker": worker.worker_id });

/** How far serving workers' predictions of their own steps are off, by worker, where the api says so. */
const errorsOf = (sharing) => new Map((sharing.value?.workers ?? []).map((report) => [report.worker_id, report]));

export function workerColumns(status, reports = new Map()) {
  const blamed = blamedWorkers(status.runs);
  return [
    { name: "Worker", width: "minmax(0, 1.7fr)", cell: nameCell },
    { name: "State", width: "minmax(0, 1.5fr)", cell: (worker) => stateCell(worker, blamed) },
    {
      name: "Run",
      width: "minmax(0, 1fr)",
      cell: runCell,
    },
    { name: "Slots", width: "minmax(0, .9fr)", cell: slotsCell },
    {
      name: "Tokens/s",
      num: true,
      width: "minmax(0, .8fr)",
      cell: (worker) => [
        h("span", { f: "tokens" }, GENERATING.includes(worker.role) ? rate(worker.tokens_per_s) : "–"),
        worker.prefix_hit_fraction !== null &&
          h("small", { f: "hits" }, `${percent(worker.prefix_hit_fraction)} cached`),
      ],
    },
    { name: "Version", num: true, width: "minmax(0, .9fr)", cell: versionCell },
    { name: "Guard", width: "minmax(0, 1.1fr)", cell: guardCell },
    {
      name: "Lease",
      width: "minmax(0, 1.2fr)",
      cell: (worker) => [
        h("span", { f: "lease" }, leaseText(worker.lease)),
        worker.plan_reason && h("small", { f: "plan" }, worker.plan_reason),
        reclaim(reports.get(worker.worker_id)),
      ],
    },
    { name: "Lend", width: "minmax(168px, 1.4fr)", cell: (worker) => lendSwitch(status, worker) ?? "–" },
  ];
}

const reclaim = (report) =>
  report?.reclaim_count > 0 &&
  h(
    "small",
    { title: "P99, from a serving request's arrival to the end of the rollout step that it found" },
    `given back in ${milliseconds(report.reclaim_ms_p99)}`,
  );

const nameCell = (worker) => [
  h("b", { f: "name" }, worker.worker_id),
  h(
    "small",
    null,
    h("span.role", { f: "role", "data-role": worker.role }, worker.role),
    " ",
    h("span", { f: "host" }, worker.host),
    worker.pool && ` · pool ${worker.pool}`,
  ),
  worker.engine && h("small", { f: "engine" }, worker.engine),
  worker.environments.length + worker.rewards.length > 0 &&
    h("small", null, [...worker.environments, ...worker.rewards].join(", ")),
];

function stateCell(worker, blamed) {
  const state = stateOf(worker);
  const rest =
    worker.sleep_note !== null ? "cannot sleep" : worker.wake_ms !== null ? `woke in ${age(worker.wake_ms)}` : "";
  return [
    h("span.dot", { f: "state", "data-state": state }, state),
    h("small", { f: "age", title: "Since its last heartbeat" }, `heard ${age(worker.heartbeat_age_ms)} ago`),
    rest && h("small", { f: "rest", title: worker.sleep_note }, rest),
    worker.waits_for && h("small", { f: "waits_for" }, `waits for ${worker.waits_for}`),
    worker.error && h("small.bad", { f: "error", title: worker.error }, worker.error),
    worker.weights_note && h("small.bad", { f: "weights_note", title: worker.weights_note }, worker.weights_note),
    blamed.has(worker.worker_id) && h("small.bad", { f: "disagrees" }, "log-probabilities disagree"),
  ];
}

const slotsCell = (worker) => [
  h("span.num", { f: "slots" }, worker.slot_count ? `${worker.running_count}/${worker.slot_count}` : "–"),
  worker.slot_count > 0 && meter(worker.running_count / worker.slot_count),
  worker.resident_bytes !== null &&
    h(
      "small",
      { f: "memory", title: "RAM, and memory of its device, that its processes hold" },
      bytes(worker.resident_bytes) + (worker.device_bytes !== null ? ` + ${bytes(worker.device_bytes)} device` : ""),
    ),
];

/** The run whose weights a worker follows, and those that it serves beside, as their weights are the same. */
const runCell = (worker) => [
  worker.run_id ? h("a", { href: runHref(worker.run_id), f: "run" }, worker.run_id) : "–",
  ...Object.keys(worker.guest_versions).map((name) => h("small", { f: "guest" }, h("a", { href: runHref(name) }, name))),
];

/** A worker's version: how far behind its run's head, and what the last change took. */
const versionCell = (worker) => [
  h("span", { f: "version" }, worker.active_version >= 0 ? worker.active_version : "–"),
  worker.versions_behind > 0 && h("small", { f: "behind" }, `${worker.versions_behind} behind`),
  worker.pause_ms !== null &&
    h(
      "small",
      {
        f: "pause",
        title: "What the last change of weights took: preparing it while it generated, and the pause to write it",
      },
      `${milliseconds(worker.stage_ms)} + ${milliseconds(worker.pause_ms)} pause`,
    ),
];

/** How far serving is from its objectives, and what the guard makes of that. */
export const guardCell = (worker) => [
  h("span", { f: "headroom" }, worker.headroom_fraction === null ? "–" : `${percent(worker.headroom_fraction)} margin`),
  worker.guard_state !== null &&
    h("small", { f: "guard" }, [worker.guard_state, worker.guard_reason].filter(Boolean).join(": ")),
  worker.open_fraction !== null &&
    h("small", { f: "open" }, `open ${percent(worker.open_fraction)}${worker.probe ? ` · by ${worker.probe}` : ""}`),
  worker.step_error_fraction_p50 !== null &&
    h(
      "small",
      { f: "step_error", title: "How far serving's steps are from the guard's predictions: the median, and the 95th percentile" },
      `steps off by ${percent(worker.step_error_fraction_p50)}, P95 ${percent(worker.step_error_fraction_p95)}`,
    ),
];

export function leaseText(lease) {
  if (!lease) return "–";
  return `${lease.slot_count} slots · ${lease.is_standing ? "standing" : age(lease.remaining_ms)}`;
}
