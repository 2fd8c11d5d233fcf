// Dead letters: trajectories that were given up, by run and cause; to retry or discard, after a look at what will happen.

import { ask, at, runHref, tell, trajectoryHref } from "../client.js";
import { notice } from "../parts/bits.js";
import { act, confirm } from "../parts/act.js";
import { h } from "../parts/dom.js";
import { Reading } from "../parts/live.js";
import { holds, sieve } from "../parts/table.js";
import { count, counted } from "../parts/words.js";

const READ_MS = 3000;
const RUNS_MAX = 20; // whose letters are read at once; the address chooses others
const LETTERS_MAX = 200; // of a run

export function dead(page) {
  const runs = new Map(); // run → its readings
  let readings = [];

  function readingsOf(runId) {
    if (!runs.has(runId)) {
      const causes = new Reading(() => ask(at(["runs", runId, "dead-letters", "causes"])), READ_MS);
      const letters = new Reading(() => ask(at(["runs", runId, "dead-letters"], { count: LETTERS_MAX })), READ_MS);
      runs.set(runId, { causes, letters });
    }
    return runs.get(runId);
  }

  return {
    title: "Dead letters",
    get readings() {
      return readings;
    },
    draw(status) {
      const all = status.runs.filter((run) => run.dead_count > 0);
      const wished = page.wishes.get("run");
      const shown = all.filter((run) => !wished || run.run_id === wished).slice(0, RUNS_MAX);
      const found = shown.map((run) => [run, readingsOf(run.run_id)]);
      readings = found.flatMap(([, each]) => [each.causes, each.letters]);
      return [
        h(
          "div.head",
          null,
          h("h1", null, "Dead letters"),
          h("span.faint", { f: "total" }, `${count(status.totals.dead_count)} in ${counted(all.length, "run")}`),
        ),
        all.length > 0 &&
          sieve(page, {
            hint: "Search reason, trajectory, worker",
            choices: [
              { name: "run", label: "Run", options: [["", "all"], ...all.map((run) => [run.run_id, run.run_id])] },
            ],
          }),
        all.length === 0 && h("p.empty.panel", null, "No trajectory was given up."),
        all.length > 0 && shown.length === 0 && h("p.empty.panel", null, `Run ${wished} has no dead letters.`),
        found.map(([run, each]) => runLetters(page, run, each)),
      ];
    },
  };
}

function runLetters(page, run, { causes, letters }) {
  const groups = byCause(
    causes.value?.causes ?? [],
    (letters.value?.dead_letters ?? []).filter((letter) =>
      holds(page.wishes, letter.reason, letter.trajectory_id, letter.worker_id),
    ),
  );
  const isSought = Boolean(page.wishes.get("q"));
  const missing = run.dead_count - (letters.value?.dead_letters.length ?? run.dead_count);
  const deal = (action, words, what) => () => secondLook(run.run_id, action, words, what, [causes, letters]);
  return h(
    "section",
    { key: run.run_id, "data-dead": run.run_id, "aria-label": `Dead letters of ${run.run_id}` },
    h(
      "div.head",
      null,
      h("h2", null, h("a", { href: runHref(run.run_id) }, run.run_id)),
      h("span.faint", null, counted(run.dead_count, "dead letter")),
      h("span.grow"),
      causes.value && [
        h("button", { f: "retry_all", onclick: deal("retry", `all of ${run.run_id}`, { all: true }) }, "Retry all"),
        " ",
        h(
          "button.danger",
          { f: "discard_all", onclick: deal("discard", `all of ${run.run_id}`, { all: true }) },
          "Discard all",
        ),
      ],
    ),
    notice(causes.error ?? letters.error),
    h(
      "div.panel",
      null,
      groups.filter((group) => group.letters.length || !isSought).map((group) => cause(run, group, deal)),
      groups.length === 0 && !causes.error && h("p.empty", null, causes.value ? "Gone by now." : "…"),
    ),
    missing > 0 && h("p.faint.pad", null, `${count(missing)} more are counted, and not listed here.`),
  );
}

