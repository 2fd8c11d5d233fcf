// Tables: grids whose rows become cards on a narrow screen; of long ones, only the rows in sight are there.

import { $, h } from "./dom.js";

const PLAIN_MAX = 80; // rows that are drawn whatever is in sight
const AROUND = 12; // rows drawn above and below what is in sight
const NARROW = matchMedia("(max-width: 760px)");

/**
 * A table. columns: {name, width (of a grid), cell(row), num, hint}; key(row): its name; mark(row): further attributes.
 * height(row, isNarrow): of a row of a long table, in pixels.
 */
export function table(id, columns, rows, { key, height = () => 64, mark = () => ({}), label = "" }) {
  const isLong = rows.length > PLAIN_MAX;
  const heights = isLong ? rows.map((row) => height(row, NARROW.matches)) : [];
  const [first, last, above, below] = isLong ? inSight(id, heights) : [0, rows.length, 0, 0];
  const widths = { "--columns": columns.map((column) => column.width ?? "minmax(0, 1fr)").join(" ") };
  return h(
    isLong ? "table.long" : "table",
    { role: "table", "aria-rowcount": rows.length + 1, "aria-label": label, style: widths },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, columns.map(heading))),
    h(
      "tbody",
      { id, role: "rowgroup" },
      gap("above", above),
      rows.slice(first, last).map((row, index) =>
        h(
          "tr",
          {
            key: `row ${key(row)}`,
            role: "row",
            "aria-rowindex": first + index + 2,
            ...(isLong ? { style: { height: `${heights[first + index]}px` } } : {}),
            ...mark(row),
          },
          columns.map((column) => cell(column, column.cell(row))),
        ),
      ),
      gap("below", below),
    ),
  );
}

const heading = (column) => h(column.num ? "th.r" : "th", { role: "columnheader", title: column.hint }, column.name);

const cell = (column, content) =>
  h(
    column.num ? "td.r.num" : "td",
    { role: "cell", "data-label": column.name, class: content === "–" ? "nil" : "" },
    h("div", null, content),
  );

const gap = (key, height) => height > 0 && h("tr.gap", { key, role: "presentation", style: { height: `${height}px` } });

/** Which rows are in sight, by where the body of the table stands in the window, and how much is above and below them. */
function inSight(id, heights) {
  const top = $(id)?.getBoundingClientRect().top ?? 0;
  const starts = [0];
  for (const height of heights) starts.push(starts.at(-1) + height);
  const place = (y) =>
    Math.max(
      0,
      starts.findLastIndex((start) => start <= y),
    );
  const first = Math.max(0, Math.min(place(-top), heights.length - 1) - AROUND);
  const last = Math.min(heights.length, place(innerHeight - top) + AROUND);
  return [first, last, starts[first], starts.at(-1) - starts[last]];
}

/** A line above a list: what it is searched by, and choices. wishes: kept in the address, so that it can be passed on. */
export function sieve(view, { hint, choices = [], more = null }) {
  const { wishes } = view;
  return h(
    "div.sieve",
    { role: "search" },
    hint &&
      h("input", {
        type: "search",
        f: "search",
        value: wishes.get("q") ?? "",
        placeholder: hint,
        "aria-label": hint,
        oninput: (event) => view.wish("q", event.target.value),
      }),
    choices.map(({ name, label, options }) =>
      h(
        "label",
        null,
        h("span", null, label),
        " ",
        h(
          "select",
          { f: name, value: wishes.get(name) ?? "", onchange: (event) => view.wish(name, event.target.value) },
          options.map(([value, words]) => h("option", { value }, words)),
        ),
      ),
    ),
    more,
  );
}

/** Whether a row's texts hold all the words that were searched for. */
export function holds(wishes, ...texts) {
  const words = (wishes.get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const all = texts.join(" ").toLowerCase();
  return words.every((word) => all.includes(word));
}
