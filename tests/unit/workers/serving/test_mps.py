"""Being a client of MPS: only where it was asked for, beside another client, and leaving without harm to it.

The daemon's control program is played: it answers by files, and notes what it was asked.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollfab.deploy.roles import run
from rollfab.deploy.roles.engines import EngineOptions
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import ConfigError
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from rollfab.workers.engines.vllm import local
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.step.scheduler_page import SchedulerPage
from rollfab.workers.serving.device.mps import MpsOptions, check_serving, take_off
from rollfab.workers.serving.guarding.guard import GuardConfig
from rollfab.workers.serving.options import ServingOptions, check_serving_options
from rollfab.workers.serving.wiring import Sharing
from tests.support.queue.played_worker import PlayedEngine

NOBODY = 2**30  # above every process id
CONTROL = """#!/bin/sh
read command
cd {home}
echo "$command" >> asked
case "$command" in
  get_server_list) cat servers;;
  get_client_list*) cat "clients.${{command##* }}";;
esac
"""


class Daemon:
    """The played one."""

    def __init__(self, home: Path) -> None:
        self.home = home
        program = home / "nvidia-cuda-mps-control"
        program.write_text(CONTROL.format(home=home))
        program.chmod(0o755)

    def serves(self, **clients: list[int]) -> None:
        """clients: of each server, by s and its process id."""
        (self.home / "servers").write_text("".join(f"{name[1:]}\n" for name in clients))
        for name, pids in clients.items():
            (self.home / f"clients.{name[1:]}").write_text("".join(f"{pid}\n" for pid in pids))

    def is_away(self) -> None:
        program = self.home / "nvidia-cuda-mps-control"
        program.write_text("#!/bin/sh\necho 'Cannot find MPS control daemon process'\nexit 1\n")

    @property
    def asked(self) -> list[str]:
        path = self.home / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    daemon = Daemon(tmp_path)
    daemon.serves()
    return daemon


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "100"])
    yield process.pid
    process.kill()
    process.wait()


# ---- the environment


def options(page: Path, **changes: Any) -> ServingOptions:
    return ServingOptions(probe=str(page), ttft_slo_ms=200.0, tpot_slo_ms=50.0, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"CUDA_MPS_PIPE_DIRECTORY": "/dev/null"}),  # no daemon can be there
        (
            {"mps": MpsOptions(is_asked=True)},
            {
                "CUDA_MPS_PIPE_DIRECTORY": "/tmp/pipes",
                "CUDA_MPS_CLIENT_PRIORITY": "1",
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "90",
            },
        ),
        (
            {"mps": MpsOptions(is_asked=True, threads_percent=40), "priority": "normal"},
            {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/pipes", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"},
        ),
    ],
)
def test_a_worker_is_a_client_only_where_it_was_asked_for(
    changes: dict[str, Any], expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an environment in which every program becomes a client
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/pipes")
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "0")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "90")
    sharing = Sharing(options(tmp_path / "page", **changes), SystemClock())

    # When
    guards: list[GuardConfig | None] = []

    def make(engine: EngineOptions) -> Any:
        guards.append(engine.guard)
        return PlayedEngine()

    run._make(sharing, EngineOptions(), make)

    # Then
    assert {name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS")} == expected
    assert guards[0] is not None and guards[0].is_mps_client is ("mps" in changes)
    assert GuardConfig.of_row(guards[0].row()) == guards[0]
    sharing.close()


def test_a_share_without_mps_and_mps_without_a_shared_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--mps-threads needs --mps"):
        check_serving_options("serving", options(tmp_path / "page", mps=MpsOptions(threads_percent=40)))
    with pytest.raises(ConfigError, match="--mps needs --probe"):
        check_serving_options("serving", ServingOptions(mps=MpsOptions(is_asked=True)))
    check_serving_options("serving", options(tmp_path / "page", mps=MpsOptions(is_asked=True, threads_percent=40)))


# ---- serving's engine


def test_serving_s_engine_is_found_among_the_clients_by_itself_or_below_it(daemon: Daemon, child: int) -> None:
    daemon.serves(s700=[NOBODY], s701=[NOBODY + 1, child])
    for pid in (child, os.getpid()):
        assert f"(process {child}) is a client of MPS" in check_serving(pid)


@pytest.mark.parametrize("others", [[], ["parent"]])
def test_serving_s_engine_that_is_no_client_is_refused(daemon: Daemon, child: int, others: list[str]) -> None:
    daemon.serves(s700=[os.getppid() for _ in others])
    with pytest.raises(ConfigError, match=rf"\(process {child}\) is no client of MPS.*leave --mps out"):
        check_serving(child)


def test_what_cannot_be_seen_of_serving_s_engine_is_said(daemon: Daemon, child: int) -> None:
    daemon.serves(s700=[NOBODY])  # whose processes have other numbers than here, as in another container
    for pid in (child, None, NOBODY):
        assert "cannot be seen from here" in check_serving(pid)


@pytest.mark.parametrize("how", ["away", "missing"])
def test_mps_without_a_daemon_is_refused_with_what_to_type(
    daemon: Daemon, child: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "away":
        daemon.is_away()
    else:
        monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"nvidia-cuda-mps-control does not answer.*nvidia-cuda-mps-control -d"):
        check_serving(child)


async def test_a_worker_looks_at_serving_s_engine_before_its_own_starts(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = Sharing(options(tmp_path / "page", mps=MpsOptions(is_asked=True)), SystemClock())
    monkeypatch.setattr(sharing, "trouble", lambda: "")
    monkeypatch.setattr(sharing._reader, "writer_pid", os.getpid)
    said: list[str] = []
    with pytest.raises(ConfigError, match="is no client of MPS"):
        await sharing.wait(asyncio.Event(), said.append)
    daemon.serves(s700=[os.getpid()])
    await sharing.wait(asyncio.Event(), said.append)
    assert "they share faults" in said[0]
    sharing.close()


# ---- leaving


class Core:
    """Fake vLLM: notes the order in which it is ended. sound: it does what it is told."""

    def __init__(self, page: SchedulerPage, pid: int, *, sound: bool) -> None:
        self.done: list[str] = []
        self._page, self._sound = page, sound
        self.engine_core = self
        self.resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[SimpleNamespace(pid=pid)]))

    async def pause_scheduler_async(self, mode: str, *, clear_cache: bool) -> None:
        assert (mode, clear_cache, self._page.words[3]) == ("keep", False, 1)
        if not self._sound:
            await asyncio.Event().wait()
        self.done.append("idle")

    def shutdown(self, timeout: float) -> None:
        self.done.append("ended")


def door_of(is_mps_client: bool) -> local.LocalDoor:
    guard = GuardConfig(probe="page", slo_ttft_ms=1.0, slo_tpot_ms=1.0, is_mps_client=is_mps_client)
    door = local.LocalDoor(VllmConfig(guard=guard))
    door._page = SchedulerPage.create()
    return door


async def test_a_client_goes_once_its_device_is_idle(daemon: Daemon, child: int) -> None:
    door = door_of(is_mps_client=True)
    core = Core(door.page, child, sound=True)
    door._vllm = local._Vllm(core, is_on_cpu=False, draws_by_place=True)
    await door.close()
    assert core.done == ["idle", "ended"]
    assert daemon.asked == []


async def test_work_of_a_client_that_does_not_become_idle_is_taken_off_before_it_is_killed(
    daemon: Daemon, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    monkeypatch.setattr(local, "IDLE_S", 0.05)
    daemon.serves(s700=[NOBODY], s701=[child])
    door = door_of(is_mps_client=True)
    core = Core(door.page, os.getpid(), sound=False)  # its client is a process below it
    monkeypatch.setattr(core, "shutdown", lambda timeout: core.done.append(daemon.asked[-1]))
    door._vllm = local._Vllm(core, is_on_cpu=False, draws_by_place=True)

    # When
    await door.close()

    # Then
    assert core.done == [f"terminate_client 701 {child}"]
    assert f"terminate_client 701 {os.getpid()}" not in daemon.asked


@pytest.mark.parametrize("is_mps_client", [True, False])
async def test_a_step_of_the_embedded_engine_that_does_not_end_is_taken_off_as_well(
    daemon: Daemon, is_mps_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def does_not_end() -> bool:
        return False

    daemon.serves(s700=[os.getpid()])
    guard = GuardConfig(probe="page", slo_ttft_ms=1.0, slo_tpot_ms=1.0, is_mps_client=is_mps_client)
    engine = TransformersEngine(TransformersConfig(guard=guard))
    monkeypatch.setattr(engine._thread, "close", does_not_end)
    await engine.close()
    assert daemon.asked[2:] == ([f"terminate_client 700 {os.getpid()}"] if is_mps_client else [])


async def test_who_is_no_client_is_ended_as_ever(daemon: Daemon, child: int) -> None:
    door = door_of(is_mps_client=False)
    core = Core(door.page, child, sound=True)
    door._vllm = local._Vllm(core, is_on_cpu=False, draws_by_place=True)
    await door.close()
    assert core.done == ["ended"]


def test_a_daemon_that_is_away_keeps_nobody_from_leaving(daemon: Daemon, child: int) -> None:
    daemon.is_away()
    assert take_off([child]) == []


LEFT_ALONE = """
import os, sys, time, types
from rollfab.workers.engines.vllm import plugin

cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: print("idle", flush=True))
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
plugin.LINGER_S = 0.1
ready, told = os.pipe()
owner = os.getpid()
if os.fork() == 0:
    plugin._die_with(owner)
    os.write(told, b"x")
    time.sleep(100)
os.read(ready, 1)
os._exit(0)
"""


@pytest.mark.parametrize(("variables", "said"), [({"ROLLFAB_VLLM_MPS": "1"}, "idle\n"), ({}, "")])
def test_an_engine_whose_worker_was_killed_waits_for_the_device_as_a_client_alone(
    variables: dict[str, str], said: str
) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", LEFT_ALONE], env=environment, capture_output=True, text=True, timeout=60, check=True
    )  # its output ends when the child is gone
    assert (done.stdout, done.stderr) == (said, "")
