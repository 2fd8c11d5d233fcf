// Groups of a run, their trajectories side by side.

import { trajectoryHref } from "../client.js";
import { head, moreOf, notice } from "../parts/bits.js";
import { h } from "../parts/dom.js";
import { counted, figure as inShort, moment } from "../parts/words.js";

const SIBLINGS_MAX = 64; // of a group, side by side

const STATES = [
  ["open", "open"],
  ["waiting", "waiting for the trainer"],
  ["finished", "finished"],
];

export function groupList(page, runId, groups, state) {
  const { value, error } = groups.reading;
  const counts = value?.counts;
  const words = counts
    ? `${counts.open} trajectories open · ${counts.waiting_groups} groups wait · ${counts.finished_groups} finished ones kept`
    : "";
  return h(
    "section",
    { key: "groups", "aria-labelledby": "h-groups" },
    head(
      "h-groups",
      "Groups, siblings side by side",
      words,
      h(
        "label",
        null,
        h("span.sr", null, "Which groups"),
        h(
          "select",
          { f: "groups", value: state, onchange: (event) => page.wish("groups", event.target.value) },
          STATES.map(([name, text]) => h("option", { value: name }, text)),
        ),
      ),
    ),
    notice(error),
    value?.rows.map((group) => groupRow(runId, group)),
    value && value.rows.length === 0 && h("p.empty.panel", null, "No group of this kind."),
    moreOf(groups, page),
  );
}

function groupRow(runId, group) {
  const rewards = group.trajectories.map((row) => row.reward).filter((value) => value !== null);
  const isFlat = group.completed_count > 1 && rewards.length === group.completed_count && new Set(rewards).size === 1;
  return h(
    "article.panel.group",
    { key: group.group_id, "data-group": group.group_id },
    h(
      "div.group-head",
      null,
      h("b", null, group.group_id),
      h("span.faint", null, `task ${group.task_id}`),
      h("span.grow"),
      isFlat &&
        group.completed_count >= group.quorum &&
        h("span.chip", { "data-kind": "warn", title: "Advantages within the group are all 0" }, "all rewards equal"),
      group.failed_count > 0 && h("span.chip", { "data-kind": "bad" }, `${group.failed_count} failed`),
      h(
        "span",
        { f: "complete" },
        `${group.completed_count} of ${group.quorum < group.size ? `${group.quorum} (quorum; ${group.size} in all)` : group.size}`,
      ),
      h(
        "span.faint",
        null,
        group.ended_ms
          ? `ended ${moment(group.ended_ms)}${group.ended_by ? `, by ${group.ended_by}` : ""}`
          : group.ended_by
            ? `complete, by ${group.ended_by}`
            : "",
      ),
    ),
    h(
      "div.meter",
      null,
      h("div", { style: { width: `${Math.min(100, (100 * group.completed_count) / Math.max(1, group.quorum))}%` } }),
    ),
    h(
      "div.siblings",
      null,
      group.trajectories.slice(0, SIBLINGS_MAX).map((row) => sibling(runId, row)),
    ),
    group.trajectories.length > SIBLINGS_MAX &&
      h("p.faint", null, `and ${group.trajectories.length - SIBLINGS_MAX} more`),
  );
}

const sibling = (runId, row) =>
  h(
    "a.sibling",
    { key: row.trajectory_id, href: trajectoryHref(runId, row.trajectory_id), "data-state": row.state },
    h("span.dot", { "data-state": row.state }, row.state),
    h("b", null, row.reward === null ? "–" : inShort(row.reward)),
    h(
      "small",
      null,
      [
        counted(row.turn_count, "turn"),
        row.completion_token_count !== null && counted(row.completion_token_count, "token"),
      ]
        .filter(Boolean)
        .join(" · "),
    ),
    h("small", null, row.finish_reason ?? row.place),
  );
