"""The thread side of the transformers engine: the library's generation loop, opened at its step boundary.

- Everything that reads or changes the library's private state is in this file, and runs on the loop's thread.
- Between two steps, in this order: commands (abort, apply, limits, a pause taking hold), admission, the step, delivery.
- While the engine is held, commands are still served; no step is taken and every request keeps its KV cache.
- A hook, if there is one, is asked before each step and told after it (steps.py); where it allows nothing, no step is
  taken and it is asked again two milliseconds later.
- A block of KV cache is shared between prompts only if all of it was computed with the weights of now (unless a commit
  says otherwise). Requests that kept theirs through a commit never offer them: `_stale_ids` says who they are.
  Forgetting the hashes alone would not do, because the library hashes a request's old blocks again when it fills its
  next one.
  Prompts are hashed with their request's salt, so that those of other salts are never found.
- A request whose logits are no numbers ends with an error; the others go on.
- A request whose KV is computed again goes the library's own way of those that were evicted: all its tokens become the
  prompt of an equal one, which keeps their log-probabilities.
- Batches are never prepared ahead (`use_async_batching` off): between two steps no token is in flight, so the count of
  tokens made before a commit is exact.

Leans on private pieces of transformers 5.23; the engine's contract tests fail if another version changes them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.logits_process import LogitsProcessorList

from ..admission import KEEPS_TOO_MANY, NOT_NUMBERS
from ..base import EngineLimits, Generation, TurnsAtCommit
from ..request import Admission
from ..steps import Moment, RequestProgress
from .options import LoopOptions, batching_config, generation_config
from .recording import ExpertsWatch, rows_read
from .sampler import RowReader, Sampler

ASK_S = 0.002  # between two questions to a hook that allows nothing


class EngineLoop(ContinuousBatchingManager):  # type: ignore[misc]
    """The library's manager, without its own thread and queues.

    `deliver` is called on the loop's thread, once per step that ended requests.
    """

    def __init__(self, model: Any, options: LoopOptions, deliver: Callable[[list[Generation]], None]) -> None:
        super().__init__(model, generation_config(), batching_config(options))
        self._options = options
        self._deliver = deliver
        self._admitted: dict[str, Admission] = {}
        self._reader = RowReader(self._admitted)
        self._experts = ExpertsWatch(model)
        self.logit_processor.logits_processor = LogitsProcessorList([self._reader])
        self.logit_processor._retrieve_processors_kwargs()  # it also takes the seed
        self.output_router: _Collector = _Collector()
        self._commands: deque[Callable[[], None]] = deque()
        self._incoming: deque[Admission] = deque()
        self._waiting: dict[str, Admission] = {}
        self._stale_ids: set[str] = set()
        self._limits = EngineLimits()
        self._is_shut = False  # by the hook
        self._taken_count = 0
        self._ended_token_count = 0
        self.hold_reasons: set[str] = set()
        self.prompt_token_count = self.cached_token_count = 0
        self.active_version = -1
        self.current_batch = 0
        with torch.random.fork_rng(devices=[]):  # the library seeds the process' random state here
            self.batch_processor = self._create_batch_processor()

    # From any thread ------------------------------------------------------------------------------------------------

    def submit(self, admission: Admission) -> None:
        """Queue a request; it joins at the next step for which there is room."""
        if self._options.hook is not None:
            self._options.hook.arrived(admission.arrived_at_s, len(admission.input_ids))
        self._incoming.append(admission)
        self._wake_up_loop.set()

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` on the loop's thread, between two steps. If it raises, the loop ends as in a crash."""
        self._commands.append(command)
        self._wake_up_loop.set()

    def request_end(self) -> None:
        """Ask `run` to return after the step at hand."""
        status = self.background_thread_status
        status.request_stop(status.HARD_STOP, 0)
        self._wake_up_loop.set()

    def wake(self) -> None:
        """Let the loop look at `hold_reasons` again."""
        self._wake_up_loop.set()

    def progress(self, request_id: str) -> Generation | None:
        """Tokens so far of a running request, read while the loop may be in a step; None if it is not running."""
        admission = self._admitted.get(request_id)
        state = self._state_of(request_id)
        if admission is None or state is None:
            return None
        tokens, logprobs = _made(state)  # before the marks: a commit in between then has a mark past these tokens
        return admission.generation("", tokens, logprobs)

    def kv_used_fraction(self) -> float:
        """Share of the cache that live requests hold; what is merely kept for later prompts is not counted."""
        cache = self._processor.cache
        kept = sum(len(ca.ledger.cached_blocks) * ca.bytes_per_block for ca in cache.cache_allocators.values())
        free = cache.compute_free_capacity(relative=False)
        return 1.0 - float((free + kept) / (cache.num_sectors * cache.bytes_per_sector))

    @property
    def holds(self) -> tuple[str, ...]:
        """Why no step is taken: the reasons given, and "limits" where a limit lets nothing run."""
        is_limited = 0 in (self._limits.running_count, self._limits.step_tokens)
        return (*sorted(self.hold_reasons), *(("limits",) if is_limited else ()))

    @property
    def paused_by(self) -> tuple[str, ...]:
        """The reasons of `holds`, and "guard" where the hook lets nothing run now."""
        return (*self.holds, *(("guard",) if self._is_shut else ()))

    @property
    def has_experts(self) -> bool:
        """True if its model's layers choose experts."""
        return bool(self._experts)

    @property
    def running_count(self) -> int:
        """Requests that hold a place in the engine."""
        return len(self._admitted)

    @property
    def waiting_count(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting) + len(self._incoming)

    @property
    def token_count(self) -> int:
        """Tokens made since start."""
        scheduler = self._processor.scheduler
        states = [*list(scheduler.active_requests.values()), *list(scheduler.waiting_requests.values())]
        return self._ended_token_count + sum(len(state.logprobs) for state in states)

    # On the loop's thread: commands -----------------------------------------------------------------------------------

    def abort(self, request_ids: Iterable[str]) -> list[Generation]:
        """End requests now, wherever they are; those unknown or just ended are left out."""
        self._take_incoming()
        scheduler = self._processor.scheduler
        ended = []
        for request_id in request_ids:
            admission = self._waiting.pop(request_id, None) or self._admitted.pop(request_id, None)
            if admission is None:
                continue
            state = self._state_of(request_id)
            tokens, logprobs = _made(state) if state is not None else ([], [])
            scheduler.set_request_cancellation(request_id)
            self._forget(request_id, len(tokens))
            ended.append(admission.generation("abort", tokens, logprobs))
        scheduler.clear_cancelled_requests()
        return ended

    def begin_version(self, version: int, *, turns: TurnsAtCommit, may_reuse_prefix: bool) -> None:
        """From here on tokens are of `version`; see Engine.apply for the rest.

        A request that has no token yet starts over, so that its first ones do not stand on a prompt half of old KV.
        """
        self.active_version = version
        self._restart_those_without_tokens()
        for request_id, admission in self._admitted.items():
            state = self._state_of(request_id)
            admission.begin_version(len(state.logprobs), version)
        if turns == "recompute":
            self._read_again()
        elif may_reuse_prefix:
            return
        cache = self._processor.cache
        cache.evict_cached_blocks()
        for allocator in cache.cache_allocators.values():
            allocator.ledger.hash_to_block.clear()
            allocator.ledger.block_to_hash.clear()
        self._stale_ids.clear()
        self._stale_ids.update(self._processor.scheduler.active_requests)

    def check_integrity(self) -> None:
        """Assert what holds between two steps."""
        scheduler = self._processor.scheduler
        taken = {*scheduler.active_requests, *scheduler.waiting_requests}
        assert taken == self._admitted.keys(), taken ^ self._admitted.keys()
        assert not self._admitted.keys() & self._waiting.keys()
        assert self._stale_ids <= scheduler.active_requests.keys()
        assert all(name == each.request_id for name, each in [*self._admitted.items(), *self._waiting.items()])
        assert taken or self.kv_used_fraction() == 0.0, "nothing runs, and blocks of KV cache are held"

    def _read_again(self) -> None:
        """Give back the blocks of all that run, and have their tokens read as prompts, before those that wait."""
        scheduler = self._processor.scheduler
        states = list(scheduler.active_requests.values())
        waiting_before = list(scheduler.waiting_requests_order)
        for state in states:
            self._processor.cache.free_blocks(state.request_id, no_cache=True)
            scheduler.add_waiting_request(state.create_equivalent_initial_request())
            state._status = RequestStatus.FINISHED
            scheduler.finish_request(state.request_id)
        scheduler.waiting_requests_order = deque([*(state.request_id for state in states), *waiting_before])

    def _restart_those_without_tokens(self) -> None:
        scheduler = self._processor.scheduler
        restarted = {}
        for request_id, state in scheduler.active_requests.items():
            if not state.logprobs:
                restarted[request_id] = self._admitted.pop(request_id)
                scheduler.set_request_cancellation(request_id)
        scheduler.clear_cancelled_requests()
        self._waiting = {**restarted, **self._waiting}

    def set_limits(self, limits: EngineLimits) -> None:
        """Take new bounds. With more running than `running_count` the oldest go on, the others wait with their KV."""
        self._limits = limits
        processor = self._processor
        processor.scheduler.max_requests_per_batch = max(1, self._running_count_max)
        processor.max_batch_tokens = max(1, self._step_tokens_max)

    # On the loop's thread: the loop -----------------------------------------------------------------------------------

    def run(self) -> BaseException | None:
        """Generate until `request_end` or a crash; returns the error of a crash."""
        self._run_generation_loop()
        error: BaseException | None = self.background_thread_status.fatal_error
        return error

    def drain(self, error: str) -> list[Generation]:
        """After `run`: everything not yet delivered, with its tokens so far; what had not ended has failed."""
        self._take_incoming()
        ended = [self._end(output) for output in self.output_router.take()]
        for admission in [*self._admitted.values(), *self._waiting.values()]:
            ended.append(admission.generation("error", [], [], error))
        self._admitted.clear()
        self._waiting.clear()
        return ended

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        while self._commands:
            self._commands.popleft()()
        if self.holds:
            return self._rest(0.1)  # as the library idles
        if not self._may_step():
            return self._rest(ASK_S)
        self._admit()  # only a step takes what the library was given here: until then it could not be aborted
        step_count = self.current_batch
        more: bool = super()._generation_loop_body(batch_processor, bootstrapping)
        self._note_first_tokens()
        ended = [self._end(output) for output in self.output_router.take()] + self._end_broken() + self._end_stopped()
        if self._options.hook is not None and self.current_batch > step_count:
            self._options.hook.after_step(self._moment(), ended)
        if ended:
            self._deliver(ended)
        return more

    def _note_first_tokens(self) -> None:
        """Note when requests got their first token; one that the library has dropped already has ended by it."""
        now_s = self._options.clock.now_s()
        for name, admission in self._admitted.items():
            if admission.first_token_s is None:
                state = self._state_of(name)
                if state is None or state.logprobs:
                    admission.first_token_s = now_s - admission.arrived_at_s

    def _rest(self, duration_s: float) -> bool:
        """Wait for a wake-up; whether to go on."""
        status = self.background_thread_status
        if status.local_status == status.HARD_STOP:
            return False
        self._wake_up_loop.wait(timeout=duration_s)
        self._wake_up_loop.clear()
        return True

    def _may_step(self) -> bool:
        """Ask the hook, and see to it that no more is computed than it allows."""
        hook = self._options.hook
        if hook is None:
            return True
        self._take_incoming()
        moment = self._moment()
        allowed = hook.before_step(moment)
        self._is_shut = allowed == 0 and bool(moment.requests)  # without any, the library waits
        self._processor.max_batch_tokens = max(1, _least(self._step_tokens_max, allowed))
        return not self._is_shut

    def _moment(self) -> Moment:
        rows = [_progress(admission, self._state_of(name)) for name, admission in self._admitted.items()]
        rows += [_progress(admission, None) for admission in self._waiting.values()]
        return Moment(
            requests=rows,
            step_tokens_max=self._step_tokens_max,
            taken_count=self._taken_count,
            kv_capacity_tokens=self._options.page_count * self._options.page_size,
        )

    def _admit(self) -> None:
        self._take_incoming()
        room = self._running_count_max - len(self._admitted)
        budget = self._limits.kv_tokens
        while self._waiting and room > 0:
            request_id, admission = next(iter(self._waiting.items()))
            if budget is not None:
                held = sum(self._held_tokens(*each) for each in self._admitted.items())
                if held + len(admission.input_ids) > budget:
                    return
            del self._waiting[request_id]
            admission.begin_anew()
            admission.begin_version(0, self.active_version)
            self._admitted[request_id] = admission
            self.prompt_token_count += len(admission.input_ids)
            self.add_request(
                admission.input_ids,
                request_id=request_id,
                max_new_tokens=admission.token_count_max,
                eos_token_id=list(admission.stop_ids),
                temperature=float(admission.sampling.temperature),
            )
            room -= 1

    def _take_incoming(self) -> None:
        while self._incoming:
            admission = self._incoming.popleft()
            self._taken_count += 1
            self._waiting[admission.request_id] = admission

    def _end(self, output: Any) -> Generation:
        admission = self._admitted.pop(output.request_id)
        tokens = output.generated_tokens
        self._forget(output.request_id, len(tokens))
        if output.status == RequestStatus.FAILED:
            return admission.generation("error", tokens, output.logprobs, output.error)
        if math.isnan(output.logprobs[-1]):
            return admission.generation("error", tokens[:-1], output.logprobs[:-1], NOT_NUMBERS)
        is_stop = tokens[-1] in admission.stop_ids or admission.find_stop(tokens[admission.fed_count :])
        reason = "stop" if is_stop else "length"
        return admission.generation(reason, tokens, output.logprobs)

    def _end_broken(self) -> list[Generation]:
        """End requests that run and whose last logits were no numbers, with the tokens before, or keep too much."""
        scheduler, ended = self._processor.scheduler, []
        for request_id, state in list(scheduler.active_requests.items()):
            if state.logprobs and math.isnan(state.logprobs[-1]):
                tokens, logprobs = _made(state)
                scheduler.set_request_cancellation(request_id)
                self._forget(request_id, len(tokens))
                ended.append(
                    self._admitted.pop(request_id).generation("error", tokens[:-1], logprobs[:-1], NOT_NUMBERS)
                )
            elif self._admitted[request_id].keeps_too_many:
                scheduler.set_request_cancellation(request_id)
                self._forget(request_id, len(state.logprobs))
                ended.append(self._admitted.pop(request_id).generation("refused", [], [], KEEPS_TOO_MANY))
        if ended:
            scheduler.clear_cancelled_requests()
        return ended

    def _end_stopped(self) -> list[Generation]:
        """End requests whose newest token completes a stop text."""
        scheduler, ended = self._processor.scheduler, []
        for request_id, admission in list(self._admitted.items()):
            state: Any = self._state_of(request_id) if admission.matcher is not None else None
            new_count = len(state.logprobs) - admission.fed_count if state is not None else 0
            if not new_count:
                continue
            admission.fed_count += new_count
            if admission.find_stop(state.generated_tokens[-new_count:]):
                tokens, logprobs = _made(state)
                scheduler.set_request_cancellation(request_id)
                self._forget(request_id, len(tokens))
                ended.append(self._admitted.pop(request_id).generation("stop", tokens, logprobs))
        if ended:
            scheduler.clear_cancelled_requests()
        return ended

    def _forget(self, request_id: str, token_count: int) -> None:
        self._stale_ids.discard(request_id)
        self._ended_token_count += token_count

    def _held_tokens(self, request_id: str, admission: Admission) -> int:
        """Count the tokens that a request holds, or will once its prompt is read."""
        state = self._state_of(request_id)
        return len(admission.input_ids) + (0 if state is None else len(state.generated_tokens))

    @property
    def _running_count_max(self) -> int:
        return _least(self._options.slot_count, self._limits.running_count)

    @property
    def _step_tokens_max(self) -> int:
        return _least(self._options.step_tokens_max, self._limits.step_tokens)

    @property
    def _processor(self) -> Any:
        return self.batch_processor

    def _state_of(self, request_id: str) -> Any:
        scheduler = self._processor.scheduler
        return scheduler.active_requests.get(request_id) or scheduler.waiting_requests.get(request_id)

    def _create_batch_processor(self) -> Any:
        processor: Any = super()._create_batch_processor()
        sampler = Sampler(self._reader, self._options.seed, self.model.device)
        processor.model_runner._sample = sampler
        compute = type(processor.model_runner).compute_batch

        def compute_more(model: Any, batch: dict[str, Any]) -> None:
            requests = processor.inputs_and_outputs.requests_in_batch
            places, self._reader.read = rows_read(requests, self._admitted)
            if places:
                indices = batch["logits_indices"]
                batch["logits_indices"] = torch.cat((indices, torch.tensor(places, device=indices.device).to(indices)))
            self._experts.is_on = any(
                self._admitted[each.state.request_id].sampling.routed_experts for each in requests
            )
            compute(processor.model_runner, model, batch)
            if self._experts.is_on:
                self._experts.note(requests, self._admitted)

        processor.model_runner.compute_batch = compute_more
        register, stale_ids = type(processor.cache).mark_complete_blocks, self._stale_ids

        def register_fresh_blocks(state: Any, complete_blocks: dict[str, int]) -> None:
            if state.request_id not in stale_ids:
                tokens = self._salted(state.request_id, state.initial_tokens + state.generated_tokens)
                hashed = SimpleNamespace(
                    request_id=state.request_id, status=state.status, initial_tokens=tokens, generated_tokens=[]
                )
                register(processor.cache, hashed, complete_blocks)

        match = type(processor.cache).search_prefix_match  # not its own: this runs again for the same cache

        def count_matches(request_id: str, prompt_ids: list[int]) -> int:
            if self._admitted[request_id].reads_all:
                return 0
            found: int = match(processor.cache, request_id, self._salted(request_id, prompt_ids))
            if len(prompt_ids) == len(self._admitted[request_id].input_ids):  # else it is read again, with its tokens
                self.cached_token_count += found
                self._admitted[request_id].cached_token_count = found
            return found

        processor.cache.mark_complete_blocks = register_fresh_blocks
        processor.cache.search_prefix_match = count_matches
        return processor

    def _salted(self, request_id: str, tokens: list[int]) -> list[int]:
        """Return a request's tokens as they are hashed; every block's hash holds those before it, so the first counts.

        Tokens have few of their 31 bits: that two salts differ in those alone is as likely as that hashes are equal.
        """
        salt = self._admitted[request_id].cache_salt
        if not salt:
            return tokens
        words = struct.unpack("<8I", hashlib.sha256(salt.encode()).digest())
        return [*(token ^ (word & 0x7FFFFFFF) for token, word in zip(tokens, words, strict=False)), *tokens[8:]]


