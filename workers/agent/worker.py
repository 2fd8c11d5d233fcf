"""The agent worker: drives environments, many at once, and asks for turns.

Per run that it can serve, three loops share one claim table: claim new trajectories, hand turn requests to the broker
in batches, and give arriving results to whoever waits for them. One trajectory's life is episode.py's.

- An environment that raises or hangs costs its own trajectory alone: the attempt fails, is tried again, and in the
  end is a dead letter with its traceback; it is never scored as reward 0.
- A claim that is lost ends its episode at once; whoever took it over goes on.
- Heartbeats, renewals and reaping share neither loop nor connection with all that (keeper.py): nothing that an
  environment gives or does holds them up.
- It holds one suspect at a time (fabric/rules/queue/retries.py): a trajectory that may have ended the agents before
  this one.
- Runs share the places for environments by weight (slots.py).
- A run whose model has no tokenizer here costs itself alone (tokenizers.py): the others are served.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, ClaimLost, FabricError, WireError
from ...fabric.contract.limits import SNAPSHOTS_BYTES_MAX
from ...fabric.contract.records import RunConfig, TurnJob, TurnResult, WorkerInfo
from ...fabric.contract.tokenizer import Tokenizer
from ...fabric.ports.queue import Fabric, TrajectoryClaim, TurnPush
from ...fabric.rules.queue.retries import is_suspect
from ...fabric.rules.queue.runs import is_same_run
from ..environments.failures import dead_letter
from ..environments.registry import Registry
from ..environments.room import Room
from .episode import Episode, Limits
from .keeper import AskReward, Elsewhere, Keeper, KeeperConfig
from .slots import Places
from .tokenizers import Tokenizers

log = logging.getLogger(__name__)


TrajectoryClaimId = tuple[str, int]  # trajectory_id, fence

WAIT_S = 0.5  # longest wait for work, or for a place: the safety net below the doorbell


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of an agent worker."""

    worker_id: str
    environment_count: int = 256
    """Environments at once, over all runs, [1, 10000]."""
    environment_timeout_s: float = 30.0
    """A reset or step that takes longer fails its attempt."""
    ask_again_s: float = 60.0
    """A turn without a result for this long is asked for again, which changes nothing if it is under way, and brings
    the result if that was lost on its way here. Waiting itself has no end: there may be no worker for hours."""
    renew_s: float = 0.5
    """Must be well below the claim time of 2 s; a cancelled group has let go of its places after as long."""
    reap_s: float = 0.25
    """How often what others lost is taken back, and groups past their deadline are completed."""
    runs_s: float = 0.25
    """How often new runs, and changed settings of others, are looked for."""
    hub_names: tuple[str, ...] = ()
    """Models whose tokenizers may be downloaded for a run that names them, as patterns: "org/*"."""
    hung_s: float = 30.0
    """An agent whose event loop stands for longer is hung, and its trajectories are for others."""


class Quarantine:
    """The one place for a suspect; from when a suspect may be asked for until it has got on, or ended."""

    def __init__(self) -> None:
        self._holder: object = None

    def take(self) -> bool:
        """Whether a suspect may be asked for now; then `hold` is called with what came."""
        if self._holder is not None:
            return False
        self._holder = self
        return True

    def hold(self, claims: Sequence[TrajectoryClaim]) -> None:
        """Of what was claimed, the suspect stays in the place."""
        self._holder = next((claim for claim in claims if is_suspect(claim.loss)), None)

    def clear(self, claim: TrajectoryClaim) -> None:
        """It has got on, or ended."""
        if self._holder is claim:
            self._holder = None


