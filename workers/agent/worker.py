"""The agent worker: drives environments, many at once, and asks for turns.

run.py serves one run: it claims trajectories and brings each to its end. One trajectory's life is episode.py's.

- An environment that raises or hangs costs its own trajectory alone: the attempt fails, the trajectory is tried again,
  and in the end it is a dead letter with its traceback; it is never scored as reward 0.
- Heartbeats, renewals and reaping share neither loop nor connection with the episodes (keeper.py): no environment can
  hold them up.
- The agent holds one suspect at a time (fabric/rules/queue/retries.py): a trajectory that may have ended the agents
  before this one.
- Runs share the places for environments by weight (slots.py).
- Tokenizers load beside the event loop, each run's by itself: a load may take seconds, or hang if a hub does not
  answer.
- A run whose model has no tokenizer here is left alone, and the others are served. The log says it once, and every
  heartbeat until a load succeeds; the agent tries again with growing pauses: somebody may yet put the model there.
- The maker of a run names its model, but cannot cause a download: the agent downloads only models that its operator
  allows; all others must lie on this machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, WireError
from ...fabric.contract.ids import new_process_id
from ...fabric.contract.limits import SNAPSHOTS_BYTES_MAX
from ...fabric.contract.records import RunConfig, WorkerInfo
from ...fabric.host.memory import resident_bytes
from ...fabric.model.presets import is_preset
from ...fabric.model.tokenizer import Tokenizer
from ...fabric.ports.queue import Fabric
from ...fabric.ports.sessions import REMOTE
from ...fabric.rules.queue.timings import Timings
from ...fabric.tracing.spans import Spans
from ..engines.model_tokenizer import load_tokenizer
from ..environments.base import in_thread
from ..environments.failures import reason_of
from ..environments.registry import Registry
from ..environments.room import Room
from .desk import Desk
from .keeper import AskReward, Elsewhere, Keeper, KeeperConfig
from .run import AgentConfig as AgentConfig
from .run import AgentParts, RunAgent
from .slots import Places, Quarantine

log = logging.getLogger(__name__)

RETRY_S = 1.0  # pause after a failure; doubles up to RETRY_S_MAX
RETRY_S_MAX = 60.0
ERROR_LENGTH = 300  # characters of each error
NAME_COUNT = 8  # refused runs named in a heartbeat


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
        desk: Desk | None = None,
        takes_what_is_opened: bool = False,
        spans: Spans | None = None,
    ) -> None:
        """Make an agent worker.

        Args:
            fabric, registry, config, clock: the broker, what is played here, the settings, the time.
            ask_reward: asks for the rewards of trajectories whose run has a reward function.
            elsewhere: lets the keeper work in a thread of its own; None: it shares this loop and `fabric`.
            desk: where agents that play by themselves reach their sessions.
            spans: takes those of trajectories that are traced.
            takes_what_is_opened: whether it claims a trajectory only where somebody opens a session for one.
        """
        desk = desk or Desk()
        self.places = Places(config.environment_count, desk.wanted if takes_what_is_opened else None)
        desk.on_asked = self.places.tell
        self._parts = AgentParts(
            fabric=fabric,
            registry=registry,
            config=config,
            clock=clock,
            ask_reward=ask_reward,
            places=self.places,
            quarantine=Quarantine(),
            room=Room(SNAPSHOTS_BYTES_MAX),
            desk=desk,
            timings=Timings(new_process_id(), spans),
        )
        self._config = config
        self._clock = clock
        self._elsewhere = elsewhere
        self._tokenizers = Tokenizers(clock, config.hub_names)
        self._agents: dict[str, RunAgent] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then release unfinished trajectories."""
        own = self._config
        config = KeeperConfig(worker_id=own.worker_id, renew_s=own.renew_s, reap_s=own.reap_s, hung_s=own.hung_s)
        timings = self._parts.timings
        keeper = Keeper(config, self._clock, say=self._say, kept=lambda: self._agents, timings=timings)
        async with keeper.keeping(self._parts.fabric, self._parts.ask_reward, self._elsewhere) as check:
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
            runs = await self._parts.fabric.board.runs()
        except (BrokerError, WireError) as error:  # the broker is away, or holds an unreadable row: served runs go on
            log.warning("agent.runs_not_read", extra={"error": str(error)})
            return
        for name, agent in list(self._agents.items()):
            if name not in runs or agent.has_died() or not agent.follow(runs[name]):
                await self._agents.pop(name).close()
                self.places.leave(name)
        self._tokenizers.keep(runs)
        self._parts.desk.follow({name for name, config in runs.items() if config.environment == REMOTE})
        for name, config in runs.items():
            if config.environment not in self._parts.registry.offered():
                continue
            if name not in self._agents:
                tokenizer = self._tokenizers.of(config)
                if tokenizer is None:
                    continue
                self._agents[name] = RunAgent(self._parts, config, tokenizer)
            self.places.join(name, config.weight)
            self.places.note_stalled(name, self._agents[name].has_stalled())
        for name, count in self.places.owed().items():
            await self._agents[name].give_back(count)

    def _say(self) -> WorkerInfo:
        """Make the heartbeat's record; the keeper calls this from its own thread."""
        return WorkerInfo(
            worker_id=self._config.worker_id,
            role="agent",
            pid=os.getpid(),
            host=socket.gethostname(),
            slot_count=self._config.environment_count,
            running_count=self.running_count,
            environments=self._parts.registry.offered(),
            error=self._tokenizers.error,
            resident_bytes=resident_bytes(),
        )

    @property
    def running_count(self) -> int:
        """Count the environments in use now."""
        return sum(len(agent.claims) for agent in list(self._agents.values()))


