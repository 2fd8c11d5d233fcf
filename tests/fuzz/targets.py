"""What reads bytes that others wrote: each decoder with inputs it accepts, and the only errors it may end in.

tests/unit/fabric/format/test_fuzz_decoders.py attacks them with hypothesis, tests/fuzz/fuzz_*.py with atheris. A
decoder that accepts damaged bytes must give a value that can be used: `read` does with it what the program does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollfab.api.access.keys import parse_keys
from rollfab.api.reading.views import agreement_view
from rollfab.deploy.cli.data import read_tasks
from rollfab.fabric.broker.clients.url import mask_url, resolve_url
from rollfab.fabric.contract.agreement import Agreement, Alarm, AlarmRule, Figures, TokenDifferences, WorkerFigures
from rollfab.fabric.contract.errors import (
    ChainBroken,
    ConfigError,
    DigestMismatch,
    FabricError,
    InputError,
    LayoutMismatch,
    WireError,
)
from rollfab.fabric.contract.ids import check_name
from rollfab.fabric.contract.lease_plan import (
    LeasePlan,
    LeaseSample,
    PlanRow,
    RunDemand,
    RunSample,
    Sample,
    ServingSample,
)
from rollfab.fabric.contract.records import (
    DeadLetter,
    Rollout,
    RunConfig,
    Sampling,
    Span,
    TokenLog,
    TrajectoryJob,
    TurnJob,
    TurnResult,
    WorkerInfo,
)
from rollfab.fabric.contract.sharing import LendSetting, SharingReport
from rollfab.fabric.contract.sides import ALIGNMENT
from rollfab.fabric.contract.wire import HEADER, MAGIC, Record, load_json
from rollfab.fabric.delivery.collective.invitations import Answer, Offer
from rollfab.fabric.format.codec import Encoder
from rollfab.fabric.format.decoder import Decoder
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import CODEC, HASH, BlockRow, WeightManifest, chunk_digest, chunk_hash
from rollfab.fabric.queue.rows import event_row, head_row, holder_row, lease_row, version_rows, worker_row
from rollfab.fabric.rules.weights.chain import plan
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.stage import Stage
from rollfab.trainer.checks import make_groups


@dataclass(frozen=True)
class Target:
    """One decoder. `read` raises nothing but `declared`."""

    read: Callable[[bytes], Any]
    seeds: tuple[bytes, ...]
    declared: tuple[type[FabricError], ...] = (WireError,)


def attack(target: Target, data: bytes) -> None:
    """Give a decoder these bytes; anything but a value or a declared error is a finding."""
    with suppress(*target.declared):
        target.read(data)


# ---- records

IDS = np.arange(5, dtype=np.int32)
FLOATS = np.zeros(5, np.float32)
SPANS = (Span(0, 3, "worker-1", 7), Span(3, 5, "worker-2", 8))
JOB = TrajectoryJob(trajectory_id="g.0", group_id="g", task_id="t", index=0, task={"seed": 1, "deep": [{}]}, seed=3)
SAMPLING = Sampling(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.1,
    stop=("\n", "</a>"),
    stop_ids=(1, 2),
    seed=7,
    logit_bias={5: -1.5},
    guided_regex="[0-9]+",
)
RECORDS: tuple[Record, ...] = (
    Sample(
        time_ms=1,
        token_count=2,
        rollout_count=3,
        groups_waiting=4,
        dead_count=5,
        worker_count=6,
        running_count=7,
        slot_count=8,
        runs=(
            RunSample(
                run_id="r1",
                token_count=1,
                rollout_count=1,
                groups_waiting=0,
                dead_count=0,
                head_version=3,
                cause="moves",
            ),
        ),
        serving=(
            ServingSample(
                worker_id="w1",
                guard_state="open",
                slot_count=1,
                token_count=2,
                request_count=3,
                violation_count=0,
                request_count_alone=4,
                violation_count_alone=0,
                ttft_ms_p99=1.5,
                tpot_ms_p99=1.5,
                ttft_ms_p99_alone=1.5,
                tpot_ms_p99_alone=1.5,
                ttft_slo_ms=200.0,
                tpot_slo_ms=20.0,
            ),
        ),
        leases=(LeaseSample("w1", 7, "r1", 2, "open"), LeaseSample("w2", 8, "", 0, "gone")),
    ),
    LeasePlan(
        controller_id="c1",
        term=3,
        made_at_ms=7,
        rows=(PlanRow(worker_id="w1", role="serving", slot_count=2, run_id=None, reason="why"),),
        runs=(RunDemand(run_id="r1", open_count=5, dedicated_count=4, borrowed_count=1),),
        extra_requests={"w1": 12},
    ),
    LendSetting(mode="on", slot_count_max=4, compute_fraction_max=0.3, hours=["mon-fri 22:00-06:00"], said_by="a"),
    SharingReport(worker_id="w1", since_s=5.0, alone={"request_count": 3, "ttft_ms_p99": 9.5}, token_count=7),
    RunConfig(run_id="r", model="tiny", environment="e", environment_options={"size": 4}, reward="success"),
    JOB,
    TurnJob(turn_id="g.0.0", agent_id="a", sampling=SAMPLING, prompt_ids=IDS),
    Offer(
        run_id="r",
        round_id="g1",
        state="open",
        epoch=1,
        version=2,
        kind="delta",
        payload_bytes=9,
        manifest_digest="0" * 32,
        backend="gloo",
        host="127.0.0.1",
        node="box",
        members=["w1", "w2"],
        is_local=True,
        answer_s=2.0,
        stall_s=10.0,
    ),
    Answer(member="w1", host="127.0.0.1", node="box", keys={"0/1": "ff00"}),
    TokenLog(spans=SPANS, completion_ids=IDS, logprobs=FLOATS),
    TurnResult(turn_id="g.0.0", finish_reason="stop", spans=SPANS, completion_ids=IDS, logprobs=FLOATS),
    Rollout(
        trajectory_id="g.0",
        group_id="g",
        task_id="t",
        reward=0.5,
        finish_reason="terminated",
        turn_count=1,
        attempt=0,
        seed=1,
        spans=SPANS,
        prompt_ids=IDS,
        completion_ids=IDS,
        logprobs=FLOATS,
        completion_mask=np.ones(5, np.uint8),
        info={"rewards": [0.5]},
    ),
    DeadLetter(
        trajectory_id="g.0", run_id="r", worker_id="a", reason="x", traceback="", attempt=0, job=dataclasses.asdict(JOB)
    ),
    WorkerInfo(
        worker_id="w", role="serving", pid=1, host="box", environments=["e"], headroom_fraction=0.5, resident_bytes=1
    ),
    Agreement(
        policy_version=7,
        rule=AlarmRule(name="float32", difference_mean_limit=1e-4),
        fresh=Figures(token_count=5),
        worker_count=1,
        workers=(WorkerFigures(worker_id="worker-1", policy_version=7, token_count=5),),
        alarms=(Alarm(worker_id="worker-1", figure="k3_kl", value=1.0, limit=0.1, policy_version=7, text="bad"),),
    ),
    TokenDifferences(
        trajectory_id="g1.0", policy_version=7, mark=3, differences=np.array([0.5, np.nan], dtype=np.float32)
    ),
)


def _use(record: Record) -> None:
    """What readers take for granted of a record: it can be named, counted, and sent on."""
    values = record.__dict__
    for name in ("turn_id", "trajectory_id", "group_id", "worker_id", "run_id"):
        assert isinstance(values.get(name) or "", str)
    for span in values.get("spans", ()):
        assert span.end - span.start + span.policy_version is not None
        assert span.worker_id + "" == span.worker_id
    if isinstance(record, Rollout):
        assert isinstance(record.policy_version, int)
        assert len(record.completion_ids) == len(record.logprobs) == len(record.completion_mask)
    if isinstance(record, TurnJob):
        assert all(isinstance(each, int) for each in record.sampling.stop_ids)
        assert record.sampling.seed is None or type(record.sampling.seed) is int
    if isinstance(record, Agreement):
        assert agreement_view(record).model_dump_json()
        assert all(math.isfinite(value) for value in record.metrics().values())
    type(record).decode(record.encode())


def _record(kind: type[Record]) -> Callable[[bytes], None]:
    return lambda data: _use(kind.decode(data))


def _framed(kind: type[Record]) -> Callable[[bytes], None]:
    """The same for metadata, a zero byte and arrays, so that damage need not get the header's length right."""

    def read(data: bytes) -> None:
        meta, _, arrays = data.partition(b"\0")
        meta += b" " * (-(HEADER.size + len(meta)) % ALIGNMENT)
        _use(kind.decode(HEADER.pack(MAGIC, kind.SCHEMA, kind.KIND, len(meta)) + meta + arrays))

    return read


