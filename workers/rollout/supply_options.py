"""The options of a worker's part in the distribution of weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...fabric.contract.errors import ConfigError
from ...fabric.host.options import option


@dataclass(frozen=True, kw_only=True)
class SupplyOptions:
    """Which sources a worker fetches weights from, and where it serves them."""

    is_shared: bool = option(
        True, "Fetch weights once for all workers of this machine, by shared memory.", key="shared_weights"
    )
    listen: str = option(
        "",
        "HOST:PORT to serve weights to other machines at. Weights travel in clear.",
        key="weights_listen",
    )
    """Port 0: a free one."""
    public_host: str = option("", "How other machines reach that HOST, if by another name.", key="weights_host")
    region: str = option("", "Where this machine is: regions are crossed once.")
    home_region: str = option("", "Where the broker is.")
    believes_peers: bool = option(
        True, "Take live weights of other workers; off where a worker may lie.", key="peer_weights"
    )
    """The sums of live weights guard against faults alone: a worker that lies can make other weights of the same sums.
    If this is off, the worker takes only chunks that the broker's manifest proves."""


def place_of(options: SupplyOptions) -> tuple[str, int]:
    """Split `listen` into host and port.

    Raises:
        ConfigError: `listen` is no HOST:PORT, or a place that other machines could not find.
    """
    host, _, port = options.listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"weights cannot be served at {options.listen!r}: give HOST:PORT, port 0 for any")
    if host in ("0.0.0.0", "::", "*") and not options.public_host:
        raise ConfigError(
            f"weights cannot be served at {options.listen!r} alone, as no other machine finds them there: name with"
            " --weights-host how this one is reached"
        )
    return host, int(port)
