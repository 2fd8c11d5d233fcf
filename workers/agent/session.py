"""A session: one claimed trajectory whose agent asks for completions by itself, many at once if it likes.

    ask ──▶ repetition of an earlier call? its answer
       └──▶ conversation (fabric/chat): what continues, what branches ──▶ turns ──▶ answers ──▶ reply

- Each completion is a turn. A turn of an earlier life of the agent, which another agent worker may have held, answers
  the first call that comes to the same context with the same settings: an agent that does the same again gets the same.
- A call whose client has gone goes on for RETURN_S, as clients repeat what broke off; then its turns are cancelled.
- Who waits while the broker is away is told so after a while, as a client that has gone: what it repeats goes on.
- An answer that nobody received goes to the next call like it. One that was received is given again only where the
  client says that it repeats a call: else it wants another sample.
- The run's own settings of sampling win over the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, overload

import xxhash

from ...fabric.chat.choice import FREE
from ...fabric.chat.conversation import Answer, Ask, Conversation
from ...fabric.chat.template import ChatTemplate
from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import (
    BrokerError,
    ClaimLost,
    EngineError,
    EngineUnsupported,
    EnvironmentFailed,
    InputError,
    QueueFull,
)
from ...fabric.contract.ids import turn_id
from ...fabric.contract.limits import INFO_BYTES_MAX, MIB, check_prompt
from ...fabric.contract.records import Float32, Int32, RunConfig, Sampling, TurnJob, TurnResult, check_reward
from ...fabric.contract.sampling import GUIDED, check_sampling, sampling_from, turn_seed, with_ends
from ...fabric.contract.sides import dense
from ...fabric.contract.wire import check_size, dump_json
from ...fabric.host.helpers import end_all
from ...fabric.model.tokenizer import Tokenizer
from ...fabric.ports.queue import TrajectoryClaim
from ...fabric.ports.sessions import ERROR_LENGTH_MAX, Call, Completion, Reply, SessionFacts, Token, check_same_end
from ..engines.admission import NO_NUMBERS, OVER_CONTEXT
from ..environments.answers import BRIEF

T = TypeVar("T")

CALL_COUNT_MAX = 64  # at once, of one session; more wait for nothing but memory
COMPLETION_COUNT_MAX = 128  # of one call, OpenAI's bound
RETURN_S = 10.0  # the openai client repeats a call that broke off within 8 s
AWAY_S = 3.0  # without an answer of the broker, which is asked for turns every second: then it is away
HUGE = MIB  # bytes of a request: more waits for the one thread that all sessions of the process have for it
REFUSAL_LENGTH_MAX = 500
IDLE_S_MAX = 600.0  # without a call: an agent that runs a test suite in between takes minutes


class Caller(Protocol):
    """What a session needs to have turns made: episode.py's TurnCaller."""

    @property
    def agent_id(self) -> str: ...
    async def ask(self, claim: TrajectoryClaim, job: TurnJob, files: Mapping[str, bytes]) -> TurnResult: ...
    def cancel(self, claim: TrajectoryClaim, job: TurnJob) -> None: ...
    @property
    def answered_at_s(self) -> float: ...


@dataclass(slots=True, eq=False)
class _Given:
    """A call as it was first made, and its answer. digest: equal for calls that ask for the same."""

    digest: str
    key: str
    turns: list[TurnJob] = field(default_factory=list)
    task: asyncio.Task[Reply] | None = None
    taker_count: int = 0
    giving_up: asyncio.TimerHandle | None = None
    is_received: bool = False
    is_given_up: bool = False

    @property
    def reply(self) -> asyncio.Task[Reply]:
        assert self.task is not None, "begun with its task"
        return self.task


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a session's client ended it. error: why the attempt failed."""

    info: Mapping[str, Any]
    error: str | None


