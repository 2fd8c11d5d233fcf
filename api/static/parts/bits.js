// Small things that several views are made of.

import { h } from "./dom.js";
import { clock, factsText } from "./words.js";

export const head = (id, words, faint = "", ...more) =>
  h("div.head", null, h("h2", { id }, words), h("span.faint", null, faint), h("span.grow"), more);

export const meter = (fraction) =>
  h(
    "div.meter",
    null,
    h("div", { style: { width: `${Math.round(1000 * Math.max(0, Math.min(1, fraction || 0))) / 10}%` } }),
  );

export const eventRow = (event) =>
  h(
    "li",
    { key: event.event_id, same: event.event_id },
    h("time", null, clock(event.time_ms)),
    h("b", { "data-kind": event.kind.split(".")[0] }, event.kind),
    h("span", { title: JSON.stringify(event.facts) }, factsText(event.facts)),
  );

/** Why a list is not there: the api's own words. */
export const notice = (error) => error && h("p.notice", { role: "status" }, error.isPassing ? `${error.message}. Trying again.` : error.message);

export const moreOf = (pages, page) =>
  pages.reading.value?.cursor &&
  h(
    "p.more",
    null,
    h(
      "button",
      {
        onclick: () => {
          pages.more();
          page.draw();
        },
      },
      "Show more",
    ),
  );
