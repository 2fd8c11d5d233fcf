"""How much a random test tries: all that it names, or a tenth under `--hypothesis-profile few` (make test-fast)."""

from __future__ import annotations

from hypothesis import settings

LEAST = 5


def tried(count: int) -> int:
    """Return how many examples or seeds to try of `count`: all, or of the profile `few` a tenth, LEAST at least."""
    return min(count, max(LEAST, count // 10)) if settings.get_current_profile_name() == "few" else count
