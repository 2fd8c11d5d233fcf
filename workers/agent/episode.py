"""One trajectory's life: reset, then turn by turn, until the environment says it is over.

- The tokens are one growing sequence; observations are tokenised once, when they appear, and never again. A world that
  speaks in chat messages has a Dialogue in the Transcript's place.
- After a take-over the episode goes on as its environment says: `replay` steps a fresh world through the turns that
  are settled, `snapshot` loads the state saved after the last of them, `restart` fails the attempt and starts anew.
- The episode takes no turn that was made in another context than its own: if a world says or pays something else after
  a replay or restore, the attempt fails as "diverged", and a new one starts. The two are never mixed.
- Infrastructure failures are no rewards: any exception here fails the attempt.
- A world's output is bounded on arrival, before it is tokenised, encoded, logged or sent; a thread does the tokenising
  or encoding that may take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from ...fabric.chat.choice import FREE, read_choice
from ...fabric.chat.template import ChatTemplate
from ...fabric.contract.clock import Clock, SystemClock
from ...fabric.contract.errors import (
    BrokerError,
    ClaimLost,
    EngineUnsupported,
    EnvironmentFailed,
    FabricError,
    InputError,
    WireError,
)
from ...fabric.contract.ids import turn_id
from ...fabric.contract.images import NO_FILES
from ...fabric.contract.limits import (
    INFO_BYTES_MAX,
    SNAPSHOT_BYTES_MAX,
    SNAPSHOTS_BYTES_MAX,
    check_prompt,
)
from ...fabric.contract.records import (
    NO_IDS,
    Int32,
    Rollout,
    RunConfig,
    Sampling,
    TurnJob,
    TurnResult,
    check_reward,
    sum_rewards,
)
from ...fabric.contract.sampling import GUIDED, check_sampling, sampling_from, turn_seed, with_ends
from ...fabric.contract.wire import dump_json, load_json
from ...fabric.model.tokenizer import Tokenizer
from ...fabric.ports.queue import TrajectoryClaim, TrajectoryQueue, TurnPush, TurnQueue
from ...fabric.rules.queue.placement import NO_HOME, Home, Homes
from ...fabric.rules.queue.timings import RunTimings
from ...fabric.tracing.spans import Place, place_of
from ..engines.model_tokenizer import chat_of
from ..environments.answers import BRIEF, check_observation, check_step, dump_within, weigh
from ..environments.base import (
    Environment,
    Recovery,
    Step,
    TextSampling,
    as_error,
    check_setting,
    time_limit,
)
from ..environments.failures import reason_of, traceback_of
from ..environments.isolated import IsolatedEnvironment
from ..environments.registry import Registry
from ..environments.room import Room
from .desk import Desk
from .dialogue import Dialogue
from .session import AgentSession, all_asked_for
from .slots import Quarantine
from .transcript import Transcript

log = logging.getLogger(__name__)

T = TypeVar("T")

DIVERGED = {  # advice for people, by how the environment recovers
    "replay": 'Its answers do not follow from task, seed and actions: mend that, or set recovery = "restart" on it',
    "snapshot": "Its answers do not follow from its snapshot and the actions since: mend that, or set "
    'recovery = "restart" on it',
    "restart": "Nothing is wrong with it: it began again, as it says, and that turn was still on its way for the life "
    "before",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The agent that runs the episode, the time limit of one call of its environment, and the room for snapshots."""

    agent_id: str
    call_timeout_s: float
    desk: Desk = field(default_factory=Desk)
    """Where agents that play by themselves reach their sessions."""
    clock: Clock = field(default_factory=SystemClock)
    timings: RunTimings = field(default_factory=RunTimings)
    """Of the run, where what a step takes is noted."""
    room: Room = field(default_factory=lambda: Room(SNAPSHOTS_BYTES_MAX))
    """Memory for snapshots, shared by all episodes of the agent."""


@dataclass(slots=True, eq=False)
class _Call:
    """A turn that an episode asks for; `answer` becomes None if the trajectory's claim is lost.

    asked_at_s: when it was asked for last, on the event loop's clock.
    """

    push: TurnPush
    answer: asyncio.Future[TurnResult | None]
    asked_at_s: float


