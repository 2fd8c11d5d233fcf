// Numbers, times and names as words.

/** 1234567 → 1.23M; below 10 000 in full. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
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
  if (fraction === null || fraction === undefined) return "–";
  const value = 100 * fraction;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value > 99 && value < 100) return value > 99.9 ? "> 99.9 %" : `${value.toFixed(1)} %`; // 100 % is all
  return `${value < 10 && value > 0 ? value.toFixed(1) : Math.round(value)} %`;
}

/** 0.05 → +5.0 %. */
export const signed = (fraction) => `${fraction < 0 ? "−" : "+"}${(100 * Math.abs(fraction)).toFixed(1)} %`;

export function age(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms > 0 && ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 120_000) return `${Math.round(ms / 1000)} s`;
  if (ms < 7_200_000) return `${Math.round(ms / 60_000)} min`;
  return ms < 172_800_000 ? `${Math.round(ms / 3_600_000)} h` : `${Math.round(ms / 86_400_000)} days`;
}

/** 0.4 → 0.4 ms; 12.3 → 12 ms; 1234 → 1.2 s. */
export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1000 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

/** 0.00000123 → 1.2e-6; 0.0123 → 0.012. */
export function small(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(2);
}

/** A reward, or another plain figure. */
export const figure = (value) => (typeof value === "number" ? String(+value.toPrecision(4)) : "–");

/** counted(1, "turn") → 1 turn; counted(2, "turn") → 2 turns. */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

/** The time, with its day where that is not today. */
export function moment(ms) {
  const day = new Date(ms).toLocaleDateString("en-CA");
  return day === new Date().toLocaleDateString("en-CA") ? clock(ms) : `${day} ${clock(ms)}`;
}

const PLAIN = [
  "worker_id",
  "run_id",
  "group_id",
  "trajectory_id",
  "role",
  "value",
  "said_by",
  "reason",
  "error",
  "text",
  "code",
  "step",
]; // say themselves what they are
const UNSAID = ["lease_epoch", "source"];

/** An event's facts in a line. */
export function factsText(facts) {
  const parts = [];
  for (const [name, value] of Object.entries(facts)) {
    if (value === null || value === "" || UNSAID.includes(name)) continue;
    const shown =
      typeof value === "number" ? +value.toPrecision(4) : typeof value === "object" ? JSON.stringify(value) : value;
    parts.push(PLAIN.includes(name) ? shown : `${name.replaceAll("_", " ")} ${shown}`);
  }
  return parts.join(" · ");
}
