"""Sessions that answer from a script, for tests of what stands before them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollfab.fabric.contract.errors import FabricError, InputError
from rollfab.fabric.ports.sessions import Call, Completion, Opened, Reply, SessionFacts, Token

KEY = "rfs_" + "k" * 43


def completion(text: str = "two words", *, finish: str = "stop", **message: Any) -> Completion:
    """An answer of this text, a token for each of its characters. message: further keys of the message."""
    said = {"content": text} if text else {}
    tokens = [Token(text=each, logprob=-0.5) for each in text or "x"]
    return Completion(message={"role": "assistant", **said, **message}, text=text, finish=finish, tokens=tokens)


def tool_call(name: str, arguments: str, identifier: str = "call_1") -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


class FakeSession:
    """Answers each call with the next of `script`: completions, an error, or an event that it waits for first.

    Without a script it says "two words". calls: what was asked. cancelled_count: how many calls were given up.
    refusals: what its client was told in place of answers.
    """

    def __init__(self, session_id: str = "group.0", model: str = "org/model") -> None:
        self.script: deque[list[Completion] | Exception | asyncio.Event] = deque()
        self.calls: list[Call] = []
        self.cancelled_count = 0
        self.refusals: list[str] = []
        self.ended: list[tuple[Mapping[str, Any] | None, str | None]] = []
        self.facts = SessionFacts(
            session_id=session_id,
            run_id="run",
            group_id="group",
            model=model,
            task={"question": "?"},
            seed=7,
            attempt=1,
            call_count=0,
            call_count_max=64,
            reward=None,
            idle_s_max=600.0,
        )

    async def ask(self, call: Call) -> Reply:
        """Answer as the script says."""
        self.calls.append(call)
        step = self.script.popleft() if self.script else [completion() for _ in range(call.count)]
        if isinstance(step, asyncio.Event):
            try:
                await step.wait()
            except asyncio.CancelledError:
                self.cancelled_count += 1
                raise
            step = [completion()]
        if isinstance(step, Exception):
            raise step
        return Reply(
            call_id=f"{self.facts.session_id}.{len(self.calls)}",
            created_s=1_700_000_000,
            prompt_token_count=11,
            policy_version=3,
            completions=step,
        )

    async def count(self, call: Call) -> int:
        """As many as there are messages."""
        self.calls.append(call)
        return len(call.messages or ())

    def note_refusal(self, told: str) -> None:
        """Remember it."""
        self.refusals.append(told)

    def reward(self, reward: float) -> None:
        """Take a finite reward."""
        if reward != reward or abs(reward) == float("inf"):
            raise InputError(f"reward is {reward}", name="reward")
        self.facts = replace(self.facts, reward=reward)

    async def end(
        self, *, reward: float | None = None, info: Mapping[str, Any] | None = None, error: str | None = None
    ) -> None:
        """Note how it ended."""
        if reward is not None:
            self.reward(reward)
        self.ended.append((info, error))


class FakeSessions:
    """Sessions by key. recorded: of those that are over. opening: what `open` gives or raises."""

    def __init__(self) -> None:
        self.by_key = {KEY: FakeSession()}
        self.recorded: dict[str, SessionFacts] = {}
        self.opening: Opened | FabricError | asyncio.Event | None = None
        self.cancelled_count = 0
        self.waits: list[float] = []

    @property
    def session(self) -> FakeSession:
        """The one that has KEY."""
        return self.by_key[KEY]

    def find(self, key: str) -> FakeSession | None:
        """Find a session."""
        return self.by_key.get(key)

    async def find_recorded(self, key: str) -> SessionFacts | None:
        """Find a session that was ended and recorded."""
        return self.recorded.get(key)

    async def open(self, run_id: str, *, wait_s: float) -> Opened:
        """Open what was laid out."""
        self.waits.append(wait_s)
        if isinstance(self.opening, asyncio.Event):
            try:
                await self.opening.wait()
            except asyncio.CancelledError:
                self.cancelled_count += 1
                raise
        if isinstance(self.opening, Exception):
            raise self.opening
        assert isinstance(self.opening, Opened), f"nothing is laid out for {run_id}"
        return self.opening
