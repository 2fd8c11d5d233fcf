// Whether workers compute the probabilities that the trainer's model does: one fold of a run.

import { h } from "../parts/dom.js";
import { table } from "../parts/table.js";
import { count, percent, small } from "../parts/words.js";

export function agreement(run) {
  const found = run.agreement;
  if (!found) return null;
  const { fresh, stale, alarms } = found;
  const isBad = alarms.length > 0;
  const isThere = fresh.token_count > 0;
  return h(
    isBad ? "details.panel.agreement.is-bad" : "details.panel.agreement",
    { key: `agreement ${isBad}`, f: "agreement", open: isBad },
    h(
      "summary",
      {
        title: "What workers said of the tokens they sampled, against what the trainer's model says of the same tokens",
      },
      h("span", null, "Log-probabilities"),
      " ",
      h(
        "b",
        { f: "agree_state" },
        isBad ? `${alarms.length} over the limit` : isThere ? "agree" : "nothing to compare",
      ),
      h("span.grow"),
      h(
        "span",
        null,
        "|difference| mean ",
        h("b", { f: "agree_mean" }, isThere ? small(fresh.logprob_difference_mean) : "–"),
      ),
      h("span", null, "max ", h("b", { f: "agree_max" }, isThere ? small(fresh.logprob_difference_max) : "–")),
    ),
    isBad &&
      h(
        "p.bad",
        { f: "alarm", role: "alert" },
        alarms
          .slice(0, 3)
          .map((alarm) => alarm.text)
          .join("\n"),
      ),
    h(
      "p.faint",
      null,
      `version ${found.policy_version}: ${count(fresh.token_count)} tokens compared, ${count(stale.token_count)} of other versions; importance ratio, least · mean · most: ${isThere ? ratios(fresh) : "–"}`,
    ),
    table("agreement-rows", COLUMNS, found.workers, {
      key: (worker) => worker.worker_id,
      label: "Agreement by worker",
      mark: (worker) => ({ "data-agreement": worker.worker_id, class: worker.is_over ? "over" : "" }),
    }),
  );
}

const COLUMNS = [
  {
    name: "Worker",
    width: "minmax(0, 2fr)",
    cell: (worker) => [worker.worker_id, worker.is_over && h("small.bad", null, "over the limit")],
  },
  { name: "Version", num: true, cell: (worker) => worker.policy_version },
  {
    name: "Tokens",
    num: true,
    cell: (worker) =>
      count(worker.token_count) + (worker.not_finite_count ? ` + ${count(worker.not_finite_count)} not finite` : ""),
  },
  { name: "Mean", num: true, cell: (worker) => small(worker.logprob_difference_mean) },
  { name: "p99", num: true, cell: (worker) => small(worker.logprob_difference_p99) },
  { name: "Max", num: true, cell: (worker) => small(worker.logprob_difference_max) },
  { name: "Ratio", num: true, width: "minmax(0, 2fr)", cell: ratios },
  { name: "Outside ½–2", num: true, cell: (worker) => percent(worker.ratio_outside_fraction) },
];

function ratios(figures) {
  const parts = [
    figures.importance_sampling_ratio_min,
    figures.importance_sampling_ratio_mean,
    figures.importance_sampling_ratio_max,
  ];
  return parts.map((value) => (value < 100 ? value.toFixed(3) : value.toExponential(1))).join(" · ");
}

/** Ids of workers with an alarm, of all runs. */
export function blamedWorkers(runs) {
  return new Set(runs.flatMap((run) => (run.agreement?.alarms ?? []).map((alarm) => alarm.worker_id)));
}
