"""The door to a vLLM of our own: AsyncLLM in this process, its EngineCore and workers as children.

- Children die with this process (plugin.py).
- On a CPU the EngineCore is forked from this process, which has imported vLLM already: 2 s instead of 20. That holds
  only while this process computes nothing with torch; it never does. Where CUDA is used it is spawned, and its workers
  by it: this process has threads, and a driver that was loaded does not survive a fork.
- Output of vLLM and its children goes to the log file, if there is one.
- A salt tells prefixes apart, which vLLM hashes into a prompt's first block and so into all that follow. It is the
  request's own, and counts commits: requests that keep their KV cache through one go on filling blocks under the old
  salt, which no new request has. What was computed of an image is told apart by the same salt.
- Not yet run on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ....fabric.contract.errors import EngineError, EngineUnsupported, FabricError
from ....fabric.contract.limits import LOGPROB_COUNT_MAX
from ....fabric.contract.records import Side
from ....fabric.contract.sampling import CUTS, GUIDED, PENALTIES
from ....fabric.inspect.safetensors import damage_in
from ....fabric.model.presets import is_preset, model_config
from ...serving.device.mps import take_off
from ...serving.guarding.guard import GuardOrders
from ..base import EngineLimits, TurnsAtCommit, Writes
from ..seeds import resumed_seed
from .common.arena import Mirror, pack, posted
from .common.backend import Abilities, Ask, Chunk, LifeSigns, ModelFacts
from .common.beside import CANNOT, made_sides, prompt_sides
from .common.environment import installed_version, prepare_environment
from .common.logs import cause_of, output_into
from .common.names import MPS, PRIOR_COUNT, PROBE
from .common.pieces import Pace, piece_tokens
from .common.shared import aside
from .images import prompt_of
from .plugin import children_die_with_us, register
from .step.scheduler_page import SchedulerPage

if TYPE_CHECKING:
    from .common.config import VllmConfig

log = logging.getLogger(__name__)

CLOSE_S = 2.0
IDLE_S = 2.0  # for a step that has begun to end
START = {True: "fork", False: "spawn"}  # vLLM's processes, by whether they compute on a CPU
# Fields of Sampling that vLLM's parameters have, by the same name and with the same meaning.
SAME = ("temperature", *CUTS, *PENALTIES)
COUNTED = frozenset(
    {"presence_penalty", "frequency_penalty"}
)  # of the turn's own tokens: prior ones are a prompt to vLLM
NO_TOKENIZER = "a preset has no tokenizer files, without which vLLM makes no grammar: take a model with a tokenizer"
SETTLE_TURNS = 8  # of the event loop, until what has arrived has reached its streams


@dataclass
class _Vllm:
    """What is imported once the engine starts."""

    llm: Any
    is_on_cpu: bool
    draws_by_place: bool  # of a seeded request: by its seed and the token's place in the context
    has_tokenizer: bool = True


class LocalDoor:
    """See common/backend.py, Door, for what each method promises."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._vllm: _Vllm | None = None
        self._facts: ModelFacts | None = None
        self._page: SchedulerPage | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._commit_count = 0  # after which prefixes were to be forgotten
        self._token_s: float | None = None  # time per token, as some request showed last

    @property
    def facts(self) -> ModelFacts:
        assert self._facts is not None, "the door is not open"
        return self._facts

    @property
    def page(self) -> SchedulerPage:
        """The words that limit the scheduler, and that it tells of itself by."""
        assert self._page is not None, "the door is not open"
        return self._page

    @property
    def abilities(self) -> Abilities:
        is_on_cpu = self._vllm is not None and self._vllm.is_on_cpu
        where = " (cpu)" if is_on_cpu else ""
        has_tokenizer = self._vllm is None or self._vllm.has_tokenizer
        return Abilities(
            name=f"vllm {self._version}{where}",
            weights="deltas",
            sleeps=not is_on_cpu,
            cannot=CANNOT if has_tokenizer else CANNOT | dict.fromkeys(GUIDED, NO_TOKENIZER),
            cannot_resume=frozenset() if is_on_cpu else COUNTED,
        )

    @cached_property
    def _version(self) -> str:
        """vLLM's; looked up once, as it is read from a file."""
        return installed_version().partition("+")[0]

    # ---- opening and closing

    async def open(self) -> None:
        prepare_environment(model=self._config.model)
        os.environ.pop(PROBE, None)  # set for the serving team's engine: ours must not write over its page
        if self._is_mps_client:
            os.environ[MPS] = "1"
        self._page = SchedulerPage.create()
        with translated(self._config.log_path, "vLLM could not start"):
            with output_into(self._config.log_path), children_die_with_us(), naming_damage(Path(self._config.model)):
                self._start()
            await self._connect_weights()

    async def _connect_weights(self) -> None:
        await self._llm.init_weight_transfer_engine(_request("init", {"layout": self.facts.layout.rows()}))

    def _start(self) -> None:
        """Takes seconds, and the event loop with it: who forks must be the thread that lives as long as the process."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from .arguments import engine_arguments, refuse_unwritable
        from .common.layout import checkpoint_layout, quantization_of, sees

        register()
        is_on_cpu = bool(current_platform.is_cpu())
        path = self._model_path()
        arguments = engine_arguments(self._config, path, on_cpu=is_on_cpu, sees=sees(path))
        refuse_unwritable(self._config, quantization_of(path), moves_experts=False)  # before vLLM finds other faults
        if self._config.guard is not None:
            arguments["async_scheduling"] = False  # a step would be let begin while the one before it still computes
        settings = AsyncEngineArgs(**arguments).create_engine_config()
        experts_move = bool(settings.parallel_config.enable_eplb)
        refuse_unwritable(self._config, settings.model_config.quantization, moves_experts=experts_move)
        self._limit(settings)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = START[is_on_cpu]
        model = settings.model_config
        self._facts = ModelFacts(
            name=self._config.model,
            layout=checkpoint_layout(path, str(model.dtype).removeprefix("torch.")),
            context_tokens_max=model.max_model_len,
            vocabulary_size=model.get_vocab_size(),
            tokenizer=self._config.model if is_preset(self._config.model) else str(model.tokenizer),
            logprob_count_max=_count_max(model),
        )
        llm = AsyncLLM.from_vllm_config(settings, disable_log_stats=True)
        self._vllm = _Vllm(llm, is_on_cpu, bool(settings.use_v2_model_runner), not model.skip_tokenizer_init)

    def _limit(self, settings: Any) -> None:
        """Put our scheduler, and the page that it reads, into vLLM's settings."""
        kind = "LimitedAsyncScheduler" if settings.scheduler_config.async_scheduling else "LimitedScheduler"
        settings.scheduler_config.scheduler_cls = f"{__package__}.step.scheduler.{kind}"
        guard = self._config.guard
        own = {"rollfab": {"page": str(self.page.path), "guard": guard.row() if guard is not None else None}}
        settings.additional_config = {**(settings.additional_config or {}), **own}

    def _model_path(self) -> str:
        """A preset has no files: its configuration is written for vLLM to read."""
        if not is_preset(self._config.model):
            return self._config.model
        self._directory = tempfile.TemporaryDirectory(prefix="rollfab-model-")
        text = {**model_config(self._config.model), "architectures": ["Qwen2ForCausalLM"], "dtype": "float32"}
        (Path(self._directory.name) / "config.json").write_bytes(orjson.dumps(text))
        return self._directory.name

    async def close(self) -> None:
        vllm, self._vllm = self._vllm, None
        try:
            if vllm is not None and self._is_mps_client:
                await self._leave(vllm)
        finally:  # also of who is told to hurry while the device is waited for
            if vllm is not None:
                with contextlib.suppress(Exception):
                    _end(vllm)
                vllm.llm.shutdown = lambda *_, **__: None  # its __del__ would, at exit, when its modules are gone
            if self._page is not None:
                self._page.close()
            if self._directory is not None:
                self._directory.cleanup()

    @property
    def _is_mps_client(self) -> bool:
        return self._config.guard is not None and self._config.guard.is_mps_client

    async def _leave(self, vllm: _Vllm) -> None:
        """Let no step begin, and wait until the device is idle; where that fails, have its work taken off it."""
        self.page.hold(True)
        core = vllm.llm.engine_core
        try:
            async with asyncio.timeout(IDLE_S):
                await core.pause_scheduler_async(mode="keep", clear_cache=False)  # it waits for every rank's device
        except Exception as error:  # noqa: BLE001 - dead or stuck: its work is taken off, and its end goes on
            pids = [process.pid for process in core.resources.engine_manager.processes]
            ended = await asyncio.to_thread(take_off, pids)
            log.warning("engine.not_idle", extra={"error": repr(error), "taken_off": ended})

    @property
    def _llm(self) -> Any:
        if self._vllm is None:
            raise EngineError("the engine is closed")
        return self._vllm.llm

    def check(self) -> None:
        if self._llm.errored:
            raise EngineError(_text("vLLM has ended", self._config.log_path, None))

    # ---- requests

    async def stream(self, ask: Ask) -> AsyncGenerator[Chunk, None]:
        prompt = prompt_of(ask, salt=f"{self._commit_count}.{ask.cache_salt}")
        is_told_more = bool(ask.sampling.logprobs) or ask.sampling.prompt_logprobs is not None
        marks: list[tuple[int, int]] = []
        starts: Sequence[tuple[str, int]] | None = None
        pace, loop = Pace(), asyncio.get_running_loop()
        with translated(self._config.log_path, "vLLM ended a request"):
            stream = self._llm.generate(
                prompt, self._parameters(ask), ask.request_id, lora_request=self._lora_request()
            )
            async with contextlib.aclosing(stream):
                async for output in stream:
                    made = output.outputs[0]
                    if made.token_ids:
                        self._token_s = pace.note(len(made.token_ids), loop.time()) or self._token_s
                    starts = starts if starts is not None else self._version_starts(ask.request_id)
                    if starts is not None and len(starts) != len(marks):
                        marks = [(start, _number(name)) for name, start in starts]
                    elif made.weight_versions and starts is None:
                        marks = [(span.start, _number(span.version)) for span in made.weight_versions]
                    yield Chunk(
                        token_ids=made.token_ids,
                        logprobs=_drawn(made.logprobs),
                        finish_reason=made.finish_reason or "",
                        marks=marks,
                        cached_token_count=output.num_cached_tokens or 0,
                        sides=_beside(ask, output) if is_told_more else (),
                    )

    def _parameters(self, ask: Ask) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = ask.sampling
        guided = None
        if sampling.is_guided:
            guided = StructuredOutputsParams(
                json=sampling.guided_json or None,
                regex=sampling.guided_regex or None,
                structural_tag=sampling.guided_tag or None,
            )
        return SamplingParams(
            **{name: getattr(sampling, name) for name in SAME},
            max_tokens=ask.token_count_max,
            stop_token_ids=list(ask.stop_ids),
            seed=self._seed(ask),
            logit_bias=sampling.logit_bias or None,
            structured_outputs=guided,
            extra_args={PRIOR_COUNT: ask.prior_count} if ask.prior_count else None,
            ignore_eos=True,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=1 if sampling.stop else piece_tokens(self._token_s),  # stop texts are found on our side
            skip_clone=True,
        )

    def _seed(self, ask: Ask) -> int | None:
        """Return the request's own seed where our CPU's runner, or vLLM's second one, draws tokens by their place."""
        seed, vllm = ask.sampling.seed, self._vllm
        if seed is None or (vllm is not None and (vllm.is_on_cpu or vllm.draws_by_place)):
            return seed
        return resumed_seed(seed, ask.prior_count)

    def _lora_request(self) -> Any:
        """The adapter that requests use; None: the model itself."""
        return None

    def _version_starts(self, request_id: str) -> Sequence[tuple[str, int]] | None:
        """vLLM's own list of (version, first token), which grows while the request runs; None once it has ended."""
        processor = self._llm.output_processor
        names = processor.external_req_ids.get(request_id)
        state = processor.request_states.get(names[0]) if names else None
        found: Sequence[tuple[str, int]] | None = state.weight_version_starts if state is not None else None
        return found

    async def abort(self, request_ids: Sequence[str]) -> None:
        with translated(self._config.log_path, "vLLM did not abort"):
            await self._llm.abort(request_ids)
            await self._llm.is_paused()  # answered in order: from here on nothing of them is computed or held

    # ---- holding

    async def hold(self) -> None:
        self.page.hold(True)  # seen at the next step; the call below may take longer
        try:
            with translated(self._config.log_path, "vLLM did not pause"):
                # pause_generation would sleep 20 ms besides
                await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        except BaseException:
            self.page.hold(False)
            raise
        await self._settle()

    async def _settle(self) -> None:
        """Answers come in order, so all tokens are here: let them reach their streams, also those of half a piece."""
        outputs = getattr(self._llm.engine_core, "outputs_queue", None)
        while outputs is not None and not outputs.empty():  # noqa: ASYNC110  vLLM's own queue tells nobody
            await asyncio.sleep(0)
        for step in range(2 * SETTLE_TURNS):
            if step == SETTLE_TURNS:
                for state in list(self._llm.output_processor.request_states.values()):
                    _hand_over(state)
            await asyncio.sleep(0)

    async def release(self) -> None:
        self.page.hold(False)
        with translated(self._config.log_path, "vLLM did not resume"):
            await self._llm.resume_generation()

    def set_limits(self, limits: EngineLimits) -> None:
        self.page.set_limits(limits)

    def life_signs(self) -> LifeSigns:
        return self.page.life_signs()

    def guard_from_now(self) -> None:
        self.page.guard_from_now()

    def order(self, orders: GuardOrders) -> None:
        self.page.order(orders)

    def guard_said(self) -> bytes | None:
        return self.page.said()

    # ---- weights

    def check_turns(self, turns: TurnsAtCommit) -> None:
        """Either."""

    @property
    def rank_count(self) -> int:
        """See by_rank.RankDoor."""
        parallel = self._llm.vllm_config.parallel_config
        return int(parallel.world_size) if parallel.data_parallel_size == 1 else 0

    async def update(self, information: dict[str, Any], what: str, version: int | None = None) -> None:
        """See by_rank.RankDoor."""
        llm = self._llm
        with translated(self._config.log_path, what):
            # All at once, as they are taken in order. `finish` ends the update also where the second has failed
            calls = [llm.start_weight_update(), llm.update_weights(_request("update", information))]
            calls.append(llm.finish_weight_update())
            if version is not None:
                calls.append(llm.update_weight_version(str(version)))
            for problem in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(problem, BaseException):
                    raise problem

    async def write(self, writes: Writes, version: int) -> None:
        """Where there are several engines in one."""
        size = sum(values.nbytes for _, values in writes.values())
        async with posted(await aside(size, pack, writes)) as path:
            await self.update({"parcel": path}, "vLLM did not take the weights", version)

    async def forget_prefixes(self, turns: TurnsAtCommit) -> None:
        """Blocks of an older salt are never found again; vLLM takes them when it needs room."""
        if turns == "keep":
            self._commit_count += 1
            return
        with translated(self._config.log_path, "vLLM did not drop its KV cache"):
            await self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            if self._llm.vllm_config.model_config.is_multimodal_model:
                await self._llm.reset_encoder_cache()  # of images, which those requests need again

    async def read(self, into: Mirror) -> None:
        await self.update({"export": str(into.path)}, "vLLM did not show its weights")

    # ---- sleeping

    async def sleep(self) -> None:
        """Weights go to host memory, the KV cache is dropped (vLLM's level 1). Unverified on a GPU."""
        self._require_sleep_mode()
        with translated(self._config.log_path, "vLLM did not fall asleep"):
            await self._llm.sleep(level=1, mode="keep")

    def _require_sleep_mode(self) -> None:
        if self._vllm is not None and self._vllm.is_on_cpu:
            raise EngineUnsupported("vLLM on a CPU has no memory of a device to give back: it cannot sleep")
        if not self._llm.vllm_config.model_config.enable_sleep_mode:
            raise EngineUnsupported("this vLLM was started without sleep mode: add -- --enable-sleep-mode")

    async def wake(self) -> None:
        self.page.hold(False)
        with translated(self._config.log_path, "vLLM did not wake"):
            if not await self._llm.wake_up():
                raise EngineError("vLLM is still partly asleep after waking")

    async def release_kv(self) -> None:
        """Unverified on a GPU."""
        self._require_sleep_mode()
        with translated(self._config.log_path, "vLLM did not release its KV cache"):
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
            await self._llm.release_kv_cache_memory()

    async def take_kv(self) -> None:
        self.page.hold(False)
        with translated(self._config.log_path, "vLLM did not take its KV cache again"):
            if not await self._llm.wake_up(["kv_cache"]):
                raise EngineError("vLLM is still partly asleep")


