"""A conversation as a graph of tokens: what continues token for token, and what begins a branch.

    ask(messages) ──▶ Ask: context ids for the engine ──▶ answer(ask, ids, …) ──▶ nodes, message

- A node is either what was asked (mask 0) or what the policy made of it (mask 1). Several answers to one ask share its
  node, and asks share the nodes of what they both begin with, token for token. The ids along a path are exactly what
  the engine saw and made.
- **Nothing that the policy made is encoded again as if the policy had made it.** A path goes on only where the template
  appends: where it would write all that came before as it stands on the path. Where it rewrites history (drops earlier
  reasoning, moves tools, trims an edited message), a branch begins, from a less deep answer or from the root, and
  whatever the policy once said is part of its prompt, with mask 0.
- An image is a stretch of equal tokens. Two asks share it only where it is the same file.
- A path that was cut by length, or that ended without a token that ends answers, is closed: the template would end the
  answer in a way that the policy did not.
- A last message by the assistant (prefill) is refused: its text and the policy's would be one message, encoded apart.
- No IO, no clock, no dice. A caller awaits the engine between `ask` and `answer`, and may have many asks open at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..contract import records
from ..contract.errors import InputError, PayloadTooLarge
from ..contract.images import ImagePlace, image_side
from ..contract.limits import IMAGES_BYTES_MAX, MIB, NODE_COUNT_MAX
from ..contract.records import NO_IDS, NO_LOGPROBS, Float32, Int32, Side, Span, UInt8
from ..contract.sides import WHEN_READ, joined, parts, size_bytes
from .answers import finish_of, to_message
from .control import without_marks
from .image_parts import images_in, without_files
from .messages import Message, Tool, canonical, check_messages, check_options, check_tools, same
from .template import ChatTemplate

TRIED_COUNT_MAX = 16  # paths that an ask tries where several read the same to its client: for each a rendering or two
TEXT = "text"  # the setting of nodes without messages; those of chat are digests
CONVERSATION_BYTES_MAX = 48 * MIB  # of tokens and messages: a rollout may have 64 MiB, with spans and JSON


class Prompt(NamedTuple):
    """The rendered text up to an answer, kept as its length and digest: a path is long, and compared only."""

    length: int
    digest: int

    @classmethod
    def of(cls, text: str) -> Prompt:
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        """Whether a text begins with the prompt's."""
        return len(text) >= self.length and _digest(text[: self.length]) == self.digest


NO_PROMPT = Prompt(0, 0)
NO_MASK: UInt8 = np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """A stretch of tokens after its parent's; -1: it begins a path.

    ids: int32 (T,). logprobs: float32 (T,), natural log, 0 where the mask is. mask: uint8 (T,), 1 where the policy made
    the token. spans, sides and images index this node's own tokens. messages: those along a path are all that were said
    on it, in order. What several asks share has the messages that they share; the last ones may be written behind it.

    The rest is an answer's, whose own message is its last. setting: digest of tools and options. digest: of these and
    all messages on the path. prompt: of the answer. is_open: the path may go on after it.
    """

    parent: int
    ids: Int32
    logprobs: Float32
    mask: UInt8
    spans: tuple[Span, ...] = ()
    sides: tuple[Side, ...] = ()
    images: tuple[ImagePlace, ...] = ()
    messages: tuple[Message, ...]
    setting: str = ""
    digest: str = ""
    prompt: Prompt = NO_PROMPT
    is_answer: bool = False
    is_open: bool = False

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return 9 * len(self.ids) + size_bytes(self.sides) + sum(map(_size_bytes, self.messages))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """What to ask the engine for. Hand it back with each of its answers.

    context_ids: int32 (T,), the whole context, with its images. added_ids: its end, which is not on the parent's path.
    messages: all of them, ours where they were recorded. digest: of setting and messages.
    """

    parent: int
    added_ids: Int32
    context_ids: Int32
    images: tuple[ImagePlace, ...] = ()
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    setting: str
    digest: str
    text: str = field(repr=False)  # rendered, with marks
    is_text: bool = False  # no messages: the text stands for itself

    @property
    def is_continued(self) -> bool:
        """Whether it goes on where an answer ended; else it begins a path."""
        return self.parent >= 0


class Answer(NamedTuple):
    """A recorded answer: its node's index, and the message for the client. finish: stop, tool_calls or length.

    text: all that was written, without the token that ended it; special tokens as their texts.
    """

    node: int
    message: Message
    text: str
    finish: str


