// Tokens of a trajectory, piece by piece: their text or ids, coloured by what they are. Also part of the offline page.
//
// A piece is filled when it comes near the window, and a long one only as far as it is unfolded, so that a hundred
// thousand tokens open as fast as ten. Colour is never the only sign: marks, labels and the line below say the same.

const CHUNK = 1500; // tokens of a piece that are shown, and added at a time
const TONES = 6; // of workers and versions; then they begin again, and labels tell them apart
const DIFFERENCE_STEPS = [0.01, 0.1, Math.LN2]; // nats; the last is a ratio of 1/2 or 2, as in docs/agreement.md
const LOG_STEPS = [-0.1, -0.7, -2, -4]; // from surely to hardly expected

export const MODES = [
  ["mask", "who made it"],
  ["worker", "worker"],
  ["version", "policy version"],
  ["logprob", "log-probability"],
  ["difference", "trainer − worker"],
  ["none", "no colour"],
];

/** Draws pieces into an element that it owns. say(facts): called with the token under pointer or focus. */
export class Tokens {
  constructor(say) {
    this.element = document.createElement("div");
    this.element.className = "pieces";
    this.say = say;
    this.mode = "mask";
    this.areIds = false;
    this.rows = []; // one a piece: {root, body, piece, depth, filled, shown}
    this.names = { worker: [], version: [] };
    this.seen = new IntersectionObserver(
      (found) => found.forEach((each) => each.isIntersecting && this.#fill(each.target.row)),
      { rootMargin: "600px" },
    );
    this.element.addEventListener("pointerover", (event) => this.#point(event.target));
    this.element.addEventListener("click", (event) => this.#point(event.target));
  }

  /** Show these pieces; those that did not change stay as they are. */
  show(pieces) {
    const depths = depthsOf(pieces);
    for (const piece of pieces) for (const span of piece.spans) this.#note(span);
    while (this.rows.length > pieces.length) this.rows.pop().root.remove();
    pieces.forEach((piece, index) => {
      const row = this.rows[index] ?? this.#add();
      const mark = `${piece.kind} ${piece.turn} ${piece.ids.length} ${piece.is_running} ${piece.tokens.length} ${depths[index]}`;
      row.piece = piece;
      row.index = index;
      if (row.mark === mark) return;
      row.mark = mark;
      this.#title(row, depths[index], pieces);
      this.#again(row);
    });
  }

  /** Colour by another thing, or show ids for texts. */
  choose({ mode = this.mode, areIds = this.areIds }) {
    if (mode === this.mode && areIds === this.areIds) return;
    Object.assign(this, { mode, areIds });
    this.rows.forEach((row) => this.#again(row));
  }

  close() {
    this.seen.disconnect();
  }

  #note(span) {
    for (const [kind, value] of [
      ["worker", span.worker_id],
      ["version", span.policy_version],
    ]) {
      if (!this.names[kind].includes(value)) this.names[kind].push(value);
    }
  }

  #add() {
    const root = document.createElement("article");
    root.className = "piece";
    const [head, body] = ["header", "div"].map((name) => root.appendChild(document.createElement(name)));
    body.className = "token-text";
    const row = { root, head, body, shown: CHUNK };
    body.row = row;
    this.rows.push(row);
    this.element.append(root);
    this.seen.observe(body);
    return row;
  }

  #title({ root, head, piece, index }, depth, pieces) {
    root.style.setProperty("--depth", Math.min(depth, 8));
    root.dataset.kind = piece.kind;
    root.dataset.piece = index;
    const isBranch = piece.parent >= 0 && piece.parent !== index - 1;
    const kind = { prompt: "prompt", turn: `turn ${piece.turn}`, observation: `environment, after turn ${piece.turn}` }[
      piece.kind
    ];
    const words = [kind, piece.ids.length === 1 ? "1 token" : `${piece.ids.length.toLocaleString("en")} tokens`];
    if (isBranch)
      words.push(
        `branches off piece ${piece.parent + 1}${pieces[piece.parent] ? ` (${pieces[piece.parent].kind})` : ""}`,
      );
    if (piece.is_running) words.push("being made now");
    head.replaceChildren(
      ...words.map((text, place) => Object.assign(document.createElement(place ? "span" : "b"), { textContent: text })),
    );
  }

  /** Have a piece filled anew: at once if it was, else when it comes near. */
  #again(row) {
    const wasFilled = row.filled;
    row.filled = false;
    if (wasFilled) return void this.#fill(row);
    const size = Math.min(row.shown, row.piece.ids.length);
    row.body.style.minHeight = `${Math.ceil(size / 22) * 21}px`;
  }

