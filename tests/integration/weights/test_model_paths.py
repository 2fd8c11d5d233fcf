"""A worker and a trainer that name one model by two paths find each other; a path where nothing is is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import rollfab
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.contract.records import WorkerInfo
from tests.support.processes.fabric_processes import ROOT, processes

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]  # real processes that load a model, on a busy machine


def make_model(path: Path) -> dict[str, object]:
    """A tiny model with a tokenizer of letters, as a directory; returns its weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    letters = ["<unk>", "<eos>", *map(chr, range(32, 127))]
    words = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {**sizes, "num_key_value_heads": 2, "vocab_size": len(letters), "max_position_embeddings": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **options))
    model.save_pretrained(path)
    return {name: each.detach().numpy() for name, each in model.named_parameters()}


@pytest.mark.slow
def test_a_worker_serves_a_run_of_its_model_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a model that the trainer reaches by a relative path, and a copy that the worker was started with
    weights = make_model(tmp_path / "here" / "mymodel")
    shutil.copytree(tmp_path / "here" / "mymodel", tmp_path / "there" / "renamed")
    monkeypatch.chdir(ROOT)
    with processes(tmp_path) as fabric:
        agent = ("--environment", "walk=tests.support.worlds.worlds:Walk")
        fabric.start_roles(agent=agent, worker=("--model", str(tmp_path / "there" / "renamed") + "/"))
        # When a run of it has weights and work
        monkeypatch.chdir(tmp_path / "here")
        run = fabric.fabric.run("r1", model="./mymodel", environment="walk", environment_options={"turns": 1})
        assert run.config.model == os.path.realpath(tmp_path / "here" / "mymodel")
        run.publish(weights, version=0)
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
