"""Seeds of sampling: which numbers may be one, and which one a turn gets of its run's.

- A turn's seed follows from the run's seed and the turn's name alone. An attempt that starts anew, an agent that takes
  over, and another run that pushes the same group names under the same seed all ask for the same dice.
- The run's own name is left out, so that a run can be repeated under another one.

Drawing with a seed is the engines' (workers/engines/seeds.py).
"""

from __future__ import annotations

from typing import Any

import xxhash

from .ids import turn_id

SEED_MAX = (1 << 63) - 1  # a signed 64-bit number, as JSON readers, torch and vLLM take it; -1 means "none" to vLLM


def is_seed(value: Any) -> bool:
    """Whether `value` is a whole number in [0, 2**63)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= SEED_MAX


def turn_seed(run_seed: int, trajectory_id: str, turn_index: int) -> int:
    """The seed of one turn, in [0, 2**63): XXH3-64 of "<run seed>/<turn id>" as text, without its lowest bit.

    A turn id is <group id>.<index in the group>.<turn index>. Among a million turns two share a seed with a probability
    of 5e-8 (birthday bound over 63 bits).
    """
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{turn_id(trajectory_id, turn_index)}".encode()) >> 1