class _Collector(OutputRouter):  # type: ignore[misc]
    """Keeps what ended until the loop hands it out, instead of one thread-crossing call per request."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def deliver(self, output: Any) -> None:
        self.outputs.append(output)

    def deliver_batch(self, outputs: list[Any]) -> None:
        self.outputs.extend(outputs)

    def take(self) -> list[Any]:
        taken, self.outputs = self.outputs, []
        return taken


def _least(own: int, limit: int | None) -> int:
    return own if limit is None else min(own, limit)


def _progress(admission: Admission, state: Any) -> RequestProgress:
    """state: the library's; None: it waits for a place."""
    return RequestProgress(
        request_id=admission.request_id,
        arrived_at_s=admission.arrived_at_s,
        prefill_tokens=len(admission.input_ids) if state is None else len(state.remaining_prefill_tokens),
        token_count=0 if state is None else len(state.logprobs),
        context_tokens=0 if state is None else state.position_offset,
        is_waiting=state is None,
    )


def _made(state: Any) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a live request. Also right while the loop appends: tokens come first."""
    tokens = state.generated_tokens[:]
    if state._true_initial_tokens:  # evicted once: what it had made became part of its prompt
        tokens = state.initial_tokens[state._true_initial_tokens :] + tokens
    logprobs = state.logprobs[: len(tokens)]
    return tokens[: len(logprobs)], logprobs
