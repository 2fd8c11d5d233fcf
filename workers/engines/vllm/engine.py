"""vLLM as an engine: requests, pauses counted by reason, and weights, over a door to a vLLM
(engines/vllm/common/backend.py).

- Every request ends exactly once: in `finished` or in `abort`. One that fails ends with finish_reason "error".
- The door is held while any reason holds the engine; reasons are counted here, because a vLLM has one pause for all.
- vLLM's ranks stage beside their live weights while it generates, and commit by a ticket
  (engines/vllm/inplace/by_rank.py): versions that they decode themselves, or what a caller of `apply` has decoded.
- This process keeps a mirror of the weights, which callers of `apply` stage on, and peers copy; it is written after the
  engine goes on, and let go at the first commit that the ranks decoded.
- At a commit requests in flight keep their KV cache or have it computed again; those without a token start over.
- At start every kind of parameter is written once to see that it changes an answer (write_probe.py): a backend that
  computes with copies of its weights is found before the first turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ....fabric.contract.clock import SystemClock
from ....fabric.contract.errors import EngineError, EngineUnsupported, InputError, WeightError
from ....fabric.contract.limits import LOGPROB_COUNT_MAX
from ....fabric.contract.sampling import GUIDED, Sampling
from ....fabric.format.layout import Layout
from ....fabric.model.presets import is_preset
from ....fabric.versions.commit import Staged, check_writes
from ..admission import check_images, context_of, is_over, stops_of
from ..base import Bits, EngineLimits, EngineStats, Generation, GenerationRequest, TurnsAtCommit
from ..model_tokenizer import find_tokenizer
from ..stops import Pieces, StopMatcher
from .common.arena import Mirror
from .common.backend import Ask, Door
from .common.config import VllmConfig
from .common.shared import aside
from .images import Eyes, find_eyes
from .inplace.by_rank import VllmRanks, Write, ranks_of
from .pause_reasons import DoorGuard, Holding
from .requests import OpenRequest, start_over
from .write_probe import probe_writes

log = logging.getLogger(__name__)

COMMIT = "commit"  # our own reason for holding the door
NO_TOKENS = ("limits",)
ENDINGS = ("stop", "length", "abort")
UNTOLD = {False: "the stream ended before the request did", True: "vLLM could not go on with it: see its log"}
COMMIT_S = 60.0  # how long closing waits for a commit to somebody else's server
ABORT_AGAIN_S = 0.05
LOOKING_COUNT_MAX = 2  # requests whose images are read at once: the other threads are for weights


def new_door(config: VllmConfig) -> Door:
    """Make a closed door: to somebody's server, to an adapter on a vLLM of our own, or to such a vLLM's own weights.

    Only the chosen one is imported.
    """
    if config.server is not None:
        from .attached.backend import ServerDoor

        return ServerDoor(
            config.server,
            slot_count=config.slot_count,
            context_tokens_max=config.context_tokens_max,
            api_key=config.api_key,
            model=config.model,
        )
    if config.adapter_rank is not None:
        from .adapter import AdapterDoor

        return AdapterDoor(config)
    from .local import LocalDoor

    return LocalDoor(config)


class VllmEngine:
    """One vLLM. See base.Engine for what each method promises."""

    def __init__(self, config: VllmConfig | None = None, *, door: Door | None = None) -> None:
        self.config = config or VllmConfig()
        self._door = door or new_door(self.config)
        self._clock = SystemClock()
        self._failure: EngineError | None = EngineError("the engine is not started: await start() first")
        self._mirror: Mirror | None = None
        self._ranks: VllmRanks | None = None
        self._version = -1
        self._pieces: Pieces | None = None
        self._eyes: Eyes | None = None
        self._looking = asyncio.Semaphore(LOOKING_COUNT_MAX)
        self._cannot: dict[str, str] = {}
        self._open: dict[str, OpenRequest] = {}
        self._ended: dict[str, Generation] = {}
        self._has_ended = asyncio.Event()
        self._holding = Holding(self._door)
        self._apply_lock = asyncio.Lock()  # taken before the next
        self._commit_lock = asyncio.Lock()  # taken before that of holding
        self._limits = EngineLimits()
        self._token_count = 0
        self._prompt_token_count = 0
        self._cached_token_count = 0

    @property
    def name(self) -> str:
        """The name of the vLLM that runs, as it is shown."""
        return self._door.abilities.name

    @property
    def guard(self) -> DoorGuard | None:
        """The guard that its steps are under; None: it has the device to itself."""
        return DoorGuard(self._door) if self.config.guard is not None else None

    async def start(self) -> None:
        try:
            await self._door.open()
            facts = self._door.facts
            try:
                self._mirror = Mirror.create(facts.layout)
            except OSError as error:
                raise EngineError(
                    f"no room for a copy of the weights of {facts.name!r} in shared memory"
                    f" ({facts.layout.byte_count:,} bytes): {error}"
                ) from error
            await self._door.read(self._mirror)
            await self._find_tokenizer(facts.tokenizer)
            await self._find_eyes()
            self._failure = None
            self._ranks = await ranks_of(self._door, self._between_commits, self._apply_by_ranks)
            way = self._door.abilities.weights
            if self.config.probes_writes and way in ("deltas", "reload"):
                is_ours = self.config.server is None
                is_dummy = is_ours and (
                    is_preset(self.config.model) or self.config.arguments.get("load_format") == "dummy"
                )
                await probe_writes(self, facts, is_dummy=is_dummy, is_whole=way == "reload", eyes=self._eyes)
            self._token_count = self._prompt_token_count = self._cached_token_count = 0
            self._door.guard_from_now()
        except BaseException:
            await self.close()
            raise
        for note in self._door.abilities.notes:
            log.info("engine.cannot", extra={"note": note})

    async def _find_tokenizer(self, name: str) -> None:
        tokenizer, reason = await asyncio.to_thread(find_tokenizer, name)
        self._cannot = dict(self._door.abilities.cannot)
        if tokenizer is None:
            self._cannot |= dict.fromkeys(("stop", *GUIDED), reason)
        else:
            self._pieces = Pieces(tokenizer)

    async def _find_eyes(self) -> None:
        if "images" not in self._cannot:
            self._eyes, reason = await asyncio.to_thread(find_eyes, self.config.model)
            self._cannot |= {"images": reason} if self._eyes is None else {}

    @property
    def cannot(self) -> Mapping[str, str]:
        return self._cannot

    @property
    def cannot_resume(self) -> frozenset[str]:
        return self._door.abilities.cannot_resume

    async def close(self) -> None:
        """Drop what runs, and leave no process of vLLM."""
        self._failure = EngineError("the engine is closed")
        tasks = [request.task for request in self._open.values() if request.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._open.clear()
        self._ended.clear()
        if self.config.server is not None:  # it outlives us: a commit under way is not left in the middle
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_S), self._commit_lock:
                    pass
        await self._door.close()
        if self._mirror is not None:
            self._mirror.close()

    async def check_integrity(self) -> None:
        """Assert that its books agree."""
        assert self._ended.keys() <= self._open.keys()
        for name, opened in self._open.items():
            assert name == opened.ask.request_id
            assert name in self._ended or (opened.task is not None and not opened.task.done())

    # ---- requests

    def generate(self, request: GenerationRequest) -> None:
        """A request that would outgrow the context is cut there, with finish_reason "length"."""
        self._check()
        if request.request_id in self._open:
            raise EngineError(f"request {request.request_id!r} is already running", request_id=request.request_id)
        opened = self._opened(request)
        ask = opened.ask
        self._open[request.request_id] = opened
        self._prompt_token_count += len(ask.input_ids)
        over = is_over(request, ask.stop_ids, opened.matcher, ask.token_count_max)
        if over:
            self._end(opened, over)
        else:
            opened.task = asyncio.create_task(self._follow(opened))

    def _opened(self, request: GenerationRequest) -> OpenRequest:
        facts, sampling = self._door.facts, request.sampling
        ids = context_of(
            request,
            context_tokens_max=facts.context_tokens_max,
            vocabulary_size=facts.vocabulary_size,
            engine=self.name,
            cannot=self.cannot,
        )
        self._check_counts(request)
        if request.images and self._eyes is not None:
            check_images(request, self._eyes.vision)
        matcher = stops_of(request, self._pieces)
        ask = Ask(
            request_id=request.request_id,
            input_ids=ids.tolist(),
            prior_count=request.prior_ids.size,
            token_count_max=min(sampling.max_tokens - request.prior_ids.size, facts.context_tokens_max - ids.size),
            sampling=sampling,
            stop_ids=(*sampling.stop_ids, *self._more_stops(sampling, matcher)),
            cache_salt=request.cache_salt,
        )
        return OpenRequest(ask=ask, matcher=matcher, images=request.images, begun_s=self._clock.now_s())

    def _check_counts(self, request: GenerationRequest) -> None:
        """Require that it tells so many likeliest tokens.

        Raises:
            EngineUnsupported: it does not, however often it is asked.
        """
        most = self._door.facts.logprob_count_max
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(request.sampling, name) or 0
            if count > most:
                raise EngineUnsupported(
                    f"request {request.request_id!r} asks for {name} {count}, this vLLM tells at most {most} beside a"
                    f" token: ask for fewer, or start it with --max-logprobs {LOGPROB_COUNT_MAX}",
                    request_id=request.request_id,
                    field=name,
                )

    def _more_stops(self, sampling: Sampling, matcher: StopMatcher | None) -> Sequence[int]:
        """Tokens besides its own that end a request. A grammar takes those for its end: it has no others."""
        eos_id = self._pieces.tokenizer.eos_id if self._pieces is not None else None
        if sampling.is_guided:
            return () if eos_id is None else (eos_id,)
        return () if matcher is None else matcher.token_ids

    async def _follow(self, opened: OpenRequest) -> None:
        """Collect a stream's tokens until it ends for good."""
        try:
            await self._look(opened)
            while (reason := await self._collect(opened)) == "abort" and opened.starts_over and not opened.is_unwanted:
                opened.starts_over = False
            is_told = reason in ENDINGS
            self._end(opened, reason if is_told else "error", None if is_told else UNTOLD[bool(reason)])
        except InputError as error:  # of an image whose head was sound
            self._end(opened, "refused", str(error))
        except EngineError as error:
            self._end(opened, "error", str(error))
        except Exception as error:  # of vLLM's stream: this request alone ends, and its agent asks again
            log.exception("engine.stream_failed", extra={"request_id": opened.ask.request_id})
            self._end(opened, "error", f"reading its tokens failed: {error!r}")

    async def _look(self, opened: OpenRequest) -> None:
        """Make what the model reads of a request's images, which takes 0.2 s a megapixel where it is new."""
        if opened.images and self._eyes is not None:
            async with self._looking:
                seen = await asyncio.to_thread(self._eyes.look, opened.images)
            opened.ask, opened.images = replace(opened.ask, images=seen), ()

    async def _collect(self, opened: OpenRequest) -> str:
        """Follow a stream to its end; return why it ended."""
        opened.has_begun = True
        async with contextlib.aclosing(
            self._door.stream(opened.ask)
        ) as chunks:  # one that is given up ends in the vLLM too
            async for chunk in chunks:
                if chunk.token_ids and opened.first_token_s is None:
                    opened.first_token_s = self._clock.now_s() - opened.begun_s
                opened.take(chunk, self._version)
                self._token_count += len(chunk.token_ids)
                if opened.has_stopped:
                    return "stop"
                if chunk.finish_reason:
                    return chunk.finish_reason
        return ""

    def _end(self, opened: OpenRequest, finish_reason: str, error: str | None = None) -> None:
        self._cached_token_count += opened.cached_token_count
        self._ended[opened.ask.request_id] = opened.generation(finish_reason, error)
        self._has_ended.set()

    async def finished(self, timeout_s: float) -> list[Generation]:
        if not self._ended:
            self._has_ended.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._has_ended.wait()
            except TimeoutError:
                return []
        return self._hand_out(list(self._ended))

    def _hand_out(self, request_ids: Sequence[str]) -> list[Generation]:
        for request_id in request_ids:
            self._open.pop(request_id, None)
        return [self._ended.pop(request_id) for request_id in request_ids if request_id in self._ended]

    def progress(self, request_ids: Sequence[str]) -> list[Generation]:
        self._check()
        running = [name for name in request_ids if name in self._open and name not in self._ended]
        return [self._open[name].generation() for name in running]

    async def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """On an engine that has failed, its requests end through `finished` instead."""
        wanted = [name for name in request_ids if name in self._open]
        running = [name for name in wanted if name not in self._ended]
        for name in running:
            self._open[name].is_unwanted = True
        if running and self._failure is None:
            pending = {task for task in (self._open[name].task for name in running) if task is not None}
            while pending:  # one that has only just begun may not be known to the door yet
                with contextlib.suppress(EngineError):
                    await self._door.abort(running)
                _, pending = await asyncio.wait(pending, timeout=ABORT_AGAIN_S)
        return self._hand_out([name for name in wanted if name in self._ended])

    # ---- holding it

    async def pause(self, reason: str) -> None:
        """Pausing twice for one reason holds once."""
        self._check()
        await self._holding.add(reason)

    async def resume(self, reason: str) -> None:
        self._check()
        await self._holding.take(reason)

    def set_limits(self, limits: EngineLimits) -> None:
        """Above a lowered `running_count` the oldest requests go on, the others wait with their KV; 0 holds all."""
        self._check()
        self._limits = limits
        self._door.set_limits(limits)

    def stats(self) -> EngineStats:
        self._check()
        signs = self._door.life_signs()
        is_limited_to_none = 0 in (self._limits.running_count, self._limits.step_tokens)
        running_count = min(signs.running_count, len(self._open) - len(self._ended))
        return EngineStats(
            running_count=running_count,
            waiting_count=len(self._open) - len(self._ended) - running_count,
            kv_used_fraction=signs.kv_used_fraction,
            step_count=signs.step_count,
            token_count=self._token_count,
            active_version=self._version,
            paused_by=self._holding.reasons + (NO_TOKENS if is_limited_to_none else ()),
            prompt_token_count=self._prompt_token_count,
            cached_token_count=self._cached_token_count,
            kv_capacity_tokens=signs.kv_capacity_tokens,
        )

    # ---- weights

    @property
    def layout(self) -> Layout:
        self._check_live()
        return self._door.facts.layout

    @property
    def ranks(self) -> VllmRanks | None:
        """To stage by; None: it takes whole versions only."""
        return self._ranks

    def weight_bits(self) -> Mapping[str, Bits]:
        """Not once a version was committed that the ranks had decoded: this process has no copy of it."""
        self._check_live()
        if self._mirror is None:
            raise EngineError(f"version {self._version} is held by the engine's ranks alone: use read_weights")
        return {name: _read_only(bits) for name, bits in self._mirror.bits.items()}

    async def read_weights(self) -> Mapping[str, Bits]:
        self._check()
        layout = self._door.facts.layout
        async with self._commit_lock:
            self._check_in_place()
            scratch = await aside(layout.byte_count, Mirror.create, layout)
            try:
                await self._door.read(scratch)
            finally:
                scratch.close()
        return {name: _read_only(bits) for name, bits in scratch.bits.items()}

    async def apply(self, staged: Staged, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False) -> float:
        """A write that fails half-way leaves a torn model: the engine then fails as in a crash."""
        self._check_live()
        self._door.check_turns(turns)
        check_writes(self._door.facts.layout, staged.writes)
        size = sum(values.nbytes for _, values in staged.writes.values())

        async def keep() -> None:
            if self._mirror is not None:
                await aside(size, self._mirror.take, staged.writes)

        async with self._apply_lock:  # what the ranks have staged last is all that they have
            write: Write = partial(self._door.write, staged.writes, staged.version)
            if self._ranks is not None:
                write = self._ranks.writing(await self._ranks.stage_writes(staged))
            return await self._committed(staged.version, write, keep, turns, may_reuse_prefix)

    async def _apply_by_ranks(self, version: int, write: Write, turns: TurnsAtCommit, may_reuse_prefix: bool) -> float:
        async def keep_none() -> None:
            mirror, self._mirror = self._mirror, None
            if mirror is not None:
                mirror.close()

        self._check_live()
        self._door.check_turns(turns)
        return await self._committed(version, write, keep_none, turns, may_reuse_prefix)

    async def _between_commits(self, tell: Write) -> None:
        async def alone() -> bool:
            async with self._commit_lock:
                if is_in_place := self._holding.in_place.is_set():
                    await tell()
                return is_in_place

        is_told = False
        while not is_told:
            await self._holding.in_place.wait()
            is_told = await asyncio.shield(asyncio.ensure_future(alone()))  # half told, vLLM would take no other update

    async def _committed(
        self, version: int, write: Write, keep: Write, turns: TurnsAtCommit, may_reuse_prefix: bool
    ) -> float:
        is_shared = may_reuse_prefix and turns == "keep"
        commit = self._commit(version, write, keep, None if is_shared else turns)
        return await asyncio.shield(asyncio.ensure_future(commit))

    async def _commit(self, version: int, write: Write, keep: Write, forget: TurnsAtCommit | None) -> float:
        """keep: called once the engine goes on. forget: how the prefix cache is; None: not at all."""
        begin_s = self._clock.now_s()
        try:
            async with self._commit_lock:
                self._check_in_place()
                async with self._holding.held(COMMIT, is_gone=lambda: self._failure is not None):
                    await self._write(version, write, forget)
                    if forget != "recompute":
                        running = [each for name, each in self._open.items() if name not in self._ended]
                        await start_over(running, self._door)
                pause_s = self._clock.now_s() - begin_s
                await keep()
        except WeightError:
            raise
        except EngineError as error:
            raise WeightError(f"version {version} was not applied: {error}", version=version) from error
        return pause_s

    def _check_in_place(self) -> None:
        if not self._holding.in_place.is_set():
            raise EngineError("the engine sleeps: its weights are not where they are computed with")

    async def _write(self, version: int, write: Write, forget: TurnsAtCommit | None) -> None:
        try:
            await write()
            if forget is not None:
                await self._door.forget_prefixes(forget)
        except WeightError:
            raise
        except EngineError as error:
            self._failure = EngineError(f"version {version} was written in part: {error}. Start a new engine")
            raise
        self._version = version

    # ---- sleeping

    async def sleep(self) -> float:
        """While it sleeps, pauses and limits are only noted; they hold when it wakes. What is staged then, is again."""
        return await self._rest(self._sleep)

    async def _sleep(self) -> None:
        if self._ranks is not None:
            await asyncio.shield(asyncio.ensure_future(self._ranks.stop()))  # an update that has begun must end
        await self._door.sleep()

    async def wake(self) -> float:
        """May be repeated, also on an engine that is awake."""
        return await self._rise(self._door.wake)

    async def release_kv(self) -> float:
        """Give the KV cache's memory back, keeping the weights; returns seconds. See Engine.sleep; `take_kv` wakes."""
        return await self._rest(self._door.release_kv, with_weights=False)

    async def take_kv(self) -> float:
        """Have a KV cache again; returns seconds."""
        return await self._rise(self._door.take_kv)

    async def _rest(self, fall_asleep: Callable[[], Awaitable[None]], *, with_weights: bool = True) -> float:
        self._check()
        begin_s = self._clock.now_s()
        async with self._commit_lock:
            await self._holding.sleep(fall_asleep, with_weights=with_weights)
        return self._clock.now_s() - begin_s

    async def _rise(self, wake: Callable[[], Awaitable[None]]) -> float:
        self._check()
        begin_s = self._clock.now_s()
        async with self._commit_lock:
            await self._holding.wake(wake)
        return self._clock.now_s() - begin_s

    # ---- what it stands on

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure.message, **self._failure.facts) from self._failure
        self._door.check()

    def _check_live(self) -> None:
        if self._failure is not None:
            raise self._failure


def _read_only(bits: Bits) -> Bits:
    view = np.asarray(bits).view()
    view.flags.writeable = False
    return view
