// What happened, over a span that the address keeps: read now and then, as columns for plots.

import { ask, at } from "../client.js";
import { h } from "./dom.js";
import { Reading } from "./live.js";

const SPANS = { "1h": [1, "1 hour"], "6h": [6, "6 hours"], "24h": [24, "1 day"], "72h": [72, "3 days"] };

const HISTORY_MS = 20_000;

/** Reads what happened, over as many hours as the address wishes. */
export function historyReading(page) {
  const hours = () => (SPANS[page.wishes.get("span")] ?? SPANS["6h"])[0];
  const reading = new Reading(
    () => ask(at(["history"], { since_ms: Math.round(Date.now() - hours() * 3_600_000), count: 300 })),
    HISTORY_MS,
  );
  reading.isByWish = true;
  return reading;
}

export const spanChoice = (page) =>
  h(
    "label.span",
    null,
    h("span", null, "Over"),
    " ",
    h(
      "select",
      { f: "span", value: page.wishes.get("span") ?? "6h", onchange: (event) => page.wish("span", event.target.value) },
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
