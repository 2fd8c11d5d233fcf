"""What a serving worker is told, refuses, scrapes and reports."""

import asyncio
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.rules.serving.facts import ServingState, Slo, StepWork
from rollfab.fabric.rules.serving.guard import GuardFacts, GuardRule, decide
from rollfab.fabric.rules.serving.step_time import cold
from rollfab.workers.serving.device.memory_options import MemoryOptions
from rollfab.workers.serving.options import ServingOptions, check_serving_options
from rollfab.workers.serving.probes.reader import ProbeReader
from rollfab.workers.serving.probes.scrape import MetricsProbe, ScrapeOptions, target_of
from rollfab.workers.serving.wiring import Sharing, SharingSender, blank_report
from tests.standin.fabric import StandInFabric
from tests.support.queue.played_worker import PlayedEngine
from tests.support.until import until

RECORDED = Path(__file__).parent / "vllm_metrics"
SLO = Slo(ttft_ms=200.0, tpot_ms=50.0)
GOOD = {"probe": "/dev/shm/page", "ttft_slo_ms": 200.0, "tpot_slo_ms": 50.0}
UNSEEN = {"probe": None, "ttft_slo_ms": None, "tpot_slo_ms": None}


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("role", "changes", "match"),
    [
        (
            "serving",
            {"ttft_slo_ms": None, "tpot_slo_ms": None},
            "--slo-ttft-ms and --slo-tpot-ms; missing: --slo-ttft-ms, --slo-tpot-ms",
        ),
        ("serving", {"tpot_slo_ms": None}, "--slo-ttft-ms and --slo-tpot-ms; missing: --slo-tpot-ms"),
        ("serving", {"probe": None}, "--slo-ttft-ms --slo-tpot-ms needs --probe"),
        ("serving", {"probe": None, "ttft_slo_ms": None, "tpot_slo_ms": None, "is_observing": True}, "--observe needs"),
        ("serving", {"probe": ""}, "--probe is empty"),
        ("serving", {"probe": "ftp://host"}, "no http:// URL"),
        ("serving", {"probe": "http://host:port"}, "--probe http://host:port"),
        ("serving", {"ttft_slo_ms": 0.0}, "--slo-ttft-ms is 0"),
        ("serving", {"tpot_slo_ms": -1.0}, "--slo-tpot-ms is -1"),
        ("serving", {"tpot_slo_ms": float("nan")}, "--slo-tpot-ms is nan"),
        ("serving", {"priority": "high"}, "there are idle, low, normal, yield"),
        ("serving", {"pool": "a b"}, "--pool"),
        ("serving", {"probe_user": "no-such-user"}, "--probe-user no-such-user: this machine has no such user"),
        ("serving", {"probe": "http://h:1", "probe_user": "root"}, "--probe-user needs --probe with a page"),
        ("serving", {**UNSEEN, "probe_user": "root"}, "--probe-user needs --probe with a page"),
        ("serving", {"memory": MemoryOptions(backend="elastic")}, "did you mean static"),
        ("serving", {**UNSEEN, "memory": MemoryOptions(backend="static")}, "--kv-memory needs --probe"),
        ("dedicated", {**UNSEEN, "memory": MemoryOptions(backend="release")}, "--kv-memory needs --probe"),
        ("dedicated", {}, "--probe is for --role serving"),
        ("dedicated", {"probe": None, "ttft_slo_ms": None, "tpot_slo_ms": None, "pool": "chat"}, "--pool is for"),
    ],
)
def test_what_does_not_go_together_is_refused(role: str, changes: dict[str, object], match: str) -> None:
    options = ServingOptions(**{**GOOD, **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match):
        check_serving_options(role, options)


def test_a_whole_set_of_options_is_taken() -> None:
    check_serving_options("serving", ServingOptions(**GOOD, pool="chat", priority="low", is_observing=True))  # type: ignore[arg-type]
    for memory in (MemoryOptions(backend="static"), MemoryOptions(backend="release")):
        check_serving_options("serving", ServingOptions(**GOOD, memory=memory))  # type: ignore[arg-type]
    check_serving_options("serving", ServingOptions())
    check_serving_options("dedicated", ServingOptions())
    with pytest.raises(ConfigError, match="no guard"):
        check_serving_options("serving", ServingOptions(**GOOD), has_server=True)  # type: ignore[arg-type]


def test_the_metrics_of_a_server_are_found_by_any_of_its_urls() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/metrics", "http://h:1/v1/"):
        assert (target_of(url).host, target_of(url).port, target_of(url).path) == ("h", 1, "/metrics")


# ---------------------------------------------------------------- scraping


@dataclass
class Server:
    """Serves one text at /metrics; "" is an error."""

    text: bytes = b""
    count: int = 0
    port: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, more: int) -> None:
        """Until that many more scrapes have been answered."""
        with self.changed:
            until = self.count + more
            assert self.changed.wait_for(lambda: self.count >= until, timeout=8)


@pytest.fixture
def server() -> Iterator[Server]:
    played = Server((RECORDED / "one.txt").read_bytes())

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200 if played.text else 500)
            self.send_header("Content-Length", str(len(played.text)))
            self.end_headers()
            self.wfile.write(played.text)
            with played.changed:
                played.count += 1
                played.changed.notify_all()

        def log_message(self, *_: object) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    played.port = listening.server_address[1]
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield played
    listening.shutdown()
    thread.join()
    listening.server_close()


