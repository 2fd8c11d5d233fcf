"""Publishing from a trainer: exact, checked before anything is written, and finished after every failure.

What every way of publishing promises is checked of each (`trainer`): compared on the host, on a device (the CPU stands
for it), and as the one rank of a group. Several ranks are processes: see test_sharded_publish.py.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollfab.fabric.contract.errors import (
    BrokerError,
    BrokerFull,
    ChainBroken,
    InputError,
    LayoutMismatch,
    VersionConflict,
    VersionUnknown,
    WeightsNotFinite,
)
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import Holder, WeightManifest
from rollfab.fabric.rules.weights.chain import DELTA, GRACE_COUNT, JUMPS, KEYFRAME
from rollfab.fabric.rules.weights.publish import VERSION_MAX
from rollfab.fabric.versions.commit import commit
from rollfab.fabric.versions.held import readable
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.reader import ChainReader, fetch_weights
from rollfab.fabric.versions.snapshot import Identity, Snapshot
from rollfab.fabric.versions.stage import Stage
from rollfab.trainer.publish import upkeep
from rollfab.trainer.publish.publisher import Publisher
from tests.support.weights.faulty_weights import (
    RUN,
    FaultyStore,
    Trainer,
    assert_published,
    collect,
    published,
    small_model,
)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of torch.distributed with one rank."""
    file = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=file, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(params=["host", "device", "group"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    """One that publishes in each way."""
    if request.param == "group":
        return Trainer(group=request.getfixturevalue("group"))
    return Trainer(compares_on=request.param)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def plain(store: FaultyStore) -> Publisher:
    return Publisher(store, RUN)


async def test_the_first_version_is_a_keyframe_and_the_next_a_delta(trainer: Trainer) -> None:
    first = await trainer.publish(0)
    with torch.no_grad():
        next(iter(trainer.model.parameters()))[0, :3] += 1.0
    second = await trainer.publish(1, rate=0.0)

    assert (first.kind, first.density) == (KEYFRAME, 1.0)
    assert (second.kind, second.changed_count) == (DELTA, 3)
    assert second.payload_bytes < 100 < first.payload_bytes
    assert second.density == 3 / sum(parameter.numel() for parameter in trainer.model.parameters())
    await trainer.check()


async def test_every_kind_of_tensor_is_published_exactly(trainer: Trainer) -> None:
    tensors = {
        "bf16": torch.randn(3, 4).to(torch.bfloat16),
        "f16": torch.randn(5).to(torch.float16),
        "f32": torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]),
        "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "i8": torch.arange(-4, 4, dtype=torch.int8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "negative view": torch.view_as_complex(torch.randn(3, 2)).conj().imag,
    }

    await trainer.publisher.publish(tensors, 0, allow_nonfinite=True)
    found = await fetch_weights(trainer.store, RUN)

    assert found["bf16"].dtype == np.uint16
    assert found["f32"].dtype == np.float32
    assert found["transposed"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    for name, tensor in tensors.items():
        expected = tensor.contiguous().resolve_neg().reshape(-1).view(torch.uint8).numpy()
        assert found[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(found[name].reshape(-1).view(np.uint8), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_new_values_that_are_not_finite_are_refused_by_name(trainer: Trainer, value: float) -> None:
    # Given a trainer whose first step is good
    await trainer.publish(0)
    before, kept = published(trainer.store), copy.deepcopy(trainer.model.state_dict())
    with torch.no_grad():
        trainer.model[2].bias[1:3] = value
    # When it publishes a step that is not; then tensor, count, live version and next step are named, and nothing moved
    with pytest.raises(
        WeightsNotFinite, match=r"2 new values.* in '2.bias' \(2 of 5\): nothing was.*version 0 stays.*allow_nonfinite"
    ):
        await trainer.publish(1, rate=0.0)
    assert published(trainer.store) == before
    # And it goes on with a delta, from weights that are finite
    trainer.model.load_state_dict(kept)
    assert (await trainer.publish(1)).kind == DELTA
    await trainer.check()


async def test_what_is_not_finite_and_permitted_stays_live_without_permission(trainer: Trainer) -> None:
    # Given a version with such a value, which was permitted
    with torch.no_grad():
        trainer.model[2].bias[1] = float("nan")
    with pytest.raises(WeightsNotFinite, match="no version is live"):
        await trainer.publish(0)
    assert published(trainer.store) == (-1, {}, {})
    await trainer.publish(0, allow_nonfinite=True)
    # When others change, also in the same tensor; then nobody is asked again, for a keyframe beside a delta neither
    for version in range(1, 20):
        report = await trainer.publish(version, rate=1e-2, keyframe=version == 19)
    assert report.kind == DELTA and report.keyframe_bytes > 0
    await trainer.check()


async def test_what_was_fetched_can_be_published_again(trainer: Trainer) -> None:
    await trainer.publish(0)
    report = await trainer.publisher.publish(await fetch_weights(trainer.store, RUN), 1, allow_nonfinite=True)
    assert (report.kind, report.changed_count, report.payload_bytes) == (DELTA, 0, 0)


def test_tensors_on_the_host_are_not_copied() -> None:
    model = small_model()
    bits = collect(model.named_parameters()).bits
    for name, parameter in model.named_parameters():
        assert bits[name].ctypes.data == parameter.data_ptr()


SHARED = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("named", "error", "text"),
    [
        ({"embed": SHARED, "head": SHARED}, LayoutMismatch, "'embed' and 'head' are tied"),
        ([("w", torch.zeros(1)), ("w", torch.ones(1))], LayoutMismatch, "'w' appears twice"),
        ({}, InputError, "no tensors"),
        ({"w\ud800": torch.zeros(1)}, InputError, "cannot be written as UTF-8"),
    ],
)
async def test_what_cannot_be_published_is_named(trainer: Trainer, named: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        await trainer.publisher.publish(named, 0)
    assert await trainer.store.held(RUN) == []


@pytest.mark.parametrize("version", [-1, 1 << 53, 1_700_000_000_123_456_789])
async def test_a_version_that_the_broker_cannot_count_is_refused(trainer: Trainer, version: int) -> None:
    with pytest.raises(InputError, match="count up from 0"):
        await trainer.publish(version)

    assert await trainer.store.held(RUN) == []
    await trainer.publish(VERSION_MAX)
    assert (await trainer.store.head(RUN)).version == VERSION_MAX


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"0.weight": torch.zeros(30, 40)}, r"0\.weight: float32\[30, 40\] instead of bfloat16\[30, 40\]"),
        ({"0.weight": torch.zeros(40, 30).bfloat16()}, r"0\.weight: bfloat16\[40, 30\] instead of bfloat16\[30, 40\]"),
        ({"0.bias": None}, r"1 missing \(0\.bias\)"),
        ({"head": torch.zeros(2)}, r"1 unknown \(head\)"),
    ],
)
async def test_another_layout_is_refused_before_anything_is_written(
    trainer: Trainer, changes: dict[str, Any], text: str
) -> None:
    await trainer.publish(0)
    before = published(trainer.store)
    named = {
        name: each for name, each in {**dict(trainer.model.named_parameters()), **changes}.items() if each is not None
    }
    with pytest.raises(LayoutMismatch, match=text):
        await trainer.publisher.publish(named, 1)
    trainer.start()
    with pytest.raises(LayoutMismatch, match=rf"{text}|different"):
        await trainer.publisher.publish(named, 1)
    assert published(trainer.store) == before


