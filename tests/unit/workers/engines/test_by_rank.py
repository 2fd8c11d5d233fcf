"""Ranks that stage their own parts, in one process: from a run's versions to the bits that each of them holds."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rollfab.fabric.contract.errors import DigestMismatch, EngineError, WeightError  # noqa: E402
from rollfab.fabric.format.layout import Layout, TensorSpec  # noqa: E402
from rollfab.fabric.versions.commit import Staged  # noqa: E402
from rollfab.fabric.versions.stage import part_sums  # noqa: E402
from rollfab.workers.engines.base import Bits, TurnsAtCommit  # noqa: E402
from rollfab.workers.engines.vllm.inplace import by_rank, lane, rank_part  # noqa: E402
from rollfab.workers.engines.vllm.inplace.by_rank import VllmRanks, Write  # noqa: E402
from rollfab.workers.engines.vllm.inplace.lane import DeviceBits, Lane, LiveBits  # noqa: E402
from rollfab.workers.engines.vllm.inplace.pieces import integers, piece_of  # noqa: E402
from rollfab.workers.engines.vllm.inplace.placement import Memory, Placement  # noqa: E402
from rollfab.workers.engines.vllm.inplace.rank_answers import StageOrder  # noqa: E402
from rollfab.workers.engines.vllm.inplace.rank_part import RankPart, shard_map  # noqa: E402
from rollfab.workers.engines.vllm.inplace.version_files import HEAD  # noqa: E402
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver  # noqa: E402
from tests.standin.fabric import StandInFabric  # noqa: E402
from tests.standin.weight_tables import WeightTables  # noqa: E402
from tests.support.until import until  # noqa: E402
from tests.support.weights.random_trainer import RUN, RandomTrainer  # noqa: E402
from tests.support.weights.rank_maps import cut_for_ranks  # noqa: E402

LAYOUT = Layout(
    (
        TensorSpec("column.weight", "bfloat16", (64, 48)),
        TensorSpec("norm.weight", "float32", (48,)),
        TensorSpec("row.weight", "bfloat16", (48, 64)),
    )
)
NO_AUDIT = ReceiverOptions(audit_every=0)


def placement_of(rank: int, rank_count: int) -> Placement:
    """Rows of one tensor, columns of another, all of the third, as vLLM's loader would place them."""
    memories, pieces = {}, {}
    for key, spec in enumerate(LAYOUT.tensors):
        form = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        dim = 1 if spec.name.startswith("row") else 0
        part = form if len(spec.shape) == 1 else form.chunk(rank_count, dim)[rank]
        own = torch.zeros(part.shape, dtype=part.dtype)
        flat = own.view(-1).view({2: torch.int16, 4: torch.int32}[part.dtype.itemsize])
        memories[key] = Memory(f"own.{spec.name}", flat, own, True)
        piece = piece_of(key, part, own)
        pieces[spec.name] = [piece] if piece is not None else []
    return Placement(LAYOUT, memories, pieces)


class PartsDoor:
    """Fake door to ranks in this process. silent: a rank that hears nothing. is_gone: what `check` finds."""

    def __init__(self, rank_count: int) -> None:
        self.rank_count = rank_count
        self.placements = [placement_of(rank, rank_count) for rank in range(rank_count)]
        self.parts = [RankPart(placement, rank) for rank, placement in enumerate(self.placements)]
        self.silent: int | None = None
        self.is_gone = False

    def check(self) -> None:
        if self.is_gone:
            raise EngineError("vLLM has ended")

    async def update(self, information: dict[str, Any], what: str, version: int | None = None) -> None:
        for rank, part in enumerate(self.parts):
            if "commit" in information:
                part.commit(information["commit"])
            elif "stop" in information:
                part.stop()
            elif rank != self.silent:
                part.begin(StageOrder.from_row(information["stage"]))