def decided(state: ServingState | None) -> tuple[int | None, str]:
    """What the guard lets run of four sequences."""
    model = cold(0.005, 0.00001, 0.0001)
    facts = GuardFacts(
        now_s=SystemClock().now_s(),
        state=state,
        slo=SLO,
        serving=model,
        rollout=model,
        reserve_s=0.0,
        work=StepWork(decode_count=4),
    )
    allowance = decide(facts, GuardRule(stale_s=30.0))  # only failures make it stale here, however slow the machine
    return allowance.step_tokens, allowance.reason


def test_a_server_is_scraped_into_a_page_and_two_failures_shut(server: Server, tmp_path: Path) -> None:
    # Given a server that rests
    page = tmp_path / "page"
    probe = MetricsProbe(f"http://127.0.0.1:{server.port}", page, ScrapeOptions(interval_s=0.01, timeout_s=5.0))
    reader = ProbeReader(page, "metrics")
    try:
        # When it has been scraped, then rollouts may run, and its requests are seen as they come
        server.wait(2)
        assert decided(reader.read(0.0))[0] is None
        server.text = (RECORDED / "busy0.txt").read_bytes()
        server.wait(3)
        state = reader.read(1.0)
        assert state is not None and (len(state.waiting), len(state.running)) == (4, 8)
        assert len(reader.new_arrivals()) == 12

        # When it fails twice, then nothing may run; and it may again once it answers
        server.text = b""
        server.wait(3)
        assert decided(reader.read(2.0)) == (0, "no sign of the serving engine for over 30 s")
        server.text = (RECORDED / "after.txt").read_bytes()
        server.wait(2)
        assert decided(reader.read(3.0))[0] is None
        assert len(reader.new_ends()) == 12
    finally:
        probe.close()
    assert not page.exists()


# ---------------------------------------------------------------- waiting and reporting


async def test_a_missing_probe_is_waited_for_with_a_line_to_type(tmp_path: Path) -> None:
    page, stop = tmp_path / "page", asyncio.Event()
    said: list[str] = []
    sharing = Sharing(ServingOptions(probe=str(page), ttft_slo_ms=200.0, tpot_slo_ms=50.0), SystemClock())
    waiting = asyncio.create_task(sharing.wait(stop, said.append))
    await asyncio.sleep(0.3)
    assert not waiting.done() and len(said) == 1
    assert f"ROLLFAB_PROBE={page} vllm serve" in said[0]

    # When what is wrong changes, then that is said, once
    page.write_bytes(b"x")
    await until(lambda: len(said) >= 2)
    await asyncio.sleep(0.5)
    assert "is no page of a probe" in said[1] and len(said) == 2
    stop.set()
    await waiting


async def test_a_report_holds_what_the_guard_measured_and_the_tokens_made() -> None:
    board = StandInFabric(SystemClock()).board
    measured = {"since_s": 9.0, "alone": {"request_count": 3}, "reclaim_count": 2, "of_a_newer_version": 1}
    sender = SharingSender(
        board, blank_report("w", SLO), SystemClock(), measured=lambda: measured, token_count=lambda: 77
    )
    await board.heartbeat(WorkerInfo(worker_id="w", role="serving", pid=1, host="h"))
    await sender.send()
    report = (await board.sharing())["w"]
    assert (report.token_count, report.reclaim_count, report.alone["request_count"]) == (77, 2, 3)
    assert (report.ttft_slo_ms, report.tpot_slo_ms) == (200.0, 50.0)


# ---------------------------------------------------------------- memory


class GuardedEngine(PlayedEngine):
    guard = object()


class ReleasingEngine(GuardedEngine):
    async def release_kv(self) -> float:
        return 0.1

    async def take_kv(self) -> float:
        return 0.2


@pytest.mark.parametrize(
    ("backend", "engine", "is_lent"),
    [(None, GuardedEngine, False), ("static", ReleasingEngine, False), ("release", ReleasingEngine, True)],
)
async def test_a_worker_gives_back_what_the_backend_that_it_was_told_can(
    backend: str | None, engine: type[GuardedEngine], is_lent: bool, tmp_path: Path
) -> None:
    options = {**GOOD, "probe": str(tmp_path / "page"), "priority": "normal", "memory": MemoryOptions(backend=backend)}
    sharing = Sharing(ServingOptions(**options), SystemClock())  # type: ignore[arg-type]
    made = engine()
    try:
        sharing.check(made)  # type: ignore[arg-type]
        assert sharing.memory is None, "it has not started"
        sharing.attach(made, 100)  # type: ignore[arg-type]
        assert (sharing.memory is not None) is is_lent
    finally:
        sharing.close()


def test_a_backend_that_an_engine_cannot_have_is_refused_before_it_is_started(tmp_path: Path) -> None:
    options = {**GOOD, "probe": str(tmp_path / "page"), "memory": MemoryOptions(backend="release")}
    sharing = Sharing(ServingOptions(**options), SystemClock())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        sharing.check(GuardedEngine())  # type: ignore[arg-type]
    sharing.close()
