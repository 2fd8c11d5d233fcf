// A run in short: why it moves or not, its reward, its figures.

import { ROOT, runHref } from "../client.js";
import { h } from "../parts/dom.js";
import { spark } from "../parts/plot.js";
import { count, rate } from "../parts/words.js";

export const CHIP = { moves: "good", waits: "idle", passing: "warn", stuck: "bad" };

/** Why a run does or does not move: the one line an operator wants. */
export function why(run, isWhole = false) {
  const [first, ...others] = run.causes;
  return h(
    "div.why",
    { "data-kind": CHIP[first.kind], f: "why", role: "status", "aria-label": "Why the run does or does not move" },
    h("span", { f: "cause" }, first.text),
    first.step && h("code", { f: "next" }, first.step),
    others.length > 0 &&
      !isWhole &&
      h("small", { f: "also" }, `and then: ${others.map((cause) => cause.text).join("; ")}`),
    isWhole && others.map((cause) => h("p", null, cause.text, cause.step && h("code", null, cause.step))),
  );
}

export const chip = (run) =>
  h("span.chip", { f: "waits", "data-kind": CHIP[run.causes[0].kind] }, run.causes[0].code.replaceAll("_", " "));

export const lastReward = (run) => run.reward_curve.map((point) => point.reward_mean).filter((value) => value !== null);

export function card(run) {
  const alarms = run.agreement?.alarms ?? [];
  return h(
    "article.panel.card",
    { key: run.run_id, "data-run": run.run_id },
    h(
      "div.card-head",
      null,
      h(
        "div",
        null,
        h("h3", { f: "name" }, h("a", { href: runHref(run.run_id) }, run.run_id)),
        h("p.faint", { f: "what" }, `${run.environment} · ${run.model}`),
      ),
      chip(run),
    ),
    why(run),
    alarms.length > 0 &&
      h("p.alarm.bad", { f: "alarm", role: "alert" }, `Log-probabilities disagree: ${alarms[0].text}`),
    h("div.card-body", null, rewardFigure(run), h("dl", null, facts(run))),
    stack(run),
  );
}

function rewardFigure(run) {
  const rewards = lastReward(run);
  const last = run.reward_curve.at(-1);
  const step = run.training?.step ?? null;
  const isUnit = rewards.every((value) => value >= 0 && value <= 1);
  const range = isUnit ? { low: 0, high: 1 } : { low: Math.min(...rewards), high: Math.max(...rewards) };
  return h(
    "figure",
    null,
    h(
      "figcaption",
      null,
      h("span", null, "Reward"),
      h("b", { f: "reward" }, rewards.length ? rewards.at(-1).toFixed(2) : "–"),
      h(
        "i.faint",
        { f: "step" },
        step !== null ? `step ${step}` : last && last.policy_version !== null ? `version ${last.policy_version}` : "",
      ),
    ),
    h(
      "div.plot",
      null,
      spark(rewards, { ...range, f: "curve", dot: true, label: "Mean reward by policy version" }),
      rewards.length > 0 && [
        h("span.top", null, String(+range.high.toFixed(2))),
        h("span.bottom", null, String(+range.low.toFixed(2))),
      ],
      rewards.length === 0 && h("em", null, "no rollout yet"),
    ),
  );
}

const fact = (name, f, value) => h("div", null, h("dt", null, name), h("dd", { f }, value));

export function facts(run) {
  const { counters } = run;
  const letters = `${ROOT.href}dead?run=${encodeURIComponent(run.run_id)}`;
  return [
    fact("Policy version", "head_version", run.head_version < 0 ? "none" : run.head_version),
    fact("Rollouts/s", "rollouts_per_s", rate(run.rates.rollouts_per_s)),
    fact("Tokens/s", "tokens_per_s", rate(run.rates.tokens_per_s)),
    h(
      "div",
      null,
      h("dt", null, "Turns claimed / ready"),
      h(
        "dd",
        null,
        h("span", { f: "claimed" }, count(run.turns.claimed ?? 0)),
        " / ",
        h("span", { f: "ready" }, count(run.turns.ready ?? 0)),
      ),
    ),
    fact("Groups waiting", "groups_waiting", count(run.groups_waiting)),
    fact("Groups consumed", "groups_consumed", count(counters.groups_consumed ?? 0)),
    fact("Rollouts in all", "completed", count(counters.trajectories_completed ?? 0)),
    h(
      run.dead_count ? "div.is-bad" : "div",
      null,
      h("dt", null, "Dead letters"),
      h("dd", { f: "dead_count" }, run.dead_count ? h("a", { href: letters }, count(run.dead_count)) : "0"),
    ),
  ];
}

export function stack(run) {
  const { queued = 0, running = 0, scoring = 0 } = run.trajectories;
  const done = Math.max(0, run.depth - queued - running - scoring);
  const open = { queued, running, scoring, done };
  const sum = queued + running + scoring + done;
  return [
    h(
      "div.stack",
      { f: "stack" },
      Object.entries(open).map(([name, value]) =>
        h("div", { "data-s": name, style: { width: `${sum ? (100 * value) / sum : 0}%` } }),
      ),
    ),
    h(
      "p.legend",
      null,
      Object.entries(open).map(([name, value]) =>
        h(
          "span",
          { "data-s": name, title: name === "done" ? "finished, but their group is not consumed yet" : null },
          `${name} `,
          h("b", { f: name }, count(value)),
        ),
      ),
      h("span.grow"),
      h("span.faint", null, h("b", { f: "depth" }, count(run.depth)), ` open of ${count(run.trajectory_count_max)}`),
    ),
  ];
}
