"""Real processes with a real broker: signals in the middle of a publish or a command, and children that were forked."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from types import FrameType
from typing import Any

import psutil
import pytest
import redis

import rollfab
from rollfab.deploy.roles.run import AT_ONCE, STOP_S, _ends
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.host.directories import owner_only
from rollfab.trainer.client import _Event
from tests.support.until import wait_until

ROOT = Path(__file__).parents[3]

SIGNALS = """
import random, signal, threading
import numpy as np
import rollfab

class Stopped(Exception): ...

def handler(number, frame):
    if number == signal.SIGALRM:
        raise Stopped
    signal.default_int_handler(number, frame)

signal.signal(signal.SIGALRM, handler)
signal.signal(signal.SIGINT, handler)
random.seed(1)
rng = np.random.default_rng(1)
count = wrong = version = 0

def train(weights, density):
    for array in weights.values():
        where = slice(None) if density == 1 else rng.integers(0, array.size, int(array.size * density))
        array[where] += rng.integers(1, 4, array[where].size, dtype=np.uint16)

with rollfab.connect() as fabric:
    for density in (1, 0.6, 0.01):
        run = fabric.run(f"density-{int(density * 100)}", model="any", environment="frozenlake")
        weights = {f"w{n}": rng.integers(0, 2**16, 2_000_000, dtype=np.uint16) for n in range(4)}
        run.publish(weights, 0, allow_nonfinite=True)
        version = 0
        for round in range(10):
            version += 1
            train(weights, density)
            number = random.choice([signal.SIGALRM, signal.SIGINT])
            timer = threading.Timer(random.uniform(0.001, 0.03), signal.pthread_kill,
                                    (threading.main_thread().ident, number))
            try:
                timer.start()
                run.publish(weights, version, allow_nonfinite=True)
                timer.join()
            except (Stopped, KeyboardInterrupt):
                count += 1
            train(weights, density)
            version += 1
            run.publish(weights, version, allow_nonfinite=True)
            found = run.weights()
            wrong += any((found[name] != array).any() for name, array in weights.items())
print(count, wrong)
"""

FORK = """
import gc, multiprocessing, os, signal, sys
import numpy as np
import rollfab
from rollfab.errors import ConnectionForked

weights = {"w": np.arange(100_000, dtype=np.uint16) % 0x7000}
fabric = rollfab.connect()
run = fabric.run("forked", model="any", environment="frozenlake")
run.publish(weights, 0)
run.submit([{"seed": 1}])

def use():
    signal.alarm(20)  # a hang ends this child by a signal
    calls = (
        lambda: run.publish(weights, 1), lambda: run.weights(), lambda: run.submit([{"seed": 2}]),
        lambda: next(run.groups(timeout=1)), lambda: run.status(), lambda: fabric.runs(), lambda: run.head_version(),
        lambda: fabric.run("other", model="any", environment="frozenlake"),
    )
    for call in calls:
        try:
            call()
        except ConnectionForked as error:
            assert "forked from it" in str(error) and "open a connection here" in str(error), error
        else:
            raise AssertionError("it was not refused")
    fabric.close()
    gc.collect()

def end(code):
    assert code == 0, code
    weights["w"][:] += 1
    run.publish(weights, run.head_version() + 1)  # the parent goes on
    assert (run.weights()["w"] == weights["w"]).all()

child = os.fork()
if child == 0:
    use()
    with rollfab.connect(fabric.url) as own:  # and the child, with a connection of its own
        assert own.run("forked").head_version() == 0
    sys.exit(0)  # an ordinary end, with everything collected
