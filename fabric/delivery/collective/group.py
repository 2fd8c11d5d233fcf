"""One group of torch.distributed: built for one round, used by one thread, taken down after it.

- The process groups are objects of their own; torch's default group is left to the trainer or engine. Several rounds
  and runs can be under way in one process.
- Every operation ends within `stall_s`, by an error if need be. With gloo that holds by its own timeouts (measured:
  a member that is killed fails the others at once, one that is frozen after stall_s, and taking the group down takes
  no time in either case). NCCL has no such promise, so its work is polled and the communicator aborted.
- The NCCL half is unverified on a GPU.

This module imports torch; everybody else imports it late, in the thread that uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # dist.Store, where type checkers see it

from .invitations import CollectiveFailed
from .meeting import Meeting

ROOT = 0
POLL_S = 0.0005  # of NCCL work: short beside a message, long beside a look
NCCL_TIMEOUT = timedelta(hours=1)  # ours is shorter; its own would end the process
MESSAGE_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}  # gloo's best of 1, 4, 64 and 256 MiB (measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This process' place in a group. host: the address at which the others reach it."""

    rank: int
    size: int
    backend: str
    device: str
    host: str
    stall_s: float


class Group:
    """Members in one group, rank 0 being the publisher.

    Raises:
        CollectiveFailed: from every method: another member is gone or stands still; the group is of no use any more.
    """

    def __init__(self, meeting: Meeting, seat: Seat) -> None:
        self.seat = seat
        self.message_bytes = MESSAGE_BYTES[seat.backend]
        self._timeout = timedelta(seconds=seat.stall_s)
        self._store = _MeetingStore(meeting)  # kept: the group holds only its C++ half
        build = _build_gloo if seat.backend == "gloo" else _build_nccl
        self._group: Any = None
        self._group = self._try(lambda: build(self._store, seat, self._timeout))

    def empty(self, byte_count: int) -> torch.Tensor:
        """Make room for a message: uint8, (byte_count,), contiguous, on the group's device."""
        return torch.empty(byte_count, dtype=torch.uint8, device=self.seat.device)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the publisher's `tensor` into everybody's; contiguous, of one dtype and shape."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = ROOT, 0, self._timeout
        self._try(lambda: self._finish(self._group.broadcast([tensor], options)))

    def combine(self, tensor: torch.Tensor) -> None:
        """Turn everybody's `tensor` into the largest of all, element by element."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.MAX, self._timeout
        self._try(lambda: self._finish(self._group.allreduce([tensor], options)))

    def close(self) -> None:
        """Take the group down; members that still wait for it fail."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _finish(self, work: Any) -> None:
        if self.seat.backend == "gloo":
            work.wait()
            return
        never = threading.Event()
        for _ in range(int(self.seat.stall_s / POLL_S)):
            if work.is_completed():
                work.wait()
                return
            never.wait(POLL_S)
        raise CollectiveFailed(f"a message took longer than {self.seat.stall_s:g} s")

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (RuntimeError, ValueError) as error:  # torch's errors of groups are RuntimeErrors
            failure = str(error)
        # Not inside the handler: the error's frames hold the work, which holds the connections. While those are open,
        # the members at their other ends wait in vain until their time is over.
        self.close()
        raise CollectiveFailed(f"the group broke: {failure}")


class _MeetingStore(Store):
    """Presents a Meeting as the store that groups are built on."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self._meeting = meeting

    def set(self, key: str, value: bytes | str) -> None:
        self._meeting.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._meeting.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._meeting.wait(keys)

    def check(self, keys: Sequence[str]) -> bool:
        return self._meeting.has(keys)


def _build_gloo(store: Store, seat: Seat, timeout: timedelta) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=seat.host)]
    options._timeout = timeout
    options._threads = 1
    return kind(store, seat.rank, seat.size, options)


def _build_nccl(store: Store, seat: Seat, timeout: timedelta) -> Any:
    """Build a group of NCCL. Unverified on a GPU."""
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise RuntimeError("this build of torch has no NCCL")
    torch.cuda.set_device(seat.device)
    options = kind.Options()
    options._timeout = NCCL_TIMEOUT
    return kind(store, seat.rank, seat.size, options)
