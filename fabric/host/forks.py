"""The process that opened a connection; children that it forks must not use their copy.

A forked child shares the sockets of its parent: its commands would mix with the parent's, and it would wait for a
thread that it does not have.
"""

from __future__ import annotations

import os

from ..contract.errors import ConnectionForked


class Home:
    """Remembers the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True if this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Require to be in that process.

        Raises:
            ConnectionForked: this is a child that was forked.
        """
        if not self.is_here:
            raise ConnectionForked(
                f"this connection was opened by process {self._pid}, and this is process {os.getpid()}, forked from it"
                " (os.fork, or multiprocessing with the start method fork): open a connection here, with"
                " rollfab.connect(url) or rollfab.aio.connect(url), and open the run on it",
                opened_by=self._pid,
            )