class PartsEngine:
    """The part of an engine that holds weights, by ranks alone."""

    layout = LAYOUT

    def __init__(self, rank_count: int) -> None:
        self.door = PartsDoor(rank_count)
        self.ranks = VllmRanks(self.door, LAYOUT, self._between, self._commit)

    async def _between(self, tell: Write) -> None:
        await tell()

    async def _commit(self, version: int, write: Write, turns: TurnsAtCommit, may_reuse_prefix: bool) -> float:
        await write()
        return 0.0

    async def apply(self, staged: Staged, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False) -> float:
        """A whole version."""
        await self.ranks.apply(await self.ranks.stage_writes(staged))
        return 0.0

    async def read_weights(self) -> dict[str, Bits]:
        found = {spec.name: np.zeros(spec.element_count, spec.bits_dtype) for spec in LAYOUT.tensors}
        for placement in self.door.placements:
            for name, bits in found.items():
                placement.read(name, integers(bits))
        return found


class Trainer(RandomTrainer):
    """Cuts along the ranks' borders."""

    def __init__(self, rank_count: int) -> None:
        rows, columns = {"column.weight": rank_count}, {"row.weight": rank_count}
        super().__init__(LAYOUT, cut_for_ranks(LAYOUT, row_parts=rows, column_parts=columns), rank_count)
        self.store = StandInFabric().weights


def receiver_of(trainer: Trainer, engine: PartsEngine) -> WeightReceiver:
    return WeightReceiver(trainer.store, RUN, engine, options=NO_AUDIT)  # type: ignore[arg-type]


async def begun(rank_count: int = 2) -> tuple[Trainer, PartsEngine, WeightReceiver]:
    """Ranks that hold version 0."""
    trainer, engine = Trainer(rank_count), PartsEngine(rank_count)
    await engine.ranks.survey()
    receiver = receiver_of(trainer, engine)
    await trainer.publish(trainer.store)
    assert await receiver.update()
    return trainer, engine, receiver


def assert_holds(engine: PartsEngine, bits: dict[str, Bits]) -> None:
    """Every rank holds its slice, and nothing else."""
    for placement in engine.door.placements:
        for name, pieces in placement.pieces.items():
            for piece in pieces:
                held = placement.memories[piece.memory].flat
                expected = torch.zeros_like(held)
                piece.target(expected).copy_(piece.source(integers(bits[name])))
                assert torch.equal(held, expected), name


