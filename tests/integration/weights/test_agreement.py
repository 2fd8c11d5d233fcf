"""Engines against the trainer's model on the same tokens: real weights, real broker, and everything that shows it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollfab.deploy.cli.status import snapshot
from rollfab.deploy.cli.status_view import draw
from rollfab.fabric.contract.records import Group, Rollout, Sampling, Span
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.fabric.versions.commit import Staged
from rollfab.trainer import aio
from rollfab.workers.engines.base import GenerationRequest
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from tests.support.processes.api_server import ApiWorld
from tests.support.processes.fabric_processes import processes
from tests.support.records import new_rollout

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollfab.trainer.grpo import Grpo, GrpoSettings, build_model  # noqa: E402
from rollfab.trainer.loop import TrainOptions, run_training  # noqa: E402
from rollfab.workers.engines.transformers import loop as transformers_loop  # noqa: E402, F401  imported here, or the first test pays for it

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

WRONG = "model.layers.0.mlp.down_proj.weight"


def staged(version: int, model: Any, factor: float = 1.0) -> Staged:
    """A model's parameters as a version; `factor` is what silently happened to one of them."""
    tensors = {name: each.detach().clone() for name, each in model.named_parameters()}
    tensors[WRONG] *= factor
    return Staged(version, {name: (None, each.numpy().view(np.uint32).ravel()) for name, each in tensors.items()})


async def sampled(worker_id: str, version: Staged, count: int = 6) -> tuple[Rollout, ...]:
    """What a worker samples with these weights, several requests in one batch."""
    engine = TransformersEngine(TransformersConfig(slot_count=count, seed=len(worker_id)))
    await engine.start()
    try:
        await engine.apply(version)
        prompts = {str(index): np.arange(5, 12 + 3 * index, dtype=np.int32) for index in range(count)}
        for name, prompt_ids in prompts.items():
            engine.generate(GenerationRequest(request_id=name, prompt_ids=prompt_ids, sampling=Sampling(max_tokens=24)))
        ended: list[Any] = []
        while len(ended) < count:
            ended += await engine.finished(5.0)
    finally:
        await engine.close()
    return tuple(
        new_rollout(
            each.completion_ids,
            trajectory_id=f"{worker_id}.{each.request_id}",
            group_id=worker_id,
            spans=tuple(Span(start, end, worker_id, version) for start, end, version in each.versions),
            prompt_ids=prompts[each.request_id],
            logprobs=each.logprobs,
        )
        for each in ended
    )


async def batch(model: Any, *, factor: float) -> list[Group]:
    """Groups of two workers, of which one has a tensor multiplied by `factor` and says that it is at version 0, too."""
    good, other = await sampled("good", staged(0, model)), await sampled("other", staged(0, model, factor))
    return [Group(group_id=rows[0].group_id, task_id="t", rollouts=rows) for rows in (good, other)]


async def open_run(api: ApiWorld, model: Any, version: int = 0) -> aio.AsyncRun:
    run = aio.AsyncRun(api.fabric, (await api.fabric.board.runs())["r1"])
    await run.publish(model.named_parameters(), version=version)
    return run


async def test_the_transformers_engine_agrees_with_the_trainer_s_model(api: ApiWorld) -> None:
    # Given two workers with the published weights
    model = build_model("tiny", seed=3)
    groups = await batch(model, factor=1.0)
    run = await open_run(api, model)
    # When the trainer compares
    agreement = await run.compare(groups, Grpo(model, GrpoSettings()).look(groups).logprobs())
    # Then they agree to float32's noise, and everybody is told so
    assert agreement.fresh.token_count == sum(len(row.completion_ids) for group in groups for row in group.rollouts)
    assert agreement.fresh.logprob_difference_max < 1e-4
    assert abs(agreement.fresh.importance_sampling_ratio_mean - 1) < 1e-5
    assert agreement.alarms == ()
    (shown,) = (await api.json("v1/runs"))["runs"]
    assert shown["agreement"]["rule"] == "float32"
    assert [row["is_over"] for row in shown["agreement"]["workers"]] == [False, False]


