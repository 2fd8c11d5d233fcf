"""Environments that speak in chat messages and offer a tool, with what their policies write."""

from __future__ import annotations

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


class SumsBySnapshot(Sums):
    recovery = "snapshot"


class SumsInAProcess(Sums):
    inline = False
