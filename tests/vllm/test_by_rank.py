"""Two tensor-parallel ranks of a real vLLM that each fetch, stage and commit their own part of a run's versions."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import EngineError, WeightError
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.weights import WeightStore
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import Bits, Generation, GenerationRequest
from rollfab.workers.engines.ranks import Ranks, StagedByRanks
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from rollfab.workers.engines.vllm.inplace.version_files import HEAD, MappedVersion
from rollfab.workers.engines.vllm.local import LocalDoor
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from tests.support.weights.engine_sides import catch
from tests.support.weights.random_trainer import RUN, RandomTrainer
from tests.support.weights.rank_maps import cut_for_ranks
from tests.vllm import transfer_engines as engines
from tests.vllm.transfer_engines import QWEN2

LAYOUT = engines.layout_of(QWEN2)
ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
COLUMNS = ("o_proj.weight", "down_proj.weight")
REGIONS = cut_for_ranks(
    LAYOUT,
    row_parts={spec.name: 2 for spec in LAYOUT.tensors if spec.name.endswith(ROWS)},
    column_parts={spec.name: 2 for spec in LAYOUT.tensors if spec.name.endswith(COLUMNS)},
)
Q = "model.layers.0.self_attn.q_proj.weight"


def trainer_of_sane_weights() -> RandomTrainer:
    return RandomTrainer(LAYOUT, REGIONS, draw=lambda version: engines.random_bits(LAYOUT, 1 + version))


@pytest.fixture
async def store() -> AsyncIterator[WeightStore]:
    with EmbeddedBroker.start() as broker:
        async with await RedisFabric.open(broker.url, client_name="tests") as fabric:
            yield fabric.weights


class Receiver(WeightReceiver):
    """Remembers what the ranks staged."""

    staged: StagedByRanks | None = None

    async def _stage_by_ranks(
        self, ranks: Ranks, manifests: Sequence[WeightManifest], have: int | None
    ) -> StagedByRanks:
        self.staged = await super()._stage_by_ranks(ranks, manifests, have)
        return self.staged


class FaultyDoor(LocalDoor):
    """Fake faults: a block that only rank 1 needs is damaged on its way to it; rank 1 dies before it has answered."""

    damages = False
    kills = False

    async def update(self, information: dict[str, Any], what: str, version: int | None = None) -> None:
        files = information.get("stage", {}).get("files")
        if files and self.damages:
            self.damages = False
            damage(files[-1])
        await super().update(information, what, version)
        if files and self.kills:
            kill(max(workers_below(os.getpid())))
            (Path(information["stage"]["answers"]) / "1").unlink(missing_ok=True)


def damage(path: str) -> None:
    """Turn one bit over in the second half of Q, which rank 1 holds."""
    manifest = MappedVersion(path).manifest
    half = next(spec.element_count for spec in LAYOUT.tensors if spec.name == Q) // 2
    row = next(row for row in manifest.rows if LAYOUT.tensors[row.tensor].name == Q and row.region.start >= half)
    place = HEAD.size + len(manifest.pack()) + int(manifest.chunk_bytes[: row.chunk].sum()) + row.offset
    with Path(path).open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def workers_below(pid: int) -> list[int]:
    """vLLM's worker processes below this one."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    own = [child for child in children if "Worker" in Path(f"/proc/{child}/comm").read_text()]
    return own + [worker for child in children for worker in workers_below(child)]


def kill(pid: int) -> None:
    """Returns once nothing of it runs."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):  # its parent has noticed
        while " Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.001)


@asynccontextmanager
async def engine_of(directory: Path, *, door: type[LocalDoor] = LocalDoor, **options: Any) -> AsyncIterator[VllmEngine]:
    arguments = {"skip_tokenizer_init": True, "tensor_parallel_size": 2}
    config = VllmConfig(model=str(directory), slot_count=4, context_tokens_max=256, arguments=arguments, **options)
    engine = VllmEngine(config, door=door(config))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def asked(name: str, max_tokens: int) -> GenerationRequest:
    prompt, sampling = np.arange(5, 85, dtype=np.int32), Sampling(temperature=0.0, max_tokens=max_tokens)
    return GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling)


async def begun(engine: VllmEngine, name: str) -> None:
    """A request that has some of its tokens, and waits."""
    await catch(engine, asked(name, 40))
    await engine.pause("test")


async def ended(engine: VllmEngine) -> Generation:
    (generation,) = await engine.finished(60.0)
    assert generation.error is None
    return generation


async def told(engine: VllmEngine) -> tuple[Any, ...]:
    """Tokens, log-probabilities, and vLLM's own checksums of its weights."""
    engine.generate(asked("told", 20))
    generation = await ended(engine)
    checksums = await engine._door._llm.compute_weight_checksums()  # type: ignore[attr-defined]
    return generation.completion_ids.tolist(), generation.logprobs.tolist(), checksums


