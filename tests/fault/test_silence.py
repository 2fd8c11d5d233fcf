"""Nobody waits in silence: whatever keeps a run from moving, everyone who looks reads the same sentence.

Real processes (broker, controller, agent, worker, api) and one cause after the other. What takes a GPU, or minutes, is
played by heartbeats on the same broker. Who looks: a newcomer's loop over groups, `rollfab status`, the page's
/v1/status, /readyz?run=, `rollfab doctor --run`, and the events.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from rollfab.deploy.main import app
from rollfab.fabric.broker.embedded import EmbeddedBroker, free_port
from rollfab.fabric.contract.errors import NothingMoves, QueueFull
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.host.command import with_commands
from rollfab.fabric.model.presets import preset_shapes
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import PYTHONPATH, Processes, processes, tiny_weights

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]  # each process takes seconds to start on a busy machine

TASKS = [{"seed": 1}, {"seed": 2}]
LOGGER = "rollfab.trainer.waiting"
AGO = re.compile(r", last heard of \d+ s ago")  # other looks come later
SOME = {name: np.zeros(shape, np.float32) for name, shape in preset_shapes("small").items()}  # nobody reads them


class Watched:
    """A fabric of real processes, and its page."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.url = processes, processes.url
        port = free_port()
        processes.start("api", "api", "--port", str(port))
        processes.start_roles(agent=("--environment", "short=tests.support.worlds.worlds:Walk"))
        self.page = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
        processes.until(self._answers, 30.0, "the api answers")

    def _answers(self) -> bool:
        try:
            return self.page.get("/healthz").is_success
        except httpx.HTTPError:
            return False

    @contextmanager
    def run(self, run_id: str, model: str = "tiny", environment: str = "short", **settings: Any) -> Iterator[Run]:
        """A run that is gone afterwards: the others need its worker."""
        try:
            yield self.processes.fabric.run(run_id, model=model, environment=environment, **settings)
        finally:
            self.processes.ask(lambda ports: ports.board.delete_run(run_id))


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with processes(tmp_path_factory.mktemp("silence")) as found:
        watched = Watched(found)
        yield watched
        watched.page.close()


@contextmanager
def played(fabric: Watched, worker_id: str, role: str, **facts: Any) -> Iterator[None]:
    """A worker that says of itself what a test wants, twice a second, and leaves at the end."""
    info = WorkerInfo(worker_id=worker_id, role=role, pid=1, host="played", **facts)
    stop, ask = threading.Event(), fabric.processes.ask

    def beat() -> None:
        while not stop.wait(0.5):
            ask(lambda ports: ports.board.heartbeat(info))

    ask(lambda ports: ports.board.heartbeat(info))
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)
        ask(lambda ports: ports.board.forget_worker(worker_id))


def told_everywhere(fabric: Watched, run: Run, code: str) -> dict[str, str]:
    """The cause as each place tells it to those who look now; all places must agree."""
    run_id = run.run_id
    runner = CliRunner()

    def rows() -> dict[str, list[dict[str, str]]]:
        status = runner.invoke(app, ["status", "--run", run_id, "--json", "--url", fabric.url])
        doctor = runner.invoke(app, ["doctor", "--run", run_id, "--json", "--url", fabric.url])
        page = next(each for each in fabric.page.get("/v1/status").json()["runs"] if each["run_id"] == run_id)
        ready = fabric.page.get(f"/readyz?run={run_id}")
        codes = {
            "status": status.exit_code,
            "doctor": doctor.exit_code,
            "readyz": {200: 0, 503: 1}[ready.status_code],
            "page": int(not page["is_well"]),
        }
        assert len(set(codes.values())) == 1, codes
        return {
            "status": json.loads(status.stdout)["runs"][0]["causes"],
            "doctor": json.loads(doctor.stdout)["causes"],
            "page": page["causes"],
            "readyz": ready.json()["causes"],
        }

    def agreed() -> dict[str, list[dict[str, str]]] | None:
        found = rows()
        return found if all(row[0]["code"] == code for row in found.values()) else None

    found = fabric.processes.until(agreed, 6.0, f"every place says {code}: {rows()}")
    firsts = {place: row[0] for place, row in found.items()}
    assert len({AGO.sub("", first["text"]) for first in firsts.values()}) == 1, firsts
    return dict(firsts["status"])


