// Numbers as text, values as lines, and the few DOM helpers the page needs.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** Elements of a template or section by their data-f name. */
export function fields(root) {
  const found = {};
  for (const element of root.querySelectorAll("[data-f]")) found[element.dataset.f] = element;
  return found;
}

/** Set text only where it changed: an untouched node keeps the user's selection. */
export function text(element, value) {
  const next = String(value);
  if (element.textContent !== next) element.textContent = next;
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

export function width(element, fraction) {
  element.style.width = `${Math.round(1000 * Math.max(0, Math.min(1, fraction || 0))) / 10}%`;
}

/** 1234567 → 1.23M; below 10 000 in full. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${(value / (letter === "k" ? 1e3 : size)).toPrecision(3)}${letter}`;
  }
  return value.toLocaleString("en");
}

export function rate(value) {
  if (!value) return "0";
  if (value < 10) return value.toFixed(1);
  return count(Math.round(value));
}

export function bytes(value) {
  let rest = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (rest < 1000) return `${rest < 10 && unit !== "B" ? rest.toFixed(1) : Math.round(rest)} ${unit}`;
    rest /= 1000;
  }
  return `${rest.toFixed(1)} TB`;
}

export function percent(fraction) {
  const value = 100 * fraction;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value < 10 && value > 0 ? value.toFixed(1) : Math.round(value)} %`;
}

export function age(ms) {
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 120_000) return `${Math.round(ms / 1000)} s`;
  return `${Math.round(ms / 60_000)} min`;
}

/** Draw values as a line with a soft area under it. Returns the range shown, as [low, high]. */
export function line(svg, values, { low = 0, high = null, dot = false } = {}) {
  const key = values.join();
  const top = high ?? Math.max(...values, 0) * 1.15;
  const range = [low, top > low ? top : low + 1];
  if (svg.dataset.key === key) return range;
  svg.dataset.key = key;
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    for (const name of ["area", "line", "dot"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      svg.append(path);
    }
  }
  const [area, stroke, end] = svg.children;
  if (values.length < 2) {
    for (const path of svg.children) path.removeAttribute("d");
    return range;
  }
  const y = (value) => (97 - 94 * ((value - range[0]) / (range[1] - range[0]))).toFixed(2);
  const x = (index) => ((100 * index) / (values.length - 1)).toFixed(2);
  const points = values.map((value, index) => `${x(index)} ${y(value)}`).join("L");
  stroke.setAttribute("d", `M${points}`);
  area.setAttribute("d", `M0 100L${points}L100 100Z`);
  if (dot) end.setAttribute("d", `M100 ${y(values.at(-1))}h0`);
  return range;
}

/** Rows of a container by key: made once, moved into order, removed when gone. */
export class Keyed {
  constructor(container, template) {
    this.container = container;
    this.template = template;
    this.rows = new Map();
  }

  update(items, keyOf, fill) {
    const gone = new Set(this.rows.keys());
    let place = this.container.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      gone.delete(key);
      let row = this.rows.get(key);
      if (!row) {
        const root = this.template ? this.template.content.firstElementChild.cloneNode(true) : document.createElement("tr");
        row = { root, f: fields(root) };
        this.rows.set(key, row);
      }
      if (row.root !== place) this.container.insertBefore(row.root, place);
      else place = place.nextElementSibling;
      fill(row, item);
    }
    for (const key of gone) {
      this.rows.get(key).root.remove();
      this.rows.delete(key);
    }
  }
}
