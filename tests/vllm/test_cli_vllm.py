"""A person and `rollfab … --engine vllm`: words, errors, a real worker's life and death, and what doctor says.

Every worker here is a process of its own, started as a person would; its vLLM is found by pid.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rollfab.deploy.cli.options import with_ports
from rollfab.deploy.doctor.command import examine
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import ConfigError
from rollfab.workers.engines.vllm.arguments import parse_words
from rollfab.workers.engines.vllm.common.logs import MARK
from tests.support.until import wait_until

START_S = 60.0
END_S = 40.0

# ---------------------------------------------------------------- words


def test_words_mean_what_they_mean_to_vllm_and_nothing_else_is_said():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = "-tp 2 --gpu_memory_utilization 0.8 --kv-cache-memory-bytes 1G --no-enable-prefix-caching -O2".split()
    words += ["--hf-overrides.rope_theta", "7", "--max-model-len=4k", "--speculative-config", '{"model": "ngram"}']
    ours = parse_words(words)
    theirs = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    assert ours == {name: getattr(theirs, name) for name in ours}
    assert set(ours) == {
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "enable_prefix_caching",
        "optimization_level",
        "hf_overrides",
        "max_model_len",
        "speculative_config",
    }
    assert parse_words([]) == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tensor-paralel-size", "2"], "--tensor-parallel-size"),
        (["--tensor-parallel-size", "two"], "invalid int value: 'two'"),
        (["--dtype", "float99"], "invalid choice: 'float99'"),
        (["stray"], "stray"),
        (["--config", "/none.yaml"], "/none.yaml"),
    ],
)
def test_words_that_vllm_does_not_know_are_refused_with_the_next_step(words: list[str], told: str):
    with pytest.raises(ConfigError) as caught:
        parse_words(words)
    assert told in str(caught.value)


# ---------------------------------------------------------------- a worker


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedBroker.start(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.url


def rollfab(broker_url: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rollfab", *words],
        env={**os.environ, "ROLLFAB_URL": broker_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def worker_words(log: Path, name: str) -> list[str]:
    return ["worker", "--engine", "vllm", "--slots", "4", "--context", "64", "--name", name, "--engine-log", str(log)]


def is_up(broker_url: str, name: str) -> bool:
    """Whether the broker knows it, with its engine: it is known while that starts, too."""
    known = with_ports(broker_url, lambda ports: ports.board.workers())
    return name in known and known[name][0].state != "loading"


@contextmanager
def running_worker(broker_url: str, log: Path, name: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A worker that the broker knows, and its EngineCore; whatever is left of them is killed."""
    worker = rollfab(broker_url, *worker_words(log, name))
    children: list[psutil.Process] = []
    try:

        def is_there() -> bool:
            assert worker.poll() is None, worker.communicate()
            return is_up(broker_url, name)

        wait_until(is_there, lambda: log.read_text()[-2000:], START_S, 0.2)
        children = psutil.Process(worker.pid).children(recursive=True)
        yield worker, next(child for child in children if "EngineCore" in child.name())
    finally:
        for process in (psutil.Process(worker.pid) if worker.poll() is None else None, *children):
            if process is not None and process.is_running():
                process.kill()
        worker.communicate(timeout=END_S)


@pytest.mark.timeout(240)
def test_a_worker_that_is_asked_to_stop_leaves_no_process_and_its_output_is_in_the_log(broker_url: str, tmp_path: Path):
    log = tmp_path / "vllm.log"
    with running_worker(broker_url, log, "asked") as (worker, core):
        worker.send_signal(signal.SIGTERM)
        output, errors = worker.communicate(timeout=END_S)
        assert worker.returncode == 0, errors
        core.wait(END_S)
    assert output == ""
    begun, starting, stopped = errors.splitlines()
    assert stopped == "stopped by SIGTERM"
    assert begun.startswith("dedicated worker asked: connected to the broker ")
    assert starting == f"vLLM is starting; its log: {log}"
    assert log.read_text().startswith(MARK) and "EngineCore pid=" in log.read_text()


@pytest.mark.timeout(240)
def test_a_worker_that_is_killed_leaves_no_process(broker_url: str, tmp_path: Path):
    with running_worker(broker_url, tmp_path / "vllm.log", "killed") as (worker, core):
        worker.kill()
        worker.communicate(timeout=END_S)
        core.wait(END_S)


@pytest.mark.timeout(240)
def test_a_worker_ends_with_a_short_error_when_its_engine_core_is_killed(broker_url: str, tmp_path: Path):
    log = tmp_path / "vllm.log"
    with running_worker(broker_url, log, "coreless") as (worker, core):
        core.kill()
        _, errors = worker.communicate(timeout=END_S)
    told = " ".join(errors.partition("error:")[2].split())
    assert worker.returncode == 1, errors
    assert told.startswith("vLLM has ended:") and str(log) in told.replace(" ", "")
    assert "Traceback" not in errors and "See stack trace" not in errors


@pytest.mark.timeout(120)
def test_a_vllm_that_cannot_start_is_told_by_its_root_cause_and_its_log(broker_url: str, tmp_path: Path):
    log = tmp_path / "vllm.log"
    worker = rollfab(broker_url, *worker_words(log, "hungry"), "--", "--kv-cache-memory-bytes", "1000000000000")
    _, errors = worker.communicate(timeout=110)
    told = " ".join(errors.partition("error:")[2].split())
    assert worker.returncode == 1, errors
    assert "ValueError: Available memory" in told and "requested memory for kv (931.32 GiB)" in told
    assert str(log) in told.replace(" ", "")
    assert "Traceback" not in errors


# ---------------------------------------------------------------- doctor


@pytest.mark.timeout(200)
def test_doctor_finds_nothing_wrong_with_the_vllm_that_these_tests_run_on():
    findings = [finding for finding in examine() if "vllm" in finding.what]
    assert len(findings) >= 4
    assert [finding for finding in findings if not finding.is_fine] == []
