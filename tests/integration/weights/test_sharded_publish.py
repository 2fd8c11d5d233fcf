"""Trainers by shards, as real processes: what is published is the gathered model, or nothing is."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.versions.reader import fetch_bits
from tests.support.processes.sharded_trainer import Answer, Ranks, trainer_ranks

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


@pytest.fixture
async def store(url: str) -> AsyncIterator[Any]:
    fabric = await RedisFabric.open(url, client_name="checker")
    yield fabric.weights
    await fabric.close()


async def bits_of(store: Any, run_id: str, version: int) -> Answer:
    _, bits = await fetch_bits(store, run_id, version)
    return {name: array.tobytes() for name, array in bits.items()}


async def assert_published(store: Any, run_id: str, version: int, full: Answer) -> None:
    assert (await store.head(run_id)).version == version
    assert await bits_of(store, run_id, version) == full


@pytest.fixture(scope="module")
def trainer(url: str) -> Iterator[Ranks]:
    with trainer_ranks(4, url) as made:
        yield made


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "dim1"])
async def test_what_fsdp_ranks_publish_is_the_gathered_model(trainer: Ranks, store: Any, kind: str) -> None:
    trainer.all("open", kind, kind)
    sent = [0]
    for version in range(3):
        answers = trainer.all("publish", version)
        assert {repr(answer.get("report")) for answer in answers} == {repr(answers[0]["report"])}
        report = answers[0]["report"]
        assert report.kind == ("delta" if version else "keyframe")
        await assert_published(store, kind, version, trainer.all("full")[0])
        trainer.all("train", 1)
        sent.append(answers[0]["rank_bytes"])

    first, *others = [after - before for before, after in itertools.pairwise(sent)]
    assert max(others) < first  # what each rank publishes is told once
    sent_bytes = sum(answer["rank_bytes"] for answer in answers)
    assert 0 < sent_bytes < 0.05 * report.dense_bytes


async def test_a_value_of_one_rank_that_is_not_finite_is_refused_on_all_unless_it_is_permitted(
    trainer: Ranks, store: Any
) -> None:
    trainer.all("open", "finite", "fsdp")
    trainer.all("publish", 0)
    live = await bits_of(store, "finite", 0)
    trainer.some([2], "spoil")

    for answer in trainer.all("publish", 1):
        assert answer["error"] == "WeightsNotFinite"
        assert "rank 2: version 1 has 1 new value" in answer["text"] and "version 0 stays live" in answer["text"]
    await assert_published(store, "finite", 0, live)
    reports = [answer["report"] for answer in trainer.all("publish", 1, allow_nonfinite=True)]
    assert reports[0].kind == "delta"
    await assert_published(store, "finite", 1, trainer.all("full")[0])


async def test_ranks_of_tensor_and_pipeline_parallelism_publish_the_checkpoint(trainer: Ranks, store: Any) -> None:
    trainer.all("open", "megatron", "megatron")
    for version in range(3):
        answers = trainer.all("publish", version)
        assert "report" in answers[0], answers[0]
        assert answers[3]["report"].kind == ("delta" if version else "keyframe")
        await assert_published(store, "megatron", version, trainer.all("full")[0])
        trainer.all("nudge")


async def test_every_rank_publishes_its_shards_by_its_run(trainer: Ranks, store: Any, url: str) -> None:
    trainer.all("open", "unused", "fsdp")

    reports = [answer.get("report") for answer in trainer.all("publish_by_run", url, "by-run", 0)]

    assert len({repr(report) for report in reports}) == 1 and reports[0].kind == "keyframe"
    await assert_published(store, "by-run", 0, trainer.all("full")[0])


async def test_tensors_split_in_two_dimensions_are_published_and_folded(trainer: Ranks, store: Any) -> None:
    trainer.all("open", "tiles", "tiles")
    for version in range(9):
        answer = trainer.all("publish", version)[0]
        assert "report" in answer, answer
        trainer.all("nudge")

    assert answer["report"].changed_count == 4 * 8 - 1  # of three biases the fourth rank holds none
    assert (8, "jump-8") in await store.held("tiles")
    # the last nudge came after the last publish
    trainer.all("publish", 9)
    await assert_published(store, "tiles", 9, trainer.all("full")[0])


async def test_a_version_that_one_rank_could_not_send_is_finished_by_the_next_publish(
    trainer: Ranks, store: Any
) -> None:
    trainer.all("open", "late")
    trainer.all("publish", 0)
    first = trainer.all("full")[0]
    trainer.all("train", 1)
    second = trainer.all("full")[0]
    trainer.some([1], "trap", "raise")

    answers = trainer.all("publish", 1)

    assert {(answer["error"], answer["text"]) for answer in answers} == {("BrokerError", "rank 1: the broker is away")}
    await assert_published(store, "late", 0, first)
    trainer.all("train", 1)
    assert trainer.all("publish", 2)[1]["report"].kind == "delta"
    assert await bits_of(store, "late", 1) == second
    await assert_published(store, "late", 2, trainer.all("full")[0])
    # the same again is the same; other weights are not
    assert trainer.all("publish", 2)[0]["report"].version == 2
    trainer.some([1], "nudge")
    assert {answer["error"] for answer in trainer.all("publish", 2)} == {"VersionConflict"}


async def test_what_cannot_be_published_by_shards_is_refused_by_name_on_every_rank(trainer: Ranks, store: Any) -> None:
    def texts(version: int) -> set[str]:
        return {answer["text"] for answer in trainer.all("publish", version)}

    trainer.all("open", "refused")
    trainer.all("add", "partial")
    (text,) = texts(0)
    assert "rank 0: tensor 'partial' is placed as (Partial" in text
    trainer.all("add", "own")
    (text,) = texts(0)
    assert "rank 1 publishes tensor own float32[4], rank 0 own float32[3]" in text
    trainer.all("add", None)
    assert (await store.head("refused")).version == -1

    assert "report" in trainer.all("publish", 0)[1]
    await assert_published(store, "refused", 0, trainer.all("full")[0])
    trainer.all("add", "more")
    (text,) = texts(1)
    assert "1 unknown (more)" in text


async def test_a_rank_that_is_killed_leaves_the_head_where_it_was(url: str, store: Any) -> None:
    for version, (size, victim) in enumerate([(4, 2), (2, 0)]):
        with trainer_ranks(size, url) as trainer:
            trainer.all("open", "killed")
            trainer.all("publish", version)
            before = trainer.all("full")[0]
            held = await store.held("killed")
            trainer.all("train", 1)
            trainer.some([victim], "trap", "kill")

            answers = trainer.all("publish", version + 1)

            assert answers[victim] == {"dead": True}
            living = [rank for rank in range(size) if rank != victim]
            lost = f"rank {victim} of the {size} that publish together is gone"
            assert all(lost in answers[rank]["text"] for rank in living)
            await assert_published(store, "killed", version, before)
            assert await store.held("killed") == held
            assert all(lost in answer["text"] for answer in trainer.some(living, "publish", version + 1))

    with trainer_ranks(2, url) as trainer:
        trainer.all("open", "killed")
        assert trainer.all("publish", 2)[1]["report"].kind == "keyframe"
        await assert_published(store, "killed", 2, trainer.all("full")[0])


@pytest.mark.slow
async def test_ranks_are_told_of_one_that_was_interrupted(url: str, store: Any) -> None:
    with trainer_ranks(2, url) as trainer:
        trainer.all("open", "interrupted")
        trainer.all("publish", 0)
        trainer.all("train", 1)
        trainer.some([0], "trap", "hang")

        answers = trainer.all("publish", 1)

        told = "rank 0 was interrupted while publishing: start the ranks again"
        assert (answers[0]["error"], answers[1]["text"]) == ("TimeoutError", told)
        assert {answer["text"] for answer in trainer.all("publish", 1)} == {told}
        assert (await store.head("interrupted")).version == 0
