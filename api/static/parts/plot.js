// Plots: lines over time or versions by uPlot, small ones and bars by hand. Colours come from the sheet.

import { h } from "./dom.js";
import { count, counted, rate } from "./words.js";

const HEIGHT = 170;
const WHOLE = Array.from({ length: 40 }, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3)); // of ticks
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]]; // colour is never the only sign
const COLORS = ["--accent", "--scoring", "--good", "--warn"];

const color = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

let asked = null;

/** uPlot, which is no module: asked for with the first plot, as half of the views have none. */
function library() {
  asked ??= new Promise((done) => {
    const script = document.createElement("script");
    script.src = new URL("../vendor/uPlot.iife.min.js", import.meta.url);
    script.onload = done;
    script.onerror = () => (asked = null); // the next plot asks again
    document.head.append(script);
  });
  return asked;
}

/** Lines in one plot. It is made once, and told its data; `close` when its view goes. */
export class Plot {
  /** lines: [{name, show(value), dash, color}]; band: [upper, lower] indices of lines with an area between. */
  constructor(title, lines, { isTime = true, bands = [], low = null, high = null } = {}) {
    Object.assign(this, { title, lines, isTime, bands, low, high });
    library();
    this.element = document.createElement("div");
    this.element.className = "uplot-host";
    this.element.setAttribute("role", "img");
    this.sized = new ResizeObserver(() => this.plot?.setSize({ width: this.element.clientWidth, height: HEIGHT }));
    this.sized.observe(this.element);
    this.data = null;
    this.plot = null;
  }