end(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

process = multiprocessing.get_context("fork").Process(target=use)
process.start()
process.join()
end(process.exitcode)

fabric.close()
print("fine")
"""

FORK_AIO = """
import asyncio, os, signal, sys
import numpy as np
import rollfab
from rollfab.errors import ConnectionForked
from rollfab.fabric.broker.embedded import EmbeddedBroker

weights = {"w": np.arange(100_000, dtype=np.uint16) % 0x7000}

async def main(url):
    async with await rollfab.aio.connect(url) as fabric:
        run = await fabric.run("forked", model="any", environment="frozenlake")
        await run.publish(weights, version=0)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            for call in (lambda: run.publish(weights, version=1), run.weights, run.status, run.head_version,
                         lambda: run.submit([{"seed": 2}]), fabric.runs, lambda: anext(run.groups(timeout=1))):
                try:
                    await call()
                except ConnectionForked:
                    continue
                os._exit(3)
            await fabric.close()
            os._exit(0)
        code = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1])
        assert code == 0, code
        weights["w"][:] += 1
        await run.publish(weights, version=1)
        assert ((await run.weights())["w"] == weights["w"]).all()

with EmbeddedBroker.start() as broker:
    asyncio.run(main(broker.url))
print("fine")
"""


def script(text: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "ROLLFAB_URL"}
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT / "src")},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_signals_in_the_middle_of_a_publish_leave_no_wrong_bit() -> None:
    count, wrong = script(SIGNALS).split()

    assert int(count) >= 5
    assert int(wrong) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("text", [FORK, FORK_AIO], ids=["sync", "aio"])
def test_a_forked_child_is_refused_at_once_and_hurts_nobody(text: str) -> None:
    assert script(text) == "fine\n"


# ---------------------------------------------------------------- Ctrl-C, whatever a command is doing

INTERRUPTER = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""


def command(*words: str, url: str = "redis://127.0.0.1:1", **environment: str) -> list[Any]:
    """What to start a command with."""
    everything = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "ROLLFAB_URL": url, **environment}
    return [[sys.executable, "-m", "rollfab", *words], everything]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("typer", ["version"]),
        ("rollfab.deploy.main", ["version"]),
        ("redis", ["status"]),
        ("rollfab.deploy.cli.status", ["status"]),
        ("rollfab.deploy.roles.run", ["controller"]),
        ("rollfab.workers.agent.worker", ["agent"]),
        ("rollfab.workers.rollout.worker", ["worker"]),
        ("rq", ["reward"]),
        ("uvicorn", ["api"]),
        ("rollfab.deploy.local.up", ["up", "--data", "nowhere"]),
        ("rollfab.deploy.local.demo", ["demo", "--output", "nowhere"]),
        ("rollfab.trainer.loop", ["train"]),
        ("torch", ["train"]),
    ],
)
def test_an_interrupt_while_a_command_loads_ends_it_without_a_word(
    tmp_path: Path, module: str, words: list[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    line, environment = command(*words, PYTHONPATH=path, INTERRUPT_AT=module)
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


CALLED = """
import os, signal, sys, threading

def look(frame, event, _):
    if event == "call" and frame.f_code.co_qualname == os.environ["INTERRUPT_AT"]:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(look)
threading.setprofile(look)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "call",
    [
        "set_up_logs",
        "BaseEventLoop.__init__",
        "BaseSelectorEventLoop._make_self_pipe",
        "Runner.run",
        "BaseEventLoop.run_until_complete",
        "RedisFabric.open",
        "_cancel_all_tasks",
        "BaseEventLoop.shutdown_default_executor",
        "BaseSelectorEventLoop.close",
        "_shutdown",
    ],
)
def test_an_interrupt_while_a_loop_is_made_or_closed_or_all_ends_ends_a_command_without_a_word(
    tmp_path: Path, url: str, call: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CALLED)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    line, environment = command("status", url=url, PYTHONPATH=path, INTERRUPT_AT=call)
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.timeout(120)
def test_a_client_that_is_interrupted_while_its_loop_is_made_leaves_no_half_of_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CALLED)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    _, environment = command(PYTHONPATH=path, INTERRUPT_AT="BaseEventLoop.__init__")
    line = [sys.executable, "-c", "import rollfab; rollfab.connect()"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert "Exception ignored" not in done.stderr


ROLES = (["controller"], ["agent"], ["worker"], ["reward"], ["api", "--port", "0"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [*ROLES, ["status", "--watch"]], ids=lambda words: words[0])
def test_every_command_ends_with_130_when_it_is_interrupted(words: list[str]) -> None:
    with EmbeddedBroker.start() as broker, running(broker, words) as process:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=100)[1]
        assert process.returncode == 130
        assert "Traceback" not in said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", ROLES, ids=lambda words: words[0])
def test_every_role_says_who_it_is_at_which_broker_and_what_it_does_next(words: list[str]) -> None:
    with EmbeddedBroker.start() as broker, running(broker, words) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        begun = next((line for line in lines if "connected to the broker" in line), "")
        found = re.fullmatch(r"([\w ]+) ([\w.-]+): connected to the broker (\S+); (.+)\n", begun)
        assert found and found[3] == broker.url, begun
        assert found[1].split()[-1 if words == ["worker"] else 0] == words[0]
        assert found[4].startswith(("plans leases", "waits for ", "starts its "))
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=100)[1]
        assert "connected to the broker" not in said
        is_loading = words == ["worker"] and process.returncode == -signal.SIGTERM  # holds nothing, and just ends
        assert is_loading or said.endswith("stopped by SIGTERM\n")


