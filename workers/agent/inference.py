"""Completions of token ids for requests that name no trajectory: each is a turn on a carrier (carriers.py).

    generate ──▶ may it begin? (pause, pin) ──▶ carrier ──▶ turn ──▶ result ──▶ does each token meet the pin? ──▶ answer

- A turn whose worker is lost goes on elsewhere with its tokens, as any turn. One whose carrier is lost (this process
  stood still, or the broker lost its memory) is asked for anew, on another: its client only waits longer.
- A pin is looked at twice: before anything is asked for, against the head, and in what came back, against the version
  of every token. What violates it is never given out.
- A request that its client leaves is cancelled, and its slot is free at the worker's next renewal. So is one whose
  client was told that the broker is away: who asks again has it made anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import (
    BrokerError,
    ClaimLost,
    ConfigError,
    EngineError,
    EngineUnsupported,
    InputError,
    RunUnknown,
    VersionUnmet,
    WireError,
)
from ...fabric.contract.ids import new_process_id, turn_id
from ...fabric.contract.limits import check_prompt
from ...fabric.contract.records import RunConfig, Sampling, TurnJob, TurnResult, WorkerInfo
from ...fabric.contract.sampling import GUIDED, SEED_MAX, check_sampling, sampling_from, with_ends
from ...fabric.contract.sides import dense
from ...fabric.host.helpers import Helpers, end_all
from ...fabric.inspect.diagnosing import diagnose_run
from ...fabric.inspect.diagnosis import is_well
from ...fabric.model.tokenizer import Tokenizer
from ...fabric.ports.inference import (
    ABORT,
    INFERENCE,
    WAIT,
    Completions,
    Made,
    PauseMode,
    Pin,
    Prompt,
    ServerFacts,
    Stretch,
)
from ...fabric.ports.queue import Fabric
from ...fabric.rules.queue.runs import is_same_run
from ...fabric.rules.queue.timings import Timings
from ..engines.admission import NO_NUMBERS, OVER_CONTEXT
from .carriers import Carrier, Carriers
from .episode import TurnCaller
from .keeper import Elsewhere, Keeper, KeeperConfig, patiently
from .session import answered
from .slots import Quarantine

log = logging.getLogger(__name__)

COUNT_MAX = 128  # completions of one request
ASK_AGAIN_S = 60.0  # without a result, after which a turn is asked for again: see AgentConfig
RENEW_S, REAP_S, HUNG_S = 0.5, 0.25, 30.0
FOLLOW_S = 1.0  # between two looks whether the run is still there
AWAY_S = 3.0  # without an answer to them: then requests wait for the broker
HEAD_S = 5.0  # longest wait for a new head
DONE = ("stop", "length")
NO_TEXT = "\ufffd"  # for a token that the model has and its tokenizer has not

Publish = Callable[
    [str, int | None, bool], Awaitable[int]
]  # a path, its version, whether NaN and infinity may be in it


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is known of the run's model here. ends: tokens that end its answers. context_tokens_max: 0: not known."""

    tokenizer: Tokenizer
    ends: tuple[int, ...]
    context_tokens_max: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    """A request under way, and its turns that can be given up."""

    request_id: str
    turns: dict[asyncio.Task[TurnResult], tuple[Carrier, TurnJob]] = field(default_factory=dict)
    is_aborted: bool = False


class FleetInference:
    """See ports/inference.py, Inference."""

    def __init__(
        self,
        fabric: Fabric,
        run: RunConfig,
        model: Model,
        clock: Clock,
        *,
        worker_id: str,
        publish: Publish,
        broker_wait_s: float = math.inf,
    ) -> None:
        """Make it.

        Args:
            publish: publishes the weights of a path; see Inference.publish.
            broker_wait_s: for which a client waits for a broker that does not answer, before it is told to try again.
        """
        self._fabric = fabric
        self._run = run
        self._model = model
        self._clock = clock
        self._worker_id = worker_id
        self._publish = publish
        self._broker_wait_s = broker_wait_s
        self._carriers = Carriers(fabric, run, worker_id)
        self._timings = Timings(new_process_id())
        self._caller = TurnCaller(
            worker_id,
            fabric.turns(run),
            fabric.trajectories(run),
            Quarantine(),
            ask_again_s=ASK_AGAIN_S,
            timings=self._timings.of(run.run_id),
            run=run,
        )
        self._head = -1
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._requests: set[_Request] = set()
        self._publishing = asyncio.Lock()
        self._heard_at_s = clock.now_s()  # when the broker answered last

    # ---- its life

    async def serve(self, stop: asyncio.Event, elsewhere: Elsewhere) -> None:
        """Keep the carriers and bring results until `stop`; then give all carriers up.

        Raises:
            RunUnknown: the run was deleted, or made anew.
        """
        config = KeeperConfig(worker_id=self._worker_id, renew_s=RENEW_S, reap_s=REAP_S, hung_s=HUNG_S)
        kept = {self._run.run_id: self._carriers}
        keeper = Keeper(config, self._clock, say=self._say, kept=lambda: kept, timings=self._timings)
        work = (self._caller.push, self._caller.receive, self._carriers.sweep, self._follow_head)
        async with (
            keeper.keeping(self._fabric, no_reward, elsewhere) as check,
            Helpers(*(patiently(each, self._clock) for each in work)) as helpers,
        ):
            try:
                while not stop.is_set():
                    check()
                    helpers.check()
                    await self._check_run()
                    await _wait(stop, FOLLOW_S)
            finally:
                await self._carriers.close()

    async def _check_run(self) -> None:
        try:
            run = (await self._fabric.board.runs()).get(self._run.run_id)
        except (BrokerError, WireError) as error:
            log.warning("inference.runs_not_read", extra={"error": str(error)})
            return
        self._heard_at_s = self._clock.now_s()
        if run is None or not is_same_run(run, self._run):
            raise RunUnknown(
                f"run {self._run.run_id!r} was deleted or made anew while its requests were served: start the gateway "
                "again",
                run_id=self._run.run_id,
            )

    async def _follow_head(self) -> None:
        while True:
            head = await self._fabric.weights.wait_head(self._run.run_id, self._head, HEAD_S)
            self._head = max(self._head, head.version)

    def _say(self) -> WorkerInfo:
        """Make the heartbeat's record; the keeper calls this from its own thread."""
        return WorkerInfo(
            worker_id=self._worker_id,
            role="agent",
            pid=os.getpid(),
            host=socket.gethostname(),
            running_count=len(self._carriers.claims),
            environments=[INFERENCE],
        )

    # ---- the port

    @property
    def model(self) -> str:
        """See ports/inference.py."""
        return self._run.model

    async def facts(self) -> ServerFacts:
        """See ports/inference.py."""
        return ServerFacts(
            run_id=self._run.run_id,
            model=self._run.model,
            head_version=await self._read_head(),
            dtype=self._run.dtype,
            context_tokens_max=self._model.context_tokens_max,
            is_paused=not self._may_begin.is_set(),
            running_count=len(self._requests),
        )

    async def why_waiting(self) -> str:
        """See ports/inference.py."""
        if not self._may_begin.is_set():
            return "requests are held back by a pause. Send POST /resume, or /continue_generation"
        if away := self._away():
            return away
        try:
            async with asyncio.timeout(AWAY_S):  # less than a client waits for us
                causes = await diagnose_run(self._fabric.board, self._run.run_id)
        except (BrokerError, WireError, TimeoutError) as error:
            log.warning("inference.not_diagnosed", extra={"error": str(error)})
            return self._away()
        return "" if is_well(causes) else causes[0].words

    def _away(self) -> str:
        away_s = self._clock.now_s() - self._heard_at_s
        if away_s < AWAY_S:
            return ""
        return (
            f"the broker has not answered this gateway for {away_s:.0f} s. See that it runs, and can be reached from "
            "here: requests go on by themselves when it answers"
        )

    @property
    def vocabulary_size(self) -> int:
        """See ports/inference.py."""
        return self._model.tokenizer.vocabulary_size

    def text_of(self, token_ids: Sequence[int]) -> str:
        """See ports/inference.py."""
        tokenizer, size = self._model.tokenizer, self.vocabulary_size
        return "".join(
            tokenizer.decode(list(ids)) if is_known else NO_TEXT * len(list(ids))
            for is_known, ids in groupby(token_ids, lambda each: each < size)
        )

    async def generate(self, prompt: Prompt, *, outlasts_broker: bool = False) -> Completions:
        """See ports/inference.py."""
        making = asyncio.create_task(self._generate(prompt, self._settings(prompt)))
        try:
            return await answered(making, self._caller, math.inf if outlasts_broker else self._broker_wait_s)
        finally:
            await end_all([making])

    async def _generate(self, prompt: Prompt, settings: Sequence[Sampling]) -> Completions:
        is_let_in = False
        while not is_let_in:
            await self._may_begin.wait()
            await self._check_pin(prompt.pin)
            is_let_in = self._may_begin.is_set()
        request = _Request(prompt.request_id)
        self._requests.add(request)
        self._is_idle.clear()
        turns = [asyncio.create_task(self._turn(request, prompt, each)) for each in settings]
        try:
            made = await asyncio.gather(*turns)
        finally:
            for turn in turns:
                turn.cancel()
            self._requests.discard(request)
            if not self._requests:
                self._is_idle.set()
        return self._answer(prompt.pin, made)

    async def pause(self, mode: PauseMode) -> None:
        """See ports/inference.py."""
        self._may_begin.clear()
        if mode == ABORT:
            self.abort(None)
        if mode in (ABORT, WAIT):
            idling = asyncio.create_task(self._is_idle.wait())
            try:
                await answered(idling, self._caller, self._broker_wait_s)
            finally:
                idling.cancel()

    async def resume(self) -> None:
        """See ports/inference.py."""
        self._may_begin.set()

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """See ports/inference.py."""
        chosen = [each for each in self._requests if request_ids is None or each.request_id in request_ids]
        for request in chosen:
            request.is_aborted = True
            for carrier, job in request.turns.values():
                self._caller.cancel(carrier.claim, job)
        return len(chosen)

    async def publish(self, path: str, version: int | None, *, allow_nonfinite: bool = False) -> int:
        """See ports/inference.py."""
        async with self._publishing:
            published = await self._publish(path, version, allow_nonfinite)
        self._head = max(self._head, published)
        return published

    # ---- one request

    def _settings(self, prompt: Prompt) -> list[Sampling]:
        """Return the settings of each completion. Raises InputError, PayloadTooLarge."""
        if not 1 <= prompt.count <= COUNT_MAX:
            raise InputError(f"n is {prompt.count}, expected 1 to {COUNT_MAX}", name="n")
        if not len(prompt.token_ids):
            raise InputError("the prompt has no tokens: send at least one", name="token_ids")
        check_prompt("of the request", len(prompt.token_ids))
        own = self._run.sampling
        stated = {name: each for name, each in prompt.sampling.items() if not (name in GUIDED and GUIDED & own.keys())}
        sampling = sampling_from(check_sampling({**stated, **own}, "the request"))
        if prompt.ends_at_eos:
            sampling = with_ends(sampling, self._model.ends)
        return [_placed(sampling, place) for place in range(prompt.count)]

    async def _check_pin(self, pin: Pin) -> None:
        """Raises VersionUnmet: nothing that begins now could meet it."""
        least = max(-1 if each is None else each for each in (pin.min_version, pin.exact_version))
        if least > self._head or (pin.exact_version is not None and pin.exact_version != self._head):
            head = await self._read_head()
            if least > head:
                raise _unmet(f"version {least} is not published yet: the head is {head}", head)
            if pin.exact_version is not None and pin.exact_version != head:
                raise _unmet(f"version {pin.exact_version} is over: the head is {head}", head)

    async def _read_head(self) -> int:
        self._head = max(self._head, (await self._fabric.weights.head(self._run.run_id)).version)
        return self._head

    async def _turn(self, request: _Request, prompt: Prompt, sampling: Sampling) -> Made:
        """Have one completion made, on whichever carriers it takes.

        Raises:
            EngineUnsupported, EngineError: no worker could make it, or one failed.
        """
        while True:
            carrier = await self._carriers.of(prompt.session)
            if request.is_aborted:
                return _ABORTED
            job = TurnJob(
                turn_id=turn_id(carrier.name, carrier.asked_count),
                agent_id=self._worker_id,
                sampling=sampling,
                prompt_ids=prompt.token_ids,
            )
            asking = self._carriers.ask(carrier, self._caller, job)
            request.turns[asking] = carrier, job
            try:
                return _made(await asyncio.shield(asking), len(prompt.token_ids))
            except asyncio.CancelledError:
                if not asking.cancelled():
                    self._caller.cancel(carrier.claim, job)
                    raise
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
            except ClaimLost:
                self._carriers.give_up(carrier)
            finally:
                del request.turns[asking]

    def _answer(self, pin: Pin, made: Sequence[Made]) -> Completions:
        """Raises VersionUnmet: a token is of a version that the pin does not admit."""
        versions = [each.version for completion in made for each in completion.stretches]
        wrong = next((each for each in versions if not pin.admits(each)), None)
        if wrong is not None:
            log.info("inference.pin_unmet", extra={"policy_version": wrong, "head_version": self._head})
            raise _unmet(f"tokens were made by version {wrong}: weights changed meanwhile", self._head)
        return Completions(
            made=made,
            start_version=min(versions, default=self._head),
            end_version=max(versions, default=self._head),
        )


