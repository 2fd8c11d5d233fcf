"""The client library's commands, on a Redis Cluster.

The library's own client for clusters opens connections of its own making, counts attempts instead of seconds, and
cannot share round trips. So its commands go through ClusterChannel here; only the shaping of answers is the library's.

- Our map of nodes and slots is a guess that any answer may correct: a MOVED corrects one slot, anything else is a
  reason to read the whole map again, from the first node that answers.
- Clients of nodes have no patience of their own; who calls them keeps trying, so that it gives up a lost node for the
  replica that takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

import redis.asyncio
from redis import exceptions
from redis.asyncio.client import Pipeline

from ...host.helpers import end_all
from .channel import Argument, Channel, Command, checked
from .patience import Patience, PatientRetry, may_pass, pause_s
from .pools import NamedPool, Pools
from .routes import SLOT_COUNT, is_blocking, key_of, slots_of
from .translate import note_node, translate
from .typed import TypedClient
from .url import Address, shown

log = logging.getLogger(__name__)

T = TypeVar("T")

MAP_TIMEOUT_S = 2.0  # a node that is alive says in milliseconds what it knows


class ClusterClient(TypedClient):
    """A client of all of a cluster's primaries.

    Args:
        topology: the map, read once at least.
        pool: leads to the node that was given first; its name stands for the cluster.
        patience_s: how long a command keeps trying.
    """

    def __init__(self, topology: Topology, pool: NamedPool, patience_s: float) -> None:
        super().__init__(connection_pool=pool)
        self._topology = topology
        self._seed_pool = pool
        self._patience_s = patience_s
        self._channel = self.channel()

    @classmethod
    async def open(
        cls, seeds: Sequence[Address], pools: Pools, patience_s: float, open_patience_s: float
    ) -> ClusterClient:
        """Find out which node holds which slots. Arguments as in `open_broker`; `seeds`: nodes to ask.

        Raises:
            BrokerError: no node answers, or it refused us.
        """
        name = f"redis{'s' * pools.is_tls}+cluster://{','.join(map(shown, seeds))}"
        topology = Topology(pools, seeds, name)
        client = cls(topology, pools.make(open_patience_s, name=name), patience_s)

        async def again(error: Exception) -> None:
            return None

        try:
            with translate(client):
                await PatientRetry(open_patience_s).call_with_retry(lambda: topology.read(0), again)
        except BaseException:
            await client.aclose()
            raise
        return client

    def channel(self) -> ClusterChannel:
        """Make another channel, which shares round trips with no other."""
        return ClusterChannel(self._topology, self._patience_s)

    def primaries(self) -> list[redis.asyncio.Redis]:
        """Return a client for each node that holds slots; each knows only its node, and has no patience."""
        return [self._topology.client(address) for address in self._topology.primaries()]

    async def _ask(self, *args: Any, **options: Any) -> Any:
        command = _command(args)
        (answer,) = checked(
            await (self._channel.ask_alone([command]) if is_blocking(command) else self._channel.ask_many([command]))
        )
        return _shaped(self.response_callbacks, args[0], answer, options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Make a pipeline of commands that travel together; never a transaction, as scripts do that."""
        assert not transaction
        return _Pipeline(self._seed_pool, self.response_callbacks, self._channel)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self._seed_pool.disconnect()
        await self._topology.close()


class _Pipeline(Pipeline):
    def __init__(self, pool: NamedPool, callbacks: Any, channel: ClusterChannel) -> None:
        super().__init__(pool, callbacks, False, None)
        self._channel = channel

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack: list[Any] = self.command_stack
        self.command_stack = []
        answers = await self._channel.ask_alone([_command(args) for args, _ in stack])
        if raise_on_error:
            checked(answers)
        return [
            _shaped(self.response_callbacks, args[0], answer, options)
            for (args, options), answer in zip(stack, answers, strict=True)
        ]


def _command(args: Any) -> list[Any]:
    """Split a command as the broker wants it; the library writes "XGROUP CREATE" as one word."""
    return [*str(args[0]).split(), *args[1:]]


def _shaped(callbacks: Any, name: str, answer: Any, options: dict[str, Any]) -> Any:
    if isinstance(answer, Exception) or name not in callbacks:
        return answer
    return callbacks[name](answer, **{key: value for key, value in options.items() if key != "keys"})


# ---------------------------------------------------------------- cluster
#
# A Redis Cluster seen as one broker: commands go to the node that holds their keys, wherever those move.
#
# - Commands for one node that are asked at the same time share a round trip, as on a single broker (channel.py).
# - MOVED and ASK are followed; a node that is lost, loading or without its majority is asked again, with the map of
#   slots read anew, for as long as patience lasts. A lost command may have run: it must be safe to repeat, as ever.
# - `ask_alone` keeps the commands of one node together: if one of them has to go again, all of them do. A WAIT never
#   speaks of another connection's write.
# - A command names keys of one slot; a caller that waits at several shards asks once for each (waiting.py).