def waited(
    run: Run, caplog: pytest.LogCaptureFixture, timeout: float = 5.5
) -> tuple[list[str], NothingMoves | None, str]:
    """What a loop over groups says while it waits, what it raises, and why it ended."""
    caplog.clear()
    groups = run.groups(timeout=timeout, consumer="newcomer")
    error = None
    with caplog.at_level(logging.WARNING, LOGGER):
        try:
            assert list(groups) == []
        except NothingMoves as raised:
            error = raised
    return [record.getMessage() for record in caplog.records if record.name == LOGGER], error, groups.ended_why


def event_of(fabric: Watched, run: Run, kind: str) -> dict[str, Any]:
    """The newest event of a kind about a run."""

    def found() -> dict[str, Any] | None:
        rows = fabric.processes.ask(lambda ports: ports.board.newest_events("", 200))
        return next((facts for _, each, facts in rows if each == kind and facts.get("run_id") == run.run_id), None)

    return dict(fabric.processes.until(found, 6.0, f"an event {kind} of {run.run_id}"))


def check(fabric: Watched, run: Run, code: str, caplog: pytest.LogCaptureFixture, *, words: str) -> None:
    """A run that stands until somebody acts: one warning within 6 s, a typed error, and one sentence everywhere."""
    said, error, _ = waited(run, caplog)
    first = told_everywhere(fabric, run, code)
    event = event_of(fabric, run, "run.stands")
    assert words in first["text"]
    assert (
        error is not None
        and error.cause == code
        and with_commands(first["text"]) in error.message
        and with_commands(first["step"]) in error.message
    )
    assert len(said) == 1 and with_commands(first["text"]) in said[0] and with_commands(first["step"]) in said[0]
    assert (event["code"], event["text"]) == (code, first["text"])


