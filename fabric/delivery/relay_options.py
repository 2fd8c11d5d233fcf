"""How long relays wait, and how much they do at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """How a process of a node fetches, waits and serves. Each field is above 0."""

    stall_s: float = 2.0
    """Longest wait for the process of this node that fetches, if it shows neither a chunk that we need nor a beat."""
    poll_s: float = 0.005
    """Time between two looks for the chunk."""
    parent_stall_s: float = 1.0
    """Longest silence of another relay, also when connecting; below stall_s, so that leaving it is not a stall."""
    patience_s: float = 10.0
    """Longest wait for a busy relay's next chunk to begin, and for a child to take a part of one."""
    slow_s: float = 30.0
    """After this long a peer that sends or takes less than slow_bytes_per_s is given up."""
    slow_bytes_per_s: float = 128 << 10
    """A slower peer is of no use to anybody."""
    retry_s: float = 30.0
    """A parent that failed is left alone for this long."""
    refresh_s: float = 5.0
    """How old our view of the tree may be."""
    parent_count_max: int = 2
    """Relays asked, nearest first, before the broker: parent and grandparent."""
    piece_bytes: int = 4 << 20
    """Bytes asked of the broker at once; they show in the cache when complete. At least one chunk."""
    child_count_max: int = 64
    """Proven connections that a relay serves at the same time; each holds at most one piece in memory."""
    unproven_count_max: int = 32
    """Connections that have not shown the secret yet, each for patience_s at most; beyond it the oldest is dropped."""
    snapshot_count_max: int = 2
    """Snapshots that are made at the same time: each takes a share of a processor from generating."""
    idle_s: float = 300.0
    """A connection that asks nothing for this long is closed."""

    @property
    def busy_s(self) -> float:
        """Return how often a busy relay says so: a few times within a child's patience."""
        return self.parent_stall_s / 4

    @property
    def piece_s(self) -> float:
        """Return the longest time that a piece may take to come."""
        return self.body_s(self.piece_bytes)

    def body_s(self, byte_count: int) -> float:
        """Return the longest time that so many bytes may take while they flow."""
        return self.slow_s + byte_count / self.slow_bytes_per_s