def _unframed(data: bytes) -> bytes:
    length = HEADER.unpack_from(data)[3]
    return data[HEADER.size : HEADER.size + length] + b"\0" + data[HEADER.size + length :]


# ---- weights

LAYOUT = Layout((TensorSpec("bias", "bfloat16", (40,)), TensorSpec("weight", "float32", (6, 50))))
OLD = {"bias": np.arange(40, dtype=np.uint16), "weight": np.arange(300, dtype=np.uint32)}
NEW = {
    "bias": np.where(np.arange(40) % 7 == 0, np.uint16(900), OLD["bias"]).astype(np.uint16),
    "weight": np.where(np.arange(300) % 99 == 0, OLD["weight"] + np.uint32(70_000), OLD["weight"]).astype(np.uint32),
}


def blocks() -> dict[str, bytes]:
    """A block of every mode, of every width that matters."""
    encoder = Encoder()
    rng = np.random.default_rng(0)
    old = rng.integers(0, 60_000, 300).astype(np.uint16)
    dense = old + rng.integers(1, 3, 300).astype(np.uint16)
    sparse = encoder.delta(OLD["weight"], NEW["weight"])
    steps = encoder.delta(old, dense)
    assert sparse is not None and steps is not None
    wide = np.repeat(rng.integers(0, 256, 4).astype(np.uint64), 75)
    return {"sparse": sparse.data, "steps": steps.data, "values": encoder.dense(wide).data}


