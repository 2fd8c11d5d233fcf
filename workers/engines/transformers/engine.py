"""The embedded engine: continuous batching of the transformers library, on a laptop CPU or one GPU.

- A thread of its own builds the model and steps (thread.py, loop.py); this side is asyncio.
- Every request ends exactly once: in `finished` or in `abort`.
- If the thread fails, everything running ends with finish_reason "error" and `generate` raises from then on.
- A turn with a seed is drawn from the seed alone, whatever runs beside it, and also if it is handed over in the middle
  (seeds.py).
- Greedy turns (temperature 0) report the log-probability at temperature 1 (sampler.py).
- Limits: `running_count` and `step_tokens` hold from the next step, up to what the engine was built for. `kv_tokens`
  bounds what requests may come to hold when they are admitted; the cache is allocated once, its memory is never given
  back, and requests that run keep what they have (abort them to free it).
- Not yet run on a GPU: the dtype, page and attention choices for one are untried.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ....fabric.contract.clock import SystemClock
from ....fabric.contract.errors import ConfigError, EngineError, EngineUnsupported, WeightError
from ....fabric.contract.models import is_preset
from ....fabric.format.layout import Layout
from ...serving.guarding.guard import GuardConfig
from ...serving.guarding.thread import GuardThread
from ..admission import context_of
from ..base import Bits, EngineLimits, EngineStats, Generation, GenerationRequest, StagedWeights, TurnsAtCommit
from ..request import Admission
from ..steps import StepHook
from ..writes import check_writes
from .thread import Deliver, LoopThread

if TYPE_CHECKING:
    from .loop import EngineLoop
    from .model import ParameterStore


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """What the engine is built from; fixed while it lives. None: chosen for the device.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    model: str = "tiny"
    """Preset, path or hub name."""
    dtype: str | None = None
    """torch's name without the prefix; None: float32 on a CPU, bfloat16 elsewhere."""
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
        self._open_ids: set[str] = set()  # started and not yet handed out
        self._ended: dict[str, Generation] = {}  # of those, the ones that ended
        self._has_ended = asyncio.Event()

    @cached_property
    def name(self) -> str:
        return f"transformers {importlib.metadata.version('transformers')}"

    async def start(self) -> None:
        if self.config.guard is not None:
            assert self._hook is None, "a guard is the hook"
            self._hook = self._guard = GuardThread(
                self.config.guard, slot_count=self.config.slot_count, is_on_cpu=self.config.device == "cpu"
            )
        await self._thread.start()

    async def close(self) -> None:
        """Takes at most 2 s; what runs or waits is dropped, and the model with it."""
        await self._thread.close()
        self._store = None
        if self._guard is not None:
            self._guard.close()

    @property
    def guard(self) -> GuardThread | None:
        """What its steps are under, once it has started; None: it has the device to itself."""
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
        model = load_model(config.model, config.dtype or ("float32" if on_cpu else "bfloat16"), config.device)
        text_config = model.config.get_text_config()
        position_count = getattr(text_config, "max_position_embeddings", None) or config.context_tokens_max
        self._context_tokens_max = min(config.context_tokens_max, position_count)
        self._vocabulary_size = text_config.vocab_size
        self._store = ParameterStore(model)
        page_size = config.page_size or (16 if on_cpu else 256)
        options = LoopOptions(
            slot_count=config.slot_count,
            page_size=page_size,
            page_count=config.slot_count * -(-self._context_tokens_max // page_size),
            step_tokens_max=max(config.step_tokens_max or (512 if on_cpu else 2048), config.slot_count),
            seed=secrets.randbits(31) if config.seed is None else config.seed,
            may_use_flash=not on_cpu,
            hook=self._hook,
        )
        try:
            return EngineLoop(model, options, deliver)
        except (MemoryError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"model {config.model!r} with {config.slot_count} slots of {self._context_tokens_max} tokens does not"
                f" fit on {config.device}: {error}. Lower slot_count or context_tokens_max"
            ) from error

    def generate(self, request: GenerationRequest) -> None:
        """A request that would outgrow the context is cut there, with finish_reason "length"."""
        engine_loop = self._thread.engine_loop
        if request.request_id in self._open_ids:
            raise EngineError(f"request {request.request_id!r} is already running", request_id=request.request_id)
        admission = self._admission(request)
        self._open_ids.add(request.request_id)
        if request.prior_ids.size and int(request.prior_ids[-1]) in admission.stop_ids:
            self._receive([admission.generation("stop", [], [])])
        elif admission.token_count_max <= 0:
            self._receive([admission.generation("length", [], [])])
        else:
            engine_loop.submit(admission)

    def _admission(self, request: GenerationRequest) -> Admission:
        ids = context_of(request, context_tokens_max=self._context_tokens_max, vocabulary_size=self._vocabulary_size)
        prior_count, sampling = request.prior_ids.size, request.sampling
        return Admission(
            request_id=request.request_id,
            input_ids=ids.tolist(),
            token_count_max=min(sampling.max_tokens - prior_count, self._context_tokens_max - ids.size),
            stop_ids=sampling.stop_ids,
            temperature=float(sampling.temperature),
            arrived_at_s=self._clock.now_s(),
            dice={} if sampling.seed is None else {"seed": sampling.seed, "prior_count": prior_count},
        )

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

    async def apply(
        self, staged: StagedWeights, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False
    ) -> float:
        """A write that fails half-way leaves a torn model: the engine then fails as in a crash."""
        store, writes, version = self._live_store(), staged.writes(), staged.version
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