class TurnCaller:
    """Asks the broker for the episodes of one run: for the next turn, and to keep a snapshot.

    All turns that are asked for in one round of the event loop go in one call; each result goes to its episode.
    """

    def __init__(
        self,
        agent_id: str,
        turns: TurnQueue,
        trajectories: TrajectoryQueue,
        quarantine: Quarantine,
        *,
        ask_again_s: float,
        timings: RunTimings,
        run: RunConfig,
    ) -> None:
        """Make a caller; its owner must keep `push` and `receive` running as long as any episode asks.

        run: whose turns they are, as it was set.
        """
        self._run = run
        self.agent_id = agent_id
        self._timings = timings
        self._turns = turns
        self._trajectories = trajectories
        self._quarantine = quarantine
        self._ask_again_s = ask_again_s
        self._waiting: dict[str, _Call] = {}  # by turn
        self._silent_since_s = 0.0  # on the event loop's clock; of use only while an episode waits
        self.heard_at_s = -math.inf
        """When the last turn came, on the event loop's clock."""
        self.answered_at_s = -math.inf
        """When the broker last answered to being asked for turns, which it is all the time; likewise on that clock."""
        self._asked: list[_Call] = []
        self._cancelled: list[TurnPush] = []
        self._has_asked = asyncio.Event()
        self._look_at_s = -math.inf
        self._homes = Homes()

    async def ask(
        self, claim: TrajectoryClaim, job: TurnJob, files: Mapping[str, bytes] = NO_FILES, *, goes_home: bool = True
    ) -> TurnResult:
        """Ask for a turn and wait for its result. files: of its images at least, by digest.

        goes_home: whether its context goes on from the trajectory's last turn.

        Raises:
            ClaimLost: somebody else holds the trajectory.
            QueueFull: the trajectory has had all its turns (facts: is_final).
        """
        trajectory = played_at(claim)
        if trajectory is not None:
            job = replace(job, traceparent=trajectory.child(job.turn_id).traceparent)
        loop = asyncio.get_running_loop()
        name, begun_s = claim.job.trajectory_id, loop.time()
        home = self._homes.leave(name)
        push = _push(claim, job, files, home if goes_home else NO_HOME)
        if not self._waiting:
            self._hear()
        call = self._waiting[job.turn_id] = _Call(push, loop.create_future(), begun_s)
        self._asked.append(call)
        self._has_asked.set()
        try:
            result = await call.answer
        finally:
            call.answer.cancel()  # also stops a push that still waits: its answer would look like a later claim's
            if self._waiting.get(job.turn_id) is call:  # false if a later claim asks for the same turn
                del self._waiting[job.turn_id]
        if result is None:
            raise _lost(claim)
        self._quarantine.clear(claim)
        ended_s = loop.time()
        self._timings.note("turn", ended_s - begun_s, name)
        if trajectory is not None and self._timings.spans.is_on:
            self._trace(trajectory, push, result, begun_s, ended_s)
        if result.spans:
            self._homes.note(self._run, name, result.spans[-1])
        return result

    def _trace(self, trajectory: Place, push: TurnPush, result: TurnResult, begun_s: float, ended_s: float) -> None:
        """Add the span of a turn, as whoever asked for it saw it."""
        job = push.job
        self._timings.spans.add(
            "turn",
            place_of(job.traceparent),
            trajectory,
            begun_s,
            ended_s,
            error=result.finish_reason if result.finish_reason in ("error", "refused") else "",
            model=self._run.model,
            trajectory_id=push.trajectory_id,
            turn_id=job.turn_id,
            input_tokens=len(job.prompt_ids),
            output_tokens=len(result.completion_ids),
            max_tokens=job.sampling.max_tokens,
            temperature=job.sampling.temperature,
            finish_reasons=(result.finish_reason,),
            worker_ids=tuple(dict.fromkeys(span.worker_id for span in result.spans)),
            policy_version=min((span.policy_version for span in result.spans), default=None),
            is_handed_over=result.resumed,
        )

    @property
    def waiting(self) -> set[str]:
        """The trajectories that wait for a turn."""
        return {call.push.trajectory_id for call in self._waiting.values()}

    def silent_s(self) -> float:
        """Tell for how long no turn of the run has come; of use only while an episode waits."""
        return asyncio.get_running_loop().time() - self._silent_since_s

    def _hear(self) -> None:
        self._silent_since_s = asyncio.get_running_loop().time()

    def cancel(self, claim: TrajectoryClaim, job: TurnJob) -> None:
        """Give up a turn that was asked for; whoever waits gets a result that says so, unless it has come before."""
        self._cancelled.append(_push(claim, job, NO_FILES, NO_HOME))
        self._has_asked.set()

    async def save(self, claim: TrajectoryClaim, snapshot: bytes) -> None:
        """Keep a snapshot for the next agent. Raises ClaimLost."""
        if not await self._trajectories.save(self.agent_id, claim, snapshot):
            raise _lost(claim)

    async def push(self) -> None:
        """Push the turns that are asked for, then cancel those that are given up; for ever.

        Raises:
            BrokerError: that failed; its turns stay asked for, and the next call pushes them.
        """
        while True:
            await self._has_asked.wait()
            await asyncio.sleep(0)
            self._has_asked.clear()
            asked, self._asked = [call for call in self._asked if not call.answer.done()], []
            cancelled, self._cancelled = self._cancelled, []
            try:
                answers = await self._turns.push(self.agent_id, [call.push for call in asked]) if asked else []
                for call, why in zip(asked, answers, strict=True):
                    if why == "lost" and not call.answer.done():
                        call.answer.set_result(None)
                    elif why == "over" and not call.answer.done():
                        call.answer.set_exception(all_asked_for(call.push.turn_count_max))
                asked = []
                if cancelled:
                    await self._turns.cancel(self.agent_id, cancelled)
            except BrokerError:
                self._asked = [*asked, *self._asked]
                self._cancelled = [*cancelled, *self._cancelled]
                self._has_asked.set()
                raise

    async def receive(self) -> None:
        """Bring each result to the episode that waits for it, and ask again for turns that take long; for ever."""
        while True:
            results = await self._turns.results(self.agent_id, min(1.0, self._ask_again_s))
            self.answered_at_s = asyncio.get_running_loop().time()
            for result in results:
                self._hear()
                self.heard_at_s = self._silent_since_s
                call = self._waiting.get(result.turn_id)
                if call is not None and not call.answer.done():
                    call.answer.set_result(result)
            if self.answered_at_s >= self._look_at_s:
                self._ask_again(self.answered_at_s)

    def _ask_again(self, now_s: float) -> None:
        """Ask again for turns that were last asked for long ago: somebody may have lost them."""
        self._look_at_s = now_s + min(1.0, self._ask_again_s)
        due = [call for call in self._waiting.values() if now_s - call.asked_at_s >= self._ask_again_s]
        for call in due:
            call.asked_at_s = now_s
        if due:
            self._asked += due
            self._has_asked.set()


