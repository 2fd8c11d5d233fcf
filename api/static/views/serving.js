// Serving: what lending costs its users against their objectives, what it gives, who allows it, and the way out.

import { ask, at } from "../client.js";
import { eventRow, head, notice } from "../parts/bits.js";
import { h } from "../parts/dom.js";
import { columns, historyReading, nothingKept, spanChoice } from "../parts/history.js";
import { Reading } from "../parts/live.js";
import { lendSwitch } from "../parts/act.js";
import { Plot, figure } from "../parts/plot.js";
import { table } from "../parts/table.js";
import { age, count, milliseconds, moment, percent, rate, signed } from "../parts/words.js";
import { guardCell, leaseText, lendAll, rowMark, stateOf } from "./workers.js";

const VERDICTS_MAX = 20; // the worst first
const REPORT_MS = 5000; // reports change with heartbeats, and nobody reads them faster

/** What sharing comes to, in one line. */
export function sentence(totals) {
  if (!totals.shared_request_count) return "no serving request met a rollout yet";
  const parts = [
    `${percent(totals.shared_attained_fraction)} within objectives`,
    `${count(totals.violation_count)} beyond`,
  ];
  for (const [name, tax] of [
    ["TTFT", totals.ttft_tax_p99_worst],
    ["TPOT", totals.tpot_tax_p99_worst],
  ]) {
    if (tax !== null) parts.push(`${name} P99 ${signed(tax)}`);
  }
  return [...parts, `${count(totals.token_count)} rollout tokens`].join(" · ");
}

export function serving(page) {
  const sharing = new Reading(() => ask(at(["sharing"])), REPORT_MS);
  const history = historyReading(page);
  const ttft = new Plot("TTFT P99, in ms", latencyLines(), { low: 0 });
  const tpot = new Plot("TPOT P99, in ms", latencyLines(), { low: 0 });
  const lent = new Plot("Harvested tokens per second", [{ name: "tokens", show: rate }], { low: 0 });
  const beyond = new Plot(
    "Serving requests a sample",
    [
      { name: "all", show: count },
      { name: "beyond an objective, beside rollouts", show: count, color: "--bad" },
    ],
    { low: 0 },
  );

  return {
    title: "Serving",
    readings: [sharing, history],
    close: () => [ttft, tpot, lent, beyond].forEach((plot) => plot.close()),
    draw(status) {
      const rows = status.workers.filter((worker) => worker.lend_terms);
      const reports = new Map((sharing.value?.workers ?? []).map((report) => [report.worker_id, report]));
      const chosen = chooseWorker(page, rows);
      const of = (...names) =>
        chosen && columns(history, ...names.map((name) => (point) => point.serving[chosen]?.[name] || null));
      const requests =
        chosen &&
        columns(
          history,
          (point) => allRequests(point.serving[chosen]),
          (point) => point.serving[chosen]?.violation_count,
        );
      const latencies = (name) => of(`${name}_ms_p99`, `${name}_ms_p99_alone`, `${name}_slo_ms`);
      return [
        h(
          "div.head",
          null,
          h("h1", null, "Serving"),
          h("span.faint", { id: "sharing-totals" }, status.sharing.worker_count ? sentence(status.sharing) : ""),
          h("span.grow"),
          rows.length > 0 && lendAll(status),
        ),
        rows.length === 0 && h("p.empty.panel", null, "No serving worker is connected, so nothing is borrowed."),
        rows.length > 0 &&
          h(
            "section",
            { key: "switches", "aria-labelledby": "h-switches" },
            head("h-switches", "Who lends", `for all: ${status.lend_all}`),
            h(
              "div.panel",
              null,
              table("serving", switchColumns(status), rows, {
                key: (worker) => worker.worker_id,
                height: (_, isNarrow) => (isNarrow ? 340 : 104),
                label: "Serving workers",
                mark: rowMark,
              }),
            ),
          ),
        notice(sharing.error),
        reports.size > 0 &&
          h(
            "section",
            { key: "sharing", id: "sharing", "aria-labelledby": "h-sharing" },
            head(
              "h-sharing",
              "What sharing costs and gives",
              "P99 of requests beside rollouts, in brackets against those alone; below, between what it truly lies, with 95 %",
            ),
            h(
              "div.panel",
              null,
              table("sharing-rows", SHARING, [...reports.values()], {
                key: (report) => report.worker_id,
                height: (_, isNarrow) => (isNarrow ? 330 : 104),
                label: "Sharing",
                mark: (report) => ({ "data-sharing": report.worker_id }),
              }),
            ),
          ),
        rows.length > 0 &&
          h(
            "section",
            { key: "over-time", "aria-labelledby": "h-time" },
            h(
              "div.head",
              null,
              h("h2", { id: "h-time" }, "Over time"),
              h("span.grow"),
              workerChoice(page, rows, chosen),
              spanChoice(page),
            ),
            verdicts(history),
            h(
              "div.plots.four",
              null,
              figure(ttft, latencies("ttft"), nothingKept(history)),
              figure(tpot, latencies("tpot"), nothingKept(history)),
              figure(lent, of("tokens_per_s"), nothingKept(history)),
              figure(beyond, requests, nothingKept(history)),
            ),
          ),
        settings(status),
      ];
    },
  };
}

