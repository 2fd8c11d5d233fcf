"""How safe a push must be before it counts as acknowledged: in the broker's memory, on its disk, or on a replica.

- memory: the broker has it. It survives whatever happens to other processes, and the broker as far as its own
  persistence goes (docs/guarantees.md).
- disk: the broker's append-only file is synced past it (WAITAOF). A power cut does not take it back.
- replica: a replica has it, too (WAIT). A fail-over to that replica does not take it back.
- A push travels with its barrier over one connection, and both are repeated together: the barrier confirms the write
  just before it, and push_group writes something even for a group that it knows already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..broker.clients.channel import Command
from ..broker.clients.url import Durability
from ..broker.server_facts import BrokerFacts
from ..contract.errors import BrokerError, ConfigError
from .scripts import Call, Scripts

__all__ = ["Durability", "call_durably", "check_durability"]

BARRIER_MS_MAX = 4_000  # less than the silence that a connection bears; everysec needs 1 s, 2 s on a busy disk
BARRIERS: dict[Durability, Command] = {
    "disk": ("WAITAOF", 1, 0, BARRIER_MS_MAX),
    "replica": ("WAIT", 1, BARRIER_MS_MAX),
}
NEXT_STEPS = {
    "disk": "look at its disk and at appendfsync",
    "replica": "see that a replica is connected (INFO replication)",
}


def check_durability(facts: BrokerFacts, durability: Durability) -> None:
    """Refuse at the start a durability that the broker could never confirm.

    Raises:
        ConfigError: durability "disk" on a broker that has no append-only file, or cannot tell of it.
    """
    if durability == "disk" and not facts.can_confirm_disk:
        raise ConfigError(
            f"durability=disk needs a broker that writes an append-only file and can say so (WAITAOF): this one is "
            f"{facts.version_text}, appendonly {'yes' if facts.is_aof_on else 'no'}; "
            "set appendonly yes on Redis >= 7.2 or Valkey >= 8"
        )


async def call_durably(scripts: Scripts, calls: Sequence[Call], durability: Durability) -> list[Any]:
    """Run scripts of one slot, and wait until their writes are safe.

    Returns:
        Answers in order, an error as an exception object in its place.

    Raises:
        BrokerError: written, but not confirmed in time; facts["reason"] is "durability". Repeating it is safe.
    """
    assert durability != "memory"
    *answers, safe = await scripts.call_together(calls, BARRIERS[durability])
    if isinstance(safe, Exception):
        raise safe
    if (safe[0] if isinstance(safe, list) else safe) < 1:
        raise BrokerError(
            f"the broker took the push, but did not confirm within {BARRIER_MS_MAX / 1000:g} s that it is safe "
            f"(durability={durability}): {NEXT_STEPS[durability]}, then push the same group ids again",
            reason="durability",
        )
    return answers
