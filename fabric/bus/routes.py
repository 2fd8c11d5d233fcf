"""Which slot of a Redis Cluster a command belongs to, and what becomes of one that reads keys of several.

Pure: commands in, slots and commands out. Only what this room sends is understood.

- A script's keys share a slot, as all keys of one tag do; the first says which.
- A command without a key goes where the fabric's own keys are, so that TIME is the clock of the heartbeats; within a
  sequence it goes where the command before it went, so that WAIT speaks of that one's write.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis.crc import key_slot

from .channel import Argument, Command

__all__ = ["SLOT_COUNT", "block_free", "is_blocking", "keys_of", "narrow", "slots_of"]

SLOT_COUNT = 16384
FABRIC_SLOT = key_slot(b"rf")
KEYLESS = frozenset("AUTH CLIENT CLUSTER COMMAND CONFIG ECHO INFO PING SCRIPT TIME WAIT WAITAOF".split())
SECOND = frozenset("MEMORY OBJECT XGROUP XINFO".split())  # their key is the third word
SEVERAL = frozenset("BLPOP DEL EXISTS MGET UNLINK".split())
STREAMS = frozenset(("XREAD", "XREADGROUP"))


def keys_of(command: Command) -> list[bytes]:
    """The keys of a command, as far as routing needs them: all of those that may lie in several slots."""
    name = _text(command[0])
    if name in KEYLESS:
        return []
    if name in ("EVAL", "EVALSHA"):
        return [_bytes(key) for key in command[3 : 3 + min(1, int(command[2]))]]
    if name in STREAMS:
        return [_bytes(key) for key in _streams(command)[0]]
    if name == "SCAN":
        return [_bytes(command[position + 1]) for position in _positions(command, "MATCH")[:1]]
    if name in SEVERAL:
        return [_bytes(key) for key in command[1 : -1 if name == "BLPOP" else None]]
    return [_bytes(command[2 if name in SECOND else 1])]


def slots_of(commands: Sequence[Command]) -> list[int]:
    """The slot of each command of a sequence; of one that reads several, that of its first key."""
    found: list[int] = []
    before = FABRIC_SLOT
    for command in commands:
        keys = keys_of(command)
        before = key_slot(keys[0]) if keys else before
        found.append(before)
    return found


def narrow(command: Command) -> list[Command]:
    """The same as commands of one slot each."""
    keys = keys_of(command)
    if len(keys) < 2:
        return [command]
    name = _text(command[0])
    by_slot: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        by_slot.setdefault(key_slot(key), []).append(index)
    if len(by_slot) == 1:
        return [command]
    if name in STREAMS:
        names, after = _streams(command)
        head = command[: len(command) - 2 * len(names)]
        return [(*head, *(names[i] for i in part), *(after[i] for i in part)) for part in by_slot.values()]
    assert name == "BLPOP", f"{name} reads keys of several slots: {keys}"
    return [(command[0], *(command[1 + i] for i in part), command[-1]) for part in by_slot.values()]


def is_blocking(command: Command) -> bool:
    """Whether it may wait for data."""
    name = _text(command[0])
    return name == "BLPOP" or (name in STREAMS and bool(_positions(command, "BLOCK")))


def block_free(command: Command) -> tuple[Command, int]:
    """A stream read without its BLOCK, and that in milliseconds."""
    (position,) = _positions(command, "BLOCK")
    return (*command[:position], *command[position + 2 :]), int(command[position + 1])


def _streams(command: Command) -> tuple[Sequence[Argument], Sequence[Argument]]:
    """Names and positions of a stream read."""
    start = _positions(command, "STREAMS")[0] + 1
    middle = start + (len(command) - start) // 2
    return command[start:middle], command[middle:]


def _positions(command: Command, word: str) -> list[int]:
    return [index for index, part in enumerate(command) if index and _text(part) == word]


def _text(word: Argument) -> str:
    return (word.decode("latin-1") if isinstance(word, bytes) else str(word)).upper()


def _bytes(word: Argument) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()