const latencyLines = () => [
  { name: "beside rollouts", show: milliseconds },
  { name: "alone", show: milliseconds, color: "--good" },
  { name: "objective", show: milliseconds, color: "--bad", dash: [10, 4] },
];

const allRequests = (row) => row && row.request_count + row.request_count_alone;

const ANSWERS = {
  yes: ["bad", "hurt"],
  no: ["good", "did not hurt"],
  unclear: ["warn", "unclear"],
  idle: ["idle", "idle"],
};

/** Whether lending hurt anybody's users in the time that the plots show: the api's own test and words. */
function verdicts(history) {
  const found = history.value?.lending ?? [];
  return (
    found.length > 0 &&
    h(
      "ul.panel.verdicts",
      { "aria-label": "Whether lending hurt anybody's users" },
      found.slice(0, VERDICTS_MAX).map((verdict) => {
        const [kind, word] = ANSWERS[verdict.answer] ?? ["idle", verdict.answer];
        return h(
          "li",
          { key: verdict.worker_id, "data-verdict": verdict.worker_id },
          h("b", null, verdict.worker_id),
          " ",
          h("span.chip", { "data-kind": kind }, word),
          " ",
          h("span", null, verdict.words),
        );
      }),
    )
  );
}

/** The worker whose plots are shown: the one in the address, else the tightest. */
function chooseWorker(page, rows) {
  const wished = page.wishes.get("worker");
  if (rows.some((worker) => worker.worker_id === wished)) return wished;
  const tightest = [...rows].sort((a, b) => (a.headroom_fraction ?? 2) - (b.headroom_fraction ?? 2))[0];
  return tightest?.worker_id ?? null;
}

const workerChoice = (page, rows, chosen) =>
  h(
    "label.span",
    null,
    h("span", null, "Worker"),
    " ",
    h(
      "select",
      { f: "worker", value: chosen, onchange: (event) => page.wish("worker", event.target.value) },
      rows.slice(0, 1000).map((worker) => h("option", { value: worker.worker_id }, worker.worker_id)),
    ),
  );

const switchColumns = (status) => [
  {
    name: "Worker",
    width: "minmax(0, 1.5fr)",
    cell: (worker) => [
      h("b", { f: "name" }, worker.worker_id),
      h("small", null, worker.pool ? `pool ${worker.pool}` : worker.host),
    ],
  },
  {
    name: "State",
    width: "minmax(0, 1fr)",
    cell: (worker) => [
      h("span.dot", { f: "state", "data-state": stateOf(worker) }, stateOf(worker)),
      worker.error && h("small.bad", null, worker.error),
    ],
  },
  {
    name: "Turns",
    num: true,
    width: "minmax(0, .7fr)",
    cell: (worker) => `${worker.running_count}/${worker.slot_count}`,
  },
  { name: "Tokens/s", num: true, width: "minmax(0, .7fr)", cell: (worker) => rate(worker.tokens_per_s) },
  { name: "Guard", width: "minmax(0, 1.4fr)", cell: guardCell },
  {
    name: "Lease",
    width: "minmax(0, 1.6fr)",
    cell: (worker) => [
      h("span", { f: "lease" }, leaseText(worker.lease)),
      worker.plan_reason && h("small", { f: "plan" }, worker.plan_reason),
    ],
  },
  { name: "Lend", width: "minmax(190px, 2fr)", cell: (worker) => lendSwitch(status, worker) },
];