class AgentWorker:
    """Serves every run whose environment it offers."""

    def __init__(
        self,
        fabric: Fabric,
        registry: Registry,
        config: AgentConfig,
        clock: Clock,
        *,
        ask_reward: AskReward,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`elsewhere`: how the keeper gets a thread of its own; None: it shares this loop and `fabric`."""
        self._fabric = fabric
        self._registry = registry
        self._config = config
        self._clock = clock
        self._ask_reward = ask_reward
        self._elsewhere = elsewhere
        self._places = Places(config.environment_count)
        self._quarantine = Quarantine()
        self._room = Room(SNAPSHOTS_BYTES_MAX)
        self._tokenizers = Tokenizers(clock, config.hub_names)
        self._agents: dict[str, RunAgent] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then give unfinished trajectories back."""
        own = self._config
        config = KeeperConfig(worker_id=own.worker_id, renew_s=own.renew_s, reap_s=own.reap_s, hung_s=own.hung_s)
        keeper = Keeper(config, self._clock, say=self._say, kept=lambda: self._agents)
        async with keeper.keeping(self._fabric, self._ask_reward, self._elsewhere) as check:
            try:
                while not stop.is_set():
                    check()
                    await self._follow_runs()
                    await self._clock.sleep(self._config.runs_s)
            finally:
                self._tokenizers.close()
                await asyncio.gather(*(agent.close() for agent in self._agents.values()), return_exceptions=True)

    async def _follow_runs(self) -> None:
        try:
            runs = await self._fabric.board.runs()
        except (BrokerError, WireError) as error:  # away, or with a row that is none: those that are served go on
            log.warning("agent.runs_not_read", extra={"error": str(error)})
            return
        for name, agent in list(self._agents.items()):
            if name not in runs or agent.has_died() or not agent.follow(runs[name]):
                await self._agents.pop(name).close()
                self._places.leave(name)
        self._tokenizers.keep(runs)
        for name, config in runs.items():
            if config.environment not in self._registry.offered():
                continue
            if name not in self._agents:
                tokenizer = self._tokenizers.of(config)
                if tokenizer is None:
                    continue
                self._agents[name] = RunAgent(self, config, tokenizer)
            self._places.join(name, config.weight)

    def _say(self) -> WorkerInfo:
        """What the keeper says of us, from its own thread."""
        return WorkerInfo(
            worker_id=self._config.worker_id,
            role="agent",
            pid=os.getpid(),
            host=socket.gethostname(),
            slot_count=self._config.environment_count,
            running_count=self.running_count,
            environments=self._registry.offered(),
            error=self._tokenizers.error,
        )

    @property
    def running_count(self) -> int:
        """Environments in use now."""
        return sum(len(agent.claims) for agent in list(self._agents.values()))

    @property
    def parts(self) -> tuple[Fabric, Registry, AgentConfig, Clock, AskReward]:
        """What a RunAgent works with."""
        return self._fabric, self._registry, self._config, self._clock, self._ask_reward

    @property
    def places(self) -> Places:
        """The places for environments, shared between the runs."""
        return self._places

    @property
    def room(self) -> Room:
        """Memory for snapshots, of whatever run."""
        return self._room

    @property
    def quarantine(self) -> Quarantine:
        """The place for a suspect, of whatever run."""
        return self._quarantine


class RunAgent:
    """The part of an agent worker that serves one run."""

    def __init__(self, owner: AgentWorker, run: RunConfig, tokenizer: Tokenizer) -> None:
        self._places, self._quarantine, self._room = owner.places, owner.quarantine, owner.room
        self._fabric, self._registry, self._config, self._clock, self._ask_reward = owner.parts
        self._run = run
        self._trajectories = self._fabric.trajectories(run)
        self._turns = self._fabric.turns(run)
        self._tokenizer = tokenizer
        self.claims: dict[str, TrajectoryClaim] = {}
        self._episodes: dict[str, asyncio.Task[None]] = {}
        self._settling: set[TrajectoryClaimId] = set()
        self._waiting: dict[str, asyncio.Future[TurnResult]] = {}
        self._asked: list[TurnPush] = []
        self._has_asked = asyncio.Event()
        loops = (self._claim, self._push, self._receive)
        self._loops = [asyncio.create_task(self._patiently(loop)) for loop in loops]

    @property
    def run(self) -> RunConfig:
        """The run as it is now."""
        return self._run

    def follow(self, run: RunConfig) -> bool:
        """Take in settings that changed, for claims from now on: episodes under way go on as they began.

        How often a trajectory may fail counts at once. False: it is another run, made anew under the same name.
        """
        if not is_same_run(self._run, run):
            return False
        if run != self._run:
            self._run, self._trajectories = run, self._fabric.trajectories(run)
        return True

    def has_died(self) -> bool:
        """Whether a loop ended by an error that is ours."""
        for loop in self._loops:
            if loop.done() and not loop.cancelled() and loop.exception() is not None:
                log.error("agent.loop_died", exc_info=loop.exception(), extra={"run_id": self._run.run_id})
                return True
        return False

    async def close(self) -> None:
        """Stop, and give back what is unfinished."""
        held, running = list(self.claims.values()), [*self._loops, *self._episodes.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        try:
            await self._trajectories.release(self._config.worker_id, held)
        except FabricError as error:
            log.warning("agent.left_without_saying", extra={"error": str(error)})

    async def _patiently(self, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except (BrokerError, WireError) as error:  # away, or with rows that cannot be read
                log.warning("agent.broker_lost", extra={"error": str(error)})
                await self._clock.sleep(0.5)

    # ---- the loops

    async def _claim(self) -> None:
        run_id = self._run.run_id
        while True:
            is_inside = await self._is_inside()
            want, claims = self._places.take(run_id), []
            if not want:
                await self._places.changed(WAIT_S)
                continue
            takes_suspect = is_inside and self._quarantine.take()
            try:
                found = await self._trajectories.claim(
                    self._config.worker_id, want, takes_suspect=takes_suspect or not is_inside, is_inside=is_inside
                )
                claims = [dataclasses.replace(each, snapshot=None) for each in found]  # those are kept
            finally:
                self._places.used(run_id, want, len(claims))
                if takes_suspect:
                    self._quarantine.hold(claims)
            for claim in claims:
                self._start(claim, found.pop(0))
            if not claims:
                await self._trajectories.wait(WAIT_S)

    async def _is_inside(self) -> bool:
        """Whether the environment could end this agent; one that cannot be had says why to each of its episodes."""
        try:
            return await self._registry.is_inside(self._run.environment)
        except FabricError:
            return False

    async def _push(self) -> None:
        """All turns that were asked for in one round of the event loop go in one call."""
        while True:
            await self._has_asked.wait()
            await asyncio.sleep(0)
            self._has_asked.clear()
            asked, self._asked = [push for push in self._asked if self._is_ours(push)], []
            if not asked:
                continue
            try:
                lost = await self._turns.push(self._config.worker_id, asked)
            except BrokerError:
                self._asked = [*asked, *self._asked]
                self._has_asked.set()
                raise
            self.lose(lost, {push.trajectory_id: push.fence for push in asked})

    def _is_ours(self, push: TurnPush) -> bool:
        """Not, when it waited here while its claim was lost: the answer could not be told from a later claim's."""
        claim = self.claims.get(push.trajectory_id)
        return claim is not None and claim.fence == push.fence

    async def _receive(self) -> None:
        while True:
            for result in await self._turns.results(self._config.worker_id, 1.0):
                waiting = self._waiting.pop(result.turn_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(result)

    # ---- one trajectory

    def _start(self, claim: TrajectoryClaim, found: TrajectoryClaim) -> None:
        """Begin its episode. found: the same claim as it came, with a snapshot that the episode lets go of."""
        name = claim.job.trajectory_id
        if name in self._episodes:  # its claim was lost, which nobody has told us yet
            self._episodes[name].cancel()
        self.claims[name] = claim
        self._episodes[name] = asyncio.create_task(self._live(claim, self._episode(claim, found)))
        self._episodes[name].add_done_callback(lambda _: self._end(claim))

    def _end(self, claim: TrajectoryClaim) -> None:
        """An episode is over: also one that was cancelled before it began."""
        name = claim.job.trajectory_id
        self._quarantine.clear(claim)
        if self.claims.get(name) is claim:  # not, when a retry of it was claimed here in the meantime
            del self.claims[name], self._episodes[name]
        self._places.give(self._run.run_id)

    def lose(self, trajectory_ids: list[str], fences: Mapping[str, int]) -> None:
        """End episodes whose claim is lost, but not those that were claimed anew while the broker was asked.

        One that is being handed in is no longer held by its claim: the answer to that tells what became of it.
        """
        for name in trajectory_ids:
            claim = self.claims.get(name)
            if claim is not None and claim.fence == fences[name] and (name, claim.fence) not in self._settling:
                self._episodes[name].cancel()

    def _episode(self, claim: TrajectoryClaim, found: TrajectoryClaim) -> Episode:
        limits = Limits(
            agent_id=self._config.worker_id, call_timeout_s=self._config.environment_timeout_s, room=self._room
        )
        world = (self._registry, self._tokenizer, limits)
        return Episode(self._run, found, *world, self._ask(claim), self._save(claim))

    async def _live(self, claim: TrajectoryClaim, episode: Episode) -> None:
        """Run a claimed trajectory to its end, whatever that is."""
        name = claim.job.trajectory_id
        try:
            rollout = await episode.run()
            is_scored = self._run.reward is None
            self._settling.add((name, claim.fence))
            settle = self._trajectories.settle
            is_settled = await self._settle_patiently(lambda: settle(claim, rollout, is_scored=is_scored))
            if is_settled and not is_scored:
                await self._ask_reward(self._run.run_id, name, claim.fence)
        except ClaimLost:
            log.info("agent.claim_lost", extra={"job_id": name, "fence": claim.fence})
        except Exception as error:  # noqa: BLE001 - around a user's environment: its attempt fails, the agent goes on
            await self._fail(claim, error)
        finally:
            self._settling.discard((name, claim.fence))

    async def _settle_patiently(self, settle: Callable[[], Awaitable[bool]]) -> bool:
        """Settling is idempotent, so it is repeated until the broker answers or the claim is surely lost."""
        for _ in range(10):
            try:
                return await settle()
            except BrokerError as error:
                log.warning("agent.broker_lost", extra={"error": str(error)})
                await self._clock.sleep(0.5)
        return False

    async def _fail(self, claim: TrajectoryClaim, error: Exception) -> None:
        who = {"run_id": self._run.run_id, "worker_id": self._config.worker_id}
        letter = dead_letter(error, claim.job, attempt=claim.attempt, **who)
        try:
            outcome = await self._trajectories.fail(claim.job.trajectory_id, claim.fence, letter)
        except FabricError as trouble:
            log.error("agent.fail_failed", extra={"job_id": claim.job.trajectory_id, "error": str(trouble)})
            return
        log.warning(
            "agent.attempt_failed",
            extra={
                "job_id": claim.job.trajectory_id,
                "attempt": claim.attempt,
                "outcome": outcome,
                "reason": letter.reason,
            },
        )

    def _ask(self, claim: TrajectoryClaim) -> Callable[[TurnJob], Awaitable[TurnResult]]:
        async def ask(job: TurnJob) -> TurnResult:
            future: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
            self._waiting[job.turn_id] = future
            try:
                while not future.done():
                    self._asked.append(TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job))
                    self._has_asked.set()
                    await asyncio.wait([future], timeout=self._config.ask_again_s)
                self._quarantine.clear(claim)
                return future.result()
            finally:
                if self._waiting.get(job.turn_id) is future:  # not, when a later claim asks for the same turn
                    del self._waiting[job.turn_id]

        return ask

    def _save(self, claim: TrajectoryClaim) -> Callable[[bytes], Awaitable[None]]:
        async def save(snapshot: bytes) -> None:
            if not await self._trajectories.save(self._config.worker_id, claim, snapshot):
                raise ClaimLost(
                    f"trajectory {claim.job.trajectory_id} is held by someone else now",
                    job_id=claim.job.trajectory_id,
                    fence=claim.fence,
                )

        return save
