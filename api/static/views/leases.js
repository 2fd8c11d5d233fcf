// Leases over time: for each worker, which run held it when and with how many slots, and what its guard said meanwhile.

import { ask, at, runHref } from "../client.js";
import { notice } from "../parts/bits.js";
import { h } from "../parts/dom.js";
import { spanChoice, spanHours } from "../parts/history.js";
import { Reading } from "../parts/live.js";
import { clock, count, counted, moment } from "../parts/words.js";

const USUAL = "1h"; // of the spans of history
const READ_MS = 30_000; // a sample is taken every minute
const STEP_MS = 15_000; // by which lanes move on
const AT_ONCE = 50; // lanes, and added at a time
const LANES_MAX = 200; // as many names as the api takes
const TONES = 6; // of runs; then they begin again, and names tell them apart
const TICKS = 4;
const NAMED_PERCENT = 7; // wide enough for a run's name
const GUARDS = { open: "open", narrow: "narrow", shut: "shut", silent: "silent" };

/** Draws lanes of workers, and reads what they need for as long as they are drawn. */
export class LeaseTimes {
  constructor(page) {
    this.page = page;
    this.most = AT_ONCE;
    this.names = [];
    this.isShown = false;
    this.reading = new Reading(async () => {
      if (!this.isShown || !this.names.length) return null;
      const since_ms = Math.round(Date.now() - spanHours(page, USUAL) * 3_600_000);
      const found = await ask(at(["leases", "history"], { since_ms, worker: this.names }));
      return { ...found, lanes: new Map(found.lanes.map((lane) => [lane.worker_id, lane])) };
    }, READ_MS);
    this.reading.isByWish = true;
  }

  /** workers: all that match, in order; null: other things are shown. */
  draw(workers, now_ms) {
    this.isShown = workers !== null;
    if (!workers) return null;
    const shown = workers.slice(0, this.most);
    const names = shown.map((worker) => worker.worker_id);
    if (String(names) !== String(this.names)) {
      this.names = names;
      this.reading.renew();
    }
    const found = this.reading.value;
    const end = (Math.floor(now_ms / STEP_MS) + 1) * STEP_MS;
    const span = { start: end - spanHours(this.page, USUAL) * 3_600_000, end };
    const lanes = shown.map((worker) => [worker, found?.lanes.get(worker.worker_id)?.stretches ?? []]);
    const runs = [...new Set(lanes.flatMap(([, all]) => all.map((each) => each.run_id)))].filter(Boolean).sort();
    const tone = (runId) => `n${runs.indexOf(runId) % TONES}`;
    return h(
      "section",
      { key: "leases", id: "lease-times", "aria-label": "Leases over time" },
      h("div.head", null, h("span.faint", { f: "looked" }, looked(found)), h("span.grow"), spanChoice(this.page, USUAL)),
      notice(this.reading.error),
      legend(runs, tone, lanes),
      h(
        "div.panel.lease-rows",
        null,
        shown.length > 0 && axis(span),
        lanes.map(([worker, stretches]) => row(worker, stretches, span, tone, `${found?.until_ms} ${span.start} ${span.end} ${runs}`)),
        shown.length === 0 && h("p.empty", null, "No worker that takes leases matches."),
      ),
      this.#more(workers.length),
    );
  }

  #more(number) {
    const left = Math.min(number, LANES_MAX) - this.most;
    if (left <= 0) {
      const words = `${count(LANES_MAX)} of ${count(number)} are shown: search for others.`;
      return number > LANES_MAX && h("p.more.faint", null, words);
    }
    const onclick = () => {
      this.most += AT_ONCE;
      this.page.draw();
    };
    return h("p.more", null, h("button", { f: "more-lanes", onclick }, `Show ${Math.min(left, AT_ONCE)} more`));
  }
}

function looked(found) {
  if (!found) return "…";
  if (found.until_ms === null) return "Nothing is written down of that time: a controller does so every minute.";
  return `as written down every minute, last at ${clock(found.until_ms)}`;
}

const legend = (runs, tone, lanes) =>
  h(
    "p.legend.lease-legend",
    { f: "lease-legend" },
    runs.map((runId) => h("span", { key: `run ${runId}` }, h("i.swatch", { "data-tone": tone(runId) }), runId)),
    h("span", { key: "idle" }, h("i.swatch.idle-lease"), "no lease"),
    h("span", { key: "unknown" }, h("i.swatch.unknown"), "not known"),
    lanes.some(([, all]) => all.some((each) => each.guard_state)) &&
      Object.entries(GUARDS).map(([state, words]) =>
        h("span", { key: `guard ${state}` }, h("i.swatch.guard", { "data-guard": state }), `guard ${words}`),
      ),
  );

function axis({ start, end }) {
  const isLong = end - start > 86_400_000;
  const words = (ms) => (isLong ? moment(ms).slice(5, -3) : clock(ms).slice(0, -3));
  return h(
    "div.lease-row.lease-axis",
    { key: "axis", "aria-hidden": "true" },
    h("span"),
    h(
      "div.ticks",
      null,
      Array.from({ length: TICKS + 1 }, (_, index) =>
        h("small", null, index === TICKS ? "now" : words(start + ((end - start) * index) / TICKS)),
      ),
    ),
    h("span"),
  );
}

function row(worker, stretches, { start, end }, tone, same) {
  const most = Math.max(1, ...stretches.map((each) => each.slot_count));
  const last = stretches.at(-1);
  const held = stretches.filter((each) => each.run_id).length;
  const summary = stretches.length ? `${counted(held, "lease")}; at last ${said(last)}` : "nothing is known of it";
  const place = (ms) => (100 * (Math.max(ms, start) - start)) / (end - start);
  return h(
    "div.lease-row",
    { key: `lane ${worker.worker_id}`, "data-lane": worker.worker_id },
    h("div", null, h("b", null, worker.worker_id), h("small.role", { "data-role": worker.role }, worker.role)),
    h(
      "div.lease-lane",
      { role: "img", "aria-label": `${worker.worker_id}: ${summary}`, same },
      stretches.map((each, index) => {
        const width = place(each.end_ms) - place(each.start_ms);
        return h(
          "i",
          {
            key: index,
            class: each.run_id ? "" : "idle-lease",
            "data-tone": each.run_id && tone(each.run_id),
            "data-guard": each.guard_state,
            title: inWords(each),
            style: {
              left: `${place(each.start_ms).toFixed(3)}%`,
              width: `max(1px, ${width.toFixed(3)}%)`,
              "--fill": each.run_id ? `${Math.round(45 + (55 * each.slot_count) / most)}%` : "",
            },
          },
          each.run_id && width > NAMED_PERCENT && h("span", null, `${each.run_id} · ${each.slot_count}`),
        );
      }),
    ),
    h(
      "details",
      { f: "in-words" },
      h("summary", null, h("span.sr", null, `${worker.worker_id} `), "in words"),
      stretches.length === 0 && h("p", null, "Nothing is known of it in this time."),
      h("ol", null, stretches.map((each, index) => h("li", { key: index }, inWords(each, true)))),
    ),
  );
}

const said = ({ run_id, slot_count, guard_state }) =>
  [run_id ? `run ${run_id}, ${counted(slot_count, "slot")}` : "no lease", guard_state && `guard ${guard_state}`]
    .filter(Boolean)
    .join(", ");

const inWords = (each, isLinked = false) => {
  const times = `${moment(each.start_ms)} to ${clock(each.end_ms)}: `;
  if (!isLinked || !each.run_id) return times + said(each);
  return [times, h("a", { href: runHref(each.run_id) }, said(each))];
};
