"""Which slot of a Redis Cluster a command belongs to.

Pure: commands in, slots out. It understands only the commands that this room sends.

- The keys of a command share a slot, as all keys of one tag do; the first says which.
- A command without a key goes where the fabric's own keys are, so that TIME is the clock of the heartbeats; within a
  sequence it goes where the command before it went, so that WAIT speaks of the write of that command.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis.crc import key_slot

from .channel import Argument, Command

SLOT_COUNT = 16384
FABRIC_SLOT = key_slot(b"rf")
KEYLESS = frozenset("AUTH CLIENT CLUSTER COMMAND CONFIG ECHO INFO PING SCRIPT TIME WAIT WAITAOF".split())
SECOND = frozenset("MEMORY OBJECT XGROUP XINFO".split())  # their key is the third word
STREAMS = frozenset(("XREAD", "XREADGROUP"))


def key_of(command: Command) -> bytes | None:
    """Return the key that a command is routed by, its first; None for a command without a key."""
    name = _text(command[0])
    if name in KEYLESS:
        return None
    if name in ("EVAL", "EVALSHA"):
        return _bytes(command[3]) if int(command[2]) else None
    if name in STREAMS:
        return _bytes(command[_position(command, "STREAMS") + 1])
    if name == "SCAN":
        place = _position(command, "MATCH")
        return _bytes(command[place + 1]) if place else None
    return _bytes(command[2 if name in SECOND else 1])


def slots_of(commands: Sequence[Command]) -> list[int]:
    """The slot of each command of a sequence."""
    found: list[int] = []
    before = FABRIC_SLOT
    for command in commands:
        key = key_of(command)
        before = before if key is None else key_slot(key)
        found.append(before)
    return found


def is_blocking(command: Command) -> bool:
    """Tell whether it may wait for data."""
    name = _text(command[0])
    return name == "BLPOP" or (name in STREAMS and bool(_position(command, "BLOCK")))


def _position(command: Command, word: str) -> int:
    """Return the position of a word; 0 if it is absent."""
    return next((index for index, part in enumerate(command) if index and _text(part) == word), 0)


def _text(word: Argument) -> str:
    return (word.decode("latin-1") if isinstance(word, bytes) else str(word)).upper()


def _bytes(word: Argument) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()
