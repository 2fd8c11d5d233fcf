"""Fuzz records that travel: python tests/fuzz/fuzz_wire.py -runs=100000. See harness.py."""

from __future__ import annotations

from harness import fuzz

KINDS = "RunConfig TrajectoryJob TurnJob TokenLog TurnResult Rollout DeadLetter WorkerInfo".split()

if __name__ == "__main__":
    fuzz(*KINDS, *(f"{kind} unframed" for kind in KINDS))
