"""Whatever bytes a decoder is given, it returns a usable value or raises an error that it declares."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import ChainBroken, InputError, PayloadTooLarge, WireError
from rollfab.fabric.contract.limits import RECORD_BYTES_MAX
from rollfab.fabric.contract.records import TokenLog, TrajectoryJob, TurnJob, WorkerInfo
from rollfab.fabric.contract.wire import HEADER as RECORD_HEADER
from rollfab.fabric.contract.wire import Record
from rollfab.fabric.format import codec
from rollfab.fabric.format.codec import HEADER, SPARSE, STREAM, VALUES
from rollfab.fabric.format.decoder import Decoder
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.rules.weights.chain import KEYFRAME, Link, plan
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.stage import Stage
from tests.fuzz.damage import damaged
from tests.fuzz.targets import LAYOUT, OLD, TARGETS, attack, blocks, manifest, row
from tests.support.tried import tried

MIB = 1 << 20
# Each example is a few damages of a valid input: thousands of them find what a few do not, and take seconds.
many = settings(
    max_examples=tried(600),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_given_damaged_bytes_ends_in_a_value_or_a_declared_error(name: str) -> None:
    target = TARGETS[name]

    @many
    @given(damaged(target.seeds))
    def check(data: bytes) -> None:
        attack(target, data)

    check()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_given_any_bytes_ends_in_a_value_or_a_declared_error(name: str) -> None:
    @given(st.binary(max_size=300))
    def check(data: bytes) -> None:
        attack(TARGETS[name], data)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_accepted_or_declared_so_that_damage_reaches_the_inside(name: str) -> None:
    accepted = 0
    for seed in TARGETS[name].seeds:
        try:
            TARGETS[name].read(seed)
        except TARGETS[name].declared:
            continue
        accepted += 1
    assert accepted or name == "chunk"  # staged to another digest than the manifest's, which is its last check


def test_every_kind_of_record_is_attacked() -> None:
    kinds = {kind.__name__ for kind in _all_records()}
    assert kinds <= set(TARGETS) | {"WeightManifest"}, "add a seed of the new record to tests/fuzz/targets.py"


def test_every_kind_of_record_has_a_limit_of_its_own() -> None:
    kinds = {kind.__name__ for kind in _all_records()}
    assert kinds == set(RECORD_BYTES_MAX), "add the record to RECORD_BYTES_MAX in fabric/contract/limits.py"


def _all_records() -> list[type[Record]]:
    """Those that come from the broker or a peer; ranks of one trainer speak to one another alone."""
    ours = [kind for kind in Record.__subclasses__() if kind.__module__.startswith("rollfab.")]
    return [kind for kind in ours if kind.__module__ != "rollfab.trainer.publish.messages"]


# ---- what a header says is not believed


def _peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [10, 1 << 31, 1 << 62, -1, True, 1.5, "9", None])
def test_an_array_that_claims_another_length_is_refused_before_it_is_made(length: object) -> None:
    import orjson

    meta = orjson.dumps({"spans": [], "completion_ids": ["i4", length], "logprobs": ["f4", 0]})
    meta += b" " * (-(RECORD_HEADER.size + len(meta)) % 8)
    data = RECORD_HEADER.pack(b"rf", 1, TokenLog.KIND, len(meta)) + meta

    assert _peak_bytes(lambda: TokenLog.decode(data)) < MIB


def test_a_stream_whose_frame_claims_a_terabyte_is_refused_before_it_is_made() -> None:
    # Given a block whose compressed stream carries a content size in its own header
    frame = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(70_000)))
    assert zstandard.frame_content_size(bytes(frame)) == 70_000
    frame[5:9] = (0xFFFF_FFF0).to_bytes(4, "little")
    data = HEADER.pack(VALUES, 1, 0, 1, 300) + STREAM.pack(300, len(frame)) + frame

    assert _peak_bytes(lambda: Decoder().decode(data, element_count=300, dtype=np.dtype("u1"))) < MIB


def test_a_stream_that_holds_more_than_it_promises_is_refused() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MIB))
    data = HEADER.pack(VALUES, 1, 0, 1, 300) + STREAM.pack(300, len(bomb)) + bomb

    assert _peak_bytes(lambda: Decoder().decode(data, element_count=300, dtype=np.dtype("u1"))) < 2 * MIB


def test_one_escaped_number_with_megabytes_of_rest_is_refused_at_once() -> None:
    # Given a sparse block of one change whose step has ten million planes: each would be a round of a loop
    element_count = codec.BLOCK_BYTES
    rest = bytes(10 * MIB)
    streams = [b"\0", b"", b"", b"\x0f", b"\x01" + rest]
    table = b"".join(STREAM.pack(len(stream), len(stream)) for stream in streams)
    data = HEADER.pack(SPARSE, 1, 0, 5, 1) + table + b"".join(streams)

    with pytest.raises(WireError, match="10485760 escaped numbers for 1 changes"):
        Decoder().decode(data, element_count=element_count, dtype=np.dtype("u1"))


# ---- records


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (TrajectoryJob, "trajectory_id", ["g.0"]),
        (TrajectoryJob, "task", "text"),
        (TrajectoryJob, "seed", True),
        (TrajectoryJob, "seed", 1.0),
        (TurnJob, "agent_id", None),
        (TurnJob, "sampling", {"temperature": "hot"}),
        (TurnJob, "sampling", {"max_tokens": 1.5}),
        (TurnJob, "sampling", {"stop_ids": [1, "x"]}),
        (TurnJob, "sampling", {"seed": 1.0}),
        (TurnJob, "sampling", {"seed": True}),
        (TokenLog, "spans", [[0, 1, 7, 3]]),
        (WorkerInfo, "environments", ["e", 3]),
        (WorkerInfo, "slot_count", "many"),
    ],
)
def test_a_field_of_another_type_is_refused_and_named(kind: type[Record], field: str, value: object) -> None:
    import orjson

    (seed,) = TARGETS[kind.__name__].seeds
    magic, schema, number, length = RECORD_HEADER.unpack_from(seed)
    meta = {**orjson.loads(seed[RECORD_HEADER.size : RECORD_HEADER.size + length]), field: value}
    head = orjson.dumps(meta)
    head += b" " * (-(RECORD_HEADER.size + len(head)) % 8)
    data = RECORD_HEADER.pack(magic, schema, number, len(head)) + head + seed[RECORD_HEADER.size + length :]

    with pytest.raises(WireError, match=f"{kind.__name__}.*{field if field != 'sampling' else ''}"):
        kind.decode(data)


def test_arrays_of_one_turn_that_differ_in_length_are_refused() -> None:
    log = TokenLog(completion_ids=np.zeros(3, np.int32), logprobs=np.zeros(2, np.float32))
    with pytest.raises(WireError, match="completion_ids, logprobs differ in length"):
        TokenLog.decode(log.encode())


def test_a_record_above_its_limit_is_neither_sent_nor_read() -> None:
    limit = RECORD_BYTES_MAX["WorkerInfo"]
    info = WorkerInfo(worker_id="w1", role="agent", pid=1, host="box", environments=["e" * 100] * 1000)

    with pytest.raises(
        PayloadTooLarge, match=r"WorkerInfo w1 is 1\d\d,\d\d\d bytes.*offer fewer environments"
    ) as caught:
        info.encode()
    assert caught.value.facts["limit_bytes"] == limit
    assert isinstance(caught.value, InputError)

    with pytest.raises(WireError, match="at most"):
        WorkerInfo.decode(TARGETS["WorkerInfo"].seeds[0] + bytes(limit))


# ---- weights


@pytest.mark.parametrize("choice", range(8))
@pytest.mark.parametrize("mode", ["sparse", "steps", "values"])
def test_a_chunk_of_the_wrong_kind_is_refused_whatever_its_manifest_says(mode: str, choice: int) -> None:
    with pytest.raises(TARGETS["chunk"].declared):
        TARGETS["chunk"].read(bytes([choice]) + blocks()[mode])


def test_a_keyframe_of_steps_is_refused() -> None:
    sparse = blocks()["sparse"]
    rows = [row(1, 0, 0, len(sparse)), row(0, 0, 0, len(sparse))]
    stage = Stage(whole(LAYOUT), None)
    stage.begin(manifest("keyframe", [sparse], rows))
    with pytest.raises(WireError, match="needs a base"):
        stage.feed(sparse)


def test_a_delta_without_a_base_is_refused_where_nothing_is_held() -> None:
    with pytest.raises(ChainBroken):
        Stage(whole(LAYOUT), None).begin(manifest("delta", [b""], [], base_version=-1))


GOOD = row(1, 0, 0, 4)
BAD_ROWS = {
    "a chunk before the first": GOOD._replace(chunk=-1),
    "a tensor before the first": GOOD._replace(tensor=-1),
    "a tensor behind the last": GOOD._replace(tensor=2),
    "a block that is not there": GOOD._replace(start=300),
    "a block before the first": GOOD._replace(start=-1),
    "a tile that ends behind the tensor": GOOD._replace(run=10, stride=100, run_count=4),
    "a tile of overlapping runs": GOOD._replace(run=10, stride=5, run_count=4),
    "a block without elements": GOOD._replace(run=0, stride=0),
    "more changes than elements": GOOD._replace(changed_count=301),
    "behind its chunk": GOOD._replace(offset=2, length=8),
    "before its chunk": GOOD._replace(offset=-2, length=2),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_row_that_points_nowhere_is_refused(case: str) -> None:
    with pytest.raises(WireError):
        Stage(whole(LAYOUT), OLD, 1).begin(manifest("delta", [b"1234"], [BAD_ROWS[case]]))


def test_a_block_that_comes_twice_is_refused() -> None:
    rows = [row(1, 0, 0, 2), row(1, 0, 2, 2)]
    with pytest.raises(WireError, match="twice"):
        Stage(whole(LAYOUT), OLD, 1).begin(manifest("delta", [b"1234"], rows))


@pytest.mark.parametrize(
    "layout",
    [
        [["w", "bfloat16"]],
        [["w", "bfloat16", 3]],
        [["w", "bfloat16", [1.5]]],
        [["w", "bfloat16", ["3"]]],
        [["w", "complex", [3]]],
        [["w", "bool", [-1]]],
        [["w", "bool", [1]], ["w", "bool", [1]]],
        [7],
    ],
)
def test_a_layout_that_cannot_be_is_refused_as_bytes_we_cannot_read(layout: list[object]) -> None:
    with pytest.raises(WireError):
        _ = WeightManifest.decode(manifest("delta", [], [], layout=layout).encode()).tensors


def test_links_in_a_circle_are_no_way() -> None:
    def link(version: int, base: int, kind: str = "delta", size: int = -5) -> Link:
        return Link(version=version, base_version=base, kind=kind, epoch=1, payload_bytes=size, chunk_count=1)

    circle = [link(3, -1, KEYFRAME, 10), link(4, 3), link(4, 4), link(5, 5)]
    assert [each.version for each in plan(None, 4, circle)] == [3, 4]
    with pytest.raises(ChainBroken):
        plan(None, 5, circle)
