"""Processor time that a hypervisor kept from this machine while it wanted to compute: Linux calls it steal.

On a shared host it comes in gaps of tens of milliseconds, in clusters. What is measured meanwhile measures the host.
"""

from __future__ import annotations

from pathlib import Path

STAT = Path("/proc/stat")
STEAL = 8  # the word of a processor's line; see proc(5)
TICKS_PER_S = 100  # USER_HZ, the same on every architecture that matters here


def stolen_s(stat: Path = STAT) -> float:
    """Seconds since boot, of all processors together, to 10 ms. 0.0 where nobody says: no Linux, or no hypervisor."""
    if not stat.exists():
        return 0.0
    words = stat.read_text().partition("\n")[0].split()
    return int(words[STEAL]) / TICKS_PER_S if len(words) > STEAL else 0.0