async def test_a_worker_with_one_wrong_tensor_is_found_by_name_and_shown_everywhere(
    api: ApiWorld, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a worker of which one tensor is two percent off
    model = build_model("tiny", seed=3)
    groups = await batch(model, factor=1.02)
    run = await open_run(api, model)
    # When the trainer compares
    agreement = await run.compare(groups, Grpo(model, GrpoSettings()).look(groups).logprobs())
    # Then that worker is named, and only that one: in the answer, in the log, as an event
    assert [alarm.worker_id for alarm in agreement.alarms] == ["other"]
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    assert [each.getMessage().split(" disagrees")[0] for each in warnings] == ["agreement.alarm: worker other"]
    events = await api.fabric.board.events("0-0", 100, 0.01)
    assert [(kind, facts["run_id"], facts["worker_id"]) for _, kind, facts in events] == [
        ("agreement.alarm", "r1", "other")
    ]
    # By the api
    (shown,) = (await api.json("v1/status"))["runs"]
    assert {row["worker_id"]: row["is_over"] for row in shown["agreement"]["workers"]} == {"other": True, "good": False}
    assert "worker other disagrees" in shown["agreement"]["alarms"][0]["text"]
    # In the metrics
    metrics = (await api.http.get("metrics")).text
    assert 'rollfab_agreement_alarms{run="r1"} 1.0' in metrics
    assert f'rollfab_agreement_tokens{{run="r1",state="fresh"}} {float(agreement.fresh.token_count)}' in metrics
    mean = next(line for line in metrics.splitlines() if line.startswith('rollfab_logprob_difference_mean{run="r1"}'))
    assert float(mean.split()[1]) == pytest.approx(agreement.fresh.logprob_difference_mean)
    # And by `rollfab status`
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(draw(await snapshot(api.fabric)))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "log-probabilities" in said and "worker other disagrees with the trainer at version 0" in said


async def test_a_worker_that_kept_older_weights_than_it_says_is_found(api: ApiWorld) -> None:
    # Given a policy, and what one optimiser step makes of it
    model = build_model("tiny", seed=3)
    groups = await batch(model, factor=1.0)
    grpo = Grpo(model, GrpoSettings(learning_rate=1e-4))
    for index, rollout in enumerate(groups[0].rollouts):
        object.__setattr__(rollout, "reward", float(index % 2))
    grpo.step(grpo.look(groups[:1]))
    run = await open_run(api, model)
    # When workers sample with the old one under the new one's number; then their tokens show it
    agreement = await run.compare(groups, grpo.look(groups).logprobs())
    assert {alarm.worker_id for alarm in agreement.alarms} == {"good", "other"}
    assert all("trainer first" in alarm.text for alarm in agreement.alarms)


async def test_an_agreement_that_cannot_be_read_is_shown_as_that(api: ApiWorld) -> None:
    await api.fabric.board._client.hset(ShardKeys("r1", 0).run, "agreement", b"rubbish")
    (shown,) = (await api.json("v1/runs"))["runs"]
    assert "cannot be read" in shown["agreement"]["alarms"][0]["text"]


async def test_without_a_comparison_nothing_is_claimed(api: ApiWorld) -> None:
    assert (await api.json("v1/runs"))["runs"][0]["agreement"] is None
    assert "rollfab_logprob_difference_mean{" not in (await api.http.get("metrics")).text
    console = Console(file=io.StringIO(), width=160)
    console.print(draw(await snapshot(api.fabric)))
    assert "log-probabilities" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.timeout(120)
def test_the_reference_trainer_compares_every_batch_and_its_workers_agree(tmp_path: Path) -> None:
    # Given a worker of its own process; when the reference trainer takes two steps
    with processes(tmp_path) as fabric:
        fabric.start_roles()
        run_training(
            TrainOptions(
                url=fabric.url,
                run_id="r1",
                environment="frozenlake",
                reward=None,
                steps=2,
                seed=0,
                output=str(tmp_path / "out"),
                is_fresh=True,
            )
        )
        found = fabric.fabric.run("r1").status().agreement
        events = fabric.ask(lambda ports: ports.board.events("0-0", 1000, 0.01))
    # Then each step says how its batch agreed, and so does the run: over deltas and a wire, to float32's noise
    steps = [facts for _, kind, facts in events if kind == "trainer.step"]
    assert len(steps) == 2
    for facts in steps:
        assert facts["compared_token_count"] == facts["token_count"] > 0
        assert facts["logprob_difference_max"] < 1e-4
        assert facts["importance_sampling_ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert facts["agreement_alarm_count"] == 0
    assert found is not None and found.policy_version == 1 and found.worker_count == 1
    assert found.fresh.token_count == steps[1]["token_count"]
