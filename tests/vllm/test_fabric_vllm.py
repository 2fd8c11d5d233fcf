"""vLLM at work in a whole fabric of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes.fabric_processes import check_each_arrived_once, check_totals, check_walk, processes
from tests.support.weights.reference import plain_logprobs_elsewhere
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config
from tests.vllm.attached.server_process import served

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(400)]


def test_an_unmodified_server_attached_by_url_makes_rollouts_that_are_token_exact(tmp_path: Path) -> None:
    # Given a server as anybody starts one, and a run whose version 0 is what it serves
    model = write_config(tmp_path / "tiny")
    tensors = random_tensors(model, 1)
    write_checkpoint(model, tensors)
    groups, turns = ["group-0", "group-1"], 3
    with served(model, tmp_path, "--served-model-name", "tiny") as server, processes(tmp_path / "fabric") as fabric:
        worker = ("--engine", "vllm", "--server", server.url, "--model", "tiny", "--slots", "8")
        fabric.start_roles(agent=("--environment", "walk=tests.support.worlds.worlds:Walk"), worker=worker)
        options = {"turns": turns, "pace_s": 0.0, "tokens": 20}
        run = fabric.fabric.run("attached", model="tiny", environment="walk", environment_options=options)
        run.publish(tensors, version=0)

        # When it makes rollouts of several turns
        run.submit([{"seed": 1}, {"seed": 2}], group_size=4, group_ids=groups)
        found = fabric.collect(run, len(groups), 120.0)

        # Then each arrived once and whole, and is worth to torch what it says it is worth
        check_each_arrived_once(found, groups, 4)
        rollouts = [rollout for group in found for rollout in group.rollouts]
        assert len({rollout.completion_ids.tobytes() for rollout in rollouts}) == len(rollouts)
        bits = {name: each.reshape(-1).view(np.uint32) for name, each in tensors.items()}
        for rollout in rollouts:
            check_walk(rollout, turns)
            logs = plain_logprobs_elsewhere("tiny", bits, rollout.prompt_ids, rollout.completion_ids, 1.0)
            own = rollout.completion_mask.astype(bool)
            expected = np.take_along_axis(logs, rollout.completion_ids[:, None].astype(np.int64), axis=1)[:, 0]
            np.testing.assert_allclose(rollout.logprobs[own], expected[own], rtol=1e-4, atol=1e-4)
            assert {span.policy_version for span in rollout.spans} == {0}
        check_totals(fabric, run)

        # And when the trainer publishes other weights, the worker says why it cannot follow, and what would help
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(2)
        run.publish(tensors, version=1)
        info = fabric.until(
            lambda: (found := fabric.worker_of("dedicated")) and found.error and found, 30.0, "the worker complains"
        )
        assert info.state == "failed" and "VLLM_SERVER_DEV_MODE=1" in info.error


def test_frozenlake_is_learnt_by_vllm_workers_as_by_others(tmp_path: Path) -> None:
    words = ["demo", "--engine", "vllm", "--json", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "rollfab", *words], capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["kills"] == 1
    assert (summary["lost"], summary["duplicated"]) == (0, 0)
    assert summary["reward_first"] <= 0.2
    assert summary["reward_last"] >= 0.9