@pytest.mark.parametrize("version", [0, 3])
async def test_a_version_that_is_not_newer_is_refused(trainer: Trainer, version: int) -> None:
    await trainer.publish(3)
    said = f"version {version} of run 'publish' is not newer than its head, version 3"
    with pytest.raises(VersionConflict, match=said):
        await trainer.publish(version)


async def test_publishing_the_same_again_changes_nothing(trainer: Trainer) -> None:
    first = await trainer.publish(0)
    assert await trainer.publish(0, rate=0.0) == first


async def test_the_older_of_two_publishers_is_told(trainer: Trainer) -> None:
    await trainer.publish(0)
    older = trainer.publisher
    trainer.start()
    await trainer.publish(1)

    with pytest.raises(VersionConflict, match="another publisher took over"):
        await older.publish(trainer.model.named_parameters(), 2)


async def test_a_publisher_that_is_refused_at_its_start_takes_nobodys_place(trainer: Trainer) -> None:
    await trainer.publish(3)
    first, model = trainer.publisher, trainer.model
    for named, version, error in (
        (model, 3, VersionConflict),
        (model, 1, VersionConflict),
        (small_model().float(), 9, LayoutMismatch),
    ):
        trainer.start()
        trainer.model = named
        with pytest.raises(error):
            await trainer.publish(version)

    assert (await first.publish(model.named_parameters(), 4)).kind == DELTA


