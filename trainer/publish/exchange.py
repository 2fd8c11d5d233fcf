"""Messages between the ranks of one training job while they publish together: small, to rank 0 and back.

- A star of plain sends over gloo groups of its own: no collective, so a rank that dies is known by its number, and
  the ranks that wait for it are told.
- Answers go through a second group: gloo closes all connections of a group in which a rank waited too long.
- After a loss nothing is sent any more; the job starts again, as every job of torch.distributed must.
- messages.py defines the messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...fabric.contract.errors import InputError, WeightError
from .messages import MESSAGE_BYTES_MAX, RankMessage

log = logging.getLogger(__name__)

LATE_FACTOR = 2.0  # an answer comes after rank 0 has waited for all others, and done its own part


class RankExchange:
    """The messages of one rank. Every rank of the group makes one at the same point of its program.

    Args:
        group: of the ranks that publish together.
        timeout_s: how long rank 0 waits for a rank.

    Attributes:
        rank: in the group; size: of the group.
        sent_bytes: bytes that this rank has sent in all.
        lost: why nothing can be sent any more; empty while all is well.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise InputError(
                f"publish: group is {type(group).__name__}, expected one of torch.distributed, such as its group.WORLD",
                name="group",
            )
        self.rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self.size = len(self._ranks)
        self.sent_bytes = 0
        self._timeout_s = timeout_s
        self.lost = ""
        self._lost_ranks: set[int] = set()
        self._up = self._new(timeout_s)
        self._down = self._new(timeout_s * LATE_FACTOR)

    def _new(self, timeout_s: float) -> Any:
        limit = timedelta(seconds=timeout_s)
        return dist.new_group(self._ranks, timeout=limit, backend="gloo", use_local_synchronization=True)

    def send(self, message: RankMessage) -> None:
        """Send a message to rank 0. If that waits no longer, this does not raise: its answer says why."""
        assert self.rank > 0
        self.check()
        try:
            self._put(message.encode(), 0, self._up)
        except RuntimeError as error:
            log.warning("ranks.not_sent", extra={"rank": self.rank, "error": str(error)})

    def receive(self) -> RankMessage:
        """Receive the next message of rank 0.

        Raises:
            WeightError: rank 0 is gone.
        """
        assert self.rank > 0
        self.check()
        try:
            return RankMessage.decode(self._get(0, self._down))
        except RuntimeError as error:
            self._lose(0, error, self._timeout_s * LATE_FACTOR)
            raise WeightError(self.lost, ranks=[0]) from error

    def tell(self, message: RankMessage, rows: Callable[[int], NDArray[np.int64]] | None = None) -> None:
        """Send this message to every other rank, each with its own rows if given; `gather` names one that is gone."""
        assert self.rank == 0
        data = message.encode()
        for rank in self._living():
            try:
                own = data if rows is None else replace(message, rows=rows(rank)).encode()
                self._put(own, rank, self._down)
            except RuntimeError as error:
                self._lose(rank, error)

    def gather(self) -> list[RankMessage]:
        """Receive a message of every other rank, in their order.

        Raises:
            WeightError: a rank is gone; names it. The messages of living ranks were taken.
        """
        assert self.rank == 0
        found: list[RankMessage] = []
        for rank in self._living():
            try:
                found.append(RankMessage.decode(self._get(rank, self._up)))
            except RuntimeError as error:
                self._lose(rank, error)
                if _is_late(error):
                    break  # gloo has closed the connections to the others too
        self.check()
        return found

    def check(self) -> None:
        """Require that no rank is gone.

        Raises:
            WeightError: a rank is.
        """
        if self.lost:
            raise WeightError(self.lost, ranks=sorted(self._lost_ranks))

    def _living(self) -> list[int]:
        return [rank for rank in range(1, self.size) if rank not in self._lost_ranks]

    def _lose(self, rank: int, error: RuntimeError, limit_s: float | None = None) -> None:
        self._lost_ranks.add(rank)
        how = f"did not answer within {limit_s or self._timeout_s:g} s" if _is_late(error) else "is gone"
        self.lost = self.lost or (
            f"rank {rank} of the {self.size} that publish together {how}: this job can publish nothing more. Start its"
            " ranks again"
        )

    def _put(self, data: bytes, rank: int, group: Any) -> None:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), self._ranks[rank], group=group)
        dist.send(payload, self._ranks[rank], group=group)
        self.sent_bytes += len(data)

    def _get(self, rank: int, group: Any) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, self._ranks[rank], group=group)
        payload = torch.empty(min(int(length), MESSAGE_BYTES_MAX), dtype=torch.uint8)
        dist.recv(payload, self._ranks[rank], group=group)
        return payload.numpy().tobytes()


def _is_late(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower()
