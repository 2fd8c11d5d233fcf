// One trajectory: its turns as a tree of tokens, when it did what and where, its rewards, and all that is raw.

import { ask, at, runHref, trajectoryHref } from "../client.js";
import { notice } from "../parts/bits.js";
import { h } from "../parts/dom.js";
import { Reading } from "../parts/live.js";
import { offlinePage, save } from "../parts/offline.js";
import { Sheet } from "./sheet.js";

const LIVE_MS = 2000;
const OVER = ["completed", "failed", "finished"];

export function trajectory(page, runId, id) {
  const reading = new Reading(() => ask(at(["runs", runId, "trajectories", id])), LIVE_MS);
  const sheet = new Sheet(page.draw, page.wishes, (name, value) => page.wish(name, value));
  const links = { run: runHref(runId), sibling: (name) => trajectoryHref(runId, name) };
  return {
    title: id,
    readings: [reading],
    close: () => sheet.close(),
    draw() {
      const view = reading.value;
      if (view && OVER.includes(view.state)) reading.every_ms = 15_000;
      return [
        h(
          "div.head",
          null,
          h("h1", null, id),
          view && h("span.chip", { f: "state", "data-kind": kindOf(view.state) }, view.state),
          h("span.grow"),
          view &&
            h(
              "button",
              { f: "download", onclick: () => save(`${id}.json`, "application/json", JSON.stringify(view, null, 1)) },
              "Download JSON",
            ),
          view &&
            h(
              "button",
              { f: "offline", onclick: async () => save(`${id}.html`, "text/html", await offlinePage(view)) },
              "Offline page",
            ),
        ),
        notice(reading.error),
        view ? sheet.draw(view, links) : !reading.error && h("p.empty.panel", null, "…"),
      ];
    },
  };
}

const kindOf = (state) => ({ failed: "bad", running: "good", scoring: "good", queued: "warn" })[state] ?? "idle";