class Tokenizers:
    """Tokenizers by run, and the errors of those that are missing."""

    def __init__(self, clock: Clock, hub_names: Sequence[str] = ()) -> None:
        """hub_names: patterns of models that may be downloaded."""
        self._clock = clock
        self._hub_names = hub_names
        self._loads: dict[tuple[str, str], asyncio.Task[Tokenizer]] = {}  # (run_id, model)
        self._errors: dict[tuple[str, str], str] = {}

    def of(self, run: RunConfig) -> Tokenizer | None:
        """Return the tokenizer of a run's model; None if it is not loaded yet (the first call begins the load)."""
        if is_preset(run.model):
            return load_tokenizer(run.model)
        key = (run.run_id, run.model)
        if key not in self._loads:
            self._loads[key] = asyncio.create_task(self._load(key))
        load = self._loads[key]
        return load.result() if load.done() else None

    def keep(self, runs: Mapping[str, RunConfig]) -> None:
        """Forget the tokenizers of all other runs."""
        for key in self._loads.keys() - {(run.run_id, run.model) for run in runs.values()}:
            self._loads.pop(key).cancel()
            self._errors.pop(key, None)

    def close(self) -> None:
        """Load no more."""
        self.keep({})

    @property
    def error(self) -> str | None:
        """Why runs are not served, or None: the newest NAME_COUNT errors, and how many more there are."""
        shown = [
            f"run {run_id!r} is not served: {error[:ERROR_LENGTH]}" for (run_id, _), error in self._errors.items()
        ][::-1]
        left = len(shown) - NAME_COUNT
        return "; ".join(shown[:NAME_COUNT] + ([f"and {left} more"] if left > 0 else [])) or None

    async def _load(self, key: tuple[str, str]) -> Tokenizer:
        run_id, model = key
        may_download = any(fnmatchcase(model, each) for each in self._hub_names)
        pause_s = RETRY_S
        while True:
            try:
                tokenizer = await in_thread(lambda: load_tokenizer(model, may_download=may_download))
            except Exception as error:  # noqa: BLE001 - what any run names: tried again later, other runs go on
                if key not in self._errors:
                    log.error("agent.run_not_served", extra={"run_id": run_id, "error": reason_of(error)})
                self._errors[key] = reason_of(error)
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            else:
                self._errors.pop(key, None)
                return tokenizer
