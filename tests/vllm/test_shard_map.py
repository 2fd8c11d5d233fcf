"""The map of a vLLM rank, against the weights that vLLM holds."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.format.layout import Layout
from rollfab.fabric.versions.commit import Staged, commit
from rollfab.fabric.versions.rank_parts import ShardMap, check_regions
from rollfab.fabric.versions.snapshot import Identity, Snapshot
from rollfab.fabric.versions.stage import Stage, part_sums
from rollfab.fabric.versions.vote import agree, vote
from rollfab.workers.engines.vllm.inplace.rank_part import shard_map
from tests.vllm import transfer_engines as engines
from tests.vllm.transfer_engines import LLAMA, NEEDS_AVX512, QWEN2

RUN = "shards"
Rank = tuple[ShardMap, dict[str, Any]]


def tell(worker: Any) -> bytes:
    """Runs in a worker process of vLLM: its map and its parameters' bits."""
    placement = worker.weight_transfer_engine._placement
    made = shard_map(placement)
    live = {memory.name: memory.flat.numpy().copy() for memory in placement.memories.values()}
    bits = {spec.name: live[spec.name].view(spec.bits_dtype) for spec in made.local.tensors}
    return pickle.dumps((made, bits))


def staged_by_ranks(layout: Layout, bits: list[dict[str, Any]], ranks: list[Rank]) -> list[Staged]:
    """The step from the first bits to the second, as both ranks stage and agree on it."""
    prepared = Snapshot(layout, bits[0], 0).prepare_delta(Identity(run_id=RUN, epoch=1, version=1), bits[1])
    staged = []
    for made, live in ranks:
        stage = Stage(made, live, 0)
        stage.begin(prepared.manifest)
        for chunk in prepared.chunks:
            stage.feed(chunk)
        stage.end()
        staged.append(stage.finish())
    votes = [vote(rank, made, staged[rank]) for rank, (made, _) in enumerate(ranks)]
    agree(votes, prepared.manifest, len(ranks))
    return staged


@pytest.mark.parametrize(
    "config",
    [QWEN2, pytest.param(LLAMA, marks=NEEDS_AVX512)],
    ids=["tied-padded-grouped", "untied-bfloat16"],
)
def test_what_two_ranks_stage_by_their_maps_is_what_vllm_itself_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    layout = engines.layout_of(config)
    bits = [engines.random_bits(layout, seed) for seed in range(2)]
    directory = engines.save_checkpoint(tmp_path / "model", config, layout, bits[0])
    told: list[list[Rank]] = []
    with engines.engine(directory, tensor_parallel_size=2, distributed_executor_backend="mp") as vllm:
        vllm.set_up(layout)
        for version in range(2):
            vllm.write({name: (None, values) for name, values in bits[version].items()})
            told.append([pickle.loads(answer) for answer in vllm.call("collective_rpc", tell)])

    check_regions(layout, {one.region for made, _ in told[0] for one in made.slices})
    staged = staged_by_ranks(layout, bits, told[0])
    for (made, live), (_, expected), writes in zip(*told, staged, strict=True):
        commit(writes, live)
        np.testing.assert_array_equal(part_sums(made, live), writes.sums)
        assert live.keys() == expected.keys()
        assert all(np.array_equal(live[name], expected[name]) for name in live)
        assert sum(array.size for array in live.values()) < 0.8 * layout.element_count
