"""The tokenizers of the runs that an agent serves: loaded beside the event loop, each run's by itself.

- A load may take seconds, or hang where a hub does not answer: no other run waits for it, and neither does leaving.
- Whoever makes a run names its model. Nothing is downloaded on that word: only what the agent's operator allows is; the
  rest must lie on this machine.
- What cannot be loaded costs its own run alone. It is said once in the log, in every heartbeat until it succeeds, and
  tried again with growing pauses: a model may yet be put where its name says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ...fabric.contract.clock import Clock
from ...fabric.contract.models import is_preset
from ...fabric.contract.records import RunConfig
from ...fabric.contract.tokenizer import Tokenizer
from ..engines.model_tokenizer import load_tokenizer
from ..environments.base import in_thread
from ..environments.failures import reason_of

log = logging.getLogger(__name__)

RETRY_S = 1.0  # pause after a failure; doubles up to RETRY_S_MAX
RETRY_S_MAX = 60.0
ERROR_LENGTH = 300  # of each
NAME_COUNT = 8  # refused runs named in a heartbeat


class Tokenizers:
    """Tokenizers by run, and why there is none."""

    def __init__(self, clock: Clock, hub_names: Sequence[str] = ()) -> None:
        """hub_names: patterns of what may be downloaded."""
        self._clock = clock
        self._hub_names = hub_names
        self._loads: dict[tuple[str, str], asyncio.Task[Tokenizer]] = {}  # (run_id, model)
        self._errors: dict[tuple[str, str], str] = {}

    def of(self, run: RunConfig) -> Tokenizer | None:
        """The tokenizer of a run's model; None: it is not there yet, and asking has begun that."""
        if is_preset(run.model):
            return load_tokenizer(run.model)
        key = (run.run_id, run.model)
        if key not in self._loads:
            self._loads[key] = asyncio.create_task(self._load(key))
        load = self._loads[key]
        return load.result() if load.done() else None

    def keep(self, runs: Mapping[str, RunConfig]) -> None:
        """Forget all that is of other runs."""
        for key in self._loads.keys() - {(run.run_id, run.model) for run in runs.values()}:
            self._loads.pop(key).cancel()
            self._errors.pop(key, None)

    def close(self) -> None:
        """Load no more."""
        self.keep({})

    @property
    def error(self) -> str | None:
        """Why runs are not served: the newest first, as far as there is room, and how many more there are."""
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
