"""The serving team's section of the README, word by word, with the real `vllm serve` on a CPU.

Only what stands for something is replaced: the models, the page's path, the port, and `…` for more arguments.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rollfab.workers.serving.wiring import memory_directory
from tests.support.processes.fabric_processes import PYTHONPATH, Processes, processes
from tests.support.until import wait_until
from tests.vllm.attached.checkpoints import write_config

pytestmark = [pytest.mark.alone, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

README = Path(__file__).parents[3] / "README.md"
ON_A_CPU = (
    "--load-format dummy --skip-tokenizer-init --dtype float32 --enforce-eager --block-size 32"
    " --kv-cache-memory-bytes 67108864 --max-model-len 256 --max-num-seqs 8 --host 127.0.0.1 --port {port}"
)
SHORT = "--duration 5 --rate 4 --lengths 0.1"  # of a trace of an hour
START_S, SOON_S = 240.0, 90.0


def commands() -> dict[str, str]:
    """What the section says to type, by the first words that tell one from another."""
    section = README.read_text("utf-8").split("## For the serving team", 1)[1].split("\n## ", 1)[0]
    block = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0].replace("\\\n", "")
    lines = [line.partition(" # ")[0].strip() for line in block.splitlines()]
    names = ("ROLLFAB_PROBE=", "rollfab worker", "lend report", "lend on", "lend off", "rollfab replay")
    assert len(lines) == len(names) and all(name in line for name, line in zip(names, lines, strict=True)), lines
    return dict(zip(names, lines, strict=True))


class Shell:
    """Types the README's commands, in the environment of these tests."""

    def __init__(self, directory: Path, url: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.page = memory_directory() / f"rollfab-readme-{os.getpid()}"
        model = write_config(directory / "model")
        self._replaced = {
            "YOUR-MODEL …": f"{model} {ON_A_CPU.format(port=port)}",
            "THE-RUNS-MODEL": "tiny",
            "/dev/shm/chat": str(self.page),
            "localhost:8000 …": f"127.0.0.1:{port} {SHORT}",
        }
        self._directory = directory
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        kept = {name: text for name, text in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
        self._environment = {**kept, "PATH": path, "PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": url, "COLUMNS": "80"}
        self._environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as everybody has it

    def words(self, line: str) -> str:
        for what, by in self._replaced.items():
            line = line.replace(what, by)
        assert "…" not in line
        return line

    def run(self, line: str) -> str:
        """What a command prints, on both streams; it must end well."""
        done = subprocess.run(
            ["bash", "-c", self.words(line)], env=self._environment, capture_output=True, text=True, timeout=SOON_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    @contextmanager
    def running(self, line: str, name: str) -> Iterator[Path]:
        """A command that goes on while the block runs, with everything it starts; its log."""
        log = self._directory / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {self.words(line)}"],
                env=self._environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            yield log
        finally:
            with_group(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with_group(process, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        for left in self.page.parent.glob(f"*{self.page.name}*"):
            left.unlink()


def with_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """A signal to all that a command has started."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def until(condition: Callable[[], bool], limit_s: float, *logs: Path) -> None:
    """Poll for it; fails with the ends of the logs."""
    wait_until(condition, lambda: "\n".join(f"== {log}\n{log.read_text()[-3000:]}" for log in logs), limit_s, 0.1)


def said(log: Path) -> str:
    return " ".join(log.read_text().split())


def test_what_the_readme_tells_a_serving_team_to_type_works_as_it_stands(tmp_path: Path) -> None:
    typed = commands()
    with processes(tmp_path / "fabric") as fabric:
        shell = Shell(tmp_path, fabric.url)
        fabric.start("controller", "controller")
        fabric.start("agent", "agent")
        fabric.wait_for_role("controller", "agent")
        run = fabric.new_run("r", "frozenlake")
        [group_id] = run.submit([{"seed": 0}], group_size=2)
        try:
            with (
                shell.running(typed["ROLLFAB_PROBE="], "vllm") as served,
                shell.running(typed["rollfab worker"], "worker") as worker,
            ):
                _attach(fabric, shell, served, worker)
                _lend(shell, typed, worker)
                [group] = fabric.collect(run, 1, SOON_S)
                assert group.group_id == group_id
                _take_back_and_measure(shell, typed, worker)
            assert served.read_text().count("rollfab probe") == 1
        finally:
            shell.close()


def _attach(fabric: Processes, shell: Shell, served: Path, worker: Path) -> None:
    # Given a worker that was started before the serving engine is there: it says what it waits for, here and in status
    until(lambda: "waiting for the serving engine: no page at" in said(worker), SOON_S, worker)
    [row] = [each for each in json.loads(shell.run("rollfab status --json"))["workers"] if each["role"] == "serving"]
    assert row["state"] == "waiting" and f"ROLLFAB_PROBE={shell.page} vllm serve" in row["error"]

    # When that has started, then its log has one line of the probe, and the worker says that it is ready
    until(lambda: "rollfab probe" in said(served), START_S, served, worker)
    until(lambda: ": ready, observing only" in said(worker), START_S, served, worker)
    [line] = [line for line in served.read_text().splitlines() if "rollfab probe" in line]
    assert f"rollfab probe: on at {shell.page} (process" in line
    assert "in pool chat: ready, observing only (nothing was said of it yet" in said(worker)
    assert "it sees vllm " in said(worker) and f"by {shell.page} (process" in said(worker)
    info = fabric.ask(lambda ports: ports.board.workers())
    assert [(each.pool, each.probe, each.error) for each, _ in info.values() if each.role == "serving"] == [
        ("chat", "vllm", None)
    ]


def _lend(shell: Shell, typed: dict[str, str], worker: Path) -> None:
    # Nothing is lent before its team says so, and what could be is measured
    until(lambda: "more could be lent" in shell.run(typed["lend report"]), SOON_S, worker)
    [row] = json.loads(shell.run(typed["lend report"] + " --json"))["workers"]
    assert (row["token_count"], row["lent_s"]) == (0, 0.0)

    shell.run(typed["lend on"])
    until(lambda: "in pool chat: ready, lent" in said(worker), SOON_S, worker)


def _take_back_and_measure(shell: Shell, typed: dict[str, str], worker: Path) -> None:
    shell.run(typed["lend off"])
    until(lambda: "in pool chat: ready, taken back" in said(worker), SOON_S, worker)

    replayed = shell.run(typed["rollfab replay"])
    assert "TTFT" in replayed

    def counted() -> int:
        [row] = json.loads(shell.run(typed["lend report"] + " --json"))["workers"]
        assert row["token_count"] > 0
        return int(row["alone"].get("ttft_count", 0) + row["shared"].get("ttft_count", 0))

    until(lambda: counted() == 20, SOON_S, worker)  # 4 a second for 5 s
    assert "too few" in shell.run(typed["lend report"])