def read_block(data: bytes) -> None:
    """A block after one byte that says its element's width."""
    width = (1, 2, 4, 8)[data[0] % 4] if data else 1
    decoded = Decoder().decode(data[1:], element_count=300, dtype=np.dtype(f"<u{width}"))
    if decoded.indices is None:
        assert len(decoded.numbers) == 300
    elif len(decoded.indices):
        assert decoded.indices.min() >= 0 and decoded.indices.max() < 300
        assert (np.diff(decoded.indices) > 0).all()
        assert len(decoded.indices) == len(decoded.numbers)


def manifest(kind: str, chunks: list[bytes], rows: list[BlockRow], **changes: Any) -> WeightManifest:
    """A manifest whose digests fit its chunks: what a publisher with bad intent can always write."""
    base = {"keyframe": -1}.get(kind, 1)
    facts: dict[str, Any] = {
        "run_id": "r",
        "epoch": 1,
        "version": 2,
        "base_version": base,
        "kind": kind,
        "codec": CODEC,
        "layout": LAYOUT.rows(),
        "layout_digest": LAYOUT.digest,
        "cut_digest": "",
        "blocks": np.array(rows, np.int64).reshape(-1),
        "block_digests": np.zeros(len(rows), np.uint64),
        "chunk_bytes": np.array([len(chunk) for chunk in chunks], np.int32),
        "chunk_digests": [chunk_digest(chunk) for chunk in chunks],
        "hash_name": HASH,
        "chunk_hashes": [chunk_hash(chunk) for chunk in chunks],
        "payload_bytes": sum(map(len, chunks)),
        "sums": np.zeros(len(LAYOUT.tensors), np.uint64),
        "changed_count": 1,
        "element_count": LAYOUT.element_count,
        "dense_bytes": LAYOUT.byte_count,
    }
    return WeightManifest(**{**facts, **changes})


def row(tensor: int, chunk: int, offset: int, length: int, changed_count: int = 1) -> BlockRow:
    """A block that holds all of a tensor."""
    count = LAYOUT.tensors[tensor].element_count
    return BlockRow(tensor, 0, count, count, 1, chunk, offset, length, changed_count)


def _manifests() -> tuple[bytes, ...]:
    encoder = Encoder()
    parts = [encoder.dense(NEW[spec.name]).data for spec in LAYOUT.tensors]
    rows = [row(0, 0, 0, len(parts[0]), 40), row(1, 0, len(parts[0]), len(parts[1]), 300)]
    whole = manifest("keyframe", [b"".join(parts)], rows)
    delta = encoder.delta(OLD["weight"], NEW["weight"])
    assert delta is not None
    step = manifest("delta", [delta.data], [row(1, 0, 0, len(delta.data), delta.changed_count)])
    return whole.encode(), step.encode()


def read_manifest(data: bytes) -> None:
    """A manifest as a receiver meets it: planned with, checked, and its rows used."""
    found = WeightManifest.decode(data)
    with suppress(ChainBroken):
        plan(1, found.version, [found.link])
    found.check()
    for block in found.rows:
        assert 0 <= block.offset <= block.offset + block.length <= found.chunk_bytes[block.chunk]
        assert 0 <= block.region.start < block.region.stop <= found.tensors.tensors[block.tensor].element_count


def read_packed(data: bytes) -> None:
    """A manifest as the broker holds it."""
    assert WeightManifest.unpack(data).version is not None


