// Events: all that the broker keeps, as they happen, to search and to filter.

import { ApiError, follow } from "../client.js";
import { h } from "../parts/dom.js";
import { holds, sieve, table } from "../parts/table.js";
import { count, factsText, moment } from "../parts/words.js";

const KEPT_MAX = 20_000; // of a page that stays open for days
const AGAIN_MS = 2000;

export function events(page) {
  const found = []; // the newest last
  const ids = new Set();
  const ended = new AbortController();
  let trouble = null;

  async function listen() {
    while (!ended.signal.aborted) {
      try {
        await follow(found.at(-1)?.event_id ?? "0", ended.signal, take);
      } catch (error) {
        if (ended.signal.aborted) return;
        trouble = error instanceof ApiError ? error.message : "the stream broke off";
      }
      page.draw();
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }

  function take(batch) {
    trouble = null;
    for (const event of batch) {
      if (ids.has(event.event_id)) continue;
      ids.add(event.event_id);
      found.push({ ...event, words: factsText(event.facts) });
    }
    for (const event of found.splice(0, Math.max(0, found.length - KEPT_MAX))) ids.delete(event.event_id);
    page.draw();
  }

  listen();
  return {
    title: "Events",
    readings: [],
    close: () => ended.abort(),
    draw() {
      const kinds = [...new Set(found.map((event) => event.kind))].sort();
      const kind = page.wishes.get("kind");
      const shown = found
        .filter((event) => (!kind || event.kind === kind) && holds(page.wishes, event.kind, event.words))
        .reverse();
      return [
        h(
          "div.head",
          null,
          h("h1", null, "Events"),
          h("span.faint", { f: "found" }, `${count(shown.length)} of ${count(found.length)}, the newest first`),
        ),
        sieve(page, {
          hint: "Search worker, run, group, reason",
          choices: [{ name: "kind", label: "Kind", options: [["", "all"], ...kinds.map((each) => [each, each])] }],
        }),
        trouble && h("p.notice", { role: "status" }, `The stream of events is interrupted: ${trouble}. Trying again.`),
        h(
          "div.panel",
          null,
          table("all-events", COLUMNS, shown, {
            key: (event) => event.event_id,
            height: (_, isNarrow) => (isNarrow ? 92 : 36),
            label: "Events",
            mark: () => ({ class: "event" }),
          }),
          shown.length === 0 && h("p.empty", null, found.length ? "None of these match." : "Nothing has happened yet."),
        ),
      ];
    },
  };
}

const COLUMNS = [
  { name: "Time", width: "150px", cell: (event) => h("time", null, moment(event.time_ms)) },
  {
    name: "Kind",
    width: "minmax(0, 1fr)",
    cell: (event) => h("b", { "data-kind": event.kind.split(".")[0] }, event.kind),
  },
  {
    name: "What",
    width: "minmax(0, 4fr)",
    cell: (event) => h("span", { title: JSON.stringify(event.facts) }, event.words),
  },
];
