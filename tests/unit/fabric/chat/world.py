"""Generated conversations, and an engine that records exactly what it saw and made.

The client of this world is an agent that goes on, asks again, edits what was said, drops reasoning, calls sub-agents,
compacts its context, and asks for several answers. The policy writes by hand (families.py), in tokens of its own
choice, sometimes badly, and is sometimes cut. After each answer the world checks, by rules of its own:

- the ids up to the answer are what the engine saw and made; mask 1 exactly on what it made, once for each token;
- where every answer on a path was written as the template writes it, the path's text is the template's;
- such a path goes on where its text begins the new one, and never where it does not;
- whatever is added to a path, however its answers were written, is the end of the template's text;
- images stand where the engine saw them, and two that differ share nothing, though their tokens are the same;
- a side array in which the engine repeats every token that it saw or made is, in every branch, that branch's tokens;
- the rollout's branches have all of it, and its tokens are hardly more than the prefix tree of all lines has.
"""

from __future__ import annotations

import base64
import io
import json
import operator
import re
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, takewhile
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from rollfab.fabric.chat.control import MARK
from rollfab.fabric.chat.conversation import Answer, Ask, Conversation
from rollfab.fabric.chat.template import ChatTemplate
from rollfab.fabric.contract.images import ImagePlace
from rollfab.fabric.contract.records import Branch, Int32, Rollout, Side, Span
from tests.unit.fabric.chat.families import FAMILIES, IMAGE_TOKEN, Family, Message, chat_template, token_text

WORDS = "one two three mild hot Paris Rome look again Ünïcode 日本 🙂 {x} <b> </p> a/b".split()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look at a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("look", "walk")
]


def png(seed: int, width: int, height: int) -> bytes:
    """A file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image_part(data: bytes) -> dict[str, Any]:
    """An image as clients send it."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


PICTURES = [image_part(png(seed, *size)) for seed, size in enumerate([(56, 56), (56, 56), (56, 56), (84, 28)])]


def told_apart(ids: Int32, images: Sequence[ImagePlace]) -> Int32:
    """Ids in which the tokens of two images differ."""
    ids = ids.copy()
    for each in images:
        ids[each.start : each.end] = -1 - int(each.digest[:7], 16)
    return ids


class Wrong(AssertionError):
    """A property of the world does not hold."""