_ABORTED = Made(token_ids=(), logprobs=(), finish=ABORT)


def _made(result: TurnResult, prompt_count: int) -> Made:
    """Read the result of a turn whose prompt has so many tokens. Raises EngineUnsupported, EngineError."""
    if result.finish_reason == "cancelled":
        return _ABORTED
    if result.finish_reason == "refused":
        is_over = OVER_CONTEXT in (result.error or "")
        raise EngineUnsupported(f"the engine refused the request: {result.error}", is_over_context=is_over)
    if result.finish_reason not in DONE:
        is_of_weights = NO_NUMBERS in (result.error or "")
        raise EngineError(f"the engine failed: {result.error}", of_weights=is_of_weights)
    told = dense(result.sides, "prompt_logprobs", -prompt_count, 0)
    return Made(
        token_ids=result.completion_ids.tolist(),
        logprobs=result.logprobs.tolist(),
        finish=result.finish_reason,
        tops=_tops(result, "top", 0, len(result.completion_ids)),
        prompt_logprobs=[] if told is None else told.tolist(),
        prompt_tops=_tops(result, "prompt_top", -prompt_count, 0),
        stretches=[Stretch(span.start, span.end, span.policy_version) for span in result.spans],
        resumed=result.resumed,
    )


def _tops(result: TurnResult, what: str, start: int, end: int) -> list[list[tuple[int, float]]]:
    ids, logprobs = (dense(result.sides, f"{what}_{name}", start, end) for name in ("ids", "logprobs"))
    if ids is None or logprobs is None:
        return []
    rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[0] >= 0] for row in rows]