def turn_over(path: Path, place: int) -> None:
    """One bit of a byte."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("rank_count", [1, 2, 4])
async def test_after_a_chain_each_rank_holds_its_slice_of_the_dense_result(rank_count: int) -> None:
    trainer, engine = Trainer(rank_count), PartsEngine(rank_count)
    await engine.ranks.survey()
    receiver = receiver_of(trainer, engine)
    for fractions in ([1.0], [0.01], [1.0], [0.02, 0.6]):
        for fraction in fractions:
            await trainer.publish(trainer.store, fraction)
        assert await receiver.update()
        assert_holds(engine, trainer.bits)
    assert receiver.version == 4


async def test_a_rank_reads_its_own_blocks_alone() -> None:
    trainer, engine = Trainer(4), PartsEngine(4)
    payload_bytes = (await trainer.publish(trainer.store)).payload_bytes
    ranks, gathering = engine.ranks, engine.ranks.gather()
    receiver = receiver_of(trainer, engine)
    await receiver._reader.stage(await receiver._reader.plan(None, 0), gathering)
    staged = await ranks.stage(gathering, None)
    gathering.close()
    assert max(staged.read_bytes) < 0.3 * payload_bytes
    assert sum(staged.read_bytes) >= payload_bytes


async def test_a_rank_whose_live_weights_are_wrong_keeps_all_of_them_where_they_are_until_a_keyframe_heals_it() -> None:
    trainer, engine, receiver = await begun()
    torn = engine.door.placements[1].memories[0].flat
    torn ^= 1
    before = await engine.read_weights()

    await trainer.publish(trainer.store, 0.5)
    with pytest.raises(DigestMismatch, match=r"tensor column\.weight differs"):
        await receiver.update()
    assert receiver.version == 0
    after = await engine.read_weights()
    assert all(np.array_equal(after[name], bits) for name, bits in before.items())

    assert await receiver.update()
    assert_holds(engine, trainer.bits)


@pytest.mark.parametrize("how", ["missing", "flipped", "sums"])
async def test_what_the_ranks_cannot_read_keeps_them_where_they_are_and_is_told(how: str) -> None:
    # Given ranks at version 0, and a delta that is damaged in the store
    trainer, engine, receiver = await begun()
    before = dict(trainer.bits)
    await trainer.publish(trainer.store, 0.1)
    run = WeightTables.of(trainer.store, RUN)
    (manifest,) = await trainer.store.manifests(RUN, [(1, "delta")])
    assert manifest is not None
    right = (run.manifests[(1, "delta")], run.chunks[(1, "delta", manifest.epoch, 0)])
    if how == "missing":
        run.chunks.pop((1, "delta", manifest.epoch, 0))
    elif how == "flipped":
        run.chunks[(1, "delta", manifest.epoch, 0)] = right[1][:-1] + bytes([right[1][-1] ^ 1])
    else:
        run.manifests[(1, "delta")] = replace(manifest, sums=manifest.sums + 1).pack()

    # When
    for _ in range(3):
        with pytest.raises(WeightError):
            await receiver.update()

    # Then they hold version 0, nothing is in doubt, and the publisher is told
    assert (receiver.version, receiver.is_sound) == (0, True)
    assert_holds(engine, before)
    (report,) = await trainer.store.damages(RUN)
    assert (report.version, report.kind) == (1, "delta")
    assert report.problem == {"missing": "missing", "flipped": "corrupt", "sums": "undecodable"}[how]

    # And once it is healed, they follow
    run.manifests[(1, "delta")], run.chunks[(1, "delta", manifest.epoch, 0)] = right
    assert await receiver.update()
    assert_holds(engine, trainer.bits)


async def test_a_block_that_is_damaged_on_its_way_to_a_rank_keeps_all_of_them_where_they_are() -> None:
    # Given a version that was gathered well, and then a byte that only rank 1 reads turned over in its file
    trainer, engine = Trainer(2), PartsEngine(2)
    receiver = receiver_of(trainer, engine)
    await trainer.publish(trainer.store)
    (manifest,) = await receiver._reader.plan(None, 0)
    with closing(engine.ranks.gather()) as gathering:
        await receiver._reader.stage([manifest], gathering)
        row = next(row for row in manifest.rows if row.tensor == 0 and row.start)
        before = int(manifest.chunk_bytes[: row.chunk].sum()) + row.offset
        turn_over(Path(gathering.paths[0]), HEAD.size + len(manifest.pack()) + before)

        # When, Then
        with pytest.raises(WeightError, match=r"any rank: rank 1 DigestMismatch: a block in chunk 0 of version 0"):
            await engine.ranks.stage(gathering, None)


async def test_after_somebody_else_has_written_sums_are_made_anew_from_what_is_there() -> None:
    trainer, engine, receiver = await begun()
    norm = engine.door.placements[1].memories[1].flat
    norm ^= 1
    engine.door.parts[1].take({})()
    await trainer.publish(trainer.store, 0.01)  # changes next to nothing of it
    with pytest.raises(DigestMismatch, match=r"on rank 1 than on another that holds the same, in norm\.weight"):
        await receiver.update()


async def test_a_rank_that_is_gone_or_silent_is_named_and_nothing_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_rank, "ANSWER_S", 0.5)
    trainer, engine, receiver = await begun()
    before = trainer.bits
    await trainer.publish(trainer.store, 0.5)
    engine.door.silent = 1
    with pytest.raises(WeightError, match=r"version 1 .* on any rank: rank 1 gave no answer"):
        await receiver.update()
    engine.door.is_gone = True
    with pytest.raises(WeightError, match="rank 1 gave no answer: vLLM has ended"):
        await receiver.update()
    assert_holds(engine, before)


async def test_what_was_staged_before_another_order_or_another_commit_is_void() -> None:
    trainer, engine = Trainer(2), PartsEngine(2)
    receiver = receiver_of(trainer, engine)
    await trainer.publish(trainer.store)
    manifests = await receiver._reader.plan(None, 0)
    staged = [await receiver._stage_by_ranks(engine.ranks, manifests, None) for _ in range(2)]
    with pytest.raises(WeightError, match="not staged any more"):
        await engine.ranks.apply(staged[0])
    await engine.apply(Staged(0, {name: (None, bits) for name, bits in trainer.bits.items()}))
    with pytest.raises(WeightError, match="not staged any more"):
        await engine.ranks.apply(staged[1])
    assert_holds(engine, trainer.bits)


@pytest.mark.parametrize("may", [True, False])
async def test_who_serves_others_takes_whole_versions_and_weights_held_in_parts_are_not_on_offer(may: bool) -> None:
    trainer, engine = Trainer(2), PartsEngine(2)
    receiver = WeightReceiver(trainer.store, RUN, engine, options=NO_AUDIT, may_stage_by_ranks=may)  # type: ignore[arg-type]
    await trainer.publish(trainer.store)
    await receiver.update()
    assert_holds(engine, trainer.bits)
    assert receiver.stamp() == (None if may else (0, 1))


class Shortage(TorchDispatchMode):
    """Fake lack of memory: after so many new tensors and arrays there is none for the next."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.allowed = allowed

    def spend(self, error: type[Exception]) -> None:
        self.allowed -= 1
        if self.allowed < 0:
            raise error("no memory")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        olds = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in olds:
            self.spend(torch.OutOfMemoryError)
        return made


