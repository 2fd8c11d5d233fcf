"""A taskset of verifiers whose environment plays the user, with dice and a tool; runs in .venv-clients."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Lamps", "LampsEnv"]


class Switch(vf.Toolset[vf.ToolsetConfig]):
    """The tools."""

    @vf.tool
    async def press(self, lamp: int) -> str:
        """Switch a lamp on."""
        return f"lamp {lamp} is on"


class LampData(vf.TaskData):
    """How long it goes on."""

    turns: int


class LampConfig(vf.TaskConfig):
    """Where the tools are."""

    switch: vf.ToolsetConfig = vf.ToolsetConfig()
    has_tools: bool = False


class Lamp(vf.Task[LampData, vf.State, LampConfig]):
    """Sees lamps, and answers."""

    @classmethod
    def toolsets(cls, config: LampConfig) -> list[vf.Toolset]:
        """Return the tools, where they are wanted."""
        return [Switch(config.switch)] if config.has_tools else []

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        """Count the turns."""
        return float(trace.num_turns)


class LampsEnvConfig(vf.EnvConfig):
    """Who plays."""

    player: vf.AgentConfig = vf.AgentConfig()


class LampsEnv(vf.Env[LampsEnvConfig]):
    """Shows a lamp after each answer; the reward is how long all answers were."""

    async def run(self, task: Lamp, agents: Any) -> None:
        """Play one episode."""
        length = 0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(task.data.turns - 1):
                if segment.terminated:
                    break
                length += len(segment.last_reply)
                segment = await talk.turn(f"lamp {random.randint(0, 99)}")
            length += len(segment.last_reply)
        talk.trace.record_reward("length", length)


class LampsConfig(vf.TasksetConfig):
    """What its tasks are given."""

    task: LampConfig = LampConfig()


class Lamps(vf.Taskset[Lamp, LampsConfig]):
    """Without end."""

    INFINITE = True

    def load(self) -> Iterator[Lamp]:
        """Make the rows."""
        while True:
            yield Lamp(LampData(prompt="look", turns=3), self.config.task)


if __name__ == "__main__":
    Switch.run()