def _placed(sampling: Sampling, place: int) -> Sampling:
    """Return the sampling of one completion: each has a seed of its own, and the first alone tells of the prompt."""
    if not place:
        return sampling
    seed = None if sampling.seed is None else (sampling.seed + place) % (SEED_MAX + 1)
    return replace(sampling, seed=seed, prompt_logprobs=None)


def _unmet(why: str, head: int) -> VersionUnmet:
    return VersionUnmet(f"the request's weight_version cannot be met now: {why}. Ask again", head_version=head)


async def no_reward(run_id: str, trajectory_id: str, fence: int, *, is_again: bool = False) -> None:
    """Nothing that is asked for here is ever rewarded."""


async def _wait(stop: asyncio.Event, timeout_s: float) -> None:
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait((waiting,), timeout=timeout_s)
    waiting.cancel()


def check_inference_run(run: RunConfig) -> RunConfig:
    """Require that a run's turns may be asked for by requests.

    Raises:
        ConfigError: agents play it.
    """
    if run.environment != INFERENCE:
        raise ConfigError(
            f"run {run.run_id!r} has the environment {run.environment!r}, whose agents would take the trajectories "
            f"that requests need: name a run of its own, whose environment is {INFERENCE!r}",
            run_id=run.run_id,
        )
    return run
