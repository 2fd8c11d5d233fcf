"""Walks that do not go on as they began: what they say, pay or restore depends on the process they are in."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rollfab.workers.environments.base import Step
from tests.support.worlds.worlds import Walk, WalkBySnapshot


class TellsItsProcess(Walk):
    """Claims to replay, and answers with the number of its process."""

    name = "tells-its-process"

    async def step(self, action: str) -> Step:
        return dataclasses.replace(await super().step(action), text=f"{os.getpid()},")


class PaysByProcess(Walk):
    """Claims to replay, says the same, and pays otherwise."""

    name = "pays-by-process"

    async def step(self, action: str) -> Step:
        return dataclasses.replace(await super().step(action), reward=float(os.getpid()))


class CannotGoBack(WalkBySnapshot):
    """Has snapshots, and cannot load them."""

    name = "cannot-go-back"

    async def restore(self, snapshot: dict[str, Any]) -> None:
        raise OSError("saved by another version of the game")
