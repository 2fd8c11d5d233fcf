// A trajectory in full: facts, timeline, rewards, tokens and what is raw. The live page and the offline one show it.

import { h } from "../parts/dom.js";
import { age, count, counted, figure, moment } from "../parts/words.js";
import { MODES, Tokens } from "./tokens.js";

/** All of a trajectory, as the live page and the offline one show it. */
export class Sheet {
  /** draw: has it drawn again; wishes: what is chosen; wish(name, value): choose. */
  constructor(draw, wishes, wish) {
    Object.assign(this, { wishes, wish, pointed: "Point at a token, or tap it, to see all that is known of it." });
    this.tokens = new Tokens((words) => {
      this.pointed = words;
      draw();
    });
  }

  close() {
    this.tokens.close();
  }

  /** links: {run, sibling(id)}; null: there is nowhere to go. */
  draw(view, links = null) {
    if (view !== this.shown) {
      this.tokens.show(view.pieces);
      this.shown = view;
    }
    const isCompared = view.compared_version !== null;
    const wanted = this.wishes.get("colour") ?? "mask";
    const mode = wanted === "difference" && !isCompared ? "mask" : wanted;
    this.tokens.choose({ mode, areIds: this.wishes.get("ids") === "1" });
    return [
      h("div.panel.pad", { key: "facts" }, h("dl.wide", null, facts(view, links)), siblings(view, links)),
      timeline(view),
      rewards(view),
      h(
        "section",
        { key: "tokens", "aria-labelledby": "h-tokens" },
        h(
          "div.head",
          null,
          h("h2", { id: "h-tokens" }, "Turns and tokens"),
          h("span.faint", null, view.text_note ?? ""),
          h("span.grow"),
          this.#choices(mode, isCompared),
        ),
        h("p.compared.faint", { f: "compared" }, compared(view)),
        h(
          "p.legend.tokens-legend",
          { f: "legend" },
          this.tokens
            .legend()
            .map(([tone, words]) =>
              h("span", { key: tone + words }, h("span.t", { "data-tone": tone }, "Ab"), ` ${words}`),
            ),
        ),
        view.pieces.length ? this.tokens.element : h("p.empty.panel", null, "It has no tokens yet."),
        h("p.pointed", { f: "pointed", role: "status" }, this.pointed),
      ),
      raw(view),
    ];
  }

  #choices(mode, isCompared) {
    const { wishes, wish } = this;
    return [
      h(
        "label.span",
        null,
        h("span", null, "Colour by"),
        " ",
        h(
          "select",
          {
            f: "colour",
            value: mode,
            onchange: (event) => wish("colour", event.target.value),
          },
          MODES.filter(([value]) => isCompared || value !== "difference").map(([value, words]) =>
            h("option", { key: value, value }, words),
          ),
        ),
      ),
      h(
        "label.span",
        null,
        h("input", {
          type: "checkbox",
          f: "ids",
          checked: wishes.get("ids") === "1",
          onchange: (event) => wish("ids", event.target.checked ? "1" : ""),
        }),
        " ids",
      ),
    ];
  }
}

/** Whether a trainer's log-probabilities are there to colour by, and else how they come to be. */
function compared(view) {
  if (view.compared_version !== null) {
    const others = view.pieces.some((piece) => piece.spans.some((span) => span.policy_version !== view.compared_version));
    const rest = others ? "; tokens of other versions differ by what training changed, too" : "";
    return `The trainer computed its tokens' log-probabilities with version ${view.compared_version}: "trainer − worker" colours by the difference${rest}.`;
  }
  if (!view.pieces.some((piece) => piece.logprobs)) return null;
  return [
    "To colour by how far a trainer's log-probabilities differ, have it call ",
    h("code", null, "run.compare"),
    " before its groups are acknowledged; of each batch, what differs most is kept.",
  ];
}

const fact = (name, value) => h("div", null, h("dt", null, name), h("dd", null, value));

function facts(view, links) {
  return [
    fact("Run", links ? h("a", { href: links.run }, view.run_id) : view.run_id),
    fact("Place", h("span", { f: "place" }, view.place)),
    fact("Task", view.task_id),
    fact("Reward", h("span", { f: "reward" }, figure(view.reward))),
    fact("Ended as", view.finish_reason ?? "–"),
    fact("Turns", count(view.turn_count)),
    fact("Tokens", count(view.completion_token_count)),
    fact("Oldest version", view.policy_version ?? "–"),
    fact("Attempts that failed", view.attempt),
    fact(view.ended_ms ? "Ended" : "Age", view.ended_ms ? moment(view.ended_ms) : age(view.age_ms)),
    fact("Made by", view.worker_ids.join(", ") || "–"),
    fact("Seed", view.seed),
  ];
}

