"""A finding: one thing that was looked at, and what to type where it is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at. advice: what to type if it is not fine. is_optional: roles run without it."""

    what: str
    found: str
    is_fine: bool = True
    is_optional: bool = False
    advice: str = ""