ASKING: Command = ("ASKING",)
LOST = (exceptions.ConnectionError, exceptions.TimeoutError)
PASSING = (exceptions.TryAgainError, exceptions.ClusterDownError, exceptions.MasterDownError, exceptions.ReadOnlyError)


class ClusterChannel:
    """Asks one cluster; the same surface as Channel."""

    is_sharded: ClassVar[bool] = True

    def __init__(self, topology: Topology, patience_s: float) -> None:
        self._topology = topology
        self._patience_s = patience_s
        self._channels: dict[Address, Channel] = {}

    async def ask(self, *command: Argument) -> Any:
        """The answer to one command; its error is raised."""
        return checked(await self.ask_many([command]))[0]

    async def ask_many(self, commands: Sequence[Command]) -> list[Any]:
        """Answers in order, an error as an exception object in its place. Commands that block have no place here."""
        return await _Errand(self._topology, self._channels, commands, is_alone=False).run(self._patience_s)

    async def ask_alone(self, commands: Sequence[Command]) -> list[Any]:
        """Do the same as `ask_many`, in a round trip of its own per node: for commands that block or go together."""
        return await _Errand(self._topology, self._channels, commands, is_alone=True).run(self._patience_s)


class _Errand:
    """A set of commands on their way, until each has its answer."""

    def __init__(
        self, topology: Topology, channels: dict[Address, Channel], commands: Sequence[Command], *, is_alone: bool
    ) -> None:
        self._topology = topology
        self._channels = channels
        self._commands = commands
        self._is_alone = is_alone
        self._slots = slots_of(commands)
        self._answers: list[Any] = [None] * len(commands)
        self._asked_at: dict[int, Address] = {}  # commands that were sent on by ASK, for one time

    async def run(self, patience_s: float) -> list[Any]:
        """Return answers in order. Raise the error of a lost node when patience ends."""
        with Patience(patience_s) as patience:
            return await self._run(patience)

    async def _run(self, patience: Patience) -> list[Any]:
        left = list(range(len(self._commands)))
        failure_count = 0
        while True:
            seen = self._topology.reading_count
            parts = self._parts(left)
            sending = [self._send(address, part) for (address, _), part in parts.items()]
            await (sending[0] if len(sending) == 1 else asyncio.gather(*sending))
            left = self._unsettled(list(parts.values()))
            if not left:
                return self._answers
            failure_count += 1
            left_s = patience.left_s()
            if left_s <= 0 or not all(may_pass(error) for error in self._errors(left)):
                return self._give_up(left)
            if self._follow(left) and failure_count <= 3:
                continue
            await asyncio.sleep(min(left_s, pause_s(failure_count)))
            await self._reread(seen)

    def _parts(self, left: Sequence[int]) -> dict[tuple[Address, bool], list[int]]:
        """Sort commands by node, and keep apart those that ASK sent on."""
        parts: dict[tuple[Address, bool], list[int]] = {}
        for index in left:
            try:
                found = self._asked_at.get(index) or self._topology.holder(self._slots[index])
            except exceptions.ClusterDownError as error:
                self._answers[index] = error
                found = ("", 0)
            parts.setdefault((found, index in self._asked_at), []).append(index)
        return parts

    async def _send(self, address: Address, part: list[int]) -> None:
        if not address[0]:
            return  # nobody holds these slots now
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = Channel(self._topology.client(address))
        commands = [self._commands[index] for index in part]
        is_asking = part[0] in self._asked_at
        if is_asking:
            commands = [word for command in commands for word in (ASKING, command)]
        try:
            is_alone = self._is_alone or is_asking
            answers = await (channel.ask_alone(commands) if is_alone else channel.ask_many(commands))
        except LOST as error:
            answers = [error] * len(commands)
        for index, answer in zip(part, answers[1::2] if is_asking else answers, strict=True):
            note_node(answer, address)
            self._answers[index] = answer

    def _unsettled(self, parts: Sequence[Sequence[int]]) -> list[int]:
        """Return the commands that have to go again."""
        again: list[int] = []
        for part in parts:
            bad = [index for index in part if _has_to_go_again(self._answers[index])]
            again += part if bad and self._is_alone else bad
        return sorted(again)

    def _follow(self, left: Sequence[int]) -> bool:
        """Note where commands were sent on to; return False if any failed otherwise."""
        self._asked_at.clear()
        is_sent_on = True
        for index in left:
            answer = self._answers[index]
            if index - 1 in self._asked_at and key_of(self._commands[index]) is None:
                self._asked_at[index] = self._asked_at[index - 1]  # a WAIT is for the write before it
            elif not isinstance(answer, exceptions.AskError):
                is_sent_on &= not isinstance(answer, Exception)
            elif not answer.host:  # the node does not know the name of the other
                is_sent_on = False
            elif isinstance(answer, exceptions.MovedError):
                self._topology.moved(answer.slot_id, (answer.host, answer.port))
            else:
                self._asked_at[index] = (answer.host, answer.port)
        return is_sent_on

    async def _reread(self, seen: int) -> None:
        try:
            await self._topology.read(seen)
        except exceptions.RedisError:
            return  # nobody answers now: the next round says so, or finds them back

    def _errors(self, left: Sequence[int]) -> list[Exception]:
        return [answer for index in left if isinstance(answer := self._answers[index], Exception)]

    def _give_up(self, left: Sequence[int]) -> list[Any]:
        for error in self._errors(left):
            if isinstance(error, LOST):
                raise error
        return self._answers