  #fill(row) {
    if (row.filled) return;
    row.filled = true;
    const { piece, body } = row;
    body.style.minHeight = "";
    const end = Math.min(row.shown, piece.ids.length);
    const parts = document.createDocumentFragment();
    const spans = piece.spans.length
      ? piece.spans
      : [{ start: 0, end: piece.ids.length, worker_id: null, policy_version: null }];
    let place = 0;
    for (const span of spans) {
      if (span.start >= end) break;
      for (; place < span.start; place++) parts.append(this.#token(piece, place, null));
      if (span.worker_id !== null) parts.append(label(`${span.worker_id} · v${span.policy_version}`));
      for (; place < Math.min(span.end, end); place++) parts.append(this.#token(piece, place, span));
    }
    for (; place < end; place++) parts.append(this.#token(piece, place, null));
    if (end < piece.ids.length) parts.append(this.#rest(row, piece.ids.length - end));
    body.replaceChildren(parts);
  }

  #rest(row, left) {
    const button = document.createElement("button");
    button.textContent = `Show ${Math.min(left, 4 * CHUNK).toLocaleString("en")} of ${left.toLocaleString("en")} tokens more`;
    button.onclick = () => {
      row.shown += 4 * CHUNK;
      row.filled = false;
      this.#fill(row);
    };
    return button;
  }

  #token(piece, place, span) {
    const element = document.createElement("span");
    const text = piece.tokens.length ? piece.tokens[place] : null;
    const isId = this.areIds || text === null;
    element.textContent = isId ? `${piece.ids[place]} ` : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
    element.className = isId ? "t id" : text === "" ? "t none" : "t";
    element.dataset.place = place;
    const tone = this.#tone(piece, place, span);
    if (tone) element.dataset.tone = tone;
    return element;
  }

  #tone(piece, place, span) {
    if (this.mode === "mask") return piece.logprobs ? "own" : "given";
    if (this.mode === "worker" && span?.worker_id) return `n${this.names.worker.indexOf(span.worker_id) % TONES}`;
    if (this.mode === "version" && span && span.policy_version !== null)
      return `n${this.names.version.indexOf(span.policy_version) % TONES}`;
    if (this.mode === "logprob" && piece.logprobs) return `p${stepOf(piece.logprobs[place])}`;
    if (this.mode === "difference" && piece.differences) return differenceTone(piece.differences[place]);
    return null;
  }

  #point(target) {
    if (!target.classList.contains("t")) return;
    const { piece } = target.parentElement.row;
    const place = Number(target.dataset.place);
    const span = piece.spans.find((each) => each.start <= place && place < each.end);
    const logprob = piece.logprobs?.[place];
    this.say(
      [
        piece.tokens.length ? JSON.stringify(piece.tokens[place]) : "no text",
        `id ${piece.ids[place]}`,
        `place ${place} of ${piece.kind}${piece.turn === null ? "" : ` ${piece.turn}`}`,
        piece.logprobs ? "made by the policy (mask 1)" : "given (mask 0)",
        logprob === undefined
          ? null
          : typeof logprob === "number"
            ? `log-probability ${logprob.toFixed(4)}, probability ${(100 * Math.exp(logprob)).toPrecision(3)} %`
            : `log-probability ${logprob}`,
        differenceWords(piece.differences?.[place]),
        span ? `worker ${span.worker_id}, version ${span.policy_version}` : null,
      ]
        .filter(Boolean)
        .join(" · "),
    );
  }

  /** What the colours mean now: [tone, words]. */
  legend() {
    if (this.mode === "mask")
      return [
        ["own", "the policy made it (mask 1, underlined)"],
        ["given", "prompt or environment (mask 0)"],
      ];
    if (this.mode === "logprob")
      return ["surely", "likely", "unsure", "unlikely", "hardly"].map((words, step) => [
        `p${step}`,
        `${words}: ${rangeOf(step)}`,
      ]);
    if (this.mode === "difference") return DIFFERENCES;
    if (this.mode === "none") return [];
    return this.names[this.mode].map((value, index) => [
      `n${index % TONES}`,
      this.mode === "version" ? `version ${value}` : value,
    ]);
  }
}

const stepOf = (logprob) => {
  const step = LOG_STEPS.findIndex((bound) => logprob >= bound);
  return step < 0 ? LOG_STEPS.length : step;
};

const DIFFERENCES = [
  ["e0", "within ±0.01 nats"],
  ["a1", "+0.01 to +0.1"],
  ["a2", "to +0.69, twice as likely"],
  ["a3", "above"],
  ["b1", "−0.01 to −0.1"],
  ["b2", "to −0.69, half as likely"],
  ["b3", "below"],
  ["x0", "not finite"],
];

/** How far off, and to which side: a where the trainer thinks a token likelier than its worker did, b where less. */
function differenceTone(value) {
  if (typeof value !== "number") return "x0";
  const step = DIFFERENCE_STEPS.filter((bound) => Math.abs(value) > bound).length;
  return step ? `${value > 0 ? "a" : "b"}${step}` : "e0";
}

const differenceWords = (value) =>
  typeof value === "number" && `trainer − worker ${signedNats(value)} nats, ratio ${Math.exp(value).toPrecision(3)}`;

const signedNats = (value) =>
  `${value < 0 ? "−" : "+"}${Math.abs(value) < 1e-3 ? Math.abs(value).toExponential(1) : Math.abs(value).toFixed(4)}`;

function rangeOf(step) {
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(2)} %`;
  if (step === 0) return `over ${percent(LOG_STEPS[0])}`;
  return step === LOG_STEPS.length
    ? `under ${percent(LOG_STEPS.at(-1))}`
    : `${percent(LOG_STEPS[step])} to ${percent(LOG_STEPS[step - 1])}`;
}

function label(words) {
  const element = document.createElement("small");
  element.className = "span-label";
  element.textContent = words;
  return element;
}

/** How deep each piece stands: a piece goes one deeper where the piece that it continues is continued by several. */
function depthsOf(pieces) {
  const children = new Map();
  for (const piece of pieces) children.set(piece.parent, (children.get(piece.parent) ?? 0) + 1);
  const depths = [];
  for (const piece of pieces)
    depths.push(piece.parent < 0 ? 0 : (depths[piece.parent] ?? 0) + (children.get(piece.parent) > 1 ? 1 : 0));
  return depths;
}
