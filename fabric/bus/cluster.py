"""A Redis Cluster seen as one broker: commands go to the node that holds their keys, wherever those move.

- Commands for one node that are asked at the same time share a round trip, as on a single broker (channel.py).
- MOVED and ASK are followed; a node that is lost, loading or without its majority is asked again, with the map of slots
  read anew, for as long as patience lasts. What was sent may have run: commands must bear repeating, as ever.
- `ask_alone` keeps the commands of one node together: if one of them has to go again, all of them do. A WAIT never
  speaks of another connection's write.
- A read over several slots becomes one for each; the first that finds something ends the others. That loses nothing:
  a stream is waited for by XREAD, which takes nothing, and a bell that was taken for nobody is a hint (keys.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis import exceptions

from .channel import Argument, Channel, Command, checked
from .patience import may_pass, pause_s
from .routes import block_free, is_blocking, keys_of, narrow, slots_of
from .topology import Topology, end_all
from .url import Address

__all__ = ["ClusterChannel"]

ASKING: Command = ("ASKING",)
LOST = (exceptions.ConnectionError, exceptions.TimeoutError)
PASSING = (exceptions.TryAgainError, exceptions.ClusterDownError, exceptions.MasterDownError, exceptions.ReadOnlyError)


class ClusterChannel:
    """Asks one cluster; the same surface as Channel."""

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
        """As `ask_many`, in round trips of its own, one per node: for commands that block or belong together."""
        wide = {index: parts for index, command in enumerate(commands) if len(parts := narrow(command)) > 1}
        answers: list[Any] = [None] * len(commands)
        rest = [index for index in range(len(commands)) if index not in wide]
        if rest:
            for index, answer in zip(rest, await self._alone([commands[index] for index in rest]), strict=True):
                answers[index] = answer
        for index, parts in wide.items():
            answers[index] = await self._ask_wide(commands[index], parts)
        return answers

    async def _alone(self, commands: Sequence[Command]) -> list[Any]:
        return await _Errand(self._topology, self._channels, commands, is_alone=True).run(self._patience_s)

    async def _ask_wide(self, command: Command, parts: Sequence[Command]) -> Any:
        """One read over several slots."""
        if not is_blocking(command):
            return _joined(checked(await self._alone(parts)))
        if command[0] == "BLPOP":
            return await self._first(parts)
        look, block_ms = block_free(command)
        if command[0] == "XREAD":
            return _joined(checked(await self._alone(narrow(look)))) or await self._first(parts)
        return await self._read_group(command, look, block_ms)

    async def _read_group(self, command: Command, look: Command, block_ms: int) -> Any:
        """XREADGROUP over several slots. One that waits must not be cancelled: what it took would be seen by nobody."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + block_ms / 1000
        while True:
            tails = await self._tails(command)  # before the look: what comes after it is what the wait wakes for
            found = _joined(checked(await self._alone(narrow(look))))
            left_ms = int((until_s - clock()) * 1000)
            if found or left_ms <= 0:
                return found
            wait: Command = ("XREAD", "COUNT", 1, "BLOCK", left_ms, "STREAMS", *keys_of(command), *tails)
            await self._first(narrow(wait))

    async def _tails(self, command: Command) -> list[bytes]:
        """The last entry of each stream that a read names."""
        answers = checked(await self.ask_many([("XREVRANGE", key, "+", "-", "COUNT", 1) for key in keys_of(command)]))
        return [rows[0][0] if rows else b"0-0" for rows in answers]

    async def _first(self, parts: Sequence[Command]) -> Any:
        """What the first of several blocking commands finds; None where none does."""
        tasks = [asyncio.ensure_future(self._alone([part])) for part in parts]
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                found = [answer for task in done for answer in checked(task.result()) if answer]
                if found:
                    return found[0]
            return None
        finally:
            await end_all(tasks)


class _Errand:
    """Some commands on their way, until each has its answer."""

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
        """Answers in order. Raises what a lost node raises, when patience ends."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + patience_s
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
            left_s = until_s - clock()
            if left_s <= 0 or not all(may_pass(error) for error in self._errors(left)):
                return self._give_up(left)
            if self._follow(left) and failure_count <= 3:
                continue
            await asyncio.sleep(min(left_s, pause_s(failure_count)))
            await self._reread(seen)

    def _parts(self, left: Sequence[int]) -> dict[tuple[Address, bool], list[int]]:
        """What goes where: commands by node, those sent on by ASK apart."""
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
            self._answers[index] = answer

    def _unsettled(self, parts: Sequence[Sequence[int]]) -> list[int]:
        """What has to go again."""
        again: list[int] = []
        for part in parts:
            bad = [index for index in part if _has_to_go_again(self._answers[index])]
            again += part if bad and self._is_alone else bad
        return sorted(again)

    def _follow(self, left: Sequence[int]) -> bool:
        """Note where commands were sent on to; False where any failed otherwise."""
        self._asked_at.clear()
        is_sent_on = True
        for index in left:
            answer = self._answers[index]
            if not isinstance(answer, exceptions.AskError):
                is_sent_on &= not isinstance(answer, Exception)
            elif not answer.host:  # the node does not know that one's name
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
    # What a blocked command is told when its node stops being a primary.
    return isinstance(answer, exceptions.ResponseError) and str(answer).startswith("UNBLOCKED")


def _joined(answers: Sequence[Any]) -> list[Any] | None:
    return [row for answer in answers for row in answer or ()] or None
