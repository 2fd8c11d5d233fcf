"""Commits written into real vLLM engines: afterwards they are the engine that loaded the same checkpoint."""

import base64
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.format.layout import Layout
from rollfab.workers.engines.base import Bits, Writes
from rollfab.workers.engines.vllm.common.arena import pack
from tests.vllm import transfer_engines as engines
from tests.vllm.transfer_engines import DEEPSEEK, LLAMA, NEEDS_AVX512, QWEN2, Vllm

LAYOUT = engines.layout_of(QWEN2)
Q = "model.layers.0.self_attn.q_proj.weight"
REFERENCE = {"attention_backend": "CPU_MLA"}  # vLLM takes AMX where there is some, which knows no float32
NEEDS_AMX = pytest.mark.skipif(
    " amx_tile " not in Path("/proc/cpuinfo").read_text(), reason="vLLM packs these matrices only where there is AMX"
)
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def dense(bits: Mapping[str, Bits]) -> Writes:
    return {name: (None, values) for name, values in bits.items()}


def sparse(layout: Layout, bits: dict[str, Bits], seed: int) -> Writes:
    """A commit of new values at random positions of most tensors; `bits` become what it makes of them."""
    dice = np.random.default_rng(seed)
    fresh = engines.random_bits(layout, 1000 + seed)
    writes: dict[str, tuple[Any, Bits]] = {}
    for spec in layout.tensors:
        count = int(dice.integers(0, max(2, spec.element_count // 4)))
        indices = np.sort(dice.choice(spec.element_count, count, replace=False)).astype(np.int64)
        writes[spec.name] = indices, fresh[spec.name][indices]
        bits[spec.name][indices] = fresh[spec.name][indices]
    return writes


def equal(left: Mapping[str, Bits], right: Mapping[str, Bits]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def keep_absorbed_matrices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels want them in a form of their own: here they would be views of the weight, and always right."""
    from vllm.model_executor.layers.attention import mla_attention

    split = mla_attention.split_kv_b_proj
    monkeypatch.setattr(mla_attention, "split_kv_b_proj", lambda *args: tuple(part.clone() for part in split(*args)))


@pytest.mark.parametrize(
    ("config", "arguments"),
    [(QWEN2, {}), pytest.param(LLAMA, {}, marks=NEEDS_AVX512), (DEEPSEEK, REFERENCE), (QWEN2, TWO_RANKS)],
    ids=["tied-padded-grouped", "untied-bfloat16", "latent-attention", "two-ranks"],
)
def test_after_a_chain_of_commits_an_engine_is_the_one_that_loaded_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], arguments: dict[str, Any]
) -> None:
    # Two workers of a CPU each want a memory node of their own, which a small machine has not
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    keep_absorbed_matrices_apart(monkeypatch)
    layout = engines.layout_of(config)
    bits = engines.random_bits(layout, 1)
    began = engines.save_checkpoint(tmp_path / "began", config, layout, engines.random_bits(layout, 0))

    with engines.engine(began, load_format="dummy", **arguments) as vllm:
        vllm.set_up(layout)
        vllm.write(dense(bits))
        first = vllm.greedy()
        for seed in range(3):
            vllm.write(sparse(layout, bits, seed))
        assert equal(vllm.export(layout), bits)
        written = vllm.greedy(), vllm.checksums()
    ended = engines.save_checkpoint(tmp_path / "ended", config, layout, bits)
    with engines.engine(ended, **arguments) as vllm:
        loaded = vllm.greedy(), vllm.checksums()

    assert written == loaded
    assert written[0] != first


def test_what_two_ranks_refuse_leaves_no_answer_behind_for_the_next_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    began = engines.save_checkpoint(tmp_path / "began", QWEN2, LAYOUT, engines.random_bits(LAYOUT, 0))
    bits = engines.random_bits(LAYOUT, 1)
    with engines.engine(began, load_format="dummy", **TWO_RANKS) as vllm:
        for _ in range(2):  # a worker that attaches ends what another one may have left half done
            vllm.call("finish_weight_update")
        with pytest.raises(Exception, match=r"model\.other"):
            vllm.set_up(changed(Q, lambda row: ["model.other.weight", *row[1:]]))
        vllm.set_up(LAYOUT)
        before = vllm.checksums()
        refused: list[tuple[dict[str, Any], str]] = [
            ({"data": "no base64"}, "can not be read"),
            ({"commit": "7"}, "has not staged what it is to commit"),
            ({}, "one of parcel"),
        ]
        for info, why in refused:
            with pytest.raises(Exception, match=why):
                vllm.update(info)
            assert vllm.checksums() == before
        vllm.write(dense(bits))
        assert equal(vllm.export(LAYOUT), bits)


@NEEDS_AMX
def test_latent_attention_that_is_packed_for_amx_is_refused_with_the_cure(tmp_path: Path) -> None:
    config = {**DEEPSEEK, "torch_dtype": "bfloat16"}
    layout = engines.layout_of(config)
    began = engines.save_checkpoint(tmp_path / "began", config, layout, engines.random_bits(layout, 0))
    with (
        engines.engine(began, load_format="dummy") as vllm,
        pytest.raises(Exception, match=r"EngineUnsupported.*--attention-backend CPU_MLA"),
    ):
        vllm.set_up(layout)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    directory = tmp_path_factory.mktemp("shared") / "model"
    engines.save_checkpoint(directory, QWEN2, LAYOUT, engines.random_bits(LAYOUT, 0))
    with engines.engine(directory) as vllm:
        yield vllm


def test_nothing_is_taken_before_the_layout_is_known(vllm: Vllm) -> None:
    vllm.call("shutdown_weight_transfer_engine")
    with pytest.raises(Exception, match="not set up"):
        vllm.write({Q: (None, engines.random_bits(LAYOUT, 3)[Q])})


def test_what_was_loaded_can_be_read_out(vllm: Vllm, tmp_path: Path) -> None:
    vllm.set_up(LAYOUT)
    bits = engines.random_bits(LAYOUT, 4)
    directory = engines.save_checkpoint(tmp_path / "model", QWEN2, LAYOUT, bits)
    vllm.call("collective_rpc", "reload_weights", None, (), {"weights_path": str(directory)})
    assert equal(vllm.export(LAYOUT), bits)


def test_a_keyframe_written_in_place_is_what_vllm_loads_itself(vllm: Vllm, tmp_path: Path) -> None:
    vllm.set_up(LAYOUT)
    bits = engines.random_bits(LAYOUT, 5)
    vllm.write(dense(bits))
    written = vllm.checksums()
    directory = engines.save_checkpoint(tmp_path / "model", QWEN2, LAYOUT, bits)
    vllm.write(dense(engines.random_bits(LAYOUT, 6)))
    assert vllm.checksums() != written
    vllm.call("collective_rpc", "reload_weights", None, (), {"weights_path": str(directory)})
    assert vllm.checksums() == written


@pytest.mark.parametrize("some", [True, False], ids=["sparse", "dense"])
def test_every_bit_pattern_survives(vllm: Vllm, some: bool) -> None:
    vllm.set_up(LAYOUT)
    odd = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000]
    bits = engines.random_bits(LAYOUT, 7)
    vllm.write(dense(bits))
    indices = np.arange(3, 3 + 17 * len(odd), 17)
    values = np.array(odd, np.uint32)
    for name in (Q, "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        bits[name][indices] = values
        vllm.write({name: (indices, values) if some else (None, bits[name])})
    assert equal(vllm.export(LAYOUT), bits)


def test_every_element_has_its_own_place(vllm: Vllm) -> None:
    vllm.set_up(LAYOUT)
    numbers, start = {}, 0
    for spec in LAYOUT.tensors:
        numbers[spec.name] = np.arange(start, start + spec.element_count, dtype=np.uint32)
        start += spec.element_count
    vllm.write(dense(numbers))
    assert equal(vllm.export(LAYOUT), numbers)
    for name, values in numbers.items():
        indices = np.random.default_rng(1).permutation(len(values))
        numbers[name] = values[::-1].copy()
        vllm.write({name: (indices, numbers[name][indices])})
    assert equal(vllm.export(LAYOUT), numbers)


SIZE = 128 * 128
U32 = np.zeros(2, np.uint32)
BAD_WRITES: dict[str, tuple[Any, Any, str]] = {
    "values-too-narrow": (np.array([0, 1]), np.zeros(2, np.uint16), "stored bits are uint32"),
    "values-too-few": (None, np.zeros(SIZE - 1, np.uint32), f"{SIZE - 1} values for {SIZE}"),
    "position-above": (np.array([0, SIZE]), U32, f"not all below {SIZE}"),
    "position-below": (np.array([-1, 4]), U32, "not all below"),
    "position-twice": (np.array([9, 9]), U32, "twice"),
}


@pytest.mark.parametrize(("indices", "values", "why"), BAD_WRITES.values(), ids=list(BAD_WRITES))
def test_a_bad_commit_changes_nothing(vllm: Vllm, indices: Any, values: Any, why: str) -> None:
    vllm.set_up(LAYOUT)
    bits = engines.random_bits(LAYOUT, 8)
    vllm.write(dense(bits))
    others = {name: row for name, row in dense(engines.random_bits(LAYOUT, 9)).items() if name != Q}
    with pytest.raises(Exception, match=f"nothing was written.*{why}"):
        vllm.write({**others, Q: (indices, values)})
    assert equal(vllm.export(LAYOUT), bits)


def test_a_commit_with_an_unknown_tensor_changes_nothing(vllm: Vllm) -> None:
    vllm.set_up(LAYOUT)
    before = vllm.export(LAYOUT)
    with pytest.raises(Exception, match=r"'lm_head\.weight', which this model has not"):
        vllm.write({**dense(engines.random_bits(LAYOUT, 9)), "lm_head.weight": (np.array([0]), U32[:1])})
    assert equal(vllm.export(LAYOUT), before)


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"parcel": "/no/such/file"}, "no memory 'rollfab-parcel'"),
        ({"parcel": f"/proc/{os.getpid()}/fd/999999"}, "can not be read"),
        ({"parcel": __file__}, "no memory 'rollfab-parcel'"),
        ({"data": "no base64"}, "can not be read"),
        ({"data": base64.b64encode(b"RFP1" + bytes(3)).decode()}, "no parcel"),
        ({"export": "/no/such/file"}, "no memory 'rollfab-weights'"),
        ({"export": f"/proc/{os.getpid()}/fd/999999"}, "can not be read out"),
        ({"stage": {"ticket": "1", "have": -1, "files": [], "answers": "/tmp"}}, "no directory for answers"),
        ({}, "one of parcel"),
        ({"parcel": "a", "data": "b"}, "one of parcel"),
    ],
)
def test_what_is_no_commit_is_refused(vllm: Vllm, info: dict[str, str], why: str) -> None:
    vllm.set_up(LAYOUT)
    with pytest.raises(Exception, match=why):
        vllm.update(info)


def test_no_file_of_the_server_is_overwritten_by_a_request(vllm: Vllm, tmp_path: Path) -> None:
    vllm.set_up(LAYOUT)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * (1 << 18))  # as large as the model: it could be mapped
    for way in (str(victim), f"/proc/self/cwd/../{victim}"):
        with pytest.raises(Exception, match="no memory"):
            vllm.update({"export": way})
    with victim.open("r+b") as opened, pytest.raises(Exception, match="no memory"):
        vllm.update({"export": f"/proc/{os.getpid()}/fd/{opened.fileno()}"})
    assert victim.read_bytes() == b"precious" * (1 << 18)
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_a_commit_may_come_as_text(vllm: Vllm) -> None:
    vllm.set_up(LAYOUT)
    bits = engines.random_bits(LAYOUT, 10)
    vllm.update({"data": base64.b64encode(pack(dense(bits))).decode()})
    assert equal(vllm.export(LAYOUT), bits)


def changed(name: str, change: Callable[[list[Any]], list[Any] | None]) -> Layout:
    rows = [change(row) if row[0] == name else row for row in LAYOUT.rows()]
    return Layout.from_rows(row for row in rows if row is not None)


HEAD = ["lm_head.weight", "float32", [97, 128]]
WRONG_LAYOUTS: dict[str, tuple[Layout, str]] = {
    "tied-twice": (Layout.from_rows([*LAYOUT.rows(), HEAD]), r"lm_head.weight float32\[97, 128\] has no place"),
    "unknown": (changed(Q, lambda row: ["model.other.weight", *row[1:]]), r"model\.other"),
    "missing": (changed(Q, lambda row: None), "qkv_proj.weight is not written whole"),
    "other-shape": (changed(Q, lambda row: [*row[:2], [64, 128]]), r"q_proj.weight float32\[64, 128\] can not"),
    "other-dtype": (changed(Q, lambda row: [row[0], "bfloat16", row[2]]), "start vLLM with dtype='bfloat16'"),
}


@pytest.mark.parametrize(("layout", "why"), WRONG_LAYOUTS.values(), ids=list(WRONG_LAYOUTS))
def test_a_layout_of_another_model_is_refused_by_name(vllm: Vllm, layout: Layout, why: str) -> None:
    vllm.set_up(LAYOUT)
    before = vllm.checksums()
    with pytest.raises(Exception, match=why):
        vllm.set_up(layout)
    assert vllm.checksums() == before
    with pytest.raises(Exception, match="not set up"):
        vllm.export(LAYOUT)


def test_packed_weights_are_refused_not_ignored(tmp_path: Path) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollfab.workers.engines.vllm.inplace.transfer import Transfer

    if "unkept" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("unkept", Transfer)
    directory = engines.save_checkpoint(tmp_path / "model", QWEN2, LAYOUT, engines.random_bits(LAYOUT, 0))
    with engines.engine(directory, weight_transfer_config={"backend": "unkept"}) as vllm:
        with pytest.raises(Exception, match=r"embed_tokens can not be written in place: .* was packed for the CPU"):
            vllm.set_up(LAYOUT)
        assert not any(math.isnan(logprob) for logprob in vllm.greedy()[1])