def _hand_over(state: Any) -> None:
    """Have vLLM hand over what a request has made of its next piece, as it does itself once that is whole."""
    if state.stream_interval <= 1 or state.detokenizer is None or state.queue is None:
        return
    token_ids = state.detokenizer.output_token_ids[state.sent_tokens_offset :]
    if token_ids:
        state.sent_tokens_offset += len(token_ids)
        output = state._new_completion_output(token_ids, None, None)
        state.queue.put(state._new_request_output(state.external_req_id, [output], False))


def _end(vllm: _Vllm) -> None:
    """End vLLM's processes. On a CPU there is nothing that the system does not take back: no second for tidying up."""
    processes = list(vllm.llm.engine_core.resources.engine_manager.processes)
    if vllm.is_on_cpu and vllm.llm.vllm_config.parallel_config.world_size == 1:
        for process in processes:
            process.kill()
    try:
        vllm.llm.shutdown(timeout=CLOSE_S)
    finally:  # its own killing stops half-way where it comes to a process that has just gone (psutil.NoSuchProcess)
        for process in processes:
            process.kill()


def _count_max(model: Any) -> int:
    """Most likeliest tokens that vLLM tells beside one, of its settings of the model."""
    most: int = model.max_logprobs
    bounds: tuple[int, int] = (LOGPROB_COUNT_MAX, model.get_vocab_size())
    return min(bounds) if most == -1 else min(*bounds, most)