class Inline:
    """Fake thread: done when `start` returns."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self.start = target

    def is_alive(self) -> bool:
        return False


@pytest.mark.parametrize("density", [0.05, 1.0], ids=["sparse", "dense"])
async def test_wherever_memory_ends_in_staging_live_weights_stay_whole_and_a_commit_needs_none(
    monkeypatch: pytest.MonkeyPatch, density: float
) -> None:
    # Given a rank at version 0, which has memory for so many arrays and no more
    trainer, engine = Trainer(1), PartsEngine(1)
    receiver = receiver_of(trainer, engine)
    await trainer.publish(trainer.store)
    await receiver.update()
    before = dict(trainer.bits)
    await trainer.publish(trainer.store, density)
    allowed, empty, work, commit = 0, np.empty, RankPart.work, RankPart.commit
    (part,) = engine.door.parts

    def poor(self: RankPart, *args: Any) -> None:
        with Shortage(allowed) as shortage, pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "empty", lambda *rest, **more: shortage.spend(MemoryError) or empty(*rest, **more))  # type: ignore[func-returns-value]
            work(self, *args)

    def commit_without_memory(self: RankPart, ticket: str) -> None:
        with Shortage(0):
            commit(self, ticket)

    monkeypatch.setattr(rank_part, "threading", SimpleNamespace(Thread=Inline, Event=threading.Event))
    monkeypatch.setattr(rank_part, "stand_aside", lambda lane: None)
    monkeypatch.setattr(RankPart, "work", poor)
    monkeypatch.setattr(RankPart, "commit", commit_without_memory)

    # When it stages with ever more
    problems = []
    while not receiver.version:
        try:
            await receiver.update()
        except WeightError as error:
            problems.append(str(error))
            assert_holds(engine, before)
        allowed += 1
    # Then it says what is lacking, and its live weights are version 0; until it is enough
    assert len(problems) >= 8 and all("MemoryError: no memory" in each for each in problems)
    assert_holds(engine, trainer.bits)
    assert part._version == 1


async def test_a_rank_that_is_told_to_stop_reads_nothing_more_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a rank that is in the middle of staging
    trainer, engine = Trainer(2), PartsEngine(2)
    receiver = receiver_of(trainer, engine)
    await trainer.publish(trainer.store)
    await receiver.update()
    await trainer.publish(trainer.store, 0.1)
    reads, may_read, read = [], threading.Event(), LiveBits.__getitem__

    def slow(self: LiveBits, where: Any) -> Bits:
        reads.append(where)
        may_read.wait(60.0)
        return read(self, where)

    monkeypatch.setattr(LiveBits, "__getitem__", slow)
    following = asyncio.create_task(receiver.update())
    while not reads:  # noqa: ASYNC110
        await asyncio.sleep(0.001)

    # When it is told to stop, and only then goes on
    timer = threading.Timer(0.05, may_read.set)
    timer.start()
    await engine.ranks.stop()

    # Then no thread of it is left, and the version is staged anew
    assert not [thread for thread in threading.enumerate() if thread.name == "stage-part"]
    assert await following
    assert_holds(engine, trainer.bits)


def test_live_bits_are_read_by_position_and_by_stretch_as_they_are_stored() -> None:
    bits = np.arange(1000, dtype=np.uint16) * 65
    live = LiveBits(integers(bits.copy()), bits.dtype, Lane(torch.device("cpu")), lambda: None)
    places = np.array([999, 0, 500, 501], dtype=np.int64)
    assert live[places].tolist() == bits[places].tolist()
    assert live[10:20].tolist() == bits[10:20].tolist() and live[places].dtype == np.uint16
    assert len(live[places[:0]]) == 0


def test_bits_on_a_device_are_summed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "SUM_ELEMENTS", 100)
    monkeypatch.setattr(LiveBits, "__getitem__", lambda *_: pytest.fail("it comes to the host"))
    rng = np.random.default_rng(0)
    for rank in range(2):
        mine = shard_map(placement_of(rank, 2))
        arrays = {
            spec.name: rng.integers(0, 2**16, spec.element_count, dtype=spec.bits_dtype) for spec in mine.local.tensors
        }
        live = {
            name: DeviceBits(integers(bits), bits.dtype, Lane(torch.device("cpu")), lambda: None)
            for name, bits in arrays.items()
        }
        np.testing.assert_array_equal(part_sums(mine, live), part_sums(mine, arrays))


async def test_staging_rests_between_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    resting: list[int] = []
    monkeypatch.setattr(rank_part.Pace, "rest", lambda _: resting.append(threading.get_ident()))
    trainer, _, receiver = await begun(1)
    await trainer.publish(trainer.store, 0.1)
    resting.clear()
    assert await receiver.update()
    assert len(resting) >= len(LAYOUT.tensors) and threading.get_ident() not in resting


async def test_staging_that_is_cancelled_ends_though_a_rank_answers_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given ranks of which one never answers, and an answer that comes while their directory is being removed
    engine = PartsEngine(2)
    engine.door.silent = 1
    directories: list[str] = []
    made = by_rank.tempfile.mkdtemp

    def keep_name(*args: Any, **others: Any) -> str:
        directories.append(made(*args, **others))
        return directories[-1]

    def find_it_filled(path: str, *args: Any, **others: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    monkeypatch.setattr(by_rank.tempfile, "mkdtemp", keep_name)
    monkeypatch.setattr(os, "rmdir", find_it_filled)
    task = asyncio.create_task(engine.ranks.survey())
    await until(lambda: directories)
    # When it is cancelled, then it ends as cancelled
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_workers_of_one_server_have_tickets_of_their_own() -> None:
    tickets = [next(PartsEngine(1).ranks._tickets) for _ in range(3)]
    assert len(set(tickets)) == 3