/** Letters under the cause that the api counts them by: its text, with # for what is particular to each. */
function byCause(causes, letters) {
  const rest = new Set(letters);
  const groups = causes.map((each) => {
    const words = each.cause.split("#").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    const pattern = new RegExp(`^${words.join("[0-9a-fA-Fx.]+")}`);
    const own = [...rest].filter(
      (letter) =>
        pattern.test(letter.reason.trim().split("\n", 1)[0].replace(/\s+/g, " ")) ||
        letter.trajectory_id === each.example,
    );
    for (const letter of own) rest.delete(letter);
    return { ...each, letters: own };
  });
  return rest.size
    ? [...groups, { cause: null, trajectory_count: rest.size, group_count: 0, letters: [...rest] }]
    : groups;
}

function cause(run, group, deal) {
  const words = group.cause ?? "of other causes";
  return h(
    "div.cause",
    { key: words },
    h(
      "details",
      null,
      h("summary", null, h("b.num", null, count(group.trajectory_count)), " ", h("span", { f: "cause" }, words)),
      group.letters.map((each) => letter(run, group, each, deal)),
    ),
    group.cause !== null &&
      h(
        "span.buttons", // beside the summary, which is a button itself
        null,
        h(
          "button",
          {
            f: "retry_cause",
            "aria-label": `Retry all of cause ${words}`,
            onclick: deal("retry", `those of this cause: ${words}`, { all: true, cause: group.cause }),
          },
          "Retry",
        ),
        " ",
        h(
          "button.danger",
          {
            f: "discard_cause",
            "aria-label": `Discard all of cause ${words}`,
            onclick: deal("discard", `those of this cause: ${words}`, { all: true, cause: group.cause }),
          },
          "Discard",
        ),
      ),
  );
}

function letter(run, group, found, deal) {
  return h(
    "details.letter",
    { key: found.trajectory_id, "data-letter": found.trajectory_id },
    h(
      "summary",
      null,
      h("b", null, found.trajectory_id),
      " ",
      h("span", { f: "reason" }, found.reason),
      h("small", null, `attempt ${found.attempt} on ${found.worker_id}`),
    ),
    h(
      "p.row",
      null,
      h("a", { href: trajectoryHref(run.run_id, found.trajectory_id) }, "Its trajectory"),
      h("span.grow"),
      group.cause !== null && [
        h(
          "button",
          { f: "retry", onclick: deal("retry", found.trajectory_id, { trajectory_ids: [found.trajectory_id] }) },
          "Retry",
        ),
        " ",
        h(
          "button.danger",
          { f: "discard", onclick: deal("discard", found.trajectory_id, { trajectory_ids: [found.trajectory_id] }) },
          "Discard",
        ),
      ],
    ),
    h("pre", { tabindex: "0" }, found.traceback || "no traceback"),
  );
}

/** Ask the api what would become of them, show that, and only then have it done. */
function secondLook(runId, action, words, what, readings) {
  const path = at(["runs", runId, "dead-letters", action]);
  const name = `${path} ${JSON.stringify(what)}`;
  return act(`${name} dry`, async () => {
    const found = await tell(path, { ...what, dry_run: true });
    const done = (answer) =>
      `${trajectories(answer.trajectory_count)} ${action === "retry" ? "run again" : "were discarded"}.`;
    const run = () =>
      act(
        name,
        async () => {
          const answer = await tell(path, what);
          readings.forEach((reading) => reading.renew());
          return answer;
        },
        { done },
      );
    const many = `${trajectories(found.trajectory_count)} of ${counted(found.group_count, "group")}`;
    confirm({
      title: action === "retry" ? "Let them run again?" : "Discard them for good?",
      lines: [
        `Meant: ${words}.`,
        action === "retry"
          ? `${many} will run again, with all attempts.`
          : `${many} will be forgotten. This cannot be undone.`,
        ...found.refused.map((each) => `${count(each.trajectory_count)} will not: ${each.reason}.`),
      ],
      verb: action === "retry" ? "Retry" : "Discard",
      danger: action === "discard",
      run,
    });
  });
}

const trajectories = (number) => (number === 1 ? "1 trajectory" : `${count(number)} trajectories`);
