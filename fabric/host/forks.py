"""The process that opened a connection, and the children that it forks: theirs is a copy which must not be used.

A forked child shares the sockets of its parent: a command of it would mix with the parent's, and what it waits for is
run by a thread that it does not have.
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
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Require that process.

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
