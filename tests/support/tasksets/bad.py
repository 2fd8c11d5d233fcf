"""A taskset of verifiers that hangs, blocks, exits, goes on for ever or pays nonsense, as its rows say."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Bad", "BadEnv"]


class BadData(vf.TaskData):
    """How it is bad."""

    how: str


class BadTask(vf.Task[BadData, vf.State, vf.TaskConfig]):
    """Asks for a word."""


class BadEnvConfig(vf.EnvConfig):
    """Who plays."""

    player: vf.AgentConfig = vf.AgentConfig()


class BadEnv(vf.Env[BadEnvConfig]):
    """Plays one turn, unless it is bad."""

    async def run(self, task: BadTask, agents: Any) -> None:
        """Play one episode."""
        how = task.data.how
        async with agents.player.interaction(task) as talk:
            await talk.turn()
            if how == "hangs":
                await asyncio.sleep(3600)
            if how == "blocks":
                time.sleep(3600)  # noqa: ASYNC251 - it is bad
            if how == "exits":
                os._exit(3)
            if how == "leaves":
                sys.exit(3)
            while how == "endless":
                await talk.turn("go on")
            if how == "huge":
                talk.trace.record_metric("m" * (64 << 20), 1.0)
        talk.trace.record_reward("paid", {"nan": float("nan"), "infinite": float("inf")}.get(how, 1.0))


class Bad(vf.Taskset[BadTask, vf.TasksetConfig]):
    """One good row, and then none for ever."""

    def load(self) -> Iterator[BadTask]:
        """Make the row."""
        yield BadTask(BadData(prompt="look", how="good"), self.config.task)
        time.sleep(3600)
