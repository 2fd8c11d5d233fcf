"""The desk: all sessions of one process, by their keys, and who waits for one.

- A key has 256 random bits. It is shown once, kept as a hash, and forgotten as the session's claim ends.
- `open` hands out sessions of trajectories that are played elsewhere (RemoteWorlds): this process claims a trajectory
  of a run where somebody waits for one, and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import secrets
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...fabric.contract.errors import BrokerError, EnvironmentFailed, FabricError, QueueFull, RunUnknown
from ...fabric.ports.sessions import KEY_BYTES, KEY_PREFIX, REMOTE, Opened, SessionFacts
from ..environments.base import Access, Environment, Observation, Played, Step
from ..environments.registry import NO_OPTIONS, Registry
from .session import AgentSession

RUNS_READ_S = 10.0  # within which the runs are read twice, unless the broker is away
ANSWER_S = 2.0  # within which they are read once more
PLAY_COUNT_MAX = max(8, 8 * (os.cpu_count() or 1))  # a process with the openai package holds 80 MB
OVER_COUNT_MAX = 256  # sessions that were ended, and whose clients may ask again how
UNTAKEN_S = 20.0  # for which a claimed trajectory waits for somebody to open it, after who asked for it has gone


class Untaken(FabricError):
    """Nobody opened a session on a claimed trajectory: its claim is given back unharmed."""


class Desk:
    """See ports/sessions.py, Sessions."""

    def __init__(
        self,
        listen: Callable[[], Awaitable[str]] | None = None,
        play_count_max: int = PLAY_COUNT_MAX,
        *,
        broker_wait_s: float = math.inf,
    ) -> None:
        """Make a desk.

        Args:
            listen: begins to serve the model API, and returns its address; called once, before the first agent plays.
                None: agents that play have their own way to it.
            play_count_max: agents that may play in processes of this machine at once; others wait.
            broker_wait_s: for which a client waits for a broker that does not answer, before it is told to try again.
        """
        self.broker_wait_s = broker_wait_s
        self.places = asyncio.Semaphore(play_count_max)
        # A request of 8 MiB takes up to half a minute and, while it is tokenised, a GiB or two; nothing can break that
        # off. One at a time, as many as somebody sends, take neither the memory nor the threads that others need.
        self.huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge-ask")
        self._listen = listen
        self._listening = asyncio.Lock()
        self._address = ""
        self.on_asked: Callable[[], None] = lambda: None  # is called as somebody begins to wait in `open`
        self._sessions: dict[str, AgentSession] = {}  # by the key's hash
        self._over: OrderedDict[str, Callable[[], Awaitable[SessionFacts | None]]] = OrderedDict()  # the last ones
        self._runs: set[str] = set()
        self._reading_count = 0  # how often the runs were read
        self._followed = asyncio.Event()
        self._asking: Counter[str] = Counter()  # by run: who waits in `open`
        self._taken: Counter[str] = Counter()
        self._untaken: dict[str, deque[_Offer]] = defaultdict(deque)
        self._offered: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def find(self, key: str) -> AgentSession | None:
        """Return the session of a key, as long as its claim lasts."""
        return self._sessions.get(_hashed(key))

    async def find_recorded(self, key: str) -> SessionFacts | None:
        """See ports/sessions.py: who lost the answer to its end hears so whether the rollout is there."""
        ask = self._over.get(_hashed(key))
        return None if ask is None else await ask()

    @contextlib.asynccontextmanager
    async def admitted(self, session: AgentSession) -> AsyncIterator[Access]:
        """Know a session while the block runs; what it is asked afterwards is refused.

        Raises:
            ConfigError: the model API cannot be served.
        """
        async with self._listening:
            if self._listen is not None and not self._address:
                self._address = await self._listen()
        key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        self._sessions[_hashed(key)] = session
        try:
            yield Access(base_url=f"{self._address}v1", key=key)
        finally:
            del self._sessions[_hashed(key)]
            if (ask := session.conclusion()) is not None:
                self._over[_hashed(key)] = ask
                if len(self._over) > OVER_COUNT_MAX:
                    self._over.popitem(last=False)
            await session.close()

    # ---- sessions that are played elsewhere

    def follow(self, run_ids: set[str]) -> None:
        """Take note of the runs that there are."""
        self._runs = run_ids
        self._reading_count += 1
        self._followed.set()

    def wanted(self, run_id: str) -> int:
        """Count the trajectories of a run that this process should hold: those in work, and one for each who waits."""
        return self._taken[run_id] + self._asking[run_id]

    async def open(self, run_id: str, *, wait_s: float) -> Opened:
        """Open a session on the next trajectory of a run; see ports/sessions.py."""
        await self._known(run_id)
        self._asking[run_id] += 1
        self.on_asked()
        try:
            async with asyncio.timeout(wait_s):
                while not self._untaken[run_id]:
                    self._offered[run_id].clear()
                    await self._offered[run_id].wait()
        except TimeoutError:
            if not await self._read_again(1, ANSWER_S):
                raise BrokerError(
                    f"no trajectory of run {run_id} came within {wait_s:g} s, and the broker has not answered since: "
                    "ask again once it does",
                    run_id=run_id,
                ) from None
            raise QueueFull(
                f"no trajectory of run {run_id} came within {wait_s:g} s: all that its trainer has pushed are in work "
                "or done; ask again later",
                run_id=run_id,
            ) from None
        finally:
            self._asking[run_id] -= 1
        return self._untaken[run_id].popleft().take()

    async def _known(self, run_id: str) -> None:
        """Wait until a run is known here, or until it is certain that there is none, however short the caller's wait.

        Raises:
            RunUnknown: there is no such run: a second reading of the runs ended, which began after this call.
            BrokerError: the runs could not be read.
        """
        # Twice: the first may have been under way as the run was made.
        is_certain = await self._read_again(2, RUNS_READ_S, run_id)
        if run_id in self._runs:
            return
        if not is_certain:
            raise BrokerError(f"whether there is a run {run_id!r:.80} could not be read from the broker; ask again")
        raise RunUnknown(
            f"there is no run {run_id!r:.80} whose environment is {REMOTE!r}: its trainer creates it so",
            run_id=run_id,
        )

    async def _read_again(self, count: int, within_s: float, run_id: str = "") -> bool:
        """Wait until the runs were read so often, or there is this one; return whether they were read so often."""
        enough = self._reading_count + count
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while run_id not in self._runs and self._reading_count < enough:
                    self._followed.clear()
                    await self._followed.wait()
        return self._reading_count >= enough

    async def host(self, key: str) -> Played:
        """Offer a session, and wait until whoever takes it has ended it.

        Raises:
            Untaken: nobody took it for UNTAKEN_S; it is for other processes.
            EnvironmentFailed: its client says that the attempt failed, or was silent for too long.
        """
        session = self._sessions[_hashed(key)]
        run_id, offer = session.facts.run_id, _Offer(session, key)
        self._untaken[run_id].append(offer)
        self._offered[run_id].set()
        try:
            while not offer.is_taken.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(UNTAKEN_S):
                        await offer.is_taken.wait()
                if not offer.is_taken.is_set() and not self._asking[run_id]:
                    raise Untaken(f"nobody opened a session on trajectory {session.facts.session_id}")
        finally:
            with contextlib.suppress(ValueError):
                self._untaken[run_id].remove(offer)
        self._taken[run_id] += 1
        try:
            ending = await session.ended()
        finally:
            self._taken[run_id] -= 1
        if ending.error is not None:
            raise EnvironmentFailed(f"its client says: {ending.error}", reason="play")
        return Played(info=dict(ending.info))


class _Offer:
    """A session that waits to be taken."""

    def __init__(self, session: AgentSession, key: str) -> None:
        self._opened = Opened(session=session, key=key)
        self.is_taken = asyncio.Event()

    def take(self) -> Opened:
        self.is_taken.set()
        return self._opened


class RemoteWorld(Environment):
    """A trajectory that is played by whoever opens a session on it."""

    name = REMOTE
    inline = True
    is_agent = True

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        raise NotImplementedError("it is played")

    async def step(self, action: Any) -> Step:
        raise NotImplementedError("it is played")

    async def play(self, task: dict[str, Any], seed: int, access: Access) -> Played:
        """Wait until whoever opens the session has ended it."""
        return await self._desk.host(access.key)


class RemoteWorlds(Registry):
    """The environments of a gateway: the one that is played elsewhere."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self._desk = desk

    def offered(self) -> list[str]:
        return [REMOTE]

    async def is_inside(self, name: str) -> bool:
        return False  # what plays cannot end this process

    async def open(
        self, name: str, options: Mapping[str, Any] = NO_OPTIONS, *, owner: str = "", timeout_s: float = 30.0
    ) -> Environment:
        return RemoteWorld(self._desk)


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