@pytest.mark.parametrize("place", ["put_chunks", "put_manifest", "advance_head"])
@pytest.mark.parametrize("how", ["fail_at", "lose_answer_at"])
@pytest.mark.parametrize("version", [0, 1])
async def test_a_publish_that_failed_is_finished_by_the_next(
    trainer: Trainer, place: str, how: str, version: int
) -> None:
    # Given a version whose sending broke off, and weights that moved on in place
    for before in range(version):
        await trainer.publish(before)
    setattr(trainer.store, how, place)
    with pytest.raises(BrokerError):
        await trainer.publish(version)
    first = copy.deepcopy(trainer.model)

    # When
    report = await trainer.publish(version + 1, rate=1.0)

    # Then both are there, exactly
    assert report.kind == DELTA
    await assert_published(trainer.store, first, version)
    await trainer.check(version + 1)


async def test_a_failed_publish_may_be_repeated_as_it_was(trainer: Trainer) -> None:
    await trainer.publish(0)
    trainer.store.lose_answer_at = "advance_head"
    with pytest.raises(BrokerError):
        await trainer.publish(1)

    report = await trainer.publish(1, rate=0.0)

    assert (report.version, report.kind) == (1, DELTA)
    await trainer.check(1)


async def test_other_tensors_under_the_version_that_failed_are_refused_and_told_that_it_is_out(
    trainer: Trainer,
) -> None:
    await trainer.publish(0)
    trainer.store.fail_at = "put_manifest"
    with pytest.raises(BrokerError):
        await trainer.publish(1)
    first = copy.deepcopy(trainer.model)

    with pytest.raises(VersionConflict, match=r"head, version 1, which broke off .* finished by this one.*: publish 2"):
        await trainer.publish(1, rate=1.0)

    await assert_published(trainer.store, first, 1)
    with pytest.raises(VersionConflict, match="head, version 1: publish 2"):
        await trainer.publish(1, rate=1.0)


@pytest.mark.parametrize(("is_readable", "kind"), [(True, DELTA), (False, KEYFRAME)])
async def test_a_restarted_trainer_goes_on_with_a_delta_where_the_head_can_be_read(
    trainer: Trainer, is_readable: bool, kind: str
) -> None:
    await trainer.publish(0)
    trainer.start()
    if not is_readable:
        trainer.store.spoil[(0, KEYFRAME)] = 100

    assert (await trainer.publish(1)).kind == kind
    await trainer.check(1)


async def test_a_version_that_the_broker_has_no_room_for_leaves_nothing_behind(trainer: Trainer) -> None:
    await trainer.publish(0)
    before = published(trainer.store)
    trainer.store.room = 10

    with pytest.raises(BrokerFull, match=r"version 1 \(delta\).* has room for 10"):
        await trainer.publish(1)

    assert published(trainer.store) == before
    trainer.store.room = None
    report = await trainer.publish(1, rate=0.0)
    assert (report.kind, report.version) == (DELTA, 1)
    await trainer.check()


async def test_a_head_that_went_back_is_followed_by_a_keyframe(trainer: Trainer) -> None:
    # Given versions 0 and 1, of which the broker forgets the second, as a replica that takes over may
    await trainer.publish(0)
    before = trainer.store.tables.remember()
    await trainer.publish(1)
    trainer.store.tables.fall_back(before)

    # When the trainer goes on, then what it publishes needs nothing that was lost
    assert (await trainer.publish(2)).kind == KEYFRAME
    await trainer.check()


# ---- the chain


