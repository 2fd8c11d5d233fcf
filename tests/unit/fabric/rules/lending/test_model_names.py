"""What a model's name means: the same model under two paths is one, two models under one name are two."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import ConfigError, RunMismatch
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.model.presets import check_model_name, find_model
from rollfab.fabric.rules.lending.capacity import plan
from rollfab.fabric.rules.lending.capacity_facts import CapacityRule, RunFacts, WorkerFacts, is_same_model
from rollfab.fabric.rules.queue.runs import check_same_run
from rollfab.workers.engines.model_tokenizer import load_tokenizer


def make_model(path: Path, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64, **config}))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"hidden_size": 6', "not JSON: it is cut off at column 18"),
        (b"", "not JSON: it is empty"),
        (b"\xff{}", "not JSON: it is no UTF-8 text"),
        (b"[]", "it is no JSON object"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_a_model_is_named_with_what_to_do(tmp_path: Path, file: str, data: bytes, says: str) -> None:
    place = make_model(tmp_path / "model")
    (place / file).write_bytes(data)
    refuse = find_model if file == "config.json" else load_tokenizer
    with pytest.raises(ConfigError) as refused:
        refuse(str(place))
    text = "The file is damaged, cut off or of another format: copy, download or write it again"
    assert str(refused.value) == f"{place / file} cannot be read: {says}. {text}"


def test_files_of_a_model_that_hold_something_else_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its files are JSON, and hold something else than a tokenizer"):
        load_tokenizer(str(make_model(tmp_path / "model")))


@pytest.mark.parametrize("name", ["tiny", "small", "Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "a name with spaces"])
def test_presets_and_hub_names_stay_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()  # results of some run, say: no model
    make_model(tmp_path / "tiny")
    assert (find_model(name).name, find_model(name).digest) == (name, "")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("tinny", "tiny"), ("Tiny", "tiny"), ("tiy", "tiny"), ("smal", "small"), ("samll", "small"), ("SMALL", "small")],
)
def test_a_preset_that_is_misspelt_is_named(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for check in (find_model, check_model_name):
        with pytest.raises(ConfigError, match=f"no model {name!r}: did you mean {meant!r}"):
            check(name)
    check_model_name("any")
    assert find_model(f"owner/{name}").name == f"owner/{name}"
    make_model(tmp_path / name)
    assert find_model(f"./{name}").digest == find_model(name).digest != ""


def test_every_way_to_say_a_path_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "mymodel")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    found = set()
    for place, names in (
        (tmp_path, ("./mymodel", "mymodel", "mymodel/", "./link", "~/mymodel", str(model), f"{model}/")),
        (tmp_path / "elsewhere", ("../mymodel", "../link/")),
    ):
        monkeypatch.chdir(place)
        found |= {find_model(name) for name in names}
    (one,) = found
    assert one.name == str(model) and len(one.digest) == 16


@pytest.mark.parametrize("name", ["./nope", "../nope", "/nowhere/nope", "~/nope", "~nobody-of-that-name/m", "."])
def test_a_path_where_nothing_is_is_refused_in_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    if name == ".":
        assert find_model(name).digest == "", "a directory without a config.json is left to whoever loads it"
        return
    with pytest.raises(ConfigError, match="there is no such file or directory on this machine") as raised:
        find_model(name)
    assert repr(name) in str(raised.value)


def test_a_file_is_no_model_but_one_of_llama_cpp_s(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ConfigError, match="is a file: give the path of a directory with a config"):
        find_model(str(tmp_path / "notes.txt"))
    (tmp_path / "model.gguf").write_text("read by an engine")
    assert find_model(str(tmp_path / "model.gguf")).name == str(tmp_path / "model.gguf")


def test_a_copy_is_the_same_model_and_a_change_makes_another(tmp_path: Path) -> None:
    first = make_model(tmp_path / "a", transformers_version="5.0", _name_or_path="there")
    copy = Path(shutil.copytree(first, tmp_path / "b"))
    assert find_model(str(first)).digest == find_model(str(copy)).digest
    (copy / "config.json").write_text(json.dumps({"hidden_size": 64, "model_type": "qwen2", "_name_or_path": "here"}))
    assert find_model(str(first)).digest == find_model(str(copy)).digest, (
        "who wrote it, and in which order, is no matter"
    )
    (copy / "tokenizer.json").write_text('{"version": 2}')
    assert find_model(str(first)).digest != find_model(str(copy)).digest
    (copy / "config.json").unlink()
    assert find_model(str(copy)).digest == ""


names, digests = st.sampled_from(["a", "b", "/m/a"]), st.sampled_from(["", "d1", "d2"])


@given(names, digests, names, digests)
def test_contents_decide_where_both_are_known_else_the_names(a: str, of_a: str, b: str, of_b: str) -> None:
    is_same = is_same_model(a, of_a, b, of_b)
    assert is_same == is_same_model(b, of_b, a, of_a)
    assert is_same_model(a, of_a, a, of_a)
    assert is_same == (of_a == of_b if of_a and of_b else a == b)


def test_the_plan_matches_workers_and_runs_by_the_same_rule() -> None:
    run = RunFacts(run_id="r1", model="/a/m", model_digest="d1", weight=1.0, has_weights=True, open_count=9, idle_s=0.0)
    workers = [
        WorkerFacts(worker_id="same-path", model="/a/m", model_digest="d1", slot_count=4),
        WorkerFacts(worker_id="same-files", model="/b/m", model_digest="d1", slot_count=4),
        WorkerFacts(worker_id="other-files", model="/a/m", model_digest="d2", slot_count=4),
        WorkerFacts(worker_id="not-read", model="/a/m", slot_count=4),
        WorkerFacts(worker_id="other-name", model="/c/m", slot_count=4),
    ]
    grants = {grant.worker_id: grant for grant in plan(workers, [run], CapacityRule())}
    assert {name for name, grant in grants.items() if grant.run_id == "r1"} == {"same-path", "same-files", "not-read"}
    assert grants["other-name"].reason == "no run has its model '/c/m'"


def test_a_worker_of_a_run_without_weights_is_told_what_it_waits_for() -> None:
    run = RunFacts(run_id="r1", model="m", weight=1.0, has_weights=False, open_count=9, idle_s=0.0)
    (grant,) = plan([WorkerFacts(worker_id="w", model="m", slot_count=4)], [run], CapacityRule())
    assert (grant.run_id, grant.reason) == (None, "waits for the first weights of run 'r1'")


def test_a_run_may_be_opened_again_by_another_path_to_its_model() -> None:
    run = RunConfig(run_id="r1", model="/a/m", environment="e", model_digest="d1")
    check_same_run(run, replace(run, model="/b/m"))
    check_same_run(
        run, replace(run, model_digest="d2")
    )  # its directory was changed: workers must hold what is there now
    with pytest.raises(RunMismatch, match="model is '/a/m', not '/b/m'"):
        check_same_run(run, replace(run, model="/b/m", model_digest="d2"))