def read_chunk(data: bytes) -> None:
    """A chunk of any content whose digest is right, staged over live weights; the first byte chooses how."""
    choice, body = (data[0], data[1:]) if data else (0, b"")
    kind = "keyframe" if choice & 1 else "delta"
    cut = min(len(body), choice)
    rows = [row(0, 0, 0, cut), row(1, 0, cut, len(body) - cut)]
    stage = Stage(whole(LAYOUT), None if choice & 2 else OLD, 1)
    stage.begin(manifest(kind, [body], rows if choice & 5 else rows[1:]))
    stage.feed(body)
    stage.end()


def read_layout(data: bytes) -> None:
    """A layout's rows as JSON."""
    rows = load_json(data)
    digest = ""
    with suppress(Exception):  # what goes wrong here must come out of the manifest as one error
        digest = Layout.from_rows(rows).digest
    found = manifest("delta", [], [], layout=rows, layout_digest=digest).tensors
    assert found.byte_count >= 0
    assert [spec.row() for spec in found.tensors] == Layout.from_rows(found.rows()).rows()


# ---- texts


def read_url(data: bytes) -> None:
    """A broker's URL: never shown with its password, refused or usable."""
    url = data.decode("utf-8", "surrogateescape")
    mask_url(url)
    resolve_url(url)


def read_name(data: bytes) -> None:
    """A name that becomes part of a key."""
    name = check_name("run", data.decode("utf-8", "surrogateescape"))
    assert not set(name) & set("{}:.*?[]\\ \n")


def read_task_line(data: bytes) -> None:
    """A line of `rollfab submit FILE.jsonl`."""
    make_groups(read_tasks(data, "tasks.jsonl"), 1)


def read_keys_file(data: bytes) -> None:
    """The api's file of hashed keys."""
    parse_keys(data, "keys")


def read_rows(data: bytes) -> None:
    """What stands in the hashes and streams of the control plane."""
    info = worker_row(data[:20], data)
    assert info.worker_id + info.role
    entry_id, kind, facts = event_row(b"1-0", {b"kind": data[:9], b"facts": data})
    assert entry_id + kind and isinstance(facts, dict)
    event_row(b"1-0", {data[:5]: data})
    lease = lease_row("w", "r", data, 5)
    assert lease.slot_count + lease.lease_epoch is not None


def read_head(data: bytes) -> None:
    """The head's three fields."""
    version, epoch, kind, *_ = (*data.split(b" "), b"", b"", b"")
    assert head_row("r", (version, epoch, kind, epoch)).version is not None


def read_versions(data: bytes) -> None:
    """The names of versions that are held."""
    assert sorted(version_rows("r", data.split(b" "))) is not None


def read_holder(data: bytes) -> None:
    """What a receiver says that it holds."""
    holder = holder_row(data[:5], data, data[5:])
    assert isinstance(holder.version, int) and holder.holder_id + holder.address + holder.node + holder.region


KEYS_FILE = f"# keys\nread {'a' * 64} grafana\ncontrol {'0' * 64} alice\n".encode()
WEIGHT_ERRORS = (WireError, ChainBroken, DigestMismatch, LayoutMismatch)
TARGETS: dict[str, Target] = {
    **{type(each).__name__: Target(_record(type(each)), (each.encode(),)) for each in RECORDS},
    **{f"{type(each).__name__} unframed": Target(_framed(type(each)), (_unframed(each.encode()),)) for each in RECORDS},
    "manifest": Target(read_manifest, _manifests()),
    "packed manifest": Target(read_packed, tuple(WeightManifest.decode(data).pack() for data in _manifests())),
    "block": Target(read_block, tuple(bytes([n]) + data for data in blocks().values() for n in range(4))),
    "chunk": Target(
        read_chunk, tuple(bytes([n]) + data for data in blocks().values() for n in range(6)), WEIGHT_ERRORS
    ),
    "layout": Target(read_layout, (b'[["w","bfloat16",[4,3]],["b","bool",[]]]',)),
    "rows": Target(read_rows, (b"7 64 0", b"1 2 3", b'{"step": 1}')),
    "head": Target(read_head, (b"3 1 delta", b"-1 0 ")),
    "versions": Target(read_versions, (b"3:delta 0:keyframe",)),
    "holder": Target(read_holder, (b'[3,"a","west"]', b'[-1,"",""]')),
    "url": Target(
        read_url,
        (b"redis://user:pa%3Ass@host:6379/0?socket_timeout=3", b"unix:///run/b.sock?db=1", b"rediss://[::1]:1"),
        (ConfigError,),
    ),
    "name": Target(read_name, (b"run-1", b"a" * 63), (ConfigError,)),
    "tasks": Target(read_task_line, (b'{"seed": 1}\n\n{"task_id": "x", "deep": [[1.5, null]]}\n',), (InputError,)),
    "keys": Target(read_keys_file, (KEYS_FILE,), (ConfigError,)),
}