def _drawn(found: Any) -> Sequence[float]:
    """Log-probabilities of the tokens that were drawn: with the likeliest beside them, the first at each place."""
    if found is None:
        return ()
    logprobs: Sequence[float] = found.logprobs
    is_alone = len(logprobs) == len(found.start_indices)
    return logprobs if is_alone else [logprobs[start] for start in found.start_indices]


def _beside(ask: Ask, output: Any) -> tuple[Side, ...]:
    """Return what is recorded beside a stream's next tokens; with the first of them, beside the prompt too."""
    made, sampling = output.outputs[0], ask.sampling
    if not made.token_ids:
        return ()
    sides = made_sides(made.logprobs, sampling.logprobs) if sampling.logprobs else ()
    if sampling.prompt_logprobs is not None and output.prompt_logprobs:
        sides += prompt_sides(output.prompt_logprobs, sampling.prompt_logprobs)
    return sides


@contextlib.contextmanager
def translated(log_path: Path | None, what: str) -> Iterator[None]:
    """Whatever vLLM raises becomes a short EngineError that says where to read on."""
    try:
        yield
    except FabricError:
        raise
    except Exception as error:  # vLLM raises what it likes; the caller gets it as EngineError
        raise EngineError(_text(what, log_path, error)) from error


@contextlib.contextmanager
def naming_damage(model: Path) -> Iterator[None]:
    """Where the block fails and a file of the model's checkpoint is damaged, say which: a library names none.

    Raises:
        EngineError: one is.
    """
    try:
        yield
    except Exception as error:  # vLLM raises what it likes
        if any(model.glob("*.safetensors")) and (why := damage_in(model)):
            raise EngineError(f"model {str(model)!r} can not be loaded: {why}", model=str(model)) from error
        raise


def _text(what: str, log_path: Path | None, error: BaseException | None) -> str:
    cause = cause_of(error, log_path)
    place = f". Its log: {log_path}" if log_path is not None else ""
    return f"{what}: {cause or 'without a word, as a process that was killed (was there too little memory?)'}{place}"


def _request(kind: str, information: dict[str, Any]) -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    if kind == "init":
        return WeightTransferInitRequest(init_info=information)
    return WeightTransferUpdateRequest(update_info=information)


def _number(version_name: str) -> int:
    """A policy version of vLLM's name for it, which is "default" before the first."""
    return int(version_name) if version_name.lstrip("-").isdigit() else -1
