"""Environments that speak in chat messages and offer a tool, with what their policies write."""

from __future__ import annotations

import copy
from typing import Any

from rollfab.workers.environments.base import Environment, Observation, Step

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "the sum of two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class Sums(Environment):
    """Asks for `task["count"]` sums, one after the other: the policy calls `add`, reads the result, and says it."""

    recovery = "replay"
    turn_count_max = 16
    inline = True

    def __init__(self, *, broken: str = "") -> None:
        self._broken = broken
        self._left = 0
        self._sum = 0

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        self._left = int(task.get("count", 2))
        rules = {"role": "system", "content": "You are a helpful assistant."}
        messages: list[Any] = [rules, {"role": "user", "content": "one and two?"}]
        if self._broken == "reset":
            messages = [{"role": "nobody", "content": "?"}]
        return Observation(messages=messages, tools=[ADD])

    async def step(self, action: Any) -> Step:
        if calls := action.get("tool_calls"):
            arguments = calls[0]["function"]["arguments"]
            said = {"role": "tool", "content": f"three of {arguments}", "tool_call_id": calls[0]["id"]}
            return Step("", 0.25, messages=[{"role": "tool"} if self._broken == "step" else said])
        self._left -= 1
        if self._broken == "silent":
            return Step("", 0.0)
        return Step("again?", 0.5, terminated=self._left == 0, info={"said": action["content"]})

    async def snapshot(self) -> dict[str, Any]:
        return {"left": self._left}

    async def restore(self, snapshot: dict[str, Any]) -> None:
        self._left = snapshot["left"]


class Pictures(Sums):
    """Shows `task["pictures"]`, parts of messages: all with its first question, one with each result of the tool."""

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        first = await super().reset(task, seed)
        self._pictures = task["pictures"]
        first.messages[1]["content"] = [{"type": "text", "text": "one and two?"}, *self._pictures]
        return first

    async def step(self, action: Any) -> Step:
        step = await super().step(action)
        for message in step.messages:
            message["content"] = [{"type": "text", "text": message["content"]}, self._pictures[self._left - 1]]
        return step

    async def snapshot(self) -> dict[str, Any]:
        return {**await super().snapshot(), "pictures": self._pictures}

    async def restore(self, snapshot: dict[str, Any]) -> None:
        await super().restore(snapshot)
        self._pictures = snapshot["pictures"]


class PicturesBySnapshot(Pictures):
    recovery = "snapshot"


class SumsBySnapshot(Sums):
    recovery = "snapshot"


class SumsInAProcess(Sums):
    inline = False


class Meddler(Sums):
    """Inside the agent, it writes over all that it was handed, and over what it has said."""

    def __init__(self, *, rules: list[str], meddles: bool = True) -> None:
        super().__init__()
        self._rules = rules
        self._meddles = meddles
        self._tools = [copy.deepcopy(ADD)]

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        first = await super().reset(task, seed)
        first.messages[0]["content"] = self._rules[0]
        if self._meddles:
            task.clear()
            self._rules[0] = "Say nothing."
        return Observation(messages=first.messages, tools=self._tools)

    async def step(self, action: Any) -> Step:
        step = await super().step(action)
        if self._meddles:
            self._tools[0]["function"]["name"] = "subtract"
            for call in action.get("tool_calls", []):
                call["function"]["arguments"] = "{}"
            action["content"] = "the world wrote this"
        return step
