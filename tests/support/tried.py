"""How much a test tries: all that it names, or a part under `--hypothesis-profile few` (make test-fast)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import settings

LEAST = 5


def is_look() -> bool:
    """Tell whether this is a look, which tries little of everything."""
    return settings.get_current_profile_name() == "few"


def tried(count: int) -> int:
    """Return how many examples or seeds to try of `count`: all, or in a look a twentieth, LEAST at least."""
    return min(count, max(LEAST, count // 20)) if is_look() else count


def cases(found: Iterable[Any], count: int) -> list[Any]:
    """Return all cases, or in a look the first `count`: put first what differs most."""
    return list(found)[: count if is_look() else None]
