"""The tokenizers of the runs that an agent serves: loaded beside the event loop, each run's by itself.

- A load may take seconds, or hang if a hub does not answer: no other run waits for it, and neither does leaving.
- The maker of a run names its model, but cannot cause a download: the agent downloads only models that its operator
  allows; all others must lie on this machine.
- A failed load costs its own run alone. The log says it once, and every heartbeat until a load succeeds. The agent
  tries again with growing pauses: somebody may yet put the model where its name says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ...fabric.contract.clock import Clock
from ...fabric.contract.records import RunConfig
from ...fabric.model.presets import is_preset
from ...fabric.model.tokenizer import Tokenizer
from ..engines.model_tokenizer import load_tokenizer
from ..environments.base import in_thread
from ..environments.failures import reason_of

log = logging.getLogger(__name__)

RETRY_S = 1.0  # pause after a failure; doubles up to RETRY_S_MAX
RETRY_S_MAX = 60.0
ERROR_LENGTH = 300  # characters of each error
NAME_COUNT = 8  # refused runs named in a heartbeat


class Tokenizers:
    """Tokenizers by run, and the errors of those that are missing."""

    def __init__(self, clock: Clock, hub_names: Sequence[str] = ()) -> None:
        """hub_names: patterns of models that may be downloaded."""
        self._clock = clock
        self._hub_names = hub_names
        self._loads: dict[tuple[str, str], asyncio.Task[Tokenizer]] = {}  # (run_id, model)
        self._errors: dict[tuple[str, str], str] = {}

    def of(self, run: RunConfig) -> Tokenizer | None:
        """Return the tokenizer of a run's model; None if it is not loaded yet (the first call begins the load)."""
        if is_preset(run.model):
            return load_tokenizer(run.model)
        key = (run.run_id, run.model)
        if key not in self._loads:
            self._loads[key] = asyncio.create_task(self._load(key))
        load = self._loads[key]
        return load.result() if load.done() else None

    def keep(self, runs: Mapping[str, RunConfig]) -> None:
        """Forget the tokenizers of all other runs."""
        for key in self._loads.keys() - {(run.run_id, run.model) for run in runs.values()}:
            self._loads.pop(key).cancel()
            self._errors.pop(key, None)

    def close(self) -> None:
        """Load no more."""
        self.keep({})

    @property
    def error(self) -> str | None:
        """Why runs are not served, or None: the newest NAME_COUNT errors, and how many more there are."""
        shown = [
            f"run {run_id!r} is not served: {error[:ERROR_LENGTH]}" for (run_id, _), error in self._errors.items()
        ][::-1]
        left = len(shown) - NAME_COUNT
        return "; ".join(shown[:NAME_COUNT] + ([f"and {left} more"] if left > 0 else [])) or None

    async def _load(self, key: tuple[str, str]) -> Tokenizer:
        run_id, model = key
        may_download = any(fnmatchcase(model, each) for each in self._hub_names)
        pause_s = RETRY_S
        while True:
            try:
                tokenizer = await in_thread(lambda: load_tokenizer(model, may_download=may_download))
            except Exception as error:  # noqa: BLE001 - around whatever a library makes of what any run names
                if key not in self._errors:
                    log.error("agent.run_not_served", extra={"run_id": run_id, "error": reason_of(error)})
                self._errors[key] = reason_of(error)
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            else:
                self._errors.pop(key, None)
                return tokenizer
