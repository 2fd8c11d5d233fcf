"""Weight transfer in vLLM's worker processes: takes commits from shared memory, and writes each rank's part in place.

- All of a commit is checked before any of it is written: names, dtypes, counts, positions. A bad one changes nothing.
- All ranks of a model take a commit or none does: they tell one another what is wrong before any writes.
- An error is raised on one rank, the last: vLLM reads the ranks' answers up to the first that failed, and would take
  those behind it for answers to later questions.
- After a commit, vLLM computes with the new weights: setting up refuses every layer that would not (copied_weights.py).
- Orders may come from anybody who reaches the server's port: of paths only the memory and directories of a worker of
  this user are taken, by what they are and never by where they lie.
- The caller resets caches of what older weights computed (KV, prefixes).

vLLM finds the class under the backend name "rollfab" (plugin.py). Tensors are written by the same code on every device;
it is unverified on a GPU.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .....fabric.contract.errors import FabricError, WeightError, WireError
from .....fabric.format.layout import Layout
from ...base import Writes
from ..common.arena import Mirror, unpack
from .copied_weights import check_live, derive_again, derived_names
from .loader_trace import record, rehearse
from .packing import pack_again, packed_beside
from .pieces import integers
from .placement import Placement, check_covered
from .rank_answers import StageOrder, check_directory
from .rank_part import RankPart, mapped_parcel

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """layout: rows [name, dtype, shape] of the model that commits are for."""

    layout: list[list[Any]]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Exactly one of these.

    stage: a row of StageOrder, for every rank its part. commit: the ticket of what the ranks have staged. stop: what is
    being staged is given up. export: a Mirror's file to fill. parcel: a file that holds a commit, and data: a commit as
    base64, both for those who cannot see the ranks' answers.
    """

    parcel: str | None = None
    data: str | None = None
    export: str | None = None
    stage: dict[str, Any] | None = None
    commit: str | None = None
    stop: bool | None = None

    def __post_init__(self) -> None:
        values = (self.parcel, self.data, self.export, self.stage, self.commit, self.stop)
        if sum(value is not None for value in values) != 1:
            raise WeightError(
                "an update is one of parcel (a path), data (base64), export (a path), stage, commit (a ticket) and stop"
            )


class Transfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """The backend "rollfab"; one in each worker process, made by vLLM after the model is loaded."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placement: Placement | None = None
        self._part: RankPart | None = None
        let_finish_be_repeated()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Find the place of every tensor; may be called again, with another layout.

        Raises:
            LayoutMismatch: vLLM's model is not of this layout.
            EngineUnsupported: it has layers that can not be written in place.
        """
        self.shutdown()
        layout = Layout.from_rows(init_info.layout)
        placement: Placement | None = None
        problem = ""
        try:
            check_live(self.model)
            placement = record(self.model, layout, derived_names(self.model))
            rehearse(self.model, placement)
        except Exception as error:  # told to the other ranks, which wait for it: all refuse alike
            log.warning("weights.set_up_failed", exc_info=True)
            problem = f"{type(error).__name__}: {error}"
        world = get_world_group()
        ranks = _told_by_all((problem, None if placement is None else placement.coverage()), world)
        problems = [told for told, _ in ranks if told]
        try:
            if problems:
                raise WeightError(problems[0])
            check_covered(layout, [coverage for _, coverage in ranks if coverage is not None])
        except FabricError:  # the same on every rank
            if _is_last(world):
                raise
            return
        assert placement is not None
        placement.fill_padding()
        pack_again(self.model)
        self._placement = placement
        layers = partial(packed_beside, self.model)
        self._part = RankPart(placement, world.rank_in_group, layers=layers)

    def start_weight_update(self) -> None:
        """Do nothing: parameters keep their memory."""

    def finish_weight_update(self) -> None:
        """Do nothing: a commit is complete when `receive_weights` returns."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do as `receive_weights` on every rank, or on none; what goes wrong on any rank is raised on the last."""
        problem, finish = "", _nothing
        try:
            finish = self._prepared(self.parse_update_info(update_info))
        except Exception as error:  # noqa: BLE001 - told to the other ranks, which wait for it: all refuse alike
            problem = f"{type(error).__name__}: {error}"
        # Engines of one model that take requests of their own do not stop together: none waits for another
        is_shared = self.parallel_config.data_parallel_size == 1
        group = get_world_group() if is_shared else get_tp_group()
        problems = [told for told in _told_by_all(problem, group) if told]
        if not problems:
            finish()
        elif _is_last(group):
            raise WeightError(problems[0])

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Write a commit, or fill a mirror with the live weights, or begin to stage this rank's part.

        Raises:
            WeightError: it is no commit for this model; nothing was written.
        """
        self._prepared(update_info)()

    def _prepared(self, update_info: UpdateInfo) -> Callable[[], None]:
        """Do all that may fail, and return the call that does the rest."""
        if self._placement is None or self._part is None:
            raise WeightError("weight transfer is not set up: call init_weight_transfer_engine with a layout first")
        if update_info.export is not None:
            _export(self._placement, Path(update_info.export))
        elif update_info.stop is not None:
            self._part.stop()
        elif update_info.stage is not None:
            order = StageOrder.from_row(update_info.stage)
            check_directory(Path(order.answers))
            self._part.begin(order)
        elif update_info.commit is not None:
            if problem := self._part.problem(update_info.commit):
                raise WeightError(problem)
            return partial(self._write, partial(self._part.commit, update_info.commit))
        else:
            return partial(self._write, self._part.take(_read(update_info)))
        return _nothing

    def _write(self, commit: Callable[[], None]) -> None:
        with torch.no_grad():
            commit()
            derive_again(self.model, self.model_config.dtype)
        torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Let go of the model's memory; a thread that stages ends first."""
        if self._part is not None:
            self._part.stop()
        self._placement = self._part = None


def _nothing() -> None:
    pass


def _read(update_info: UpdateInfo) -> Writes:
    try:
        if update_info.data is not None:
            return unpack(memoryview(bytearray(base64.b64decode(update_info.data, validate=True))))
        return mapped_parcel(str(update_info.parcel))
    except (OSError, ValueError, binascii.Error, WireError) as error:
        raise WeightError(f"nothing was written: the commit can not be read: {error}") from error


def _export(placement: Placement, path: Path) -> None:
    try:
        mirror = Mirror(placement.layout, path)
    except (OSError, ValueError) as error:
        raise WeightError(f"the weights can not be read out into {path}: {error}") from error
    for name, bits in mirror.bits.items():
        placement.read(name, integers(bits))


def _told_by_all(mine: T, group: Any) -> list[T]:
    """Gather what every rank of a group tells, in rank order; all of them must call it."""
    if group.world_size == 1:
        return [mine]
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, mine, group=group.cpu_group)
    return told


def _is_last(group: Any) -> bool:
    return bool(group.rank_in_group == group.world_size - 1)


def let_finish_be_repeated() -> None:
    """Have this process' worker take an end of a weight update also where none has begun. May be called again.

    A worker of ours that attaches to a server ends what another may have left half done. vLLM refuses that on every
    rank, and reads one refusal: the others would be taken for answers to later questions.
    """
    from vllm.v1.worker.gpu_worker import Worker

    finish = Worker.finish_weight_update
    if getattr(finish, "may_be_repeated", False):
        return

    def finish_if_begun(worker: Any) -> None:
        if worker._weight_update_active or not isinstance(worker.weight_transfer_engine, Transfer):
            finish(worker)

    finish_if_begun.may_be_repeated = True  # type: ignore[attr-defined]
    Worker.finish_weight_update = finish_if_begun
