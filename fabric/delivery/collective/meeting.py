"""Where the members of one group learn how to reach one another, when no store of torch's own will do.

A group of torch.distributed is built on a store of keys: each member sets some and waits for those of the others. This
store lives in the process; the keys that it is told to set go out with the member's answer on the board, and the keys
of other members come in the same way.

- torch's own TCPStore is not used, because its client waits without limit for a server that is frozen: `wait`, `get`
  and connecting were all seen to hang, with every timeout set. Here a wait ends at its time, or when it is closed.
- The thread that builds the group waits here; the loop brings and takes keys. Neither blocks the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from .invitations import CollectiveFailed


class Meeting:
    """Keys of one group, on this member's side.

    Args:
        on_need: called, in the thread of the group, when it has a new key for the others, or needs one of theirs.
        patience_s: how long keys of other members are waited for, each.

    Attributes:
        is_waiting: whether somebody waits for a key.
    """

    def __init__(self, on_need: Callable[[], None], patience_s: float) -> None:
        self.is_waiting = False
        self._on_need = on_need
        self._patience_s = patience_s
        self._known: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._reason = ""

    def set(self, key: str, value: bytes) -> None:
        """Set a key of this member."""
        with self._changed:
            self._own[key] = self._known[key] = bytes(value)
            self._changed.notify_all()
        self._on_need()

    def own(self) -> dict[str, bytes]:
        """Return the keys that this member has set."""
        with self._changed:
            return dict(self._own)

    def learn(self, keys: Mapping[str, bytes]) -> None:
        """Take in keys that others have set; a known key stays as it is."""
        with self._changed:
            self._known = {**keys, **self._known}
            self._changed.notify_all()

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of them are known."""
        return all(key in self._known for key in keys)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return it.

        Raises:
            CollectiveFailed: not within `patience_s`, or closed.
        """
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str]) -> None:
        """Wait until all keys are known.

        Raises:
            CollectiveFailed: as `get`.
        """
        self.is_waiting = True
        self._on_need()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self.has(keys), self._patience_s)
            self.is_waiting = False
            if self._is_closed or not self.has(keys):
                missing = [key for key in keys if key not in self._known]
                raise CollectiveFailed(self._reason or f"members of the group did not come: {', '.join(missing)}")

    def close(self, reason: str = "") -> None:
        """End every wait with an error. reason: its text."""
        with self._changed:
            self._is_closed = True
            self._reason = self._reason or reason
            self._changed.notify_all()
