// The weights of runs, and which of them each worker holds.

import { $, Keyed, bytes, percent, show, text } from "./draw.js";

const COLUMNS = ["", "r num", "", "r num", "r num", "r num", "r num", "r num", "num", "r num"];

const rows = new Keyed($("weights"));

export function renderWeights(status) {
  const published = status.weights.filter((weights) => weights.head_version >= 0);
  show($("no-weights"), published.length === 0);
  rows.update(published, (weights) => weights.run_id, ({ root }, weights) => fillRun(root, weights, status.workers));
}

function fillRun(root, weights, workers) {
  while (root.children.length < COLUMNS.length) {
    const cell = document.createElement("td");
    cell.className = COLUMNS[root.children.length];
    root.append(cell);
  }
  root.dataset.weights = weights.run_id;
  const isHead = (version) => version.version === weights.head_version;
  const head = weights.versions.findLast((version) => isHead(version) && version.kind === weights.kind) ?? weights.versions.findLast(isHead);
  const holders = workers.filter((worker) => worker.is_fresh && worker.run_id === weights.run_id && worker.active_version >= 0);
  const cells = [
    weights.run_id,
    weights.head_version,
    head ? head.kind : weights.kind,
    head ? bytes(head.payload_bytes) : "–",
    head && head.dense_bytes ? percent(head.payload_bytes / head.dense_bytes) : "–",
    typeof head?.density === "number" ? percent(head.density) : "–",
    typeof head?.bytes_per_changed === "number" ? head.bytes_per_changed.toFixed(2) : "–",
    weights.held_bytes === null ? `${weights.held_count}` : `${weights.held_count} · ${bytes(weights.held_bytes)}`,
    onWorkers(holders),
    holders.length ? Math.max(...holders.map((worker) => worker.versions_behind ?? 0)) : "–",
  ];
  cells.forEach((value, index) => text(root.children[index], value));
}

/** How many workers generate with which version, the newest first. */
function onWorkers(holders) {
  const found = new Map();
  for (const worker of holders) found.set(worker.active_version, (found.get(worker.active_version) ?? 0) + 1);
  const parts = [...found].sort(([a], [b]) => b - a).slice(0, 3).map(([version, number]) => `v${version} × ${number}`);
  return parts.join(", ") || "–";
}

/** A worker's version: how far behind its run's head, what the last change took, and what its engine could not do. */
export function fillVersion(f, worker) {
  text(f.version, worker.active_version >= 0 ? worker.active_version : "–");
  text(f.behind, worker.versions_behind > 0 ? `${worker.versions_behind} behind` : "");
  text(f.pause, worker.pause_ms === null ? "" : `${milliseconds(worker.stage_ms)} + ${milliseconds(worker.pause_ms)} pause`);
  text(f.weights_note, worker.weights_note ?? "");
}

/** 0.4 → 0.4 ms; 12.3 → 12 ms; 1234 → 1.2 s. */
function milliseconds(value) {
  if (value === null) return "–";
  return value < 1000 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}
