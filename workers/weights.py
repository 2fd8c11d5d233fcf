"""Keeping an engine's weights at the head of a run.

- The next version is fetched, decoded and verified beside the live weights while the engine generates; only the commit,
  `engine.apply`, pauses it.
- What cannot be fetched or verified is not applied: the engine stays at its version, `error` says why, and it is tried
  again, from a keyframe when the live weights themselves are in doubt.
- A receiver that lags takes all missing versions in one commit, by whichever way is fewer bytes.
- Which runs to serve, and when to stop serving one, is rollout.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from ..fabric.clock import Clock, SystemClock
from ..fabric.errors import DigestMismatch, FabricError, WeightError
from ..fabric.ports_weights import WeightStore
from ..fabric.weights.chain import ChainReader
from ..fabric.weights.manifest import Head, WeightManifest
from ..fabric.weights.stage import Stage, check_state
from .engines.base import Engine

log = logging.getLogger(__name__)

Gate = Callable[[], AbstractAsyncContextManager[None]]

PATIENCE_COUNT = 2  # failures in a row after which a keyframe is tried instead of a chain of deltas


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverOptions:
    """How a receiver waits and checks."""

    poll_s: float = 5.0
    """Longest time without asking for the head; announcements come sooner."""
    retry_s: float = 0.25
    """Wait after a failure; doubles up to retry_s_max."""
    retry_s_max: float = 10.0
    audit_every: int = 64
    """Versions divisible by this are checked against their whole-state digest after the commit; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReport:
    """What bringing the engine to a version took. stage_s passes while the engine generates, pause_s does not."""

    version: int
    kinds: tuple[str, ...]
    payload_bytes: int
    changed_count: int
    stage_s: float
    pause_s: float


class WeightReceiver:
    """Brings one engine to the head of one run, in the background, until closed.

    Attributes:
        version: the version live in the engine, -1 before the first.
        head_version: the head as last seen.
        last: report of the last commit.
        gate: entered around every commit, which waits until it is through.
    """

    def __init__(
        self,
        store: WeightStore,
        run_id: str,
        engine: Engine,
        *,
        options: ReceiverOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.version = -1
        self.head_version = -1
        self.last: ApplyReport | None = None
        self.gate: Gate = contextlib.nullcontext
        self._store = store
        self._run_id = run_id
        self._engine = engine
        self._options = options or ReceiverOptions()
        self._clock = clock or SystemClock()
        self._reader = ChainReader(store, run_id)
        self._moved_by = 0
        self._is_in_doubt = True  # whether the live weights may not be `version`
        self._failure_count = 0
        self._error: FabricError | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def error(self) -> BaseException | None:
        """Why the engine is not at the head; None while all is well."""
        if self._error is None and self._task is not None and self._task.done() and not self._task.cancelled():
            return self._task.exception()
        return self._error

    def start(self) -> None:
        """Follow the head in a task of its own."""
        assert self._task is None
        self._task = asyncio.create_task(self._follow(), name=f"weights {self._run_id}")

    async def close(self) -> None:
        """Stop following; a commit under way is finished by the engine."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def wait(self, at_least: int, timeout_s: float) -> bool:
        """Whether version `at_least` (or a newer one) is live, within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.version < at_least:
                    await self._changed.wait()
        return self.version >= at_least

    async def update(self, timeout_s: float = 0.0) -> bool:
        """One round: wait up to `timeout_s` for a newer head, stage it, commit it. Returns whether weights changed.

        Raises:
            WeightError, WireError: not applied; the live weights are as before.
            BrokerError: the broker could not be asked.
        """
        head = await self._store.wait_head(self._run_id, -1 if self._is_in_doubt else self.version, timeout_s)
        self.head_version = head.version
        is_other = head.version == self.version and head.moved_by != self._moved_by
        if not self._is_in_doubt and (head.version < self.version or is_other):
            # A broker that lost its last writes: the version that we hold may mean other weights by now.
            log.warning("weights.head_went_back", extra={"run_id": self._run_id, "head_version": head.version})
            self._is_in_doubt = True
            self._reader = ChainReader(self._store, self._run_id)
        if head.version < 0 or (head.version == self.version and not self._is_in_doubt):
            return False
        try:
            await self._bring_to(head)
        except WeightError as error:
            self._failure_count += 1
            is_of_chunk = "chunk" in error.facts
            if self._failure_count >= PATIENCE_COUNT or (isinstance(error, DigestMismatch) and not is_of_chunk):
                self._is_in_doubt = True
            raise
        self._failure_count = 0
        return True

    async def _bring_to(self, head: Head) -> None:
        started_s = self._clock.now_s()
        have = None if self._is_in_doubt else self.version
        manifests = await self._reader.plan(have, head.version)
        live = None if have is None else self._engine.weight_bits()
        staged = await self._reader.stage(manifests, Stage(self._engine.layout, live, self.version))
        stage_s = self._clock.now_s() - started_s
        async with self.gate():
            self._is_in_doubt = True  # until the commit is through
            pause_s = await self._engine.apply(staged)
            self._is_in_doubt = False
            self.version, self._moved_by = head.version, head.moved_by
        self.last = ApplyReport(
            version=head.version,
            kinds=tuple(manifest.kind for manifest in manifests),
            payload_bytes=sum(manifest.payload_bytes for manifest in manifests),
            changed_count=staged.changed_count,
            stage_s=stage_s,
            pause_s=pause_s,
        )
        log.info("weights.applied", extra={"run_id": self._run_id, "policy_version": self.version, "stage_s": stage_s})
        self._changed.set()
        self._changed = asyncio.Event()
        await self._audit(manifests[-1])

    async def _audit(self, manifest: WeightManifest) -> None:
        """Now and then, compare all live weights with the published state."""
        every = self._options.audit_every
        if every and manifest.version % every == 0:
            await asyncio.to_thread(check_state, manifest, await self._engine.read_weights())

    async def _follow(self) -> None:
        while True:
            try:
                await self.update(self._options.poll_s)
                self._error = None
            except FabricError as error:
                self._error = error
                log.warning("weights.not_applied", extra={"run_id": self._run_id, "error": str(error)})
                exponent = min(self._failure_count, 16)
                await self._clock.sleep(min(self._options.retry_s * 2**exponent, self._options.retry_s_max))
