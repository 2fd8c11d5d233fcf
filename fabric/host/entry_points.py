"""Names installed under an entry-point group; nothing is imported."""

from __future__ import annotations

from importlib.metadata import entry_points


def installed(group: str) -> list[str]:
    """Return the names that installed packages register under `group`, sorted."""
    return sorted({point.name for point in entry_points(group=group)})