class _Match(NamedTuple):
    """A path to an answer whose messages begin those of an ask. answers: its answers' nodes, the last one last."""

    answers: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()


class _Try(NamedTuple):
    """What an ask would be behind some answer: all messages, their rendering, and their digest."""

    answers: tuple[int, ...]
    messages: tuple[Message, ...]
    text: str
    digest: str


class _Place(NamedTuple):
    """Where an ask hangs: behind a node, with the ids and messages that the nodes up to there lack.

    within: the node behind `parent` that begins as the ask goes on, with so many ids and messages; -1: none does.
    """

    parent: int
    ids: Int32
    images: tuple[ImagePlace, ...]
    messages: tuple[Message, ...]
    within: int = -1
    id_count: int = 0
    message_count: int = 0


class Conversation:
    """All that one trajectory asked and was answered, with sub-agents, retries and edits as further paths.

    What a later ask has in common with half of a node moves to a new node before it, so the parent of a node may come
    after it in the list; but a node keeps its index, and the ids up to its end. A thread may ask while another answers,
    so the list is replaced where it does not merely grow.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.nodes: list[Node] = []
        self._next: dict[tuple[int, int | str], int] = {}  # a node, and what is behind it → what was asked there
        self._bytes = 0
        self.files: dict[str, bytes] = {}  # of images, by digest

    def take(self, messages: Any) -> list[Message]:
        """Check messages, keep the files of their images, and return them with the images' digests instead.

        Raises:
            InputError, PayloadTooLarge: as `ask`.
        """
        checked = check_messages(messages)
        if next(images_in(checked), None) is None:
            return checked
        checked, files = without_files(checked)
        self._template.check_sees(files.values())
        unknown = next(
            (part["digest"] for part in images_in(checked) if part["digest"] not in files | self.files), None
        )
        if unknown is not None:
            raise InputError(f"no image with the digest {unknown} came in this conversation: send its bytes")
        size = sum(map(len, (self.files | files).values()))
        if size > IMAGES_BYTES_MAX:
            raise PayloadTooLarge(
                f"the conversation's images would have {size:,} bytes, the limit is {IMAGES_BYTES_MAX:,}: send smaller "
                "or fewer ones",
                size_bytes=size,
                limit_bytes=IMAGES_BYTES_MAX,
            )
        self.files |= files
        return checked

    def ask(self, messages: Any, tools: Any = None, options: Mapping[str, Any] | None = None) -> Ask:
        """Find where these messages go on, and what must be added there.

        Raises:
            InputError: a message, tool or option is not taken, the template refuses them, or the last message is the
                assistant's.
            PayloadTooLarge: one of them is too large.
        """
        return self.ask_taken(self.take(messages), tools, options)

    def ask_taken(self, sent: Sequence[Message], tools: Any = None, options: Mapping[str, Any] | None = None) -> Ask:
        """Ask as `ask` does with messages that `take` returned, or that an answer has: they are not checked again."""
        offered = tuple(check_tools(tools))
        if sent[-1]["role"] == "assistant":
            raise InputError(
                f"message {len(sent) - 1}, the last, is the assistant's: an answer that a client began is not "
                "continued; end with a user's or a tool's message"
            )
        setting = _hex(canonical([offered, check_options(options)]))
        tries: list[_Try] = []
        texts: dict[str, str] = {}  # by the digest of what was recorded
        for answers, recorded in self._matches(sent, setting):
            whole = (*recorded, *sent[len(recorded) :])
            said = self.nodes[answers[-1]].digest if answers else setting
            if said not in texts:
                texts[said] = self._template.render(whole, offered, answer=True, options=options)
            tries.append(_Try(answers, whole, texts[said], _behind(said, sent[len(recorded) :])))
        for part in (slice(-1, None), slice(None, -1)):  # the deepest answers of all first
            for each in tries:
                for index in reversed(each.answers[part]):
                    rest = self._rest_after(index, each.messages, offered, options, each.text)
                    if rest is not None:
                        return self._new_ask(index, each, offered, setting, rest)
        return self._new_ask(-1, tries[0], offered, setting, None)

    def ask_text(self, text: str, encode: Callable[[str], Int32]) -> Ask:
        """Find where a plain text goes on: after the longest recorded text, with its answer, that it begins with.

        encode: a text to ids. An answer that was cut by length may go on too: nothing is written after it.

        Raises:
            InputError: the text is empty.
        """
        if not text:
            raise InputError("prompt: it is empty, and the policy needs a token to start from")
        texts = [index for index, node in enumerate(self.nodes) if node.setting == TEXT and node.is_answer]
        begun = [index for index in texts if self.nodes[index].prompt.begins(text)]
        parent = max(begun, key=lambda index: (self.nodes[index].prompt.length, index), default=-1)
        known = self.nodes[parent].prompt.length if begun else 0
        added = encode(text[known:]) if text[known:] else NO_IDS
        return Ask(
            parent=parent,
            added_ids=added,
            context_ids=np.concatenate((self.ids(parent), added)),
            messages=(),
            tools=(),
            setting=TEXT,
            digest=_hex(text),
            text=text,
            is_text=True,
        )

    def answer(
        self,
        ask: Ask,
        completion_ids: Int32,
        logprobs: Float32,
        spans: Sequence[Span] = (),
        finish_reason: str = "stop",
        *,
        sides: Sequence[Side] = (),
    ) -> Answer:
        """Record what the engine made of an ask; several answers to one ask are siblings.

        Args:
            completion_ids: int32 (T,), with the token that ended it, if one did.
            logprobs: float32 (T,), natural log.
            spans: index completion_ids.
            finish_reason: stop or length, as the engine said.
            sides: index completion_ids; below 0 the ask's context.

        Raises:
            PayloadTooLarge: the conversation has as many nodes or bytes as it may.
        """
        assert ask.parent < len(self.nodes), "this ask is another conversation's"
        assert len(completion_ids) == len(logprobs), "a log-probability for each token"
        assert finish_reason in ("stop", "length"), finish_reason
        ids = np.asarray(completion_ids, dtype=np.int32)
        end = self._template.ends.get(int(ids[-1])) if len(ids) else None
        text = self._template.decode(ids[:-1] if end is not None else ids)
        seed = f"{ask.digest}/{xxhash.xxh3_64_hexdigest(ids.tobytes())}"
        reading = None if ask.is_text else self._template.read(text, prompt=without_marks(ask.text), tools=ask.tools)
        message = {"role": "assistant", "content": text} if reading is None else to_message(reading, seed)
        place = self._place(ask)
        asked = self._asked_nodes(place, parts(sides, -len(place.ids), 0), is_needed=place.parent == ask.parent)
        node = Node(
            parent=len(self.nodes) + len(asked) - 1 if asked else place.parent,
            ids=ids,
            logprobs=np.asarray(logprobs, dtype=np.float32),
            mask=np.ones(len(ids), dtype=np.uint8),
            spans=tuple(spans),
            sides=parts(sides, 0, len(ids)),
            messages=() if ask.is_text else (message,),
            setting=ask.setting,
            digest=_behind(ask.digest, [message]),
            prompt=Prompt.of(ask.text + text if ask.is_text else ask.text),
            is_answer=True,
            is_open=finish_reason == "stop" and end is not None,
        )
        self._tell_parent(ask, sides)
        self._add([*asked, node])
        self._share(place, asked)
        return Answer(len(self.nodes) - 1, message, text, finish_of(message, finish_reason))

    def record(self) -> dict[str, Any]:
        """Return the fields of a Rollout that hold its tokens: a prompt only where all branches begin with it."""
        order = _parents_first(self.nodes)
        nodes = [self.nodes[index] for index in order]
        places = {index: place for place, index in enumerate([-1, *order], -1)}
        prompt = nodes[0].ids if nodes and all(node.parent >= 0 for node in nodes[1:]) else NO_IDS
        ends = (np.cumsum([len(node.ids) for node in nodes]) - len(prompt)).tolist()
        starts = [-len(prompt), *ends][: len(nodes)]
        return {
            "prompt_ids": prompt,
            "completion_ids": np.concatenate([NO_IDS, *(node.ids for node in nodes)])[len(prompt) :],
            "logprobs": np.concatenate([NO_LOGPROBS, *(node.logprobs for node in nodes)])[len(prompt) :],
            "completion_mask": np.concatenate([NO_MASK, *(node.mask for node in nodes)])[len(prompt) :],
            "spans": tuple(
                records.Span(start + span.start, start + span.end, span.worker_id, span.policy_version)
                for start, node in zip(starts, nodes, strict=True)
                for span in node.spans
            ),
            "sides": joined(
                side
                for start, node in zip(starts, nodes, strict=True)
                for side in (
                    *parts(node.sides, 0, len(node.ids), start),
                    *(image_side(each, self.files[each.digest]) for each in _moved(node.images, by=start)),
                )
            ),
            "nodes": tuple(
                records.Node(places[node.parent], end, list(node.messages))
                for node, end in zip(nodes, ends, strict=True)
            ),
        }

    def paths(self) -> list[tuple[int, ...]]:
        """List the node indexes of each path from its root to its leaf, in the order of the leaves."""
        parents = {node.parent for node in self.nodes}
        return [self.path(index) for index in range(len(self.nodes)) if index not in parents]

    def path(self, index: int) -> tuple[int, ...]:
        """List the node indexes from the root to this node."""
        return tuple(each for each, _ in _upwards(self.nodes, index))[::-1]

    def ids(self, index: int) -> Int32:
        """Join all ids from the root to the end of this node; none for -1."""
        parts = [node.ids for _, node in _upwards(self.nodes, index)][::-1]
        return np.concatenate(parts) if parts else NO_IDS

    def _images(self, index: int) -> list[ImagePlace]:
        """Return the images from the root to the end of this node; none for -1."""
        path = [node for _, node in _upwards(self.nodes, index)][::-1]
        starts = np.cumsum([0, *(len(node.ids) for node in path)]).tolist()
        return [each for node, start in zip(path, starts, strict=False) for each in _moved(node.images, by=start)]

    def _matches(self, sent: Sequence[Message], setting: str) -> list[_Match]:
        """Find the deepest paths whose messages begin the sent ones, each to an answer.

        There are several where answers read the same to the client, which may have dropped their reasoning: open ones
        first, then newer ones. None matches: one without answers.
        """
        nodes = self.nodes
        counts = {-1: 0}  # a node on a path that begins the sent ones → how many messages that is
        found: list[tuple[int, bool, int]] = []
        for index in _parents_first(nodes):
            node = nodes[index]
            start = counts.get(node.parent)
            if start is None or (node.is_answer and node.setting != setting):
                continue
            end = start + len(node.messages)
            if end <= len(sent) and all(map(same, node.messages, sent[start:end])):
                counts[index] = end
                found += [(end, node.is_open, index)] if node.is_answer else []
        first = sorted(found, reverse=True)[:TRIED_COUNT_MAX]
        return [_match(nodes, index) for count, _, index in first if count == first[0][0]] or [_Match()]

    def _rest_after(
        self,
        index: int,
        whole: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, Any] | None,
        text: str,
    ) -> tuple[str, str] | None:
        """Find what the template writes after an answer: the token that ended it, and all that follows.

        None: the answer is not open (what was asked never is), or the template would write what came before in another
        way than it stands on the path. `text`, the rendering of all messages, must begin with the prompt that the
        engine saw, and then with the answer: word for word, or else as the template writes it up to there, saying what
        the answer says, and ending it with the same token, unless the next message begins with that token, as it does
        in some families.
        """
        node = self.nodes[index]
        if not node.is_open or not node.prompt.begins(text):
            return None
        end = self._template.ends[int(node.ids[-1])]
        made = self._template.decode(node.ids[:-1]) + end
        if text.startswith(made, node.prompt.length):  # so are most, and need no second rendering
            return end, text[node.prompt.length + len(made) :]
        try:
            before = self._template.render(whole[: self._message_count(index)], tools, answer=False, options=options)
        except InputError:  # some templates want a user's message at the end
            return None
        found = before.find(end, node.prompt.length)
        kept = before[: found if found >= 0 else len(before)]
        if len(kept) < node.prompt.length or not text.startswith(kept + end) or not self._says(kept, node, tools):
            return None
        return end, text[len(kept) + len(end) :]

    def _says(self, kept: str, node: Node, tools: Sequence[Tool]) -> bool:
        """Whether the template's text for an answer, read as an answer, says what was recorded.

        It may be written in other words (spaces in JSON, trimmed lines); but a template that drops the reasoning,
        appends or not, would have the policy go on from what it never saw.
        """
        prompt, body = kept[: node.prompt.length], kept[node.prompt.length :]
        again = to_message(self._template.read(body, prompt=without_marks(prompt), tools=tools), "")
        return same(_stripped(node.messages[-1]), _stripped(again))

    def _new_ask(
        self, parent: int, tried: _Try, tools: tuple[Tool, ...], setting: str, rest: tuple[str, str] | None
    ) -> Ask:
        written = self._template.encode(tried.text) if rest is None else self._template.encode(rest[1], after=rest[0])
        before, images = self.ids(parent), self._images(parent)
        left = [part["digest"] for part in images_in(tried.messages)][len(images) :]
        added, places = self._template.places(written, [(digest, self.files[digest]) for digest in left])
        return Ask(
            parent=parent,
            added_ids=added,
            context_ids=np.concatenate((before, added)),
            images=(*images, *_moved(places, by=len(before))),
            messages=tried.messages,
            tools=tools,
            setting=setting,
            digest=tried.digest,
            text=tried.text,
        )

    def _message_count(self, index: int) -> int:
        return sum(len(node.messages) for _, node in _upwards(self.nodes, index))

    def _place(self, ask: Ask) -> _Place:
        """Find how far the asks before it, behind the same answer or at the root, begin as this one does."""
        at, ids, messages = ask.parent, ask.added_ids, ask.messages[self._message_count(ask.parent) :]
        images = _cut(ask.images, len(ask.context_ids) - len(ids), len(ask.context_ids))
        while (index := self._next.get((at, _first(ids, images)))) is not None:
            node = self.nodes[index]
            counts = _common_count(node.ids, node.images, ids, images), _same_count(node.messages, messages)
            if counts[0] < len(node.ids):
                return _Place(at, ids, images, messages, index, *counts)
            if counts[1] < len(node.messages):
                self._hand_down(index, counts[1])
            at, images, ids, messages = (
                index,
                _cut(images, counts[0], len(ids)),
                ids[counts[0] :],
                messages[counts[1] :],
            )
            if not len(ids) and not messages:
                break
        return _Place(at, ids, images, messages)

    def _hand_down(self, index: int, count: int) -> None:
        """Leave a node so many of its messages, and the others to those behind it: some ask has its tokens alone."""
        nodes = self.nodes.copy()
        kept, others = nodes[index].messages[:count], nodes[index].messages[count:]
        behind = [each for each, node in enumerate(nodes) if node.parent == index]
        for each in behind:
            nodes[each] = replace(nodes[each], messages=(*others, *nodes[each].messages))
        nodes[index] = replace(nodes[index], messages=kept)
        self._bytes += (len(behind) - 1) * sum(map(_size_bytes, others))
        self.nodes = nodes

    def _tell_parent(self, ask: Ask, sides: Sequence[Side]) -> None:
        """Give an answer what is known of its last token only since that was read."""
        if not ask.is_continued:
            return
        node, count = self.nodes[ask.parent], len(ask.added_ids)
        end = len(node.ids)
        known = {side.name for side in parts(node.sides, end - 1, end)}
        last = parts(sides, -count - 1, -count, end + count)
        told = [part for part in last if part.name in WHEN_READ - known]
        if told:
            self.nodes = self.nodes.copy()
            self.nodes[ask.parent] = replace(node, sides=(*node.sides, *told))

    def _asked_nodes(self, place: _Place, sides: Sequence[Side], *, is_needed: bool) -> list[Node]:
        """Make the nodes that an ask adds: what it shares with half of another one, and what is its own alone.

        sides: of the place's ids, counted back from their end. What is shared has those of the ask that came first.
        is_needed: nothing is shared with an earlier ask, so there must be a node, though it may be an empty one.
        """
        head, ids, images, messages = [], place.ids, place.images, place.messages
        if place.within >= 0:
            first = parts(self.nodes[place.within].sides, 0, place.id_count)
            seen = _cut(images, 0, place.id_count)
            head = [_asked_node(place.parent, ids[: place.id_count], seen, messages[: place.message_count], first)]
            images = _cut(images, place.id_count, len(ids))
            ids, messages = ids[place.id_count :], messages[place.message_count :]
        if not (len(ids) or messages or (is_needed and not head)):
            return head
        own = parts(sides, -len(ids), 0, len(ids))
        return [*head, _asked_node(len(self.nodes) if head else place.parent, ids, images, messages, own)]

    def _share(self, place: _Place, asked: list[Node]) -> None:
        """Take note of the nodes of an ask, the last but its answer, and leave to the first what it shares."""
        first = len(self.nodes) - 1 - len(asked)
        if place.within >= 0:
            nodes = self.nodes.copy()
            old = nodes[place.within]
            rest = parts(old.sides, place.id_count, len(old.ids), -place.id_count)
            seen = _cut(old.images, place.id_count, len(old.ids))
            own = _asked_node(first, old.ids[place.id_count :], seen, old.messages[place.message_count :], rest)
            nodes[place.within] = own
            self.nodes = nodes
            self._next[first, _first(own.ids, own.images)] = place.within
        for index, node in enumerate(asked, first):
            self._next[node.parent, _first(node.ids, node.images)] = index

    def _add(self, nodes: list[Node]) -> None:
        size = self._bytes + sum(node.size_bytes for node in nodes)
        if size > CONVERSATION_BYTES_MAX or len(self.nodes) + len(nodes) > NODE_COUNT_MAX:
            raise PayloadTooLarge(
                f"the conversation would have {len(self.nodes) + len(nodes):,} nodes and {size:,} bytes, the limits "
                f"are {NODE_COUNT_MAX:,} and {CONVERSATION_BYTES_MAX:,}: end the trajectory, or let it branch less",
                size_bytes=size,
                limit_bytes=CONVERSATION_BYTES_MAX,
            )
        self._bytes = size
        self.nodes += nodes


def _asked_node(
    parent: int, ids: Int32, images: tuple[ImagePlace, ...], messages: tuple[Message, ...], sides: tuple[Side, ...]
) -> Node:
    """Make a node of tokens that were asked."""
    zeros = np.zeros(len(ids), dtype=np.float32)
    mask = zeros.astype(np.uint8)
    return Node(parent=parent, ids=ids, logprobs=zeros, mask=mask, messages=messages, sides=sides, images=images)


def _upwards(nodes: Sequence[Node], index: int) -> Iterator[tuple[int, Node]]:
    """Go from a node to its root."""
    while index >= 0:
        node = nodes[index]
        yield index, node
        index = node.parent


def _parents_first(nodes: Sequence[Node]) -> list[int]:
    """List the nodes in the order in which they came, but parents before their children."""
    order: dict[int, None] = {}
    for index in range(len(nodes)):
        way = []
        while index >= 0 and index not in order:
            way.append(index)
            index = nodes[index].parent
        order.update(dict.fromkeys(reversed(way)))
    return list(order)


def _match(nodes: Sequence[Node], index: int) -> _Match:
    path = list(_upwards(nodes, index))[::-1]
    answers = tuple(each for each, node in path if node.is_answer)
    return _Match(answers, tuple(message for _, node in path for message in node.messages))


def _size_bytes(message: Message) -> int:
    return len(canonical(message))


def _first(ids: Int32, images: Sequence[ImagePlace]) -> int | str:
    """Return what tokens begin with, as it is looked up: an image's digest, or an id; -1: there are none."""
    if images and images[0].start == 0:
        return images[0].digest
    return int(ids[0]) if len(ids) else -1


