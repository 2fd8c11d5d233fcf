"""The agent worker: drives environments, many at once, and asks for turns.

run.py serves one run: it claims trajectories and brings each to its end. One trajectory's life is episode.py's.

- An environment that raises or hangs costs its own trajectory alone: the attempt fails, the trajectory is tried again,
  and in the end it is a dead letter with its traceback; it is never scored as reward 0.
- Heartbeats, renewals and reaping share neither loop nor connection with the episodes (keeper.py): no environment can
  hold them up.
- The agent holds one suspect at a time (fabric/rules/queue/retries.py): a trajectory that may have ended the agents
  before this one.
- Runs share the places for environments by weight (slots.py).
- If a run's model has no tokenizer here, the agent leaves that run alone and serves the others (tokenizers.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, WireError
from ...fabric.contract.ids import new_process_id
from ...fabric.contract.limits import SNAPSHOTS_BYTES_MAX
from ...fabric.contract.records import WorkerInfo
from ...fabric.host.memory import resident_bytes
from ...fabric.ports.queue import Fabric
from ...fabric.ports.sessions import REMOTE
from ...fabric.rules.queue.timings import Timings
from ...fabric.tracing.spans import Spans
from ..environments.registry import Registry
from ..environments.room import Room
from .desk import Desk
from .keeper import AskReward, Elsewhere, Keeper, KeeperConfig
from .run import AgentConfig as AgentConfig
from .run import AgentParts, RunAgent
from .slots import Places, Quarantine
from .tokenizers import Tokenizers

log = logging.getLogger(__name__)


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
