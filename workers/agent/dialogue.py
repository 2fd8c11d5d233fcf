"""One trajectory that speaks in chat messages: a transcript that may branch.

- The world's messages and the policy's answers go through a conversation (fabric/chat/conversation.py): the model's own
  template writes them. Where the template appends, the tokens go on as they stand; where it rewrites history, a branch
  begins. Nothing that the policy made is encoded again as if it had made it.
- A world sees the policy's answer as a message, with its tool calls read from the text.
"""

from __future__ import annotations

import struct
from typing import Any

import xxhash

from ...fabric.chat.choice import ToolChoice
from ...fabric.chat.conversation import Ask, Conversation
from ...fabric.chat.image_parts import with_files
from ...fabric.chat.messages import Message
from ...fabric.chat.template import ChatTemplate
from ...fabric.contract.images import ImagePlace
from ...fabric.contract.records import Int32, TurnResult
from ...fabric.contract.wire import dump_json
from ..environments.answers import BRIEF


class Dialogue:
    """The conversation so far in one trajectory; stands where a Transcript stands."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]]) -> None:
        """messages: of the first observation. Raises InputError, PayloadTooLarge: they are none."""
        self.rewards: list[float] = []
        self.stop_ids = template.stop_ids
        self._template = template
        self._conversation = Conversation(template)
        self._tools = tools
        self._messages: list[Message] = []
        self._said: list[list[Message]] = []  # by the world, at the beginning and after each turn
        self._size = 0  # of all that was said, also by the policy, in bytes
        self._ask: Ask | None = None
        self.files = self._conversation.files  # of images, by digest
        self._digest = xxhash.xxh3_64(dump_json(tools))
        self._say(messages)

    def add_turn(self, result: TurnResult) -> Message:
        """Add a turn's tokens, written by the policy; return them as a message, which has "content", empty or not."""
        ask, self._ask = self._asked(), None
        reason = "stop" if result.finish_reason == "stop" else "length"
        made = result.completion_ids, result.logprobs, result.spans, reason
        answer = self._conversation.answer(ask, *made, sides=result.sides)
        self._digest.update(result.completion_ids.tobytes())
        self._size += len(answer.text.encode(errors="replace"))
        self._messages = [*ask.messages, answer.message]
        return {"content": "", **answer.message}

    def add_step(self, reward: float, messages: list[Message]) -> None:
        """Add the environment's reward for the turn, and its messages, of which there may be none.

        Raises:
            InputError, PayloadTooLarge: they are no messages.
        """
        self.rewards.append(reward)
        self._digest.update(f"{reward:.6g} ".encode())
        self._say(messages)

    def context(self) -> Int32:
        """Return all tokens of the context that the next turn goes on from.

        Raises:
            InputError: the messages, or the tools, are none that the template takes.
        """
        return self._asked().context_ids

    def images(self) -> tuple[ImagePlace, ...]:
        """Return the images in the context, once that is known."""
        return self._asked().images

    def digest(self) -> str:
        """Return the digest of all so far and of the context, as 16 hexadecimal digits.

        The same messages may come to another context: a template may write today's date.
        """
        digest = self._digest.copy()
        digest.update(self.context().tobytes())
        return str(digest.hexdigest())

    def tag(self, choice: ToolChoice) -> str:
        """Return the structural tag of the next turn as chosen; empty: it needs none.

        Raises:
            InputError: no grammar can promise it, or it asks for a tool that is not offered.
        """
        ask = self._asked()
        return self._template.tag(choice, ask.tools, prompt=ask.text)

    @property
    def is_brief(self) -> bool:
        """True if the context is known, or all that was said is short enough to be rendered and tokenised at once."""
        return self._ask is not None or self._size <= BRIEF

    def state(self) -> dict[str, Any]:
        """Return what a snapshot keeps beside texts and rewards."""
        first, *said = (with_files(each, self.files) for each in self._said)
        return {"messages": first, "tools": self._tools, "said": said}

    def record(self) -> dict[str, Any]:
        """Return the fields of a Rollout that hold its tokens: a prompt only where all branches begin with it."""
        return self._conversation.record()

    def _asked(self) -> Ask:
        if self._ask is None:
            self._ask = self._conversation.ask_taken(self._messages, self._tools)
        return self._ask

    def _say(self, messages: list[Message]) -> None:
        if messages:
            messages = self._conversation.take(messages)
        self._ask = None
        self._messages = [*self._messages, *messages]
        self._said.append(messages)
        said = dump_json(messages)
        self._size += len(said)
        self._digest.update(struct.pack("<I", len(said)) + said)