  /** data: [xs, ys of each line]. Times are milliseconds. */
  show(data) {
    const mark = JSON.stringify([
      data[0].length,
      data[0].at(-1),
      data.slice(1).map((ys) => ys.at(-1)),
      document.documentElement.dataset.theme,
    ]);
    if (mark === this.mark && this.plot) return;
    const isSameTheme = this.theme === themeNow();
    this.mark = mark;
    this.data = this.isTime ? [data[0].map((ms) => ms / 1000), ...data.slice(1)] : data;
    const last = this.lines
      .filter((line) => line.name)
      .map((line) => `${line.name} ${line.show(data[this.lines.indexOf(line) + 1].at(-1) ?? null)}`);
    this.element.setAttribute("aria-label", `${this.title}: ${counted(data[0].length, "point")}, at last ${last.join(", ")}`);
    if (this.plot && isSameTheme) return void this.plot.setData(this.data);
    requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    if (!this.element.isConnected || !this.data) return void (this.mark = null);
    if (!globalThis.uPlot) return void library().then(() => this.#draw());
    this.plot?.destroy();
    this.theme = themeNow();
    const ink = color("--dim"),
      grid = { stroke: color("--line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const { low, high } = this;
    const isWhole = this.lines.every((line) => line.show === count);
    this.plot = new uPlot(
      {
        width: this.element.clientWidth || 300,
        height: HEIGHT,
        cursor: { y: false, drag: { x: false } },
        scales: {
          x: { time: this.isTime, range: (_, first, last) => around(first, last, this.isTime ? 30 : 1) },
          y: { range: (_, least, most) => rangeOf(least, most, { low, high, isWhole }) },
        },
        legend: { markers: { dash: (plot, index) => (plot.series[index].dash?.length ? "dashed" : "solid") } },
        axes: [
          { ...axis, space: 60, size: 30, ...(this.isTime ? { values: timesOf } : { incrs: WHOLE }) },
          {
            ...axis,
            ...(isWhole ? { incrs: WHOLE } : {}),
            size: 46,
            values: (_, values) => values.map((value) => (Math.abs(value) < 10 ? +value.toPrecision(3) : rate(value))),
          },
        ],
        series: [
          {
            label: this.isTime ? "at" : "version",
            value: (_, value) => (value === null ? "" : this.isTime ? timeOf(value) : value),
          },
          ...this.lines.map((line, index) => this.#line(line, index)),
        ],
        bands: this.bands.map((series) => ({
          series: series.map((index) => index + 1),
          fill: withAlpha(color("--accent"), 0.14),
        })),
      },
      this.data,
      this.element,
    );
  }

  #line(line, index) {
    const isEdge = !line.name;
    const stroke = isEdge ? withAlpha(color("--accent"), 0.35) : color(line.color ?? COLORS[index % COLORS.length]);
    return {
      label: line.name ?? "",
      class: isEdge ? "edge" : "named",
      stroke,
      dash: line.dash ?? DASHES[isEdge ? 0 : index % DASHES.length],
      width: isEdge ? 1 : 1.7,
      spanGaps: true,
      value: (_, value) => (value === null || value === undefined ? "–" : line.show(value)),
      // without a second value there is no line to see
      points: {
        show: (plot, at) => !isEdge && plot.data[at].filter((y) => y != null).length < 3,
        size: line.color === "--faint" ? 4 : 8, // the main line's is seen below the others'
        fill: stroke,
      },
    };
  }

  close() {
    this.sized.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

/** A time of the day; at midnight, the day. */
function timeOf(s) {
  const time = new Date(s * 1000);
  const isDay = time.getHours() + time.getMinutes() + time.getSeconds() === 0;
  return isDay
    ? time.toLocaleDateString("en-GB", { day: "numeric", month: "short" })
    : time.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

/** The ticks of an axis of times; with seconds where they are closer than a minute. */
function timesOf(_, ticks) {
  const isClose = ticks.length > 1 && ticks[1] - ticks[0] < 60;
  return ticks.map((s) => (isClose ? new Date(s * 1000).toLocaleTimeString("en-GB") : timeOf(s)));
}

/** A range that has some width, also where all values are equal. */
const around = (least, most, room) => (most > least ? [least, most] : [least - room, least + room]);

function rangeOf(least, most, { low, high, isWhole }) {
  const bottom = low ?? least ?? 0;
  const top = Math.max(high ?? -Infinity, most ?? bottom + 1);
  if (top - bottom > 1e-6 * Math.abs(top)) return [bottom, top + 0.05 * (top - bottom)];
  const room = isWhole ? 1 : Math.abs(bottom) / 10 || 1; // so that what is equal is a line in the middle
  return low === null ? [bottom - room, bottom + room] : [low, low + room];
}

const themeNow = () =>
  document.documentElement.dataset.theme + String(matchMedia("(prefers-color-scheme: dark)").matches);

const withAlpha = (rgb, alpha) => rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);

/** A plot with its title, or what to say while there is nothing to plot. */
export function figure(plot, data, nothing) {
  const isThere =
    data !== null &&
    data[0].length > Number(plot.isTime) &&
    data.slice(1).some((ys) => ys.some((value) => value !== null && value !== undefined));
  if (isThere) plot.show(data);
  return h(
    "figure.panel.plotted",
    { key: plot.title },
    h("figcaption", null, plot.title),
    isThere ? plot.element : h("p.empty", null, nothing),
  );
}

/** Values as a line with a soft area under it, and nothing else. */
export function spark(values, { f, low = 0, high = null, label = null, dot = false } = {}) {
  const top = high ?? Math.max(...values, 0) * 1.15;
  const span = top > low ? top - low : 1;
  const y = (value) => (97 - 94 * ((value - low) / span)).toFixed(1);
  const points = values
    .map((value, index) => `${((100 * index) / (values.length - 1)).toFixed(1)} ${y(value)}`)
    .join("L");
  const props = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  return h(
    "svg.spark",
    { f, viewBox: "0 0 100 100", preserveAspectRatio: "none", ...props },
    values.length > 1 && [h("path.area", { d: `M0 100L${points}L100 100Z` }), h("path.line", { d: `M${points}` })],
    dot && values.length > 0 && h("path.dot", { d: `M${values.length > 1 ? 100 : 50} ${y(values.at(-1))}h0` }),
  );
}

/** How often values fall into each of a few equal ranges, in words and as bars. */
export function histogram(
  title,
  values,
  { show = String, isWhole = false, nothing = "nothing yet", key = title } = {},
) {
  const found = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  return h(
    "figure.panel.plotted",
    { key },
    h("figcaption", null, title),
    found.length ? bars(title, found, show, isWhole) : h("p.empty", null, nothing),
  );
}

function bars(title, values, show, isWhole) {
  const low = Math.min(...values),
    high = Math.max(...values);
  const step = isWhole ? Math.max(1, Math.ceil((high - low + 1) / 12)) : (high - low) / 10 || 1;
  const counts = Array(isWhole ? Math.floor((high - low) / step) + 1 : high > low ? 10 : 1).fill(0);
  for (const value of values) counts[Math.min(counts.length - 1, Math.floor((value - low) / step))] += 1;
  const most = Math.max(...counts);
  const nameOf = (index) => {
    const start = low + index * step;
    if (isWhole) return step === 1 ? show(start) : `${show(start)}–${show(start + step - 1)}`;
    return counts.length === 1 ? show(low) : `${show(start)} to ${show(start + step)}`;
  };
  const words = counts.map((number, index) => `${nameOf(index)}: ${number}`);
  return h(
    "div.bars",
    { role: "img", "aria-label": `${title}: ${words.join("; ")}` },
    h(
      "div.bars-in",
      null,
      counts.map((number, index) =>
        h(
          "div",
          { title: words[index] },
          h("small", null, number || ""),
          h("i", { style: { height: `${(100 * number) / most}%` } }),
        ),
      ),
    ),
    h(
      "p.ends",
      null,
      h("span", null, show(low)),
      h("span", null, `${values.length} trajectories`),
      h("span", null, show(high)),
    ),
  );
}
