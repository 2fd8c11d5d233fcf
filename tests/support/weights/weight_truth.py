"""What was published in a storm, and what may therefore be live; what happened, counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollfab.fabric.format.digest import state_sums
from rollfab.fabric.format.manifest import WeightManifest
from tests.sim.virtual_loop import Process
from tests.support.weights.weight_models import Model
from tests.support.weights.weight_weather import Bits, digest_of


class Broken(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class Seen:
    """What happened, for those who want to know whether anything did."""

    published: int = 0
    keyframes: int = 0
    jumps: int = 0
    commits: int = 0
    several: int = 0  # commits of more than one version
    torn: int = 0
    looks: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    ambiguous: int = 0  # versions that were made the head twice, with other weights

    def add(self, other: Seen) -> None:
        for name in ("published", "keyframes", "jumps", "commits", "several", "torn", "looks", "ambiguous"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for fault, count in other.faults.items():
            self.faults[fault] = self.faults.get(fault, 0) + count


class Truth:
    """Which bits a version may be: those that a trainer gave under that number when it became the head."""

    def __init__(self, failures: list[BaseException]) -> None:
        self._failures = failures
        self.tried: dict[tuple[str, int], dict[bytes, str]] = {}  # (process, version) → sums → digest
        self.heads: dict[int, list[str]] = {}
        self.epochs: dict[tuple[int, int], str] = {}  # (version, epoch) → digest
        self.epoch = 0  # of the publisher in charge
        self.is_epoch_lost = False  # the broker forgot one: the next publisher has the same
        self.seen = Seen()

    def is_tried(self, process: str, version: int, model: Model) -> None:
        sums = state_sums(model.layout, model.bits).tobytes()
        self.tried.setdefault((process, version), {})[sums] = digest_of(model.bits)

    def observe(self, process: Process, run_id: str, name: str, result: Any, args: Any, kwargs: Any) -> None:
        """A call that the broker carried out."""
        if name == "weights.open_publisher":
            self.epoch = max(self.epoch, result)  # one that is slow to open may end after its successor
        elif name in ("weights.put_manifest", "weights.advance_head") and args[0].epoch != self.epoch:
            self._failures.append(Broken(f"{process.name}: {name} though epoch {self.epoch} has taken over"))
        if name == "weights.put_manifest":
            manifest: WeightManifest = args[0]
            self.seen.jumps += manifest.kind.startswith("jump")
            self.seen.keyframes += manifest.kind == "keyframe"
        elif name == "weights.advance_head":
            version = args[0].version
            digest = self.tried[(process.name, version)].get(args[0].sums.tobytes())
            if digest is None:
                self._failures.append(Broken(f"{process.name}: version {version} is out with sums that nobody gave"))
                return
            by_epoch = self.epochs.setdefault((version, args[0].epoch), digest)
            if by_epoch != digest and not self.is_epoch_lost:
                self._failures.append(Broken(f"version {version} became other weights, and no receiver can tell"))
            known = self.heads.setdefault(version, [])
            self.seen.published += not known
            if digest not in known:
                known.append(digest)

    def check(self, who: str, version: int, bits: Bits) -> str:
        digest = digest_of(bits)
        if digest not in self.heads.get(version, []):
            meant = [number for number, digests in self.heads.items() if digest in digests]
            raise Broken(f"{who}: what is live as version {version} is not it; the same bits as versions {meant}")
        return digest