def played_at(claim: TrajectoryClaim) -> Place | None:
    """Return the place of a trajectory in its trace, which all agents that play one attempt know; None: not traced."""
    submitted = place_of(claim.job.traceparent)
    return None if submitted is None else submitted.child(claim.job.trajectory_id, claim.attempt)


def _push(claim: TrajectoryClaim, job: TurnJob, files: Mapping[str, bytes], home: Home) -> TurnPush:
    return TurnPush(
        trajectory_id=claim.job.trajectory_id,
        fence=claim.fence,
        job=job,
        turn_count_max=claim.turn_count_max,
        home=home.worker_id,
        home_version=home.version,
        images={place.digest: files[place.digest] for place in job.images} if files else NO_FILES,
    )


def _lost(claim: TrajectoryClaim) -> ClaimLost:
    name = claim.job.trajectory_id
    return ClaimLost(f"trajectory {name} is held by someone else now", job_id=name, fence=claim.fence)


class Episode:
    """Runs one claimed trajectory."""

    def __init__(
        self,
        run: RunConfig,
        claim: TrajectoryClaim,
        registry: Registry,
        tokenizer: Tokenizer,
        limits: Limits,
        caller: TurnCaller,
    ) -> None:
        self._run = run
        self._claim = claim
        self._registry = registry
        self._limits = limits
        self._caller = caller
        self._tokenizer = tokenizer
        self._transcript: Transcript | Dialogue = Transcript(tokenizer, NO_IDS)
        self._texts: list[str] = []
        self._recovery: Recovery = "replay"
        self._has_limit = True  # whether we limit the time of a call; known once the world is open
        self._began_s = limits.clock.now_s()
        self._turn_ms: list[int] = []  # see Rollout
        self._place = played_at(claim)  # in its trace
        self._stated: tuple[TextSampling, Sampling] | None = None  # the world's settings, and what came of them
        self._open_yet = contextlib.AsyncExitStack()
        self.session: AgentSession | None = None  # of an agent that plays by itself

    async def run(self) -> Rollout:
        """Play the trajectory to its end; return the rollout, scored unless the run has a reward function.

        Its world is open yet: `close` it, whatever comes of the rollout.

        Raises:
            EnvironmentFailed: user code raised, hung, or gave an impossible answer; traceback in its facts. Its reason
                is "restart" or "diverged" if the trajectory cannot go on from where a lost worker left it.
        """
        if (task := asyncio.current_task()) is not None:
            task.set_name(f"{self._name} of {self._claim.job.trajectory_id}")  # the watchdog names us so
        async with contextlib.AsyncExitStack() as held:
            world = await self._open(held)
            held.push_async_callback(self._close, world)
            if world.is_agent:
                rollout = await self._play(world)
            else:
                step = await self._recover(world)
                while self._goes_on(world, step):
                    step = await self._turn(world)
                rollout = await self._rollout(step)
            self._open_yet = held.pop_all()
        return rollout

    async def close(self) -> None:
        """Close the world of an episode that ended well; once that is settled, no world that hangs holds it up."""
        await self._open_yet.aclose()

    async def _play(self, world: Environment) -> Rollout:
        """Let an agent play by itself, in a session; what it asked for before it was lost answers its first calls."""
        job, desk = self._claim.job, self._limits.desk
        with self._told("play"):
            chat = await self._chat()
        parts = (self._tokenizer, self._caller, self._limits.clock, desk.huge)
        self.session = AgentSession(self._run, self._claim, chat, *parts, broker_wait_s=desk.broker_wait_s)
        self._claim = replace(self._claim, turns=())
        async with desk.admitted(self.session) as access:
            played = await self._guard("play", lambda: world.play(load_json(dump_json(job.task)), job.seed, access))
        with self._told("play"):
            record = self.session.record(played.reward)
        given = self.session.facts.reward
        end = "truncated" if played.truncated else "terminated"
        return await self._made(end, played.info, [] if given is None else [given], record)

    async def _rollout(self, last: Step) -> Rollout:
        rewards = self._transcript.rewards
        reward = sum_rewards(rewards, self._name) if self._run.reward is None else None
        record = {"reward": reward, "turn_count": len(rewards), "turn_ms": self._turn_ms, **self._transcript.record()}
        end = "terminated" if last.terminated else "truncated" if last.truncated else "turns"
        return await self._made(end, last.info, rewards, record)

    async def _made(self, end: str, info: dict[str, Any], rewards: list[float], record: dict[str, Any]) -> Rollout:
        """Make the rollout of an episode that ended so; the record holds its tokens, turns and reward."""
        dumped = await self._dump("info", info, INFO_BYTES_MAX)
        job = self._claim.job
        return Rollout(
            trajectory_id=job.trajectory_id,
            group_id=job.group_id,
            task_id=job.task_id,
            finish_reason=end,
            attempt=self._claim.attempt,
            seed=job.seed,
            info={**load_json(dumped), "rewards": rewards},
            traceparent="" if self._place is None else self._place.traceparent,
            **record,
        )

    # ---- the world

    async def _open(self, held: contextlib.AsyncExitStack) -> Environment:
        """Open the world; one that plays by itself waits for a place, which is held."""
        name = self._run.environment
        self._has_limit = False
        self._has_limit = await self._guard("make", lambda: self._registry.is_inside(name))
        if self._registry.plays(name):
            await held.enter_async_context(self._limits.desk.places)
        return await self._opened()

    async def _opened(self) -> Environment:
        """Open the world. A world with a process of its own keeps time itself; the wait for a process has no limit."""
        name, options, limit_s = self._run.environment, self._run.environment_options, self._limits.call_timeout_s
        world = await self._guard(
            "make", lambda: self._registry.open(name, options, owner=self._run.run_id, timeout_s=limit_s)
        )
        if world.inline:  # it never waits for anything, so no limit could stop it
            self._has_limit = False
        return world

    async def _close(self, world: Environment) -> None:
        """Close the world; a failure is logged and takes nothing back, as the trajectory has ended."""
        try:
            await self._guard("close", world.close)
        except FabricError as error:
            log.warning("episode.close_failed", extra={"job_id": self._claim.job.trajectory_id, "reason": str(error)})

    async def _recover(self, world: Environment) -> Step:
        """Start the episode, or bring it to where an earlier claim left it."""
        job, settled = self._claim.job, self._settled()
        self._recovery = check_setting(self._name, "recovery", world.recovery)
        if settled and world.recovery == "restart":
            raise EnvironmentFailed(
                f"environment {self._run.environment!r} cannot continue after a lost worker: a new attempt starts",
                reason="restart",
            )
        snapshot = self._claim.snapshot
        self._claim = replace(self._claim, snapshot=None)  # so that its memory is free once it is restored
        if settled and world.recovery == "snapshot" and snapshot is not None:
            with self._limits.room.share() as share:
                if await share.take(len(snapshot)):
                    return await self._restore(world, snapshot)
        observation = await self._guard("reset", lambda: world.reset(load_json(dump_json(job.task)), job.seed))
        observation = await check_observation(observation, self._name)
        if observation.messages:
            self._transcript = await self._dialogue(observation.messages, observation.tools)
        else:
            ids = np.array(observation.ids, np.int32) if observation.ids else None
            ids = await self._encode(observation.text, where="reset") if ids is None else ids
            self._transcript = Transcript(self._tokenizer, ids)
        return await self._replay(world, Step(observation.text, 0.0), settled)

    def _settled(self) -> tuple[TurnResult, ...]:
        """Return the settled turns up to the first that is missing."""
        job, turns = self._claim.job, self._claim.turns
        names = (turn_id(job.trajectory_id, index) for index in itertools.count())
        return tuple(turn for turn, name in zip(turns, names, strict=False) if turn.turn_id == name)

    async def _replay(self, world: Environment, step: Step, settled: Sequence[TurnResult]) -> Step:
        """Step the world through settled turns, from `step` on; return the last step."""
        for result in settled:
            if step.is_done:
                raise self._diverged("it is over earlier than before")
            step = await self._apply(world, result)
            self._turn_ms += [self._now_ms()] * 3
        return step

    async def _restore(self, world: Environment, snapshot: bytes) -> Step:
        """Load the state saved after some turn, then step through the turns settled since."""
        settled = self._settled()
        try:
            state = load_json(snapshot)
            if "messages" in state:
                self._transcript = await self._dialogue(state["messages"], state["tools"])
            else:
                self._transcript = Transcript(self._tokenizer, np.array(state["prompt_ids"], np.int32))
            said = state.get("said") or [[] for _ in state["texts"]]
            known = [
                Step(text, reward, messages=messages)
                for text, reward, messages in zip(state["texts"], state["rewards"], said, strict=True)
            ]
            last = known[-1]
        except (WireError, LookupError, TypeError, ValueError) as error:
            raise EnvironmentFailed(
                f"{self._name}: its snapshot cannot be read: {error!r}", reason="restore"
            ) from error
        if len(known) > len(settled):
            raise self._diverged(f"its snapshot is of turn {len(known)}, and only {len(settled)} are known")
        await self._guard("restore", lambda: world.restore(state["world"]))
        for step, result in zip(known, settled, strict=False):
            await self._take(result)
            await self._add_step(step)
            self._turn_ms += [self._now_ms()] * 3
        return await self._replay(world, last, settled[len(known) :])

    async def _turn(self, world: Environment) -> Step:
        job = TurnJob(
            turn_id=turn_id(self._claim.job.trajectory_id, self._turn_count),
            agent_id=self._limits.agent_id,
            prompt_ids=await self._context(),
            sampling=self._chosen(world, self._sampling(world)),
            context_digest=self._transcript.digest(),
            images=self._transcript.images(),
        )
        check_prompt(job.turn_id, len(job.prompt_ids))
        asked_ms = self._now_ms()
        result = await self._caller.ask(self._claim, job, self._transcript.files)
        answered_ms = self._now_ms()
        if result.finish_reason == "refused":
            raise EngineUnsupported(f"turn {job.turn_id} was refused: {result.error}")
        if result.finish_reason == "error":
            raise FabricError(f"turn {job.turn_id} failed: {result.error}")
        step = await self._apply(world, result)
        self._turn_ms += [asked_ms, answered_ms, self._now_ms()]
        if world.recovery == "snapshot" and self._goes_on(world, step):
            await self._snapshot(world)
        return step

    async def _apply(self, world: Environment, result: TurnResult) -> Step:
        """Give one turn's text to the world and record its answer."""
        action = await self._take(result)
        begun_s = self._limits.clock.now_s()
        step = await self._guard("step", lambda: world.step(copy.deepcopy(action)))  # the record keeps its own
        ended_s = self._limits.clock.now_s()
        self._limits.timings.note("environment_step", ended_s - begun_s, self._claim.job.trajectory_id)
        if self._place is not None:
            at = self._place.child("step", self._turn_count, self._claim.fence)
            name = self._run.environment
            self._limits.timings.spans.add("environment_step", at, self._place, begun_s, ended_s, tool=name)
        step = await check_step(step, self._name, is_chat=isinstance(self._transcript, Dialogue))
        await self._add_step(step)
        return step

    async def _snapshot(self, world: Environment) -> None:
        with self._limits.room.share() as share:
            if isinstance(world, IsolatedEnvironment):
                kept = await self._guard("snapshot", lambda: world.snapshot_within(share))
                if share.is_refused:
                    return  # the kept snapshot is older: a take-over steps through the turns since then
            else:
                kept = await self._guard("snapshot", world.snapshot)
            state = {
                "world": kept,
                "texts": self._texts,
                "rewards": self._transcript.rewards,
                **self._transcript.state(),
            }
            await self._caller.save(self._claim, await self._dump("snapshot", state, SNAPSHOT_BYTES_MAX))

    # ---- the record

    def _now_ms(self) -> int:
        return int((self._limits.clock.now_s() - self._began_s) * 1000)

    @property
    def _turn_count(self) -> int:
        return len(self._transcript.rewards)

    async def _take(self, result: TurnResult) -> str | dict[str, Any]:
        """Record a turn that was made in this context; return it as the world reads it.

        Workers that know no digests send an empty one.
        """
        if isinstance(self._transcript, Dialogue):
            await self._context()  # by a thread, if it is long: what comes next needs it
        if result.context_digest not in ("", self._transcript.digest()):
            raise self._diverged(f"turn {self._turn_count} was made in another context than the one it came to")
        return self._transcript.add_turn(result)

    def _diverged(self, how: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"{self._name} diverged: {how}; a new attempt starts. {DIVERGED[self._recovery]}", reason="diverged"
        )

    async def _add_step(self, step: Step) -> None:
        reward = check_reward(step.reward, self._name)
        if isinstance(self._transcript, Dialogue):
            said = [] if step.is_done else self._messages(step)
            with self._told("step"):
                self._transcript.add_step(reward, said)
        else:
            is_read = step.text and not step.is_done
            self._transcript.add_step(reward, await self._encode(step.text, where="step") if is_read else NO_IDS)
        self._texts.append(step.text)

    async def _dialogue(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Dialogue:
        """Begin a conversation by the model's own chat template."""
        with self._told("reset"):
            return Dialogue(await self._chat(), messages, tools)

    async def _chat(self) -> ChatTemplate:
        """Return the model's chat template; in a thread, for the first of a process may import a library for seconds.

        Raises:
            ConfigError: it has none.
        """
        return await asyncio.to_thread(chat_of, self._tokenizer, self._run.model)

    def _messages(self, step: Step) -> list[dict[str, Any]]:
        """Return what the world said after a turn: its messages, or its text as the user's."""
        if step.messages:
            return step.messages
        if not step.text:
            raise EnvironmentFailed(
                f"{self._name}: step gave no messages and no text, though it goes on: the policy needs something to "
                "answer",
                reason="step",
            )
        return [{"role": "user", "content": step.text}]

    async def _context(self) -> Int32:
        """Return the context of the next turn; a thread renders and tokenises a long conversation."""
        transcript = self._transcript
        if isinstance(transcript, Transcript):
            return transcript.context()
        with self._told("step" if self._turn_count else "reset"):
            return transcript.context() if transcript.is_brief else await asyncio.to_thread(transcript.context)

    @contextlib.contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """Say of whom a refused message is."""
        try:
            yield
        except FabricError as error:
            raise EnvironmentFailed(f"{self._name}: {where}: {error.message}", reason=where) from error

    async def _encode(self, text: str, where: str) -> Int32:
        encode = self._tokenizer.encode
        ids = encode(text) if len(text) <= BRIEF else await asyncio.to_thread(encode, text)
        if where == "reset" and not len(ids):
            raise EnvironmentFailed(
                f"{self._name}: the first observation is empty, the policy needs a token to start from", reason="reset"
            )
        return ids

    def _sampling(self, world: Environment) -> Sampling:
        if self._stated is None or self._stated[0] is not world.sampling:
            self._stated = world.sampling, self._settings(check_setting(self._name, "sampling", world.sampling))
        base = self._stated[1]
        if base.seed is None:
            return base
        return replace(base, seed=turn_seed(base.seed, self._claim.job.trajectory_id, self._turn_count))

    def _chosen(self, world: Environment, sampling: Sampling) -> Sampling:
        """Have a turn call the tools that the world chooses; its context is known."""
        choice = read_choice(check_setting(self._name, "tool_choice", world.tool_choice))
        if choice is None or choice == FREE:
            return sampling
        where = "step" if self._turn_count else "reset"
        if not isinstance(self._transcript, Dialogue) or sampling.is_guided:
            why = "its turns are guided" if sampling.is_guided else "it says no messages"
            raise EnvironmentFailed(f"{self._name}: tool_choice forces calls, but {why}: leave it out", reason=where)
        with self._told(where):
            return replace(sampling, guided_tag=self._transcript.tag(choice))

    def _settings(self, own: TextSampling) -> Sampling:
        """Return the run's settings of sampling, and the world's where the run has none."""
        wanted = self._run.sampling
        stated = {name: value for name, value in own.row().items() if not (name in GUIDED and GUIDED & wanted.keys())}
        made = sampling_from(check_sampling({**stated, **wanted}, f"{self._name}: sampling"))
        eos_id = self._tokenizer.eos_id if own.ends_at_eos else None
        if isinstance(self._transcript, Dialogue):
            return with_ends(made, self._transcript.stop_ids)
        return with_ends(made, [] if eos_id is None else [eos_id])

    def _goes_on(self, world: Environment, step: Step) -> bool:
        """Tell whether the episode asks for another turn."""
        own = check_setting(self._name, "turn_count_max", world.turn_count_max)  # it may say so at its reset only
        return not step.is_done and self._turn_count < min(own, self._run.turn_count_max)

    async def _guard(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Call user code under its time limit, and translate any exception to EnvironmentFailed."""
        where = f"{self._name}: {what}"
        try:
            return await (self._in_time(where, work) if self._has_limit else _contain(work))
        except FabricError:
            raise
        except Exception as error:  # a user's environment: its attempt fails, and the agent goes on
            raise EnvironmentFailed(
                f"{where} raised {reason_of(error)}", reason=what, traceback=traceback_of(error)
            ) from error

    async def _in_time(self, where: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` in a task of its own; leave the task behind if even a cancellation does not end it."""
        task = asyncio.create_task(_contain(work), name=where)
        try:
            async with time_limit(self._limits.call_timeout_s):
                await asyncio.wait((task,))
        except TimeoutError as error:
            raise EnvironmentFailed(
                f"{where} took longer than {self._limits.call_timeout_s:g} s; "
                'if it goes on nevertheless, isolation = "process" would end it',
                reason="timeout",
            ) from error
        finally:
            task.cancel()
        return task.result()

    async def _dump(self, what: str, value: object, bytes_max: int) -> bytes:
        """Encode a world's output as JSON; weigh it first, as it may be of any size."""
        try:
            if weigh(value, BRIEF) <= BRIEF:
                return dump_json(value)
            return await asyncio.to_thread(dump_within, f"its {what}", value, bytes_max)
        except InputError as error:
            raise EnvironmentFailed(f"{self._name}: {what} cannot be sent: {error}", reason=what) from error

    @property
    def _name(self) -> str:
        return f"environment {self._run.environment!r}"


async def _contain(work: Callable[[], Awaitable[T]]) -> T:
    """Call user code; turn all that would end more than this call, but our own cancellation, into an error."""
    try:
        return await work()
    except Exception:  # ends its call alone as it is
        raise
    except BaseException as error:  # user code: whatever it raises becomes the error of its call
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise as_error(error) from error