@pytest.mark.timeout(120)
def test_a_broker_of_one_s_own_ends_with_130_when_it_is_interrupted(tmp_path: Path) -> None:
    line, environment = command("broker", "--data", str(tmp_path / "data"))
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("unix://")
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=100)[1]
    assert process.returncode == 130


PATIENT = """
from rollfab.__main__ import main
from rollfab.fabric.broker import embedded

embedded.LOCK_WAIT_S = 1e9
main()
"""


@pytest.mark.timeout(120)
def test_a_broker_that_waits_for_its_directory_ends_with_130_when_it_is_interrupted(tmp_path: Path) -> None:
    # Given a directory that somebody holds who does not say who it is
    home = tmp_path / "data" / "broker"
    home.mkdir(mode=0o700, parents=True)
    _, environment = command()
    line = [sys.executable, "-c", PATIENT, "broker", "--data", str(tmp_path / "data")]
    with open(home / "broker.lock", "wb", opener=owner_only) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True) as process:
            opened = psutil.Process(process.pid).open_files
            wait_until(lambda: lock.name in [each.path for each in opened()], "it waits for the lock", 20, 0.05)

            # When who waits for it is interrupted, then that is its end
            process.send_signal(signal.SIGINT)
            assert "Traceback" not in process.communicate(timeout=30)[1]
    assert process.returncode == 130


