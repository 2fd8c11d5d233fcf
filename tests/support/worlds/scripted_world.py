"""A world that follows a script, and may follow another one in a later life: for tests of going on elsewhere."""

from __future__ import annotations

from typing import Any, Literal

from rollfab.workers.environments.base import Environment, Observation, Step, TextSampling


class Scripted(Environment):
    """Answers from a script, and with what was done so far.

    Args:
        script: [text, reward] for each turn; the world is over after the last.
        end: how it is over; "turns": it goes on beyond the run's limit.
        life: which life of the trajectory this object belongs to.
        changes: [index, what]: from its second life on, turn `index` (-1: the first observation) gives another "text"
            or "reward", the world is "over" after it, or a snapshot "cannot" be restored.
    """

    inline = True
    sampling = TextSampling(max_tokens=4)

    def __init__(
        self,
        script: list[list[Any]],
        end: Literal["terminated", "truncated", "turns"] = "terminated",
        life: int = 0,
        changes: tuple[int, str] | None = None,
    ) -> None:
        self._script = script
        self._end = end
        self._change = changes if changes is not None and life > 0 else None
        self._actions: list[str] = []
        self.turn_count_max = len(script) if end == "turns" else len(script) + 1

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        return Observation(f"seed {seed}" + ("?" if self._change == (-1, "text") else ""))

    async def step(self, action: str) -> Step:
        text, reward = self._script[len(self._actions)]
        changed = self._change[1] if self._change is not None and self._change[0] == len(self._actions) else ""
        self._actions.append(action)
        if text:
            text += chr(65 + sum(map(ord, "".join(self._actions))) % 26)
        if changed == "text":
            text = text[:-1] + "?"  # of the same length, where it has any
        is_over = len(self._actions) == len(self._script) and self._end != "turns"
        return Step(
            text,
            reward + (changed == "reward"),
            (is_over and self._end == "terminated") or changed == "over",
            is_over and self._end == "truncated",
            {"actions": list(self._actions)},
        )


class ScriptedBySnapshot(Scripted):
    """The same, from its own snapshots."""

    recovery = "snapshot"

    async def snapshot(self) -> dict[str, Any]:
        return {"actions": self._actions}

    async def restore(self, snapshot: dict[str, Any]) -> None:
        if self._change is not None and self._change[1] == "cannot":
            raise OSError("that state is of another version")
        self._actions = list(snapshot["actions"])


class ScriptedByRestart(Scripted):
    """The same, unable to go on elsewhere."""

    recovery = "restart"