function siblings(view, links) {
  return h(
    "p.siblings-line",
    null,
    h("span.faint", null, `Group ${view.group_id}: `),
    view.sibling_ids.map((name) =>
      name === view.trajectory_id || !links
        ? h("b", { key: name }, name)
        : h("a", { key: name, href: links.sibling(name) }, name),
    ),
  );
}

const BARS = { reset: "environment starts", turn: "turn", environment: "environment" };

function timeline(view) {
  const bars = view.timeline;
  if (!bars.length) return null;
  const end = Math.max(
    1,
    ...bars.map((bar) => bar.end_ms ?? bar.start_ms),
    view.ended_ms === null ? (view.age_ms ?? 0) : 0,
  );
  const totals = Object.keys(BARS).map((kind) => [
    kind,
    bars.filter((bar) => bar.kind === kind).reduce((sum, bar) => sum + (bar.end_ms ?? end) - bar.start_ms, 0),
  ]);
  return h(
    "section",
    { key: "timeline", "aria-labelledby": "h-timeline" },
    h(
      "div.head",
      null,
      h("h2", { id: "h-timeline" }, "Timeline"),
      h(
        "span.faint",
        null,
        `${age(end)} in all; ${totals
          .filter(([, ms]) => ms > 0)
          .map(([kind, ms]) => `${BARS[kind]} ${age(ms)}`)
          .join(", ")}; the rest waited`,
      ),
    ),
    h(
      "div.panel.pad",
      null,
      h(
        "div.lanes",
        { role: "list", "aria-label": "What it did, in time" },
        bars.map((bar, index) => {
          const words = `${bar.kind === "turn" ? `turn ${bar.turn}` : BARS[bar.kind]}${bar.worker_id ? ` on ${bar.worker_id}` : ""}: ${age(bar.start_ms)} to ${bar.end_ms === null ? "now" : age(bar.end_ms)}`;
          const width = (100 * ((bar.end_ms ?? end) - bar.start_ms)) / end;
          return h(
            "i",
            {
              key: index,
              role: "listitem",
              class: bar.end_ms === null ? "goes-on" : "",
              "data-kind": bar.kind,
              title: words,
              "aria-label": words,
              style: { left: `${(100 * bar.start_ms) / end}%`, width: `max(2px, ${width}%)` },
            },
            width > 4 && bar.kind === "turn" ? String(bar.turn) : "",
          );
        }),
      ),
      h(
        "p.ends",
        null,
        h("span", null, "0"),
        h(
          "span.legend",
          null,
          Object.entries(BARS).map(([kind, words]) => h("span", { "data-s": kind }, words)),
        ),
        h("span", null, age(end)),
      ),
    ),
  );
}

function rewards(view) {
  if (!view.rewards.length) return null;
  const most = Math.max(...view.rewards.map(Math.abs), 1e-9);
  return h(
    "section",
    { key: "rewards", "aria-labelledby": "h-rewards" },
    h(
      "div.head",
      null,
      h("h2", { id: "h-rewards" }, "Reward by turn"),
      h("span.faint", null, `sum ${figure(view.rewards.reduce((a, b) => a + b, 0))}, reward ${figure(view.reward)}`),
    ),
    h(
      "div.panel.pad.reward-parts",
      null,
      view.rewards.map((value, turn) =>
        h(
          "div",
          { key: turn, title: `turn ${turn}: ${value}` },
          h("small", null, figure(value)),
          h("i", {
            "data-sign": value < 0 ? "minus" : "plus",
            style: { height: `${(36 * Math.abs(value)) / most + 1}px` },
          }),
          h("small", null, turn),
        ),
      ),
    ),
  );
}

function raw(view) {
  const fold = (name, words, value) =>
    h(
      "details",
      { key: name, f: name },
      h("summary", null, words),
      h("pre", { tabindex: "0" }, typeof value === "string" ? value : JSON.stringify(value, null, 2)),
    );
  const ids = view.pieces.map(
    (piece) =>
      `${piece.kind}${piece.turn === null ? "" : ` ${piece.turn}`}: ${piece.ids.slice(0, 5000).join(" ")}${piece.ids.length > 5000 ? ` … ${piece.ids.length - 5000} more in the download` : ""}`,
  );
  return h(
    "section.panel.pad.raw",
    { key: "raw", "aria-label": "Raw" },
    fold("task", "Task", view.task),
    fold("info", "What the environment said last", view.info),
    view.messages.length > 0 &&
      h(
        "details",
        { key: "messages", f: "messages" },
        h("summary", null, `${counted(view.messages.length, "message")} of chat`),
        view.messages.map((message, index) =>
          h(
            "div.message",
            { key: index },
            h("b", null, String(message.role ?? "?")),
            h(
              "pre",
              { tabindex: "0" },
              typeof message.content === "string" && Object.keys(message).length <= 2
                ? message.content
                : JSON.stringify(message, null, 2),
            ),
          ),
        ),
      ),
    fold("raw-ids", "Raw ids", ids.join("\n\n")),
  );
}
