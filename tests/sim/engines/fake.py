"""An engine without a model, for simulation only: real weights, tokens by policy.py, time as it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from rollfab.fabric.contract.errors import EngineError
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.contract.sharing import GuardView
from rollfab.fabric.format.codec import Bits
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.versions.commit import Staged, commit
from rollfab.workers.engines.base import (
    EngineLimits,
    EngineStats,
    Generation,
    GenerationRequest,
    TurnsAtCommit,
)
from tests.sim.policy import SHAPES, context_of, ending, extend, next_token, weights_digest

LAYOUT = Layout(tuple(TensorSpec(name, "float32", shape) for name, shape in SHAPES.items()))
COMMIT_S = 0.002
SLEEP_S, WAKE_S = 0.2, 0.5
HUNG = 1e9  # slowness


@dataclass(slots=True)
class _Request:
    sampling: Sampling
    context: int
    prior_count: int
    last: int | None
    begun_s: float
    first_token_s: float | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[np.float32] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)


class FakeEngine:
    """Engine (see base). A fake: it computes checksums instead of a model.

    Args:
        step_s: virtual seconds per token.
        on_step: told before every step which requests run. on_apply: told of new weights, as (version, digest).
        on_rest: told that it was put to sleep, or has woken, in a word.
    """

    def __init__(
        self,
        step_s: float,
        *,
        on_step: Callable[[Sequence[str]], None],
        on_apply: Callable[[int, int], None],
        on_rest: Callable[[str], None],
    ) -> None:
        self.name = "simulated 1"
        self.layout = LAYOUT
        self.cannot: dict[str, str] = {}
        self.cannot_resume: frozenset[str] = frozenset()
        self.slowness = 1.0
        self._step_s = step_s
        self._on_step = on_step
        self._on_apply = on_apply
        self._on_rest = on_rest
        self._bits: dict[str, Bits] = {
            spec.name: np.zeros(spec.element_count, spec.bits_dtype) for spec in LAYOUT.tensors
        }
        self._digest = weights_digest(self._bits)
        self._version = -1
        self._requests: dict[str, _Request] = {}
        self._ended: list[Generation] = []
        self._has_ended = asyncio.Event()
        self._may_step = asyncio.Event()
        self._holds: set[str] = set()
        self._is_asleep = False
        self._step_count = self._token_count = 0
        self._is_dead = False
        self._hung_s = 0.0
        self._task: asyncio.Task[None] | None = None

    guard_view: Callable[[], GuardView] | None = None

    def following(self, keeper: object) -> contextlib.AbstractAsyncContextManager[None]:
        """What must run beside its worker: nothing."""
        return contextlib.nullcontext()

    @property
    def left_s(self) -> float:
        """How long it is busy with what it has, at most."""
        left = [each.sampling.max_tokens - each.prior_count - len(each.ids) for each in self._requests.values()]
        return max(left, default=0) * self._step_s

    @property
    def is_hung(self) -> bool:
        """Whether it makes no step any more."""
        return self.slowness >= HUNG

    def hang(self) -> None:
        """Make no step any more, for good."""
        self.slowness, self._hung_s = HUNG, _now_s()

    @property
    def standing_s(self) -> float:
        """How long a request has been in it while it hung."""
        begun = [max(each.begun_s, self._hung_s) for each in self._requests.values()]
        return _now_s() - min(begun) if self.is_hung and begun else 0.0

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def die(self) -> None:
        """As an engine whose process is gone: requests end as errors that tell nothing, later calls are refused."""
        self._is_dead = True
        self._ended += [Generation(request_id=name, finish_reason="error", error="dead") for name in self._requests]
        self._requests = {}
        self._look()
        self._has_ended.set()

    def generate(self, request: GenerationRequest) -> None:
        self._check()
        assert not self._is_asleep, "a turn for an engine that sleeps"
        prior = request.prior_ids
        last = int(prior[-1]) if len(prior) else None
        new = _Request(request.sampling, context_of(request.prompt_ids, prior), len(prior), last, _now_s())
        self._requests[request.request_id] = new
        self._end_if_over(request.request_id, new)
        self._look()

    async def finished(self, timeout_s: float) -> list[Generation]:
        if not self._ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._has_ended.wait()
        self._has_ended.clear()
        ended, self._ended = self._ended, []
        return ended

    def progress(self, request_ids: Sequence[str]) -> list[Generation]:
        return [_made(name, self._requests[name], "") for name in request_ids if name in self._requests]

    async def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        names = [name for name in request_ids if name in self._requests]
        made = [_made(name, self._requests.pop(name), "abort") for name in sorted(names)]
        self._look()
        return made

    async def pause(self, reason: str) -> None:
        self._holds.add(reason)
        self._look()

    async def resume(self, reason: str) -> None:
        self._holds.discard(reason)
        self._look()

    def set_limits(self, limits: EngineLimits) -> None:
        return

    def weight_bits(self) -> Mapping[str, Bits]:
        return self._bits

    async def read_weights(self) -> Mapping[str, Bits]:
        return {name: bits.copy() for name, bits in self._bits.items()}

    async def sleep(self) -> float:
        self._check()
        assert not self._requests, "an engine is put to sleep in the middle of a turn"
        self._is_asleep = True
        self._on_rest("sleep")
        await asyncio.sleep(SLEEP_S)
        return SLEEP_S

    async def wake(self) -> float:
        self._check()
        await asyncio.sleep(WAKE_S)
        self._check()
        self._is_asleep = False
        self._on_rest("wake")
        return WAKE_S

    async def apply(self, staged: Staged, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False) -> float:
        """Its tokens follow from their context and the weights alone: it has no KV cache to keep."""
        self._check()
        assert not self._is_asleep, "weights for an engine that sleeps"
        await asyncio.sleep(COMMIT_S)
        commit(staged, self._bits)
        self._version, self._digest = staged.version, weights_digest(self._bits)
        self._on_apply(self._version, self._digest)
        return COMMIT_S

    def stats(self) -> EngineStats:
        self._check()
        return EngineStats(
            running_count=len(self._requests),
            waiting_count=0,
            kv_used_fraction=0.0,
            step_count=self._step_count,
            token_count=self._token_count,
            active_version=self._version,
            paused_by=tuple(sorted(self._holds)),
        )

    # ---- stepping

    async def _run(self) -> None:
        while True:
            await self._may_step.wait()
            done = 0.0
            while done < 1.0:  # in parts: how slow it is may change in the middle of a step
                await asyncio.sleep(self._step_s)
                done += 1.0 / self.slowness
            if self._may_step.is_set():
                self._step()
                self._look()

    def _look(self) -> None:
        if self._requests and not self._holds:
            self._may_step.set()
        else:
            self._may_step.clear()

    def _step(self, count: int | None = None) -> None:
        """Make a token of each request; count: of the first so many alone."""
        requests = dict(islice(self._requests.items(), count))
        self._on_step(list(requests))
        self._step_count += 1
        self._token_count += len(requests)
        for name, request in requests.items():
            token, logprob = next_token(request.context, self._digest)
            request.context = extend(request.context, token)
            request.last = token
            at = len(request.ids)
            request.first_token_s = request.first_token_s or _now_s() - request.begun_s
            request.ids.append(token)
            request.logprobs.append(logprob)
            if request.versions and request.versions[-1][2] == self._version:
                request.versions[-1] = (request.versions[-1][0], at + 1, self._version)
            else:
                request.versions.append((at, at + 1, self._version))
            self._end_if_over(name, request)

    def _end_if_over(self, name: str, request: _Request) -> None:
        reason = ending(request.sampling, request.prior_count + len(request.ids), request.last)
        if reason:
            self._ended.append(_made(name, self._requests.pop(name), reason))
            self._has_ended.set()

    def _check(self) -> None:
        if self._is_dead:
            raise EngineError("the simulated engine has died")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _made(name: str, request: _Request, finish_reason: str) -> Generation:
    return Generation(
        request_id=name,
        finish_reason=finish_reason,
        completion_ids=np.array(request.ids, np.int32),
        logprobs=np.array(request.logprobs, np.float32),
        versions=tuple(request.versions),
        first_token_s=request.first_token_s,
    )
