"""Rollout demand that never ends: a trainer that trains nothing, and keeps more trajectories open than there are slots.

- It submits through the real queue, agents play them, workers generate their turns, groups come back and are
  acknowledged. Everything is counted by the run itself.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Self

from rollfab.fabric.contract.errors import EnvironmentUnknown, FabricError
from rollfab.trainer.client import Fabric, Run, connect

RUN_ID = "coserve"
GROUP_SIZE = 8
TURN_COUNT = 2
COMPLETION_TOKENS = 64
OBSERVATION_TOKENS = 32
TAKE_S = 0.25
OPEN_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 240.0


class Demand:
    """Keeps `depth` trajectories open from `start` to `drain`."""

    def __init__(self, url: str, model: str, depth: int) -> None:
        self._url = url
        self._model = model
        self._depth = depth
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="demand", daemon=True)

    def __enter__(self) -> Self:
        self._fabric = connect(self._url)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(30)
        self._fabric.close()

    def start(self, weights: Any) -> None:
        """Open the run, publish version 0, and begin. Raises FabricError: no agent comes up."""
        self._run = self._open(self._fabric)
        self._run.publish(weights, version=0)
        self._thread.start()

    def _open(self, fabric: Fabric) -> Run:
        options = {
            "turn_count": TURN_COUNT,
            "completion_tokens": COMPLETION_TOKENS,
            "observation_tokens": OBSERVATION_TOKENS,
        }
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        while True:
            try:
                return fabric.run(RUN_ID, model=self._model, environment="metronome", environment_options=options)
            except EnvironmentUnknown:  # no agent is up yet
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.1)

    def check(self) -> None:
        """Raises FabricError: the demand has ended by itself."""
        if self._failure is not None:
            raise FabricError(f"the bench's trainer has ended: {self._failure}") from self._failure

    def counters(self) -> dict[str, int]:
        """The run's totals so far."""
        return dict(self._run.status().counters)

    def drain(self) -> dict[str, int]:
        """Submit nothing more, wait for all that is under way; the run's counters.

        Raises:
            FabricError: something did not end, or ended in the dead letters.
        """
        self._is_over.set()
        self._thread.join(DRAIN_TIMEOUT_S)
        self.check()
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while (status := self._run.status()).depth:
            self._take()
            if time.monotonic() > deadline_s:
                raise FabricError(f"{status.depth} trajectories of the bench did not end in {DRAIN_TIMEOUT_S:.0f} s")
        if status.dead_count:
            raise FabricError(f"{status.dead_count} trajectories of the bench are dead letters: see its agent's log")
        return dict(status.counters)

    def _work(self) -> None:
        number = 0
        try:
            while not self._is_over.is_set():
                missing = self._depth - self._run.status().depth
                tasks = [{"seed": number + index} for index in range(-(-missing // GROUP_SIZE))]
                if tasks:
                    number += len(tasks)
                    self._run.submit(tasks, group_size=GROUP_SIZE)
                self._take()
        except FabricError as error:
            self._failure = error

    def _take(self) -> None:
        with self._run.groups(timeout=TAKE_S, count=GROUP_SIZE) as groups:
            for _ in groups:
                pass