def _has_to_go_again(answer: Any) -> bool:
    if isinstance(answer, (exceptions.AskError, *LOST, *PASSING)):
        return True
    # A blocked command gets this answer when its node stops being a primary.
    return isinstance(answer, exceptions.ResponseError) and str(answer).startswith("UNBLOCKED")


class Topology:
    """Nodes and slots of one cluster.

    Args:
        pools: makes the connections to a node.
        seeds: nodes to ask first.
        name: the cluster's name in texts.
    """

    def __init__(self, pools: Pools, seeds: Sequence[Address], name: str) -> None:
        assert seeds
        self.reading_count = 0  # grows with every reading of the map
        self.name = name
        self._pools = pools
        self._seeds = tuple(seeds)
        self._slots: list[Address | None] = [None] * SLOT_COUNT
        self._nodes: tuple[Address, ...] = ()  # all that the map names, replicas too: a replica may survive the rest
        self._clients: dict[Address, redis.asyncio.Redis] = {}
        self._lock = asyncio.Lock()

    def holder(self, slot: int) -> Address:
        """Return the node that holds a slot, as far as we know.

        Raises:
            ClusterDownError: nobody does.
        """
        found = self._slots[slot]
        if found is None:
            raise exceptions.ClusterDownError(f"no node holds slot {slot}")
        return found

    def primaries(self) -> list[Address]:
        """Return every node that holds slots."""
        return sorted({address for address in self._slots if address is not None})

    def client(self, address: Address) -> redis.asyncio.Redis:
        """Return the client for one node, without patience."""
        if address not in self._clients:
            self._clients[address] = redis.asyncio.Redis.from_pool(self._pools.make(0.0, address=address))
        return self._clients[address]

    def moved(self, slot: int, address: Address) -> None:
        """Note that another node holds this slot, as a node said."""
        self._slots[slot] = address

    async def read(self, seen: int) -> None:
        """Read the map again, unless that was done since `seen` readings.

        Raises:
            ConnectionError: no node could be asked. The map stays as it was.
        """
        async with self._lock:
            if self.reading_count != seen:
                return
            known = dict.fromkeys((*self._nodes, *self._seeds))
            slots, self._nodes = await first_answer([self._read_from(address) for address in known])
            if slots != self._slots:
                self._slots = slots
                log.info("cluster.map_changed", extra={"broker": self.name, "nodes": self.primaries()})
            self.reading_count += 1

    async def _read_from(self, asked: Address) -> tuple[list[Address | None], tuple[Address, ...]]:
        """Read slots and nodes as one node knows them."""
        try:
            async with asyncio.timeout(MAP_TIMEOUT_S):
                rows = await Channel(self.client(asked)).ask("CLUSTER", "SLOTS")
        except TimeoutError as error:
            raise exceptions.TimeoutError(f"{shown(asked)} does not say who holds the slots") from error
        slots: list[Address | None] = [None] * SLOT_COUNT
        nodes: dict[Address, None] = {}
        for start, end, *holders in rows:
            found = [_address(holder, asked) for holder in holders]
            slots[start : end + 1] = [found[0]] * (end + 1 - start)
            nodes.update(dict.fromkeys(found))
        if not nodes:
            raise exceptions.ClusterDownError("no node holds any slot")
        return slots, tuple(nodes)

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            await client.aclose()


def _address(holder: Sequence[Any], asked: Address) -> Address:
    """Return the address of a node of the map; a node without a name is the node that we asked."""
    name = (holder[0] or b"").decode()
    return (name if name not in ("", "?") else asked[0]), int(holder[1])


async def first_answer(asked: Sequence[Coroutine[Any, Any, T]]) -> T:
    """Return the first answer and cancel the other questions; raise the last error if none is answered."""
    waiting = {asyncio.ensure_future(one) for one in asked}
    tasks = list(waiting)
    try:
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    return task.result()
            if not waiting:
                raise done.pop().exception() or AssertionError
    finally:
        await end_all(tasks)
