"""The weight store: versions of a run's weights, as manifests and chunks, and the head that names the newest.

A version is published in this order: put_chunks, put_manifest, advance_head. Each may be repeated when its answer was
lost. Readers trust the head and what leads to it, nothing else. Beside the head, and without moving it, a publisher
puts keyframes of it, and jumps over versions up to it. Errors: BrokerError when the broker cannot be reached,
BrokerFull when it has no room.

The board beside it is small and forgets by itself: who holds what, and the offers and answers by which weights change
hands without the broker. What stands there is a hint: nobody's weights may depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..format.manifest import Damage, Head, Holder, WeightManifest
from ..rules.weights.chain import Link

HOLDER_COUNT_MAX = 4096  # of a run; beyond it those whose time ends first are forgotten
OFFER_BYTES_MAX = 1 << 20  # it may name every member of a group
ANSWER_BYTES_MAX = 64 << 10
ANSWER_COUNT_MAX = 4096  # of a round
DAMAGE_COUNT_MAX = 256  # versions reported at a time; the publisher reads again what it holds in any case
DAMAGE_TTL_S = 60.0  # a report that nobody has taken up is made again by whoever still cannot read

Range = tuple[int, int, int]  # chunk, start, length; bytes


class WeightBoard(Protocol):
    """What receivers of a run's weights hold, offer, answer and cannot read. Times are the broker's.

    Times are the broker's.
    """

    async def hold(self, run_id: str, holder: Holder, ttl_s: float) -> None:
        """Say what a receiver holds: it is live for `ttl_s`. The newest word of a holder_id counts."""
        ...

    async def release_hold(self, run_id: str, holder_id: str) -> None:
        """Say that a receiver holds nothing any more."""
        ...

    async def holders(self, run_id: str, *, addressed: bool = True) -> list[Holder]:
        """Return the live holders, by holder_id. addressed: with their addresses, which not every role may read."""
        ...

    async def offer(self, run_id: str, data: bytes, ttl_s: float) -> None:
        """Put up an offer in place of the last one, and wake those who wait for the head.

        Raises:
            PayloadTooLarge: more than OFFER_BYTES_MAX.
        """
        ...

    async def offers(self, run_id: str) -> bytes | None:
        """Return the newest offer; None when there is none or its time is over."""
        ...

    async def answer(self, run_id: str, round_id: str, member: str, data: bytes, ttl_s: float) -> None:
        """Answer in a round; a member's newest answer counts. The round is forgotten `ttl_s` after its last answer.

        Raises:
            PayloadTooLarge: more than ANSWER_BYTES_MAX. BrokerFull: ANSWER_COUNT_MAX others have answered.
        """
        ...

    async def answers(self, run_id: str, round_id: str) -> dict[str, bytes]:
        """Return the answers of a round, by member."""
        ...

    async def report_damage(self, run_id: str, damage: Damage, ttl_s: float = DAMAGE_TTL_S) -> None:
        """Say what cannot be read; the newest word on a version and kind counts.

        All reports are forgotten `ttl_s` after the last one. Beyond DAMAGE_COUNT_MAX of them further ones are dropped.
        """
        ...

    async def damages(self, run_id: str) -> list[Damage]:
        """Return the damage that is reported and not cleared, by version and kind."""
        ...

    async def clear_damages(self, run_id: str, damages: Sequence[Damage]) -> None:
        """Forget reports that were seen to, or are not true."""
        ...

    async def tend(self, run_id: str, epoch: int, ttl_s: float) -> None:
        """Say, as the publisher of `epoch`, that it lives and heals what is damaged, for `ttl_s` from now on."""
        ...

    async def tended(self, run_id: str) -> int | None:
        """Return the epoch of the publisher that said so last; None: none lives, or it publishes without healing."""
        ...


class WeightStore(WeightBoard, Protocol):
    """Weights of all runs on one broker."""

    async def open_publisher(self, run_id: str) -> int:
        """Take charge of a run: returns a new epoch, and from now on every older publisher is refused.

        What older publishers left above the head is deleted: it was never published. So are chunks that they wrote
        without coming to the manifest, and what has lost chunks; the chunks of everything else stay from now on,
        whatever time they had.

        Raises:
            VersionConflict: yet another publisher took over meanwhile.
        """
        ...

    async def head(self, run_id: str) -> Head:
        """Return the newest version; version -1 when there is none."""
        ...

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        """Return the head once its version is above `above`, or as it is after `timeout_s`.

        It comes back early, as it is, for an offer that was put up since the last time it did: look at `offers` then.
        """
        ...

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        """Write chunks `first_index`, `first_index` + 1, … of a version."""
        ...

    async def put_manifest(self, manifest: WeightManifest) -> None:
        """Write the manifest of a version whose chunks are there; they need not be where another path carries them.

        Above the head it may be replaced; at or below it only keyframes of the head and jumps may be added.

        Raises:
            VersionConflict: another publisher took over, this version already means something else, or a jump leads
                above the head.
            BrokerError: a chunk is not there any more; the manifest was not written.
        """
        ...

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        """Make a version the head, tell every shard of the run, and wake those who wait.

        Raises:
            VersionConflict: another publisher took over, the version is not newer, its base is not the head, or it is
                a jump.
        """
        ...

    async def held(self, run_id: str) -> list[tuple[int, str]]:
        """Return (version, kind) of every manifest, ascending by version."""
        ...

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        """Return manifests by (version, kind), in that order; None for those no longer held."""
        ...

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        """Return chunks as they are stored, unchecked; None for those no longer held."""
        ...

    async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
        """Return parts of chunks as they are stored, unchecked; None for those no longer held. No range is empty."""
        ...

    async def room_bytes(self) -> int | None:
        """Return the bytes that can still be written, of a cluster on its fullest node; None: no limit.

        None too where the broker does not tell us: then only BrokerFull does.
        """
        ...

    async def mend(self, manifest: WeightManifest, chunks: Mapping[int, bytes], epoch: int) -> None:
        """Write a version's manifest and some of its chunks again, for good and whatever lies in their place.

        Args:
            manifest: as it was published, by whichever publisher; at or below the head.
            chunks: by index, with the digests that the manifest names.
            epoch: of the publisher that mends.

        Raises:
            VersionConflict: the publisher of `epoch` is not in charge any more; nothing was written.
        """
        ...

    async def drop(self, run_id: str, links: Sequence[Link], epoch: int) -> None:
        """Delete versions: chunks first, then the manifest that names them.

        Raises:
            VersionConflict: the publisher of `epoch` is not in charge any more; what is held is another's to judge.
        """
        ...