BENCH = """
import asyncio, tempfile
from rollfab.__main__ import main
from tests.bench import cli

async def measure(name: str) -> None:
    print(name, flush=True)
    await asyncio.sleep(100)

@cli.app.command("endless")
def endless() -> None:
    with tempfile.TemporaryDirectory(prefix="rollfab-bench-") as name:
        asyncio.run(measure(name))

main()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_bench_that_is_ended_leaves_nothing_behind(tmp_path: Path, how: signal.Signals, status: int) -> None:
    _, environment = command(PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)]), TMPDIR=str(tmp_path))
    line = [sys.executable, "-c", BENCH, "bench", "endless"]
    with subprocess.Popen(line, env=environment, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith(str(tmp_path))
        process.send_signal(how)
        assert process.communicate(timeout=100) == ("", "")
    assert (process.returncode, list(tmp_path.iterdir())) == (status, [])


@pytest.mark.fault
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, id="dead"), pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("words", ROLES[:4], ids=lambda words: words[0])
def test_a_role_whose_broker_does_not_answer_ends_when_it_is_interrupted(words: list[str], how: signal.Signals) -> None:
    with EmbeddedBroker.start() as broker:
        try:
            with running(broker, words) as process:
                os.kill(broker.pid, how)
                process.send_signal(signal.SIGINT)
                said = process.communicate(timeout=100)[1]
        finally:
            if how == signal.SIGSTOP:
                os.kill(broker.pid, signal.SIGCONT)
    assert process.returncode == 130
    assert "Traceback" not in said
    if words == ["controller"]:  # it was asking, and would have gone on for as long as its patience lasts
        assert said.endswith("stopped; the broker did not answer meanwhile\n")


@pytest.mark.fault
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "frozen"])
def test_a_role_that_waits_for_its_broker_at_its_end_says_so_and_a_second_signal_ends_it(how: signal.Signals) -> None:
    # Given a role that asks its broker all the time; others that hold nothing end at once
    with EmbeddedBroker.start() as broker, running(broker, ["controller"]) as process:
        os.kill(broker.pid, how)
        try:
            # When a role is told to end twice, as a shell and a supervisor may do
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            # Then it waits, and says for what and for how long
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            told = next((line for line in lines if line.startswith("stopping: ")), "")
            assert f"waits for the broker {broker.url}, which does not answer, at most 3 s; a second signal" in told
            # And another signal is its end
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=100)[1]
        finally:
            if how == signal.SIGSTOP:
                os.kill(broker.pid, signal.SIGCONT)
    assert (process.returncode, said) == (143, "stopped at once, by a second signal\n")


async def test_a_role_that_takes_its_time_to_end_says_once_that_it_waits_for_its_work() -> None:
    with EmbeddedBroker.start() as broker:
        told: list[str] = []
        working = asyncio.ensure_future(asyncio.sleep(2.5 * STOP_S))
        assert await _ends(working, broker.url, told.append)
    assert set(told) == {"stopping: waits until what it holds is given back and what it runs has ended; " + AT_ONCE}


@contextmanager
def running(broker: EmbeddedBroker, words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command that has connected, and asks the broker things."""
    line, environment = command(*words, url=broker.url)
    with subprocess.Popen(line, env=environment, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            with redis.Redis.from_url(broker.url) as client:

                def asks() -> bool:
                    assert process.poll() is None, process.communicate()
                    return any(row["tot-cmds"] not in ("", "0", "1", "2", "3") for row in others(client))

                wait_until(asks, every_s=0.05)
            yield process
        finally:
            process.kill()


def others(client: redis.Redis) -> list[dict[str, str]]:
    own = str(client.client_id())
    return [row for row in client.client_list() if row["id"] != own]


# ---------------------------------------------------------------- brokers that are silent, or gone for good


@pytest.mark.fault
@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [["status"], ["doctor", "--run", "r"], ["runs", "ls"]], ids=lambda words: words[0])
def test_a_frozen_broker_is_named_before_it_is_given_up(words: list[str]) -> None:
    with EmbeddedBroker.start() as broker:
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            line, environment = command(*words, url=f"{broker.url}?socket_timeout=7")
            done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
    waits, error = (
        done.stderr.index("has not answered for 5 s: waiting for it another 2 s"),
        done.stderr.index("error:"),
    )
    assert waits < error and done.returncode == 1
    assert f"WARNING rollfab.fabric.broker.clients.pools the broker {broker.url} has not" in done.stderr


@pytest.mark.timeout(60)
def test_a_url_of_an_up_that_has_ended_says_to_start_it_again(tmp_path: Path) -> None:
    with EmbeddedBroker.start(tmp_path / "data", starter="rollfab up") as broker:
        pass
    line, environment = command("status", url=broker.url)
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "has ended with its `" in done.stderr and re.search(r"start `[^`]* up` again", done.stderr)
    with pytest.raises(BrokerError, match="start `rollfab up` again"):
        rollfab.connect(broker.url)


def test_what_a_call_waits_for_bears_exceptions_of_signal_handlers() -> None:
    class Stopped(Exception):
        """What a handler raises while somebody waits."""

    is_waiting, stopped = False, 0

    def stop(number: int, frame: FrameType | None) -> None:
        if is_waiting and frame is not None and frame.f_code.co_filename != __file__:
            raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        for _ in range(1500):
            event, errors = _Event(), list[BaseException]()
            setter = threading.Thread(target=_set_soon, args=(event, errors))
            setter.start()
            while not event.is_set():
                try:
                    is_waiting = True
                    event.wait()
                    is_waiting = False
                except Stopped:
                    is_waiting = False
                    stopped += 1
            setter.join()
            assert event.wait() and errors == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped, "no handler ever raised in a wait"


def _set_soon(event: _Event, errors: list[BaseException]) -> None:
    time.sleep(0.0005)
    try:
        event.set()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the fault that is looked for
        errors.append(error)