class World:
    """One history: threads of messages as their clients hold them, one conversation, one engine."""

    def __init__(self, name: str, dice: Random, *, conversation: type[Conversation] = Conversation) -> None:
        self.family: Family = FAMILIES[name]
        self.template: ChatTemplate = chat_template(name)
        self.dice = dice
        self.conversation = conversation(self.template)
        self.threads: list[tuple[list[Message], list[Any]]] = []
        self.made: dict[int, tuple[Int32, Int32]] = {}  # an answer's node → what the engine saw, what it made
        self.seen: dict[int, tuple[ImagePlace, ...]] = {}  # an answer's node → the images that the engine saw
        self.said: dict[int, list[Message]] = {}  # an answer's node → the messages before it
        self.is_canonical: dict[int, bool] = {}  # an answer's node → whether it was written as templates write
        self.counts: Counter[str] = Counter()
        self.dropping = dice.random() < 0.5  # clients that hand no reasoning back

    def run(self, step_count: int) -> Counter[str]:
        """So many steps; what happened how often."""
        self._begin()
        for _ in range(step_count):
            step = self.dice.choice(
                [self._go_on] * 6 + [self._edit, self._begin, self._compact, self._again, self._side_by_side]
            )
            step()
            self.counts[step.__name__] += 1
        self._check_all()
        return self.counts

    # ---------------------------------------------------------------- what clients do

    def _begin(self) -> None:
        """Another agent: a root of its own."""
        messages: list[Message] = []
        if self.family.has_system and self.dice.random() < 0.7:
            messages.append({"role": "system", "content": self._words()})
        messages.append({"role": "user", "content": self._said()})
        may_call = self.family.call_count_max and self.dice.random() < 0.8
        self._turn(messages, TOOLS if may_call else [])

    def _go_on(self) -> None:
        messages, tools = self.dice.choice(self.threads)
        self._turn([*messages, *self._reply(messages)], tools)

    def _edit(self) -> None:
        """The client changes an earlier text, and goes on from there."""
        messages, tools = self.dice.choice(self.threads)
        places = [index for index, each in enumerate(messages) if each.get("content") and not each.get("tool_calls")]
        place = self.dice.choice(places)
        edited = [dict(each) for each in messages]
        edited[place]["content"] = f"{self._words()} edited"
        self._turn([*edited, *self._reply(edited)], tools)

    def _compact(self) -> None:
        """The client puts a summary in place of what came first."""
        messages, tools = self.dice.choice(self.threads)
        kept = messages[:1] if messages[0]["role"] == "system" else []
        self._turn([*kept, {"role": "user", "content": f"Summary: {self._words()}"}], tools)

    def _again(self) -> None:
        """The same request twice, for instance after a timeout; both are answered."""
        messages, tools = self.dice.choice(self.threads)
        longer = [*messages, *self._reply(messages)]
        first, second = self._ask(longer, tools), self._ask(longer, tools)
        if first.digest != second.digest or first.context_ids.tobytes() != second.context_ids.tobytes():
            raise Wrong("a repeated ask is another one")
        for ask in (first, second):
            self._keep(longer, tools, self._answer(ask))

    def _side_by_side(self) -> None:
        """Two replies to one answer, asked before either is answered."""
        messages, tools = self.dice.choice(self.threads)
        histories = [[*messages, *self._reply(messages)] for _ in range(2)]
        asks = [self._ask(each, tools) for each in histories]
        for history, ask in zip(histories, asks, strict=True):
            self._keep(history, tools, self._answer(ask))

    def _turn(self, messages: list[Message], tools: list[Any]) -> None:
        ask = self._ask(messages, tools)
        for _ in range(self.dice.choice([1, 1, 1, 2, 3])):
            self._keep(messages, tools, self._answer(ask))

    def _reply(self, messages: list[Message]) -> list[Message]:
        """What follows an answer: results of the tools that it called, or the user."""
        calls = messages[-1].get("tool_calls", [])
        if calls:
            return [{"role": "tool", "tool_call_id": call["id"], "content": self._said()} for call in calls]
        return [{"role": "user", "content": self._said()}]

    def _keep(self, messages: list[Message], tools: list[Any], answer: Answer) -> None:
        """The client's copy of an answer, as clients hold them."""
        copy: Message = json.loads(json.dumps(answer.message))
        if self.dropping:
            copy.pop("reasoning_content", None)
        for call in copy.get("tool_calls", []):
            if self.dice.random() < 0.3:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        if not copy.get("content"):
            copy["content"] = self.dice.choice([None, ""])
        elif self.dice.random() < 0.2:
            copy["content"] = [{"type": "text", "text": copy["content"]}]
        self.threads.append(([*messages, copy], tools))

    def _words(self) -> str:
        return " ".join(self.dice.choice(WORDS) for _ in range(self.dice.randint(1, 4)))

    def _said(self) -> str | list[dict[str, Any]]:
        """What a user or tool says: a text, sometimes one that quotes a control token, or parts with images."""
        if self.family.image_token and self.dice.random() < 0.5:
            parts = [self.dice.choice([{"type": "text", "text": self._words()}, *PICTURES[:3]]) for _ in range(3)]
            return [*parts, self.dice.choice(PICTURES)]
        if self.dice.random() < 0.1:
            return f"{self._words()} {self.dice.choice(self.family.special)} {self._words()}"
        return self._words()

    # ---------------------------------------------------------------- the policy

    def _message(self, may_call: bool) -> Message:
        message: Message = {"role": "assistant"}
        calls = self.dice.randint(1, self.family.call_count_max) if may_call and self.dice.random() < 0.6 else 0
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call{len(self.made):04}{place}",
                    "function": {
                        "name": self.dice.choice(["look", "walk"]),
                        "arguments": json.dumps({"place": self._words(), "days": self.dice.randint(0, 9)}),
                    },
                }
                for place in range(calls)
            ]
        if not calls or (
            self.family.name in ("qwen2.5", "qwen3", "qwen3-thinking", "glm-4.5") and self.dice.random() < 0.3
        ):
            message["content"] = self._words()
        if self.family.has_reasoning and self.dice.random() < 0.8:
            message["reasoning_content"] = self._words()
        return message

    def _write(self, ask: Ask) -> tuple[Int32, str, bool]:
        """Ids that the policy makes, how it ended, and whether a template would write the same."""
        text, end = self.family.write(self._message(bool(ask.tools)))
        kind = self.dice.choice(["as templates do"] * 6 + ["split", "spaced", "malformed", "other end", "cut"])
        if kind == "spaced":
            text = text.replace('": ', '":  ') if '": ' in text else f"{text}  "
        if kind == "malformed":
            text = text.replace("}", "", 1)
        if kind == "other end":
            end = self.dice.choice([token_text(self.template, each) or end for each in self.template.stop_ids])
        cut = self.dice.randint(0, len(text)) if kind in ("split", "cut") else len(text)
        ids = self._encode(text[:cut])
        if kind == "cut":
            return ids, "length", False
        if kind == "split":  # a tokenisation of its own: the same text in other tokens
            ids = np.concatenate((ids, self._encode(text[cut:])))
        closing = self.template.encode(end)
        is_same_text = kind == "as templates do" or (kind == "split" and not self.family.is_like_sentencepiece)
        return np.concatenate((ids, closing)), "stop", is_same_text

    def _encode(self, text: str) -> Int32:
        """Ids of a text behind a token, which an answer always stands behind, by the library itself."""
        anchor = self.family.special[0]
        ids = chat_template(self.family.name)._tokenizer.encode(anchor + text, add_special_tokens=False)
        return np.asarray(ids[1:], dtype=np.int32)

    # ---------------------------------------------------------------- the engine, and the checks

    def _ask(self, messages: list[Message], tools: list[Any]) -> Ask:
        ask = self.conversation.ask(messages, tools)
        text = ask.text.replace(MARK, "")
        fits = [node for node in self.made if self._could_continue(node, text, ask)]
        self.counts["could continue"] += bool(fits)
        longest = max((len(self.conversation.ids(node)) for node in fits), default=0)
        self.counts["continued"] += bool(fits) and len(self.conversation.ids(ask.parent)) >= longest
        self.counts["asks"] += 1
        self.counts["branches"] += not ask.is_continued
        if ask.is_continued and self._path_is_canonical(ask.parent):
            if not text.startswith(self._text_of(self.conversation.ids(ask.parent))):
                raise Wrong(f"a path goes on though the template writes what came before otherwise: {text!r}")
            if self._text_of(ask.context_ids) != text:
                raise Wrong(f"the context is {self._text_of(ask.context_ids)!r}, the template writes {text!r}")
        self.counts["continued otherwise"] += ask.is_continued and not self._path_is_canonical(ask.parent)
        self._check_images(ask)
        if not text.endswith(self._text_of(ask.added_ids)):
            raise Wrong(f"what is added is {self._text_of(ask.added_ids)!r}, the template writes {text!r}")
        if not ask.is_continued and self._text_of(ask.context_ids) != text:
            raise Wrong(f"a root is {self._text_of(ask.context_ids)!r}, the template writes {text!r}")
        return ask

    def _check_images(self, ask: Ask) -> None:
        """Each image of the messages has its own tokens, in order, and no other token is an image's."""
        contents = [each["content"] for each in ask.messages if isinstance(each.get("content"), list)]
        said = [part["digest"] for content in contents for part in content if part["type"] == "image"]
        if said != [place.digest for place in ask.images]:
            raise Wrong("the images of a context are others than those of its messages")
        tokens = [at for at, each in enumerate(ask.context_ids) if token_text(self.template, each) == IMAGE_TOKEN]
        if tokens != [at for place in ask.images for at in range(place.start, place.end)]:
            raise Wrong("images stand elsewhere than their tokens")

    def _could_continue(self, node: int, text: str, ask: Ask) -> bool:
        """Whether an ask's text begins with a path that could be extended, and its messages with what was said on it.

        The text alone does not tell: a template that trims writes the same for an answer that was cut behind a space.
        """
        recorded = self.conversation.nodes[node]
        if recorded.setting != ask.setting or not recorded.is_open or not self._path_is_canonical(node):
            return False
        path = [each for index in self.conversation.path(node) for each in self.conversation.nodes[index].messages]
        said = [message.get("content") for message in path]
        return said == [message.get("content") for message in ask.messages[: len(said)]] and text.startswith(
            self._text_of(self.conversation.ids(node))
        )

    def _path_is_canonical(self, node: int) -> bool:
        return all(self.is_canonical.get(each, True) for each in self.conversation.path(node))

    def _answer(self, ask: Ask) -> Answer:
        ids, finish, is_canonical = self._write(ask)
        logprobs = -np.random.default_rng(len(self.made)).random(len(ids), dtype=np.float32)
        span = Span(0, len(ids), "engine", self.dice.randint(0, 5))
        seen = np.concatenate((ask.context_ids, ids))
        echo = Side(name="echo", start=-len(ask.context_ids), end=len(ids), array=seen)
        unread = min(len(ids), 1)  # the last token made
        late = Side(name="routed_experts", start=echo.start, end=len(ids) - unread, array=seen[: len(seen) - unread])
        answer = self.conversation.answer(ask, ids, logprobs, [span], finish, sides=[echo, late])
        self.made[answer.node] = (ask.context_ids, ids)
        self.seen[answer.node] = ask.images
        self.said[answer.node] = list(ask.messages)
        self.is_canonical[answer.node] = is_canonical
        node = self.conversation.nodes[answer.node]
        if not np.array_equal(node.logprobs, logprobs) or node.spans != (span,):
            raise Wrong("log-probabilities or spans are others than the engine's")
        return answer

    def _check_all(self) -> None:
        nodes = self.conversation.nodes
        for index, (seen, made) in self.made.items():
            if not np.array_equal(self.conversation.ids(index), np.concatenate((seen, made))):
                raise Wrong("a path is not what the engine saw and made")
            if not np.array_equal(self.conversation.ids(nodes[index].parent), seen):
                raise Wrong("the path up to an answer is not what the engine saw")
        for index, node in enumerate(nodes):
            if len({len(node.ids), len(node.logprobs), len(node.mask)}) != 1:
                raise Wrong("a node's shape")
            made = self.made[index][1] if index in self.made else node.ids[:0]
            if node.mask.sum() != len(made) or not np.array_equal(node.ids[node.mask == 1], made):
                raise Wrong("mask 1 is not exactly on what the policy made")
        leaves = [path[-1] for path in self.conversation.paths()]
        if not set(leaves) <= set(self.made) or len(set(leaves)) != len(leaves):
            raise Wrong("a leaf is no answer")
        self._check_record()
        self.counts["stored"] += sum(len(node.ids) for node in nodes)
        lines = [told_apart(self.conversation.ids(index), self.seen[index]) for index in self.made]
        self.counts["needed"] += distinct_count(lines)

    def _check_record(self) -> None:
        """Some branch has what the engine saw and made; a branch has the messages that led to its answer."""
        facts: dict[str, Any] = {
            "trajectory_id": "t",
            "group_id": "g",
            "task_id": "k",
            "reward": 0.0,
            "finish_reason": "terminated",
        }
        record = self.conversation.record()
        rollout = Rollout.decode(Rollout(**facts, turn_count=1, attempt=0, seed=0, **record).encode())
        branches = rollout.branches()
        lines = [_line(each).tobytes() for each in branches]
        for index, (seen, made) in self.made.items():
            line = told_apart(np.concatenate((seen, made)), self.seen[index]).tobytes()
            if not any(each.startswith(line) for each in lines):
                raise Wrong("no branch is what the engine saw and made")
        files = {image.digest for each in branches for image in each.images}
        if files != {place.digest for places in self.seen.values() for place in places}:
            raise Wrong("the rollout's images are others than the engine's")
        for each in branches:
            echoes = each.side("echo", of_prompt=True), each.side("echo")
            parts = zip((each.prompt_ids, each.completion_ids), echoes, strict=True)
            late = each.side("routed_experts")
            known = None if late is None else late[:-1]
            if len(each.completion_ids) > 1 and not np.array_equal(known, each.completion_ids[:-1]):
                raise Wrong("what is known once it was read is not known of all tokens but the last")
            if any(len(part) and (echo is None or not np.array_equal(part, echo)) for part, echo in parts):
                raise Wrong("a side array is not that of the tokens beside it")
        made_count = sum(len(made) for _, made in self.made.values())
        if sum(int(each.completion_mask.sum()) for each in branches) != made_count:
            raise Wrong("a token of the policy does not count once")
        for index, said in self.said.items():
            path = [each for node in self.conversation.path(index) for each in self.conversation.nodes[node].messages]
            if path[:-1] != said:
                raise Wrong("the messages on a path are others than those that were asked")

    def _text_of(self, ids: Int32) -> str:
        """The text of ids, an image as one token; where a tokenizer puts a space before each text, without those."""
        if not self.family.is_like_sentencepiece:
            text, token = self.template.decode(ids), self.family.image_token
            return re.sub(f"(?:{re.escape(token)})+", token, text) if token else text
        parts, run = [], []
        for each in [*ids.tolist(), -1]:
            token = token_text(self.template, each) if each >= 0 else ""
            if token is None:
                run.append(each)
                continue
            text = self.template.decode([*self.template.encode("x").tolist(), *run]).removeprefix("x")
            parts += [text.removeprefix(" "), token]
            run = []
        return "".join(parts)


