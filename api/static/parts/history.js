// What happened, over a span that the address keeps: read now and then, as columns for plots.

import { ask, at } from "../client.js";
import { h } from "./dom.js";
import { Reading } from "./live.js";

const SPANS = { "1h": [1, "1 hour"], "6h": [6, "6 hours"], "24h": [24, "1 day"], "72h": [72, "3 days"] };

const HISTORY_MS = 20_000;

/** As many hours as the address wishes. */
export const spanHours = (page, usual = "6h") => (SPANS[page.wishes.get("span")] ?? SPANS[usual])[0];

/** Reads what happened in that time. */
export function historyReading(page) {
  const reading = new Reading(
    () => ask(at(["history"], { since_ms: Math.round(Date.now() - spanHours(page) * 3_600_000), count: 300 })),
    HISTORY_MS,
  );
  reading.isByWish = true;
  return reading;
}

export const spanChoice = (page, usual = "6h") =>
  h(
    "label.span",
    null,
    h("span", null, "Over"),
    " ",
    h(
      "select",
      { f: "span", value: page.wishes.get("span") ?? usual, onchange: (event) => page.wish("span", event.target.value) },
      Object.entries(SPANS).map(([value, [, words]]) => h("option", { value }, words)),
    ),
  );

/** Columns of a history for a plot; null while there is none. */
export function columns(reading, ...values) {
  const points = reading.value?.points ?? null;
  return (
    points && [
      points.map((point) => point.time_ms),
      ...values.map((value) => points.map((point) => value(point) ?? null)),
    ]
  );
}

export const nothingKept = (reading) =>
  reading.error?.message ?? (reading.value ? "Nothing to draw yet: a sample is taken every minute." : "…");
