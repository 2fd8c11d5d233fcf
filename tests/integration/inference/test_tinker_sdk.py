"""Tinker's unmodified SDK before the fleet, in an environment of its own: `make .venv-clients/.done`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.lively import lively_weights
from tests.support.processes.inference_process import RUN, InferenceProcess, running_fleet
from tests.support.until import wait_until

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SDK = ROOT / "tests" / "support" / "clients" / "tinker_clients.py"
CLIENTS, SAMPLES, LENGTH = 8, 2, 200
SAID, LOGGED = "said.jsonl", "logged.txt"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceProcess]:
    assert CLIENTS_PYTHON.exists(), "make .venv-clients/.done"
    with running_fleet(tmp_path_factory.mktemp("tinker")) as fleet:
        yield fleet


def sdk(fleet: InferenceProcess, tmp_path: Path, *words: Any) -> subprocess.Popen[bytes]:
    """Start the clients: our key is in the address, as the SDK takes keys of its maker's form alone."""
    place = {
        "TINKER_BASE_URL": f"{fleet.url}/k/{fleet.key}",
        "TINKER_API_KEY": "tml-none",
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(CLIENTS_PYTHON), str(SDK), *map(str, words)]
    with (tmp_path / SAID).open("w") as out, (tmp_path / LOGGED).open("w") as log:  # a pipe would hold them
        return subprocess.Popen(command, env=place, stdout=out, stderr=log)


def said(process: subprocess.Popen[bytes], tmp_path: Path) -> Any:
    assert process.wait(timeout=200) == 0, (tmp_path / LOGGED).read_text()
    return json.loads((tmp_path / SAID).read_text().splitlines()[-1])


def reference(prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Log-probabilities of every token after the first, by the model itself, (P + T - 1, V)."""
    from rollfab.workers.engines.transformers.model import load_model

    model = load_model("tiny", "float32", "cpu")
    weights = lively_weights()
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(torch.from_numpy(weights[name]))
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0].float()
    return torch.log_softmax(logits, dim=-1).numpy()


def test_what_it_is_told_is_what_the_model_says(fleet: InferenceProcess, tmp_path: Path) -> None:
    told = said(sdk(fleet, tmp_path, "-", 1, 24), tmp_path)
    prompt, tokens = [5, 6, 7], told["tokens"]
    logs = reference(prompt, tokens)
    own, asked = logs[len(prompt) - 1 :], logs[: len(prompt) - 1]
    assert own.argmax(axis=1).tolist() == tokens == told["pinned"] and len(tokens) == 24
    for row, ids in zip(own, told["tops"], strict=True):
        assert [token for token, _ in ids] == np.argsort(-row, kind="stable")[:3].tolist()
        np.testing.assert_allclose([logprob for _, logprob in ids], np.sort(row)[::-1][:3], atol=1e-5)
    assert told["logprobs"][0] is None
    np.testing.assert_allclose(told["logprobs"][1:], asked[np.arange(2), prompt[1:]], atol=1e-5)
    assert [len(row or []) for row in told["prompt_tops"]] in ([0, 2, 2], [2, 2, 2])
    assert told["models"] == [["tiny", False]]
    words = ("here is 'tiny' alone", "version 99 is not published yet", "tinker://policy/VERSION", "nothing is trained")
    assert len(told["refused"]) == len(words)
    for text, word in zip(told["refused"], words, strict=True):
        assert word in text


@pytest.mark.fault
def test_eight_clients_at_once_lose_nothing_while_workers_die_and_join(fleet: InferenceProcess, tmp_path: Path) -> None:
    # Given what they get undisturbed
    calm = said(sdk(fleet, tmp_path, CLIENTS, SAMPLES, LENGTH), tmp_path)
    assert len(calm) == CLIENTS * SAMPLES
    assert len({each for row in calm for each in row[5]}) == 2 * len(calm), "each answer has an id of its own"
    # When their worker is killed in the middle, twice, and another one joins
    fabric = fleet.fabric
    process = sdk(fleet, tmp_path, CLIENTS, SAMPLES, LENGTH)
    for _ in range(2):
        fabric.until(lambda: process.poll() is not None or _held(fleet), 100.0, "the worker has a turn in hand")
        fabric.kill("dedicated")
        if "second" not in fabric.supervisor.children:
            fabric.start("second", "worker")
    fabric.until(lambda: process.poll() is not None, 200.0, "all clients have their answers")
    # Then every one has the same answers
    assert [row[:2] + row[4:5] for row in said(process, tmp_path)] == [row[:2] + row[4:5] for row in calm]
    counters = fabric.ask(lambda ports: ports.board.run_status(RUN)).counters
    assert counters.get("turns_resumed", 0) > 0, "some went on with the tokens that they had"


@pytest.mark.fault
def test_while_no_worker_is_there_the_sdk_logs_why_and_goes_on_when_one_comes(
    fleet: InferenceProcess, tmp_path: Path
) -> None:
    # When the SDK samples; then it logs the cause and the next step, in our words
    process = waiting_sample(fleet, tmp_path)
    line = paused(process, tmp_path)
    assert "Reason: no worker is connected that could generate for run 'policy'" in line, line
    assert "rollfab worker --model tiny" in line, line
    # And when the worker is there again, it has its sample
    fleet.fabric.supervisor.watch()
    assert len(said(process, tmp_path)[0][1]) == 24


def waiting_sample(fleet: InferenceProcess, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Sample from a fleet whose workers were killed, and nobody starts them again."""
    fleet.fabric.kill(*{"dedicated", "second"} & set(fleet.fabric.supervisor.children))
    return sdk(fleet, tmp_path, 1, 1, 24)


def paused(process: subprocess.Popen[bytes], tmp_path: Path) -> str:
    """Wait until the SDK logs that it is paused; not by fabric.until, which starts dead children again."""
    log = tmp_path / LOGGED

    def is_said() -> bool:
        assert process.poll() is None
        return "Sampling is paused" in log.read_text()

    wait_until(is_said, "the SDK logs that it is paused", 40.0, 0.1)
    (line,) = [each for each in log.read_text().splitlines() if "Sampling is paused" in each]
    return line


@pytest.mark.fault
def test_while_the_broker_does_not_answer_the_sdk_logs_that_and_goes_on_when_it_does(
    fleet: InferenceProcess, tmp_path: Path
) -> None:
    # Given a sample that waits for a worker
    fabric, process = fleet.fabric, waiting_sample(fleet, tmp_path)
    wait_until(lambda: "ready" in (tmp_path / SAID).read_text(), "the client is there")
    # When the broker stands still, too; then the SDK logs that
    os.kill(fabric.broker.pid, signal.SIGSTOP)
    try:
        line = paused(process, tmp_path)
    finally:
        os.kill(fabric.broker.pid, signal.SIGCONT)
    assert "Reason: the broker has not answered this gateway for " in line, line
    # And when both are there again, it has its sample
    fabric.supervisor.watch()
    assert len(said(process, tmp_path)[0][1]) == 24


def _held(fleet: InferenceProcess) -> int:
    return fleet.fabric.claimed_by(fleet.fabric.fabric.run(RUN), "dedicated")