def test_nothing_is_started_and_a_newcomer_without_logging_reads_it_on_stderr() -> None:
    script = """
import sys, rollfab
run = rollfab.connect(sys.argv[1]).run("new", model="tiny", environment="frozenlake")
run.submit([{"seed": 1}], group_size=2)
for group in run.groups(timeout=6): pass
"""
    with EmbeddedBroker.start() as broker:
        command = [sys.executable, "-c", script, broker.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": PYTHONPATH})
    warning = done.stderr.split("Traceback")[0]
    assert "groups() has waited for 5 s: no weights of run 'new' are published yet" in warning
    assert "run.publish(model.named_parameters(), version=0)" in warning
    assert "NothingMoves: no group came within 6 s: no weights of run 'new'" in done.stderr
    assert warning.count("groups() has waited") == 1


def test_a_run_without_weights(fabric: Watched, caplog: pytest.LogCaptureFixture) -> None:
    with fabric.run("weightless") as run:
        run.submit(TASKS)
        check(fabric, run, "no_weights", caplog, words="no weights of run 'weightless' are published yet")
        # When they are published, it moves, and that is an event too
        run.publish(tiny_weights(), version=0)
        assert len(fabric.processes.collect(run, 2, 30.0)) == 2
        assert event_of(fabric, run, "run.moves")["code"] in ("moves", "all_consumed", "for_trainer")
        # And when all has been consumed, that is said, and nobody is blamed
        said, error, why = waited(run, caplog)
        first = told_everywhere(fabric, run, "all_consumed")
        assert error is None and first["kind"] == "waits"
        assert "all 2 groups that were submitted to run 'weightless' have been consumed" in first["text"]
        assert len(said) == 1 and first["text"] in said[0] and first["text"] in why


def test_a_run_of_a_model_that_nobody_holds(fabric: Watched, caplog: pytest.LogCaptureFixture) -> None:
    with fabric.run("smallish", "small") as run:
        run.publish(SOME, version=0)
        run.submit(TASKS)
        words = "no worker holds the model 'small' of run 'smallish': they hold tiny"
        check(fabric, run, "other_model", caplog, words=words)


def test_a_run_whose_workers_cannot_reach_its_head(fabric: Watched, caplog: pytest.LogCaptureFixture) -> None:
    error = "chunk 0 of version 2 does not have the digest that its manifest promises"
    facts = {"model": "small", "slot_count": 4, "run_id": "behind", "active_version": 0, "error": error}
    with fabric.run("behind", "small", staleness=1) as run, played(fabric, "stale-1", "dedicated", **facts):
        for version in range(3):
            run.publish({name: each + version for name, each in SOME.items()}, version=version)
        run.submit(TASKS)
        words = f"the head is version 2, staleness allows 1, and stale-1 holds version 0: {error}"
        check(fabric, run, "staleness", caplog, words=words)


def test_groups_that_another_consumer_holds(fabric: Watched, caplog: pytest.LogCaptureFixture) -> None:
    with fabric.run("held") as run:
        run.publish(tiny_weights(), version=0)
        run.submit(TASKS)
        with run.groups(consumer="old", count=2, timeout=30) as groups:
            assert len(list(groups)) == 2
            said, error, why = waited(run, caplog)
            first = told_everywhere(fabric, run, "for_trainer")
        words = "2 complete groups of run 'held' are held by consumer old, and not acknowledged"
        assert AGO.sub("", first["text"]) == words
        assert error is None, "who holds them may go on"
        assert words in AGO.sub("", said[0]) and words in AGO.sub("", why)


def test_a_submit_that_waits_says_for_what(fabric: Watched, caplog: pytest.LogCaptureFixture) -> None:
    with fabric.run("brimful", "small", trajectory_count_max=2) as run:
        run.submit(TASKS)
        with caplog.at_level(logging.WARNING, LOGGER), pytest.raises(QueueFull):
            run.submit(TASKS, timeout=6)
    (said,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert "submit has waited for 5 s: run 'brimful' holds 2 trajectories not yet consumed" in said


def test_work_that_moves_is_not_blamed_and_ends_a_wait_quietly(
    fabric: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with fabric.run("slow", environment_options={"turns": 1_000, "pace_s": 0.2}) as run:
        run.publish(tiny_weights(), version=0)
        run.submit(TASKS)
        fabric.processes.until(lambda: run.status().counters.get("turns_settled", 0) > 2, 30.0, "turns are settled")
        said, error, why = waited(run, caplog)
        assert (said, error) == ([], None)
        assert "run 'slow' moves: 2 trajectories are with an agent" in why
        assert fabric.page.get("/readyz?run=slow").status_code == 200


def test_a_run_that_is_not_there_is_named(fabric: Watched) -> None:
    assert fabric.page.get("/readyz?run=nope").status_code == 404
    for command in ("status", "doctor"):
        done = CliRunner().invoke(app, [command, "--run", "nope", "--json", "--url", fabric.url])
        assert "run 'nope' does not exist on this broker" in str(done.exception)


def test_without_a_controller_no_lease_is_given(fabric: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """The last test of this file: it ends the controller."""
    controller = fabric.processes.supervisor.children["controller"]
    assert controller.process is not None
    controller.is_restarted = False
    controller.process.terminate()
    controller.process.wait(10)
    with fabric.run("unled") as run:
        run.publish(tiny_weights(), version=0)
        run.submit(TASKS)
        said, error, _ = waited(run, caplog)
        first = told_everywhere(fabric, run, "no_controller")
        assert error is not None and error.cause == "no_controller"
        assert first["text"] in said[0] and first["text"] in error.message
