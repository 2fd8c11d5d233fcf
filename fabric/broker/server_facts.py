"""Facts that a broker tells about itself, and the reasons why it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

VERSION_MIN = {"redis": (7, 0, 0), "valkey": (8, 0, 0)}
VERSION_WAITAOF = {"redis": (7, 2, 0), "valkey": (8, 0, 0)}


@dataclass(frozen=True, kw_only=True)
class BrokerFacts:
    """Facts that a broker tells about itself."""

    server_kind: Literal["redis", "valkey"]
    version: tuple[int, int, int]
    maxmemory_policy: str
    """Empty if the broker does not say."""
    is_aof_on: bool
    is_loading: bool
    is_replica: bool
    is_cluster: bool

    @property
    def version_text(self) -> str:
        """Show the version to people: "Valkey 9.1.2"."""
        return f"{self.server_kind.capitalize()} {'.'.join(map(str, self.version))}"

    @property
    def can_confirm_disk(self) -> bool:
        """True if it can tell when a write has reached its disk (WAITAOF)."""
        return self.is_aof_on and self.version >= VERSION_WAITAOF[self.server_kind]


def broker_facts(info: Mapping[str, Any]) -> BrokerFacts:
    """Read the reply of INFO, as the client library parses it."""
    kind: Literal["redis", "valkey"] = "valkey" if "valkey_version" in info else "redis"
    return BrokerFacts(
        server_kind=kind,
        version=_version(str(info.get(f"{kind}_version", ""))),
        maxmemory_policy=str(info.get("maxmemory_policy", "")),
        is_aof_on=bool(info.get("aof_enabled")),
        is_loading=bool(info.get("loading")),
        is_replica=info.get("role") == "slave",
        is_cluster=bool(info.get("cluster_enabled")),
    )


def problems(facts: BrokerFacts) -> list[str]:
    """List the reasons why this broker cannot be used, each with the next step; empty for a fit broker."""
    found = []
    if facts.version < VERSION_MIN[facts.server_kind]:
        found.append(f"is {facts.version_text}, too old: use Redis >= 7.0 or Valkey >= 8")
    if facts.maxmemory_policy != "noeviction":
        found.append(
            f"may throw away data when memory is short (maxmemory-policy is {facts.maxmemory_policy or 'unknown'}): "
            "set maxmemory-policy noeviction there"
        )
    if facts.is_replica:
        found.append("is a read-only replica: give the URL of the primary")
    if facts.is_loading:
        found.append("is still loading its data from disk: wait, then try again")
    return found


def _version(text: str) -> tuple[int, int, int]:
    numbers = [int(part) if part.isdigit() else 0 for part in text.split(".")[:3]]
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch
