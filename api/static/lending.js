// What serving teams allow, what guards do, and what sharing devices with rollouts cost and gave.

import { readSharing } from "./client.js";
import { $, Keyed, age, count, percent, show, text } from "./draw.js";

const REPORT_MS = 5000; // reports change with heartbeats, and nobody reads them faster
const COLUMNS = 12;
const LATENCIES = ["ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"];

const rows = new Keyed($("sharing-rows"));
let readAt = -Infinity;

/** The team's switch: what it said of this worker itself is pressed; what holds, and whose word that is, is beside it. */
export function fillSwitch(f, worker, own, press) {
  const terms = worker.lend_terms;
  for (const part of [f.modes, f.limit, f.why]) show(part, terms !== null);
  if (terms === null) return;
  for (const [button, mode] of [[f.lend, "on"], [f.lend_observe, "observe"], [f.lend_off, "off"]]) {
    button.setAttribute("aria-pressed", String(own === mode));
    button.setAttribute("aria-label", `${mode} ${worker.worker_id}`);
    button.onclick = () => press(button, mode);
  }
  text(f.limit, ["on", "observe", "off"].includes(worker.lend) ? worker.lend : `max ${worker.lend}`);
  text(f.why, [terms.reason, ...bounds(terms)].join(" · "));
}

function bounds(terms) {
  const shares = [["compute", terms.compute_fraction_max], ["KV cache", terms.memory_fraction_max]];
  return shares.filter(([, share]) => share !== null).map(([name, share]) => `${percent(share)} of ${name}`);
}

/** How far serving is from its objectives, what the guard makes of that, and the controller's reason. */
export function fillGuard(f, worker) {
  text(f.headroom, worker.headroom_fraction === null ? "–" : percent(worker.headroom_fraction));
  text(f.guard, worker.guard_state === null ? "" : [worker.guard_state, worker.guard_reason].filter(Boolean).join(": "));
  text(f.open, worker.open_fraction === null ? "" : `open ${percent(worker.open_fraction)}${worker.probe ? ` · by ${worker.probe}` : ""}`);
  text(f.plan, worker.plan_reason ?? "");
}

/** The report, read anew now and then; an answer that does not come leaves the last one in sight. */
export function renderSharing(status) {
  show($("sharing"), status.sharing.worker_count > 0);
  text($("sharing-totals"), sentence(status.sharing));
  if (status.sharing.worker_count === 0 || performance.now() - readAt < REPORT_MS) return;
  readAt = performance.now();
  readSharing().then(
    (sharing) => rows.update(sharing.workers, (report) => report.worker_id, fillReport),
    () => {},
  );
}

function sentence(totals) {
  if (!totals.shared_request_count) return "no serving request met a rollout yet";
  const parts = [`${percent(totals.shared_attained_fraction)} within objectives`, `${count(totals.violation_count)} beyond`];
  for (const [name, tax] of [["TTFT", totals.ttft_tax_p99_worst], ["TPOT", totals.tpot_tax_p99_worst]]) {
    if (tax !== null) parts.push(`${name} P99 ${signed(tax)}`);
  }
  return [...parts, `${count(totals.token_count)} rollout tokens`].join(" · ");
}

function fillReport({ root }, report) {
  root.dataset.sharing = report.worker_id;
  while (root.children.length < COLUMNS) {
    const cell = document.createElement("td");
    cell.className = root.children.length ? "r num" : "";
    root.append(cell);
  }
  const { alone, shared } = report;
  const cells = [
    report.worker_id,
    `${count(alone.request_count ?? 0)} / ${count(shared.request_count ?? 0)}`,
    shared.request_count ? percent(shared.attained_fraction ?? 0) : "–",
    count(report.violation_count),
    ...LATENCIES.map((name) => latency(shared, name, report[name.replace("_ms_", "_tax_")])),
    count(report.token_count),
    age(1000 * report.computing_s),
    age(1000 * report.could_lend_s),
    report.reclaim_count ? `${report.reclaim_ms_p99.toFixed(1)} ms` : "–",
  ];
  cells.forEach((value, index) => text(root.children[index], value));
}

function latency(shared, name, tax) {
  if (!shared.request_count || !shared[name]) return "–";
  return `${shared[name].toFixed(1)} ms${tax === null ? "" : ` (${signed(tax)})`}`;
}

function signed(fraction) {
  return `${fraction < 0 ? "−" : "+"}${(100 * Math.abs(fraction)).toFixed(1)} %`;
}
