"""A worker and a trainer that name one model by two paths find each other; a path where nothing is is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import rollfab
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.contract.records import WorkerInfo
from tests.integration.engines.test_dialogue_exact import make_model
from tests.support.processes.fabric_processes import ROOT, processes

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]  # real processes that load a model, on a busy machine


@pytest.mark.slow
def test_a_worker_serves_a_run_of_its_model_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a model that the trainer reaches by a relative path, and a copy that the worker was started with
    model = make_model(tmp_path / "here" / "mymodel", "qwen2.5")
    shutil.copytree(tmp_path / "here" / "mymodel", tmp_path / "there" / "renamed")
    monkeypatch.chdir(ROOT)
    with processes(tmp_path) as fabric:
        agent = ("--environment", "walk=tests.support.worlds.worlds:Walk")
        fabric.start_roles(agent=agent, worker=("--model", str(tmp_path / "there" / "renamed") + "/"))
        # When a run of it has weights and work
        monkeypatch.chdir(tmp_path / "here")
        run = fabric.fabric.run("r1", model="./mymodel", environment="walk", environment_options={"turns": 1})
        assert run.config.model == os.path.realpath(tmp_path / "here" / "mymodel")
        run.publish(model.named_parameters(), version=0)
        run.submit([{"seed": 1}], group_size=2)
        # Then the worker runs it
        assert len(fabric.collect(run, 1, 60.0)) == 1


def test_a_path_where_nothing_is_is_refused_unless_a_worker_elsewhere_holds_it(tmp_path: Path) -> None:
    with rollfab.connect() as fabric:
        with pytest.raises(ConfigError, match=r"model './nope': there is no such file or directory on this machine"):
            fabric.run("r1", model="./nope", environment="frozenlake")
        assert fabric.runs() == {}
        info = WorkerInfo(worker_id="w1", role="dedicated", pid=1, host="far", model="/far/m", model_digest="d")
        fabric._loop.call(fabric._fabric._ports.board.heartbeat(info))
        assert fabric.run("r1", model="/far/m", environment="frozenlake").config.model == "/far/m"
