"""The embedded engine: continuous batching of the transformers library, on a laptop CPU or one GPU.

- A thread of its own builds the model and steps (thread.py, loop.py); this side is asyncio.
- Every request ends exactly once: in `finished` or in `abort`.
- If the thread fails, everything running ends with finish_reason "error" and `generate` raises from then on.
- A turn with a seed is drawn from the seed alone, whatever runs beside it, and also if it is handed over in the middle
  (seeds.py).
- Greedy turns (temperature 0) report the log-probability at temperature 1 (sampler.py).
- Limits: `running_count` and `step_tokens` hold from the next step, up to what the engine was built for. `kv_tokens`
  admits requests by what all of them hold then; the cache is allocated once, its memory is never given back, and
  requests that run keep what they have and go on growing (abort them to free it).
- Not yet run on a GPU: the dtype, page and attention choices for one are untried.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.metadata
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from ....fabric.chat.vision import FAMILIES
from ....fabric.contract.clock import SystemClock
from ....fabric.contract.errors import ConfigError, EngineError, EngineUnsupported, WeightError
from ....fabric.contract.sampling import GUIDED
from ....fabric.format.layout import Layout
from ....fabric.model.presets import dtype_of, is_preset
from ....fabric.versions.commit import Staged, check_writes
from ...serving.device.mps import take_off
from ...serving.guarding.guard import GuardConfig
from ...serving.guarding.thread import GuardThread
from ..admission import context_of, is_over, stops_of
from ..base import Bits, EngineLimits, EngineStats, Generation, GenerationRequest, TurnsAtCommit
from ..model_tokenizer import find_tokenizer
from ..request import Admission
from ..steps import StepHook
from ..stops import Pieces
from .device import check_device

if TYPE_CHECKING:
    from .loop import EngineLoop
    from .model import ParameterStore

UNGUIDED = "it has no grammars. Engines that have: vllm, for a model with a tokenizer"
BLIND = f"it reads tokens alone. Engines that see: vllm, with a model of {' or '.join(FAMILIES)}"
NO_EXPERTS = "its model has none"
CANNOT = dict.fromkeys(GUIDED, UNGUIDED) | {"images": BLIND}
FLASH_DTYPES = ("bfloat16", "float16")  # all that those kernels take; the library does not look before it switches


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """What the engine is built from; fixed while it lives. None: chosen for the device.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    model: str = "tiny"
    """Preset, path or hub name."""
    dtype: str = "auto"
    """torch's name without the prefix; "auto": float32 for presets and on a CPU, bfloat16 elsewhere."""
    device: str = "cpu"
    """torch's name, like "cpu" or "cuda:0"."""
    slot_count: int = 64
    """Requests that generate at once, at least 1."""
    context_tokens_max: int = 512
    """Most tokens of one request, prompt and completion, at least 2; the model's positions bound it too."""
    page_size: int | None = None
    """Tokens in a block of KV cache, at least 4; None: 16 on a CPU, 256 elsewhere (flash kernels need that)."""
    step_tokens_max: int | None = None
    """Most tokens in one step, prompts and completions; None: 512 on a CPU, 2048 elsewhere. Never below slot_count."""
    seed: int | None = None
    """Of sampling; None: fresh. Two engines with one seed make the same tokens for the same prompts."""
    thread_count: int | None = None
    """CPU threads of one operation; None: 1 for presets on a CPU, where more only wait; else torch's own."""

    guard: GuardConfig | None = None
    """It shares its device with a serving engine, and makes steps only as this allows."""

    def __post_init__(self) -> None:
        for name, least in (("slot_count", 1), ("context_tokens_max", 2), ("page_size", 4), ("thread_count", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}, must be at least {least}", name=name)

    @property
    def held_dtype(self) -> str:
        """The type of its weights; "auto" is chosen for the device."""
        dtype = dtype_of(self.model, self.dtype)
        return dtype if dtype != "auto" else "float32" if self.device == "cpu" else "bfloat16"


class TransformersEngine:
    """One model, one thread, one continuous batch. See base.Engine for what each method promises."""

    def __init__(self, config: TransformersConfig | None = None, *, hook: StepHook | None = None) -> None:
        """hook: asked before each step and told after it, on the engine's thread; a guard is one by itself."""
        self.config = config or TransformersConfig()
        self._hook = hook
        self._guard: GuardThread | None = None
        self._clock = SystemClock()
        self._thread = LoopThread(self._build, self._receive)
        self._store: ParameterStore | None = None
        self._context_tokens_max = 0
        self._vocabulary_size = 0
        self._pieces: Pieces | None = None
        self._cannot = dict(CANNOT)
        self._open_ids: set[str] = set()  # started and not yet handed out
        self._ended: dict[str, Generation] = {}  # of those, the ones that ended
        self._has_ended = asyncio.Event()

    @cached_property
    def name(self) -> str:
        return f"transformers {importlib.metadata.version('transformers')}"

    @property
    def cannot(self) -> Mapping[str, str]:
        return self._cannot

    @property
    def cannot_resume(self) -> frozenset[str]:
        """None: it counts prior tokens as those that it made."""
        return frozenset()

    async def start(self) -> None:
        await asyncio.to_thread(check_device, self.config.device)
        if self.config.guard is not None:
            assert self._hook is None, "a guard is the hook"
            self._hook = self._guard = GuardThread(
                self.config.guard, slot_count=self.config.slot_count, is_on_cpu=self.config.device == "cpu"
            )
        await self._thread.start()

    async def close(self) -> None:
        """Takes at most 2 s; what runs or waits is dropped, and the model with it."""
        has_ended = await self._thread.close()
        if not has_ended and self.config.guard is not None and self.config.guard.is_mps_client:
            await asyncio.to_thread(take_off, [os.getpid()])  # this process may end in the middle of its step
        self._store = None
        if self._guard is not None:
            self._guard.close()

    @property
    def guard(self) -> GuardThread | None:
        """The guard of its steps, once it has started; None: it has the device to itself."""
        return self._guard

    def _build(self, deliver: Deliver) -> EngineLoop:
        import torch  # only the engine's thread pays for it, and only once the engine starts

        from .loop import EngineLoop
        from .model import ParameterStore, load_model
        from .options import LoopOptions

        config, on_cpu = self.config, self.config.device == "cpu"
        thread_count = config.thread_count or (1 if on_cpu and is_preset(config.model) else None)
        if thread_count is not None:
            torch.set_num_threads(thread_count)  # counts for the thread that asks
        model = load_model(config.model, config.held_dtype, config.device)
        text_config = model.config.get_text_config()
        position_count = getattr(text_config, "max_position_embeddings", None) or config.context_tokens_max
        self._context_tokens_max = min(config.context_tokens_max, position_count)
        if position_count < config.context_tokens_max:
            log.warning(
                "model %r has %d positions: turns end there, and not at the %d tokens of --context",
                config.model,
                position_count,
                config.context_tokens_max,
            )
        self._vocabulary_size = text_config.vocab_size
        self._store = ParameterStore(model)
        tokenizer, reason = find_tokenizer(config.model)
        if tokenizer is None:
            self._cannot["stop"] = reason
        else:
            self._pieces = Pieces(tokenizer)
        page_size = config.page_size or (16 if on_cpu else 256)
        options = LoopOptions(
            slot_count=config.slot_count,
            page_size=page_size,
            page_count=config.slot_count * -(-self._context_tokens_max // page_size),
            step_tokens_max=max(config.step_tokens_max or (512 if on_cpu else 2048), config.slot_count),
            seed=secrets.randbits(31) if config.seed is None else config.seed,
            may_use_flash=not on_cpu and config.held_dtype in FLASH_DTYPES,
            hook=self._hook,
            clock=self._clock,
        )
        try:
            engine_loop = EngineLoop(model, options, deliver)
            if not engine_loop.has_experts:
                self._cannot["routed_experts"] = NO_EXPERTS
            return engine_loop
        except (MemoryError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"model {config.model!r} with {config.slot_count} slots of {self._context_tokens_max} tokens does not"
                f" fit on {config.device}: {error}. Lower --slots or --context"
            ) from error

    def generate(self, request: GenerationRequest) -> None:
        """A request that would outgrow the context is cut there, with finish_reason "length"."""
        engine_loop = self._thread.engine_loop
        if request.request_id in self._open_ids:
            raise EngineError(f"request {request.request_id!r} is already running", request_id=request.request_id)
        admission, over = self._admission(request)
        self._open_ids.add(request.request_id)
        if over:
            self._receive([admission.generation(over, [], [])])
        else:
            engine_loop.submit(admission)

    def _admission(self, request: GenerationRequest) -> tuple[Admission, str]:
        """The request as the loop needs it, and why it is over already, or ""."""
        ids = context_of(
            request,
            context_tokens_max=self._context_tokens_max,
            vocabulary_size=self._vocabulary_size,
            engine=self.name,
            cannot=self.cannot,
        )
        prior_count, sampling = request.prior_ids.size, request.sampling
        matcher = stops_of(request, self._pieces)
        room = min(sampling.max_tokens - prior_count, self._context_tokens_max - ids.size)
        stop_ids = sampling.stop_ids if matcher is None else (*sampling.stop_ids, *matcher.token_ids)
        admission = Admission(
            request_id=request.request_id,
            input_ids=ids.tolist(),
            prior_count=prior_count,
            token_count_max=room,
            sampling=sampling,
            stop_ids=stop_ids,
            matcher=matcher,
            cache_salt=request.cache_salt,
            arrived_at_s=self._clock.now_s(),
        )
        return admission, is_over(request, stop_ids, matcher, room)

    def _receive(self, ended: list[Generation]) -> None:
        for generation in ended:
            self._ended[generation.request_id] = generation
        self._has_ended.set()

    async def finished(self, timeout_s: float) -> list[Generation]:
        if not self._ended:
            self._has_ended.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._has_ended.wait()
            except TimeoutError:
                return []
        ended, self._ended = list(self._ended.values()), {}
        self._open_ids.difference_update(generation.request_id for generation in ended)
        return ended

    async def check_integrity(self) -> None:
        """Assert that its books agree with the library's; between two steps."""
        assert self._ended.keys() <= self._open_ids
        await self._thread.call(lambda engine_loop: engine_loop.check_integrity())

    def progress(self, request_ids: Sequence[str]) -> list[Generation]:
        engine_loop = self._thread.engine_loop
        found = [engine_loop.progress(request_id) for request_id in request_ids]
        return [generation for generation in found if generation is not None]

    async def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """On an engine that has failed, its requests end through `finished` instead."""
        try:
            aborted = await self._thread.call(lambda engine_loop: engine_loop.abort(request_ids))
        except EngineError:
            aborted = []
        just_ended = [self._ended.pop(request_id) for request_id in request_ids if request_id in self._ended]
        ended = [*aborted, *just_ended]
        self._open_ids.difference_update(generation.request_id for generation in ended)
        return ended

    async def pause(self, reason: str) -> None:
        """Pausing twice for one reason holds once."""
        self._thread.engine_loop.hold_reasons.add(reason)
        await self._thread.call(lambda engine_loop: None)  # answered between two steps: from there on it is held

    async def resume(self, reason: str) -> None:
        engine_loop = self._thread.engine_loop
        engine_loop.hold_reasons.discard(reason)
        engine_loop.wake()

    def set_limits(self, limits: EngineLimits) -> None:
        """Above a lowered `running_count` the oldest requests go on, the others wait with their KV; 0 holds all."""
        engine_loop = self._thread.engine_loop
        engine_loop.post(lambda: engine_loop.set_limits(limits))

    def stats(self) -> EngineStats:
        engine_loop = self._thread.engine_loop
        return EngineStats(
            running_count=engine_loop.running_count,
            waiting_count=engine_loop.waiting_count,
            kv_used_fraction=engine_loop.kv_used_fraction(),
            step_count=engine_loop.current_batch,
            token_count=engine_loop.token_count,
            active_version=engine_loop.active_version,
            paused_by=engine_loop.paused_by,
            prompt_token_count=engine_loop.prompt_token_count,
            cached_token_count=engine_loop.cached_token_count,
        )

    @property
    def layout(self) -> Layout:
        return self._live_store().layout

    def weight_bits(self) -> Mapping[str, Bits]:
        return self._live_store().bits

    async def read_weights(self) -> Mapping[str, Bits]:
        """Tensor by tensor, each between two steps: no version may be applied meanwhile."""
        store = self._live_store()
        return {name: await self._thread.call(partial(_read, store, name)) for name in store.bits}

    async def sleep(self) -> float:
        """Never: on a CPU there is no device memory to give back, and on a GPU this engine's can not be."""
        self._live_store()
        device = self.config.device
        if device == "cpu":
            raise EngineUnsupported(
                "this engine runs on the CPU, where no device memory is given back by sleeping: it stays awake. Engines"
                " that sleep: vllm on a GPU",
                device=device,
            )
        raise EngineUnsupported(
            f"the transformers engine can not give back the memory of {device} and keep its weights and KV cache in"
            " place: it stays awake. Engines that sleep: vllm on a GPU",
            device=device,
        )

    async def wake(self) -> float:
        """It never sleeps: raises as `sleep` does."""
        return await self.sleep()

    async def apply(self, staged: Staged, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False) -> float:
        """A write that fails half-way leaves a torn model: the engine then fails as in a crash."""
        store, writes, version = self._live_store(), staged.writes, staged.version
        check_writes(store.layout, writes)

        def commit(engine_loop: EngineLoop) -> float:
            begin_s = self._clock.now_s()
            store.commit(writes)
            engine_loop.begin_version(version, turns=turns, may_reuse_prefix=may_reuse_prefix)
            return self._clock.now_s() - begin_s

        try:
            return await self._thread.call(commit, is_fatal=True)
        except (EngineError, IndexError, RuntimeError) as error:
            raise WeightError(f"version {version} was not applied: {error}", version=version) from error

    def _live_store(self) -> ParameterStore:
        if self._store is None:
            raise EngineError("the engine has no model: it is not started, or closed")
        return self._store


def _read(store: ParameterStore, name: str, _: EngineLoop) -> Bits:
    return store.read(name)


# ---------------------------------------------------------------- thread
#
# The one thread of a transformers engine, and the ways across to it and back.
#
# - The thread builds the loop, runs it, and tells the event loop what ended. It is a daemon and is stopped at
#   interpreter exit, so a process never hangs on it, whatever became of its event loop.
# - Every call across is answered: with its result, or with EngineError once the thread has ended.


log = logging.getLogger(__name__)

CLOSE_S = 1.9  # how long close() waits for the step at hand; after that the daemon thread is left to end by itself

Deliver = Callable[[list[Generation]], None]
T = TypeVar("T")


class LoopThread:
    """Owns the thread. Methods are for the event loop's thread unless they say otherwise."""

    def __init__(self, build: Callable[[Deliver], EngineLoop], receive: Deliver) -> None:
        """`build` runs on the thread and is given the function to deliver with; `receive` runs on the event loop."""
        self._build = build
        self._receive = receive
        self._thread: threading.Thread | None = None
        self._engine_loop: EngineLoop | None = None
        self._lock = threading.Lock()  # guards the two below: the thread's end against a call being posted
        self._failure: EngineError | None = EngineError("the engine is not started: await start() first")
        self._open_calls: set[asyncio.Future[Any]] = set()
        self._is_closing = False

    @property
    def engine_loop(self) -> EngineLoop:
        """The running loop.

        Raises:
            EngineError: not started, closed or crashed.
        """
        failure = self._failure
        if failure is not None:
            raise EngineError(failure.message, **failure.facts) from failure
        assert self._engine_loop is not None
        return self._engine_loop

    async def start(self) -> None:
        """Build and begin to run. Raises EngineError."""
        assert self._thread is None, "an engine starts once"
        self._event_loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._event_loop.create_future()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rollfab-engine", daemon=True)
        atexit.register(self._join)  # a daemon thread still inside torch when the interpreter goes aborts the process
        self._thread.start()
        await self._started

    async def close(self) -> bool:
        """End the thread after the step at hand; whether it has ended."""
        if self._thread is None:
            return True
        self._request_end()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._stopped.wait()
        except TimeoutError:
            log.warning("engine.close_timeout", extra={"timeout_s": CLOSE_S})
        atexit.unregister(self._join)
        self._engine_loop = None
        return self._stopped.is_set()

    async def call(self, function: Callable[[EngineLoop], T], *, is_fatal: bool = False) -> T:
        """Run `function` on the thread between two steps, also while the engine is held.

        Raises:
            EngineError: the thread has ended before it could answer.
            Exception: what `function` raised; with `is_fatal` the loop then ends as in a crash.
        """
        engine_loop = self.engine_loop
        future: asyncio.Future[T] = self._event_loop.create_future()

        def command() -> None:
            try:
                answer = partial(_answer, future, function(engine_loop))
            except Exception as error:  # raised in the caller's event loop; this thread goes on
                answer = partial(_refuse, future, error)
                if is_fatal:
                    raise
            finally:
                with self._lock:
                    self._open_calls.discard(future)
                self._cross(answer)

        with self._lock:
            if self._failure is not None:
                raise EngineError(self._failure.message) from self._failure
            self._open_calls.add(future)
            engine_loop.post(command)
        return await future

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            engine_loop = self._build(self._deliver)
            with self._lock:
                self._engine_loop = engine_loop
                self._failure = None
        except Exception as error:  # noqa: BLE001 - the thread ends; whoever awaits start() raises it
            failure = error if isinstance(error, EngineError) else EngineError(f"the engine could not start: {error!r}")
            failure.__cause__ = None if failure is error else error
            self._fail(failure)
            self._cross(partial(_refuse, self._started, failure))
        else:
            self._cross(partial(_answer, self._started, None))
            if not self._is_closing:
                cause = engine_loop.run()
            self._end(engine_loop, cause)
        self._cross(self._stopped.set)

    def _end(self, engine_loop: EngineLoop, cause: BaseException | None) -> None:
        if cause is None:
            self._fail(EngineError("the engine is closed"))
            return
        failure = EngineError(f"the generation loop crashed: {cause!r}. Start a new engine")
        failure.__cause__ = cause
        log.error("engine.crashed", extra={"error": repr(cause)})
        self._fail(failure)
        self._deliver(engine_loop.drain(failure.message))

    def _fail(self, failure: EngineError) -> None:
        with self._lock:
            self._failure = failure
            futures, self._open_calls = self._open_calls, set()
        for future in futures:
            self._cross(partial(_refuse, future, failure))

    def _deliver(self, ended: list[Generation]) -> None:
        self._cross(partial(self._receive, ended))

    def _cross(self, callback: Callable[[], Any]) -> None:
        try:
            self._event_loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the event loop is closed: nobody is left to be told
            self._request_end()

    def _request_end(self) -> None:
        with self._lock:
            self._is_closing = True
            self._failure = self._failure or EngineError("the engine is closed")
            engine_loop = self._engine_loop
        if engine_loop is not None:
            engine_loop.request_end()

    def _join(self) -> None:
        self._request_end()
        assert self._thread is not None
        self._thread.join(timeout=CLOSE_S)


def _answer(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