def _line(branch: Branch) -> Int32:
    """The tokens of a branch, images told apart."""
    first = len(branch.prompt_ids)
    images = [ImagePlace(each.start + first, each.end + first, each.digest) for each in branch.images]
    return told_apart(np.concatenate((branch.prompt_ids, branch.completion_ids)), images)


def distinct_count(lines: list[Int32]) -> int:
    """Count the tokens of the prefix tree of these lines: what must be stored, if each is stored once."""
    ordered: list[list[int]] = sorted(line.tolist() for line in lines)
    known: list[int] = [sum(takewhile(bool, map(operator.eq, *pair))) for pair in pairwise(ordered)]
    return sum(map(len, ordered)) - sum(known)


def run_world(name: str, seed: int, step_count: int = 12, **others: Any) -> Counter[str]:
    """The world of this family and seed."""
    return World(name, Random(seed), **others).run(step_count)


def main(history_count: int) -> None:
    """Run so many histories and print, for each family, what continued of what could."""
    total: Counter[str] = Counter()
    for index, name in enumerate(FAMILIES):
        counts: Counter[str] = Counter()
        for seed in range(index, history_count, len(FAMILIES)):
            counts += run_world(name, seed)
        total += counts
        print(f"{name:20}", *(f"{key} {counts[key]:>7,}" for key in REPORTED), flush=True)
    print(f"{'all':20}", *(f"{key} {total[key]:>7,}" for key in REPORTED))
    print(
        f"{history_count:,} histories: continued of what could {total['continued'] / total['could continue']:.4f}, "
        f"tokens of the prefix tree to those stored {total['needed'] / total['stored']:.4f}"
    )


REPORTED = ("asks", "branches", "could continue", "continued", "continued otherwise", "needed", "stored")

if __name__ == "__main__":  # PYTHONPATH=src python -m tests.unit.fabric.chat.world 10000
    main(int(sys.argv[1]))
