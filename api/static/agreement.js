// Whether workers compute the probabilities that the trainer's model does: one fold in a run's card.

import { Keyed, count, percent, show, text } from "./draw.js";

const tables = new WeakMap(); // tbody → its rows
const COLUMNS = 8;

/** 0.00000123 → 1.2e-6; 0.0123 → 0.012. */
export function small(value) {
  if (value === 0) return "0";
  return value < 1e-3 ? value.toExponential(1) : value.toPrecision(2);
}

export function fillAgreement(f, run) {
  const found = run.agreement;
  show(f.agreement, Boolean(found));
  if (!found) return;
  const { fresh, stale, alarms } = found;
  const isBad = alarms.length > 0;
  f.agreement.classList.toggle("is-bad", isBad);
  if (isBad && !f.agreement.dataset.alarm) f.agreement.open = true; // once; who folds it again has read it
  f.agreement.dataset.alarm = isBad ? "yes" : "";
  text(f.agree_state, isBad ? `${alarms.length} over the limit` : fresh.token_count ? "agree" : "nothing to compare");
  text(f.agree_mean, fresh.token_count ? small(fresh.logprob_difference_mean) : "–");
  text(f.agree_max, fresh.token_count ? small(fresh.logprob_difference_max) : "–");
  text(f.agree_ratio, fresh.token_count ? ratios(fresh) : "–");
  text(f.agree_tokens, `version ${found.policy_version}: ${count(fresh.token_count)} tokens compared, ${count(stale.token_count)} of other versions`);
  show(f.alarm, isBad);
  text(f.alarm, alarms.slice(0, 3).map((alarm) => alarm.text).join("\n"));
  if (!tables.has(f.agree_rows)) tables.set(f.agree_rows, new Keyed(f.agree_rows));
  tables.get(f.agree_rows).update(found.workers, (worker) => worker.worker_id, fillWorker);
}

function ratios(figures) {
  const parts = [figures.importance_sampling_ratio_min, figures.importance_sampling_ratio_mean, figures.importance_sampling_ratio_max];
  return parts.map((value) => (value < 100 ? value.toFixed(3) : value.toExponential(1))).join(" · ");
}

function fillWorker({ root }, worker) {
  while (root.children.length < COLUMNS) {
    const cell = document.createElement("td");
    if (root.children.length) cell.className = "r num";
    root.append(cell);
  }
  root.dataset.agreement = worker.worker_id;
  root.classList.toggle("over", worker.is_over);
  const cells = [
    worker.worker_id,
    worker.policy_version,
    count(worker.token_count) + (worker.not_finite_count ? ` + ${count(worker.not_finite_count)} not finite` : ""),
    small(worker.logprob_difference_mean),
    small(worker.logprob_difference_p99),
    small(worker.logprob_difference_max),
    ratios(worker),
    percent(worker.ratio_outside_fraction),
  ];
  cells.forEach((value, index) => text(root.children[index], value));
}

/** Ids of workers with an alarm, of all runs. */
export function blamedWorkers(runs) {
  return new Set(runs.flatMap((run) => (run.agreement?.alarms ?? []).map((alarm) => alarm.worker_id)));
}