def _cut(images: Sequence[ImagePlace], start: int, end: int) -> tuple[ImagePlace, ...]:
    """Return the images in [start, end), counted from `start`."""
    return _moved([each for each in images if start <= each.start < end], by=-start)


def _moved(images: Iterable[ImagePlace], *, by: int) -> tuple[ImagePlace, ...]:
    return tuple(ImagePlace(each.start + by, each.end + by, each.digest) for each in images)


def _common_count(one: Int32, seen: Sequence[ImagePlace], other: Int32, shown: Sequence[ImagePlace]) -> int:
    """Count the ids with which both begin, and whose images, seen and shown, are the same."""
    count = min(len(one), len(other))
    differing = np.flatnonzero(one[:count] != other[:count])
    firsts = [min(each.start for each in pair if each) for pair in zip_longest(seen, shown) if pair[0] != pair[1]]
    return min(count, *map(int, differing[:1]), *firsts[:1]) if len(differing) or firsts else count


def _same_count(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Count the messages with which both begin."""
    count = min(len(one), len(other))
    return next((index for index in range(count) if one[index] != other[index]), count)


def _stripped(message: Message) -> Message:
    """Leave out the spaces around a message's texts, which templates trim, and the ids that we gave."""
    texts = {key: message.get(key, "").strip() for key in ("content", "reasoning_content")}
    calls = [{"function": call["function"]} for call in message.get("tool_calls", [])]
    return {"role": message["role"], **texts, "tool_calls": calls}


def _behind(digest: str, messages: Iterable[Message]) -> str:
    """Return the digest of a path that goes on with these messages."""
    for message in messages:
        digest = _hex(f"{digest} {canonical(message)}")
    return digest


def _hex(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _digest(text: str) -> int:
    return xxhash.xxh3_128_intdigest(text.encode())