const SHARING = [
  { name: "Worker", width: "minmax(0, 1.3fr)", cell: (report) => report.worker_id },
  {
    name: "Requests alone / shared",
    hint: "Serving requests that met no rollout, and those that did",
    num: true,
    width: "minmax(0, 1.1fr)",
    cell: (report) => `${count(report.alone.request_count ?? 0)} / ${count(report.shared.request_count ?? 0)}`,
  },
  {
    name: "Within objectives",
    num: true,
    cell: (report) => [
      report.shared.request_count ? percent(report.shared.attained_fraction ?? 0) : "–",
      h("small", null, `${count(report.violation_count)} beyond`),
    ],
  },
  { name: "TTFT P99", num: true, width: "minmax(0, 1.5fr)", cell: (report) => latency(report, "ttft") },
  { name: "TPOT P99", num: true, width: "minmax(0, 1.5fr)", cell: (report) => latency(report, "tpot") },
  { name: "Rollout tokens", num: true, cell: (report) => h("span", { f: "harvested" }, count(report.token_count)) },
  {
    name: "Computing",
    num: true,
    cell: (report) => [age(1000 * report.computing_s), h("small", null, `of ${age(1000 * report.lent_s)} lent`)],
  },
  {
    name: "Could lend",
    hint: "Time that could have been lent while it only observed",
    num: true,
    cell: (report) => age(1000 * report.could_lend_s),
  },
  {
    name: "Reclaim P99",
    hint: "From a serving request's arrival to the end of the rollout step that it found",
    num: true,
    cell: (report) => (report.reclaim_count ? milliseconds(report.reclaim_ms_p99) : "–"),
  },
];

/** A P99 beside rollouts: its tax, the bounds that its number of requests allows, and the objective. */
function latency(report, name) {
  const { shared } = report;
  const value = shared[`${name}_ms_p99`];
  const slo = report[`${name}_slo_ms`];
  if (!shared.request_count || !value) return ["–", slo > 0 && h("small", null, `objective ${milliseconds(slo)}`)];
  const tax = report[`${name}_tax_p99`];
  const low = shared[`${name}_ms_p99_low`],
    high = shared[`${name}_ms_p99_high`];
  const isFew = report.few.includes(`shared.${name}_ms_p99`);
  const bounds =
    low && high ? `${milliseconds(low)} to ${milliseconds(high)}` : isFew ? "of too few requests to bound" : "";
  return [
    h("span", { f: name }, `${value.toFixed(1)} ms${tax === null ? "" : ` (${signed(tax)})`}`),
    bounds && h("small", null, bounds),
    slo > 0 &&
      h(
        value > slo ? "small.bad" : "small",
        null,
        `${value > slo ? "beyond the" : "within the"} objective of ${milliseconds(slo)}`,
      ),
  ];
}

/** Who said what of whom, and what was switched of late. */
function settings(status) {
  const switched = status.events.filter((event) => event.kind.startsWith("lend."));
  const name = (setting) => (setting.subject === "*" ? "all" : setting.subject);
  const bounds = (setting) =>
    [
      setting.slot_count_max !== null && `at most ${setting.slot_count_max} slots`,
      setting.compute_fraction_max !== null && `${percent(setting.compute_fraction_max)} of compute`,
      setting.memory_fraction_max !== null && `${percent(setting.memory_fraction_max)} of KV cache`,
      ...setting.hours,
    ]
      .filter(Boolean)
      .join(" · ");
  return h(
    "div.two",
    { key: "said" },
    h(
      "section",
      { "aria-labelledby": "h-said" },
      head("h-said", "What was said", ""),
      h(
        "div.panel",
        null,
        table(
          "said",
          [
            { name: "Of", cell: name },
            {
              name: "Word",
              cell: (setting) => [h("b", null, setting.mode), bounds(setting) && h("small", null, bounds(setting))],
            },
            {
              name: "By",
              cell: (setting) => [setting.said_by || "–", setting.reason && h("small", null, setting.reason)],
            },
            { name: "When", num: true, cell: (setting) => (setting.said_at_ms ? moment(setting.said_at_ms) : "–") },
          ],
          status.lending,
          { key: (setting) => setting.subject, label: "What was said" },
        ),
        status.lending.length === 0 &&
          h("p.empty", null, "Nothing was said yet: workers observe, and nothing is lent."),
      ),
    ),
    h(
      "section",
      { "aria-labelledby": "h-switched" },
      head("h-switched", "Who switched what", ""),
      h(
        "div.panel",
        null,
        h("ol.events", { id: "switched" }, switched.map(eventRow)),
        switched.length === 0 && h("p.empty", null, "Nothing was switched of late."),
      ),
    ),
  );
}