async def test_every_eight_deltas_are_folded_into_a_jump_that_leads_to_the_same_weights(
    store: FaultyStore, plain: Publisher
) -> None:
    # Given a model whose keyframe is dear, and deltas of a few elements each
    rng = np.random.default_rng(1)
    weights = {"w": rng.integers(0, 2**16, 60_000, dtype=np.uint16), "b": rng.integers(0, 2**16, 50, dtype=np.uint16)}
    await plain.publish(weights, 0, allow_nonfinite=True)
    start = {name: array.copy() for name, array in weights.items()}

    # When 64 versions are published
    jumps = []
    for version in range(1, 65):
        weights["w"][rng.integers(0, 60_000, 30)] += rng.integers(0, 3, 30, dtype=np.uint16)
        report = await plain.publish(weights, version, allow_nonfinite=True)
        jumps.append(report.jump_bytes > 0)

    # Then every eighth brought a jump, the last one two, and the long one alone leads from the first to the last
    assert jumps == [version % 8 == 0 for version in range(1, 65)]
    names = await store.held(RUN)
    assert [name for name in names if name[1] == JUMPS[1]] == [(64, JUMPS[1])]
    (manifest,) = await store.manifests(RUN, [(64, JUMPS[1])])
    assert manifest is not None and manifest.base_version == 0
    layout = manifest.tensors
    reader = ChainReader(store, RUN)
    staged = await reader.stage([manifest], Stage(whole(layout), start, 0))
    commit(staged, start)
    for name in weights:
        np.testing.assert_array_equal(start[name], weights[name])


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_chunk_that_cannot_be_read_stops_neither_keyframes_nor_the_cleaning(
    store: FaultyStore, plain: Publisher, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    # Given a chain in which one delta is corrupt at the broker, and perhaps its bytes are not to be had any more
    if not is_kept:
        monkeypatch.setattr(upkeep, "KEPT_BYTES_MIN", 0)
        monkeypatch.setattr(upkeep, "KEPT_SHARE", 1 << 40)
    rng = np.random.default_rng(1)
    weights = {"w": rng.integers(0, 2**16, 60_000, dtype=np.uint16)}
    for version in range(4):
        await plain.publish(weights, version, allow_nonfinite=True)
        weights["w"][:30] += 1
    name = (3, DELTA, (await store.head(RUN)).epoch, 0)
    chunks = store.tables.chunks
    chunks[name] = bytes([chunks[name][0] ^ 1]) + chunks[name][1:]

    # When the run goes on
    reports = []
    for version in range(4, 40):
        reports.append(await plain.publish(weights, version, allow_nonfinite=True))
        weights["w"][:30] += 1

    # Then it is written again, or a keyframe leads around it; jumps go on, and what nobody needs is gone
    assert sum(report.keyframe_bytes > 0 for report in reports) == (0 if is_kept else 1)
    assert sum(report.jump_bytes > 0 for report in reports) >= 3
    assert (3, DELTA) not in await store.held(RUN)
    weights["w"][:30] -= 1
    np.testing.assert_array_equal((await fetch_weights(store, RUN))["w"], weights["w"])


async def test_a_manifest_that_cannot_be_read_is_gone_around(store: FaultyStore, plain: Publisher) -> None:
    # Given a delta that is torn and one that says it is another, and a jump over both
    weights = {"w": np.random.default_rng(1).integers(0, 2**16, 60_000, dtype=np.uint16)}
    for version in range(10):
        weights["w"][:30] += 1
        await plain.publish(weights, version, allow_nonfinite=True)
    run = store.tables
    run.manifests[(5, DELTA)] = b"torn"
    run.manifests[(7, DELTA)] = run.manifests[(6, DELTA)]

    names = [(6, DELTA), (5, DELTA), (7, DELTA), (8, DELTA)]
    assert [*await readable(store, RUN, names)] == [(6, DELTA), (8, DELTA)]

    # Then a newcomer finds its way, and so does a trainer that takes over
    np.testing.assert_array_equal((await fetch_weights(store, RUN))["w"], weights["w"])
    weights["w"][:30] += 1
    assert (await Publisher(store, RUN).publish(weights, 10, allow_nonfinite=True)).kind == DELTA
    np.testing.assert_array_equal((await fetch_weights(store, RUN))["w"], weights["w"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "densities",
    [[1e-4, 1.0, 0.3, 0.01], *(pytest.param([each], marks=pytest.mark.slow) for each in (1e-4, 0.01, 0.3, 0.6, 1.0))],
)
async def test_every_version_that_is_listed_can_be_read_after_every_publish(
    store: FaultyStore, plain: Publisher, densities: list[float]
) -> None:
    # Given a receiver that stays at version 3, so that ways from there are held, too
    rng = np.random.default_rng(1)
    weights, truths = {"w": rng.integers(0, 2**16, 20_000, dtype=np.uint16)}, {}
    await store.hold(RUN, Holder(holder_id="slow", version=3, node="", region=""), 3600)

    for version in range(40):
        truths[version] = weights["w"].copy()
        await plain.publish(weights, version, allow_nonfinite=True)

        # Then the head and the versions before it are there, and whatever else is said to be
        listed = await listed_versions(store)
        assert listed >= set(range(max(0, version - GRACE_COUNT), version + 1))
        for each in listed:
            np.testing.assert_array_equal((await fetch_weights(store, RUN, each))["w"], truths[each])
        for each in {name[0] for name in await store.held(RUN)} - listed:
            with pytest.raises(VersionUnknown):
                await fetch_weights(store, RUN, each)

        where = rng.random(20_000) < densities[version % len(densities)]
        weights["w"][where] = rng.integers(0, 2**16, np.count_nonzero(where), dtype=np.uint16)


@pytest.mark.parametrize("density", [0.001, 1.0])
async def test_a_reader_whose_versions_are_deleted_while_it_reads_plans_again(density: float) -> None:
    # Given a trainer that publishes twelve versions whenever a reader has planned, and before it has fetched
    rng = np.random.default_rng(1)
    weights = {"w": rng.integers(0, 2**16, 20_000, dtype=np.uint16)}
    store = Hurried()
    plain = Publisher(store, RUN)
    version = 0

    async def hurry() -> None:
        nonlocal version
        for _ in range(12):
            where = rng.random(20_000) < density
            weights["w"][where] = rng.integers(0, 2**16, np.count_nonzero(where), dtype=np.uint16)
            await plain.publish(weights, version, allow_nonfinite=True)
            version += 1

    await hurry()
    store.hurry, store.left_count = hurry, 5

    # Then the reader comes to the head as it is then; and a version that is gone is said to be
    np.testing.assert_array_equal((await fetch_weights(store, RUN))["w"], weights["w"])
    assert store.left_count == 0
    store.left_count = 1
    with pytest.raises(VersionUnknown, match=f"version {version - 3} .* is not held"):
        await fetch_weights(store, RUN, version - 3)


class Hurried(FaultyStore):
    """A store whose versions move on while they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.hurry: Callable[[], Awaitable[None]] | None = None
        self.left_count = 0

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        if self.hurry is not None and self.left_count:
            self.left_count -= 1
            hurry, self.hurry = self.hurry, None  # publishing reads chunks itself
            await hurry()
            self.hurry = hurry
        return await super().chunks(manifest, indices)


async def listed_versions(store: FaultyStore) -> set[int]:
    """Those that the text names when one is asked for that is not held."""
    with pytest.raises(VersionUnknown) as raised:
        await fetch_weights(store, RUN, 10**6)
    text = str(raised.value).partition("held are ")[2]
    ranges = [part.split("-") for part in text.split(", ")]
    return {version for ends in ranges for version in range(int(ends[0]), int(ends[-1]) + 1)}


async def test_a_reader_goes_around_a_jump_whose_chunks_are_gone(store: FaultyStore, plain: Publisher) -> None:
    rng = np.random.default_rng(1)
    weights = {"w": rng.integers(0, 2**16, 60_000, dtype=np.uint16)}
    start = weights["w"].copy()
    for version in range(9):
        await plain.publish(weights, version, allow_nonfinite=True)
        if version < 8:
            weights["w"][:30] += 1
    (jump,) = [item for item in await store.manifests(RUN, [(8, JUMPS[0])]) if item is not None]
    store.tables.chunks.pop((8, JUMPS[0], jump.epoch, 0))
    reader = ChainReader(store, RUN)

    with pytest.raises(ChainBroken):
        await reader.stage(await reader.plan(0, 8), Stage(whole(jump.tensors), {"w": start}, 0))
    way = await reader.plan(0, 8)
    commit(await reader.stage(way, Stage(whole(jump.tensors), {"w": start}, 0)), {"w": start})

    assert [manifest.kind for manifest in way] == [DELTA] * 8
    np.testing.assert_array_equal(start, weights["w"])


async def test_a_snapshot_with_a_flipped_bit_is_healed_by_its_next_keyframe() -> None:
    bits = {"w": np.arange(1000, dtype=np.uint16)}
    snapshot = Snapshot(Layout((TensorSpec("w", "bfloat16", (1000,)),)), bits, version=3)
    snapshot.bits["w"][7] ^= 1

    keyframe = snapshot.prepare_keyframe(Identity(run_id=RUN, epoch=1, version=3))

    stage = Stage(whole(snapshot.layout), None)
    stage.begin(keyframe.manifest)
    for chunk in keyframe.chunks:
        stage.feed(chunk)
    stage.end()
    np.testing.assert_array_equal(stage.finish().writes["w"][1], snapshot.bits["w"])
    np.testing.assert_array_equal(snapshot.sums, keyframe.manifest.sums)


async def test_long_chains_get_a_keyframe_and_old_ones_go() -> None:
    trainer, keyframe_count = Trainer(), 0
    for version in range(60):
        report = await trainer.publish(version)
        keyframe_count += report.kind == KEYFRAME or report.keyframe_bytes > 0
        held = await trainer.store.held(RUN)
        assert sum(kind == KEYFRAME and at < version - GRACE_COUNT for at, kind in held) <= 1

    assert keyframe_count > 3
    assert held[0][0] > 20
    await trainer.check()


def test_the_publisher_does_not_load_torch_by_itself() -> None:
    code = "import sys, rollfab.trainer.publish.publisher; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[4]

    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(root / "src")}).returncode == 0