def assert_equal(found: Any, expected: dict[str, Bits]) -> None:
    assert all(np.array_equal(found[name], bits) for name, bits in expected.items())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return engines.save_checkpoint(tmp_path / "began", QWEN2, LAYOUT, engines.random_bits(LAYOUT, 0))


async def test_after_versions_in_parts_an_engine_is_the_one_that_loaded_the_last(
    directory: Path, tmp_path: Path, store: WeightStore
) -> None:
    trainer = trainer_of_sane_weights()
    async with engine_of(directory, probes_writes=False) as engine:
        receiver = Receiver(store, RUN, engine, options=ReceiverOptions(audit_every=2))
        # Given a keyframe, then a sparse, a dense, and two sparse ones in one commit
        for fractions in ([1.0], [0.02], [1.0], [0.02, 0.05]):
            if len(fractions) == 2:
                await begun(engine, "through")
            payload_bytes = sum([(await trainer.publish(store, fraction)).payload_bytes for fraction in fractions])
            assert await receiver.update()
            # Then no rank has read all of it, and both together have
            assert receiver.staged is not None
            assert max(receiver.staged.read_bytes) < 0.75 * payload_bytes
            assert sum(receiver.staged.read_bytes) >= payload_bytes
        # And a turn in flight went on with the new weights
        await engine.resume("test")
        assert [version for _, _, version in (await ended(engine)).versions] == [2, 4]
        assert_equal(await engine.read_weights(), trainer.bits)
        with pytest.raises(EngineError, match="by the engine's ranks alone"):
            engine.weight_bits()
        assert receiver.stamp() is None
        parts = await told(engine)
    last = engines.save_checkpoint(tmp_path / "last", QWEN2, LAYOUT, trainer.bits)
    async with engine_of(last, probes_writes=False) as engine:
        assert await told(engine) == parts


async def test_a_rank_that_fails_or_dies_as_it_stages_keeps_all_of_them_where_they_are(
    directory: Path, store: WeightStore
) -> None:
    trainer = trainer_of_sane_weights()
    async with engine_of(directory, door=FaultyDoor, probes_writes=False) as engine:
        door = engine._door
        assert isinstance(door, FaultyDoor)
        receiver = Receiver(store, RUN, engine, options=ReceiverOptions(audit_every=0))
        await trainer.publish(store)
        await receiver.update()
        before = trainer.bits
        await trainer.publish(store, 0.1)
        door.damages = True
        with pytest.raises(WeightError, match=r"version 1 .* not committed on any rank: rank 1 DigestMismatch"):
            await receiver.update()
        assert (receiver.version, engine.stats().active_version) == (0, 0)
        assert_equal(await engine.read_weights(), before)
        # What is right the second time goes on from there, and from a whole version written between
        assert await receiver.update()
        assert_equal(await engine.read_weights(), trainer.bits)
        whole = {name: (None, bits) for name, bits in trainer.bits.items()}
        await engine.apply(Staged(1, whole))
        await trainer.publish(store, 0.1)
        assert await receiver.update()
        assert_equal(await engine.read_weights(), trainer.bits)

        await trainer.publish(store, 0.1)
        door.kills = True
        with pytest.raises(
            WeightError, match=r"version 3 .* on any rank: rank 1 gave no answer(; rank 0 .*)?: vLLM has ended"
        ):
            await asyncio.wait_for(receiver.update(), 60.0)
        assert receiver.version == 2
        with pytest.raises(EngineError):
            engine.stats()