class AgentSession:
    """See ports/sessions.py, Session. Its owner awaits `ended`, and closes it."""

    def __init__(
        self,
        run: RunConfig,
        claim: TrajectoryClaim,
        chat: ChatTemplate,
        tokenizer: Tokenizer,
        caller: Caller,
        clock: Clock,
        huge: Executor,
        *,
        idle_s_max: float = IDLE_S_MAX,
        broker_wait_s: float = math.inf,
    ) -> None:
        """Make a session.

        huge: where requests above HUGE are rendered and tokenised. broker_wait_s: see Desk.
        """
        self._run = run
        self._claim = claim
        self._chat = chat
        self._tokenizer = tokenizer
        self._caller = caller
        self._clock = clock
        self._huge = huge
        self._idle_s_max = idle_s_max
        self._broker_wait_s = broker_wait_s
        self._conversation = Conversation(chat)
        self._given: dict[str, list[_Given]] = defaultdict(list)  # by digest, the newest last
        self._earlier: dict[str, deque[TurnResult]] = defaultdict(deque)  # settled in earlier lives, by context digest
        for result in claim.turns:
            self._earlier[result.context_digest].append(result)
        self._turn_count = len(claim.turns)  # asked for, in all lives
        self._answer_count = 0
        self._refusal = ""
        self._reward: float | None = None
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._recorded: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._used_s = asyncio.get_running_loop().time()
        self._waiting_count = 0  # clients that wait for an answer

    # ---- the client's side

    @property
    def facts(self) -> SessionFacts:
        """Return the facts that the client may know."""
        job = self._claim.job
        return SessionFacts(
            session_id=job.trajectory_id,
            run_id=self._run.run_id,
            group_id=job.group_id,
            model=self._run.model,
            task=job.task,
            seed=job.seed,
            attempt=self._claim.attempt,
            call_count=self._answer_count,
            call_count_max=self._run.turn_count_max,
            reward=self._reward,
            idle_s_max=self._idle_s_max,
            error=self._ending.result().error if self._ending.done() and not self._ending.cancelled() else None,
        )

    async def ask(self, call: Call) -> Reply:
        """Return completions; see ports/sessions.py."""
        self._check_open()
        with self._used():
            return await self._asked(call)

    async def _asked(self, call: Call) -> Reply:
        if not 1 <= call.count <= COMPLETION_COUNT_MAX:
            raise InputError(f"n is {call.count}, expected 1 to {COMPLETION_COUNT_MAX}", name="n")
        sampling = self._sampling(call.sampling)
        ask, tag = await self._ask(call)
        if tag and sampling.is_guided:
            raise InputError(
                "the request: tool_choice cannot be kept beside response_format, or where the run guides its turns",
                name="tool_choice",
            )
        sampling = replace(sampling, guided_tag=tag or sampling.guided_tag)
        self._check_open()
        check_prompt(f"of session {self._claim.job.trajectory_id}", len(ask.context_ids))
        digest = _digest(ask, sampling, call.count)
        given = self._repeated(digest, call) or self._begin(digest, call, ask, sampling)
        return await self._deliver(given)

    async def count(self, call: Call) -> int:
        """Count the tokens of a call's prompt; nothing is asked for."""
        self._check_open()
        with self._used():
            ask, _ = await self._ask(replace(call, choice=FREE))  # which calls are forced changes no prompt
            return len(ask.context_ids)

    def note_refusal(self, told: str) -> None:
        """Take note of what the client was told in place of its last answer."""
        self._refusal = told[:REFUSAL_LENGTH_MAX]

    def reward(self, reward: float) -> None:
        """Set the trajectory's reward; the last one before the end counts.

        Raises:
            InputError: it is no number, or the session has ended with another one; ClaimLost: it is over.
        """
        if self._ending.done():
            if self._ending.cancelled():
                raise self._over()
            check_same_end(self.facts, reward, None)
            return
        self._reward = check_reward(reward, "the agent", InputError)
        self._used_s = asyncio.get_running_loop().time()

    async def end(
        self, *, reward: float | None = None, info: Mapping[str, Any] | None = None, error: str | None = None
    ) -> None:
        """End the session, and wait until its rollout is recorded, or its attempt has failed as it says.

        A client that repeats it, as its first request broke off, waits for the same.
        """
        if not self._ending.done() or self._ending.cancelled():
            self._set_ending(reward, info, error)
        check_same_end(self.facts, reward, error)
        is_void = self._ending.result().error is not None
        if not await answered(self._recorded, self._caller, self._broker_wait_s) and not is_void:
            raise self._over()

    def _set_ending(self, reward: float | None, info: Mapping[str, Any] | None, error: str | None) -> None:
        """End it, or raise with nothing changed."""
        self._check_open()
        last = self._reward if reward is None else check_reward(reward, "the agent", InputError)
        check_size("info", dump_json(dict(info or {})), INFO_BYTES_MAX, next_step="say less in it")
        if error is None and not self._answer_count:
            raise InputError(f"the session would end {self._unanswered}: there is nothing to learn from")
        if error is None and last is None and self._run.reward is None:
            raise InputError(
                f"the session has no reward, and run {self._run.run_id} has no reward function: give one, or say the "
                "error for which the attempt failed",
                name="reward",
            )
        self._reward = last
        self._ending.set_result(Ending(info=dict(info or {}), error=error and error[:ERROR_LENGTH_MAX]))

    # ---- the owner's side

    async def ended(self) -> Ending:
        """Wait until the client has ended it.

        Raises:
            EnvironmentFailed: nothing was heard from the client for too long.
        """
        loop = asyncio.get_running_loop()
        while not self._ending.done():
            left_s = self._used_s + self._idle_s_max - loop.time()
            if self._waiting_count:
                left_s = self._idle_s_max
            elif left_s <= 0:
                raise EnvironmentFailed(
                    f"its agent made no call, gave no reward and did not end it for {self._idle_s_max:g} s",
                    reason="timeout",
                )
            await asyncio.wait([self._ending], timeout=min(left_s, self._idle_s_max / 4))
        return self._ending.result()

    def record(self, reward: float | None = None) -> dict[str, Any]:
        """Return the fields of a Rollout that come of the calls. reward: that its agent returned, which counts.

        Raises:
            EnvironmentFailed: there was no call, or there is no reward though one is needed.
        """
        if not self._answer_count:
            raise EnvironmentFailed(f"it ended {self._unanswered}", reason="play")
        if reward is not None:
            self._reward = check_reward(reward, "the agent", InputError)
        if self._reward is None and self._run.reward is None:
            raise EnvironmentFailed(
                f"it ended without a reward, and run {self._run.run_id} has no reward function: return a number "
                "(a command: print an object with its reward as the last line), or give the session one",
                reason="play",
            )
        return {
            "turn_count": self._answer_count,
            "reward": None if self._run.reward is not None else self._reward,
            **self._conversation.record(),
        }

    async def close(self) -> None:
        """End what is under way: nothing is asked for any more."""
        if not self._ending.done():
            self._ending.cancel()
        tasks = [given.reply for calls in self._given.values() for given in calls]
        await end_all(tasks)

    def conclusion(self) -> Callable[[], Awaitable[SessionFacts | None]] | None:
        """Return what tells, without the conversation, how a session that its client ended came out; None: it did not.

        It waits until that is known; None: the rollout is not recorded, though its client did not wish it away.
        """
        if not self._ending.done() or self._ending.cancelled():
            return None
        facts, is_void = self.facts, self._ending.result().error is not None
        waited = self._recorded, self._caller, self._broker_wait_s

        async def ask() -> SessionFacts | None:
            return facts if await answered(*waited) or is_void else None

        return ask

    def say_recorded(self, is_recorded: bool) -> None:
        """Tell the client that waits for it whether its rollout is in the broker."""
        if not self._recorded.done():
            self._recorded.set_result(is_recorded)

    # ---- one call

    @property
    def _unanswered(self) -> str:
        """Say how it stands where no call was answered."""
        why = f"without an answer of the model: its last call was refused with {self._refusal}"
        return why if self._refusal else "without a call to the model"

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Count a client that waits: a session that was quiet for long is not over while its next call is rendered."""
        self._waiting_count += 1
        try:
            yield
        finally:
            self._waiting_count -= 1
            self._used_s = asyncio.get_running_loop().time()

    def _check_open(self) -> None:
        if self._ending.done():
            raise self._over()

    def _over(self) -> ClaimLost:
        name = self._claim.job.trajectory_id
        return ClaimLost(f"session {name} is over", job_id=name, fence=self._claim.fence)

    def _sampling(self, wished: Mapping[str, Any]) -> Sampling:
        """Return the run's settings, and the client's where the run has none. Raises InputError."""
        wanted = self._run.sampling
        stated = {key: each for key, each in wished.items() if not (key in GUIDED and GUIDED & wanted.keys())}
        return sampling_from(check_sampling({**stated, **wanted}, "the request"))

    async def _ask(self, call: Call) -> tuple[Ask, str]:
        """Find where a call goes on, and the structural tag of its choice of tools, if it needs one.

        Whatever makes it large (a text, tools, arguments), the loop does not stand.
        """

        def find() -> tuple[Ask, str]:
            if call.messages is None:
                return self._conversation.ask_text(call.text, self._tokenizer.encode), ""
            ask = self._conversation.ask(list(call.messages), list(call.tools), call.options)
            return ask, self._chat.tag(call.choice, ask.tools, prompt=ask.text)

        if call.size_bytes <= BRIEF:
            return find()
        threads = None if call.size_bytes <= HUGE else self._huge
        return await asyncio.get_running_loop().run_in_executor(threads, find)

    def _repeated(self, digest: str, call: Call) -> _Given | None:
        """Find the call that this one repeats."""
        like = [given for given in self._given[digest] if not given.is_given_up and not _has_failed(given)]
        if call.key:
            return next((given for given in like if given.key == call.key), None)
        lonely = next((given for given in like if not given.taker_count and not given.is_received), None)
        return lonely or (like[-1] if like and call.is_repeated else None)

    def _begin(self, digest: str, call: Call, ask: Ask, sampling: Sampling) -> _Given:
        """Begin the turns of a call.

        Raises:
            QueueFull: there are too many calls under way, or the session has no turns left (facts: is_final).
        """
        running = sum(not given.reply.done() for each in self._given.values() for given in each)
        if running >= CALL_COUNT_MAX:
            raise QueueFull(
                f"the session has {running} calls under way, the limit: wait for one of them", is_final=False
            )
        new_count = max(0, call.count - len(self._earlier[_digest(ask, sampling)]))
        if new_count and self._turn_count + new_count > self._run.turn_count_max:
            raise all_asked_for(self._run.turn_count_max)
        given = _Given(digest, call.key)
        chosen = [self._earlier_turn(ask, sampling) or self._new_turn(given, ask, sampling) for _ in range(call.count)]
        given.task = asyncio.create_task(self._reply(given, ask, chosen))
        given.task.add_done_callback(_has_failed_unseen)
        self._given[digest].append(given)
        return given

    async def _deliver(self, given: _Given) -> Reply:
        """Wait for the answer; give the call up if the last who waits leaves, and nobody comes back."""
        loop = asyncio.get_running_loop()
        given.taker_count += 1
        try:
            reply = await answered(given.reply, self._caller, self._broker_wait_s)
        except asyncio.CancelledError:
            if given.reply.cancelled():
                raise self._over() from None
            raise
        finally:
            given.taker_count -= 1
            if given.giving_up is not None:
                given.giving_up.cancel()  # its time counts from whoever left last
            if not given.taker_count and not given.reply.done():
                given.giving_up = loop.call_later(RETURN_S, self._give_up, given)
        given.is_received = True
        return reply

    def _give_up(self, given: _Given) -> None:
        if given.taker_count or given.reply.done() or given.is_given_up:
            return
        loop = asyncio.get_running_loop()
        if loop.time() > self._caller.answered_at_s + AWAY_S:  # the time to come back begins as the broker is back
            given.giving_up = loop.call_later(RETURN_S, self._give_up, given)
            return
        given.is_given_up = True
        for job in given.turns:
            self._caller.cancel(self._claim, job)

    async def _reply(self, given: _Given, ask: Ask, turns: list[TurnResult | TurnJob]) -> Reply:
        results = await asyncio.gather(*(self._turn(given, turn) for turn in turns), return_exceptions=True)
        errors = [each for each in results if isinstance(each, BaseException)]
        made = [each for each in results if isinstance(each, TurnResult)]
        if errors:
            for result in made:  # what the others made answers the next call like this one
                self._earlier[result.context_digest].append(result)
            raise errors[0]
        answers = [self._answer(ask, result) for result in made]
        completions = [_completion(self._chat, *pair) for pair in zip(answers, made, strict=True)]
        version = max((span.policy_version for result in made for span in result.spans), default=-1)
        return Reply(
            call_id=f"{self._claim.job.trajectory_id}.{answers[0].node}",
            created_s=self._clock.wall_ms() // 1000,
            prompt_token_count=len(ask.context_ids),
            policy_version=version,
            completions=completions,
        )

    def _answer(self, ask: Ask, result: TurnResult) -> Answer:
        self._answer_count += 1
        reason = "stop" if result.finish_reason == "stop" else "length"
        made = result.completion_ids, result.logprobs, result.spans, reason
        return self._conversation.answer(ask, *made, sides=result.sides)

    # ---- one turn

    def _earlier_turn(self, ask: Ask, sampling: Sampling) -> TurnResult | None:
        """Take a turn that was made in this context before, and that no call has had."""
        kept = self._earlier[_digest(ask, sampling)]
        while kept:
            result = kept.popleft()
            if result.finish_reason in ("stop", "length"):
                return result
        return None

    def _new_turn(self, given: _Given, ask: Ask, sampling: Sampling) -> TurnJob:
        """Make the next turn of the trajectory; asked for at once, so that the broker never sees one number skipped."""
        trajectory, index = self._claim.job.trajectory_id, self._turn_count
        self._turn_count += 1
        seed = None if sampling.seed is None else turn_seed(sampling.seed, trajectory, index)
        eos_id = self._tokenizer.eos_id
        ends = self._chat.stop_ids if not ask.is_text else () if eos_id is None else (eos_id,)
        job = TurnJob(
            turn_id=turn_id(trajectory, index),
            agent_id=self._caller.agent_id,
            sampling=with_ends(replace(sampling, seed=seed), ends),
            prompt_ids=ask.context_ids,
            context_digest=_digest(ask, sampling),
            images=ask.images,
        )
        given.turns.append(job)
        return job

    async def _turn(self, given: _Given, turn: TurnResult | TurnJob) -> TurnResult:
        """Wait for a turn's result.

        Raises:
            EngineUnsupported, EngineError: no worker could make it, or one failed.
            ClaimLost: the session is over.
            QueueFull: earlier lives asked for more turns than are known here, and none is left.
        """
        if isinstance(turn, TurnResult):
            return turn
        while True:
            result = await self._caller.ask(self._claim, turn, self._conversation.files)
            is_own = result.context_digest in ("", turn.context_digest)
            if is_own and (result.finish_reason != "cancelled" or given.is_given_up):
                break
            # An earlier life asked for another turn under this number: it was not known to be under way.
            if not is_own:
                self._earlier[result.context_digest].append(result)
            given.turns.remove(turn)
            turn = replace(turn, turn_id=turn_id(self._claim.job.trajectory_id, self._turn_count))
            self._turn_count += 1
            given.turns.append(turn)
        if result.finish_reason == "cancelled":
            raise EngineError("the call was given up: its client had gone")
        if result.finish_reason == "refused":
            is_over = OVER_CONTEXT in (result.error or "")
            raise EngineUnsupported(f"the engine refused the request: {result.error}", is_over_context=is_over)
        if result.finish_reason == "error":
            is_of_weights = NO_NUMBERS in (result.error or "")
            raise EngineError(f"the engine failed: {result.error}", of_weights=is_of_weights)
        return result


def all_asked_for(turn_count_max: int) -> QueueFull:
    """Make the error of a call for which a trajectory has no turn left."""
    return QueueFull(
        f"the session may ask for {turn_count_max} completions in all, and too few of them are left: end it, or create "
        "the run with a larger turn_count_max",
        is_final=True,
    )


async def answered(work: asyncio.Future[T], caller: Caller, broker_wait_s: float) -> T:
    """Return what `work` comes to, which goes on if its caller leaves.

    Raises:
        BrokerError: the broker has not answered for that long, of this wait.
    """
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    while not work.done():
        left_s = max(begun_s, caller.answered_at_s) + broker_wait_s - loop.time()
        if left_s <= 0:
            raise BrokerError(f"the broker has not answered for {broker_wait_s:g} s: ask again")
        await asyncio.wait([work], timeout=None if math.isinf(left_s) else left_s)
    return work.result()


def _has_failed_unseen(task: asyncio.Task[Reply]) -> None:
    """Look at the error of a call that nobody may wait for any more: else the loop would log it as forgotten."""
    if not task.cancelled():
        task.exception()


def _has_failed(given: _Given) -> bool:
    return given.reply.done() and (given.reply.cancelled() or given.reply.exception() is not None)


def _digest(ask: Ask, sampling: Sampling, count: int = 0) -> str:
    """Return 16 hexadecimal digits that are equal for calls that ask for the same."""
    hashed = xxhash.xxh3_64(ask.context_ids.tobytes())
    hashed.update(dump_json([ask.digest, sampling.row(), count]))
    return str(hashed.hexdigest())


def _completion(chat: ChatTemplate, answer: Answer, result: TurnResult) -> Completion:
    count = len(result.completion_ids)
    top = [dense(result.sides, name, 0, count) for name in ("top_ids", "top_logprobs")]
    tokens = _Tokens(chat, result.completion_ids, result.logprobs, *top)
    return Completion(message=answer.message, text=answer.text, finish=answer.finish, tokens=tokens)


class _Tokens(Sequence[Token]):
    """The tokens of an answer, each decoded only where it is looked at: few clients ask for log-probabilities."""

    def __init__(
        self, chat: ChatTemplate, ids: Int32, logprobs: Float32, top_ids: Int32 | None, top_logprobs: Float32 | None
    ) -> None:
        """top_ids, top_logprobs: the likeliest in place of each, int32 and float32 (T, k); None: nobody asked."""
        self._chat = chat
        self._ids = ids
        self._logprobs = logprobs
        self._top_ids = top_ids
        self._top_logprobs = top_logprobs

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Token]: ...
    def __getitem__(self, index: int | slice) -> Token | Sequence[Token]:
        if isinstance(index, slice):
            top_ids = None if self._top_ids is None else self._top_ids[index]
            top_logprobs = None if self._top_logprobs is None else self._top_logprobs[index]
            return _Tokens(self._chat, self._ids[index], self._logprobs[index], top_ids, top_logprobs)
        top = tuple(self._likeliest(index))
        return Token(text=self._text(self._ids[index]), logprob=float(self._logprobs[index]), top=top)

    def _likeliest(self, index: int) -> Iterator[Token]:
        if self._top_ids is not None and self._top_logprobs is not None:
            for each, logprob in zip(self._top_ids[index], self._top_logprobs[index], strict=True):
                if each >= 0:
                    yield Token(text=self._text(each), logprob=float(logprob))

    def _text(self, token: Any) -> str:
        return self._chat.decode([int(token)])
