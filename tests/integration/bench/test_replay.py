"""The client of `rollfab replay` at a fake serving engine: open loop, exact counts, errors by kind; the command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollfab.deploy.main import app
from rollfab.deploy.replay.client import Manner, Tally, find_server, replay
from rollfab.deploy.replay.records import Arrival
from rollfab.fabric.contract.errors import ConfigError, EngineError, FabricError, InputError
from rollfab.workers.engines.vllm.attached.client import Client
from tests.support.processes.sse_server import SseServer, sse_server
from tests.support.until import until

TRACE = "t_s,input_tokens,output_tokens\n" + "".join(f"{index / 50:.3f},{20 + index},{3}\n" for index in range(30))


@pytest.fixture
async def server() -> AsyncIterator[SseServer]:
    async with sse_server() as server:
        yield server


def arrivals(count: int, every_s: float = 0.01, tokens: int = 4) -> list[Arrival]:
    return [Arrival(index * every_s, 10 + index, tokens) for index in range(count)]


async def test_every_request_is_answered_with_exactly_its_tokens(server: SseServer) -> None:
    asked = [Arrival(index * 0.005, 1 + 7 * index, 1 + index % 9) for index in range(60)]

    outcomes = await replay(asked, server.url + "/v1/", "fake")

    assert [each.arrival for each in outcomes] == asked
    assert [each.error for each in outcomes] == [""] * 60
    assert [each.token_count for each in outcomes] == [each.completion_tokens for each in asked]
    assert sorted(len(body["prompt"]) for body in server.bodies) == [each.prompt_tokens for each in asked]
    assert [each.tpot_s is None for each in outcomes] == [each.completion_tokens == 1 for each in asked]
    assert all(len(each.gaps_us) == each.token_count - 1 for each in outcomes)


async def test_latencies_are_at_least_what_the_server_waited(server: SseServer) -> None:
    # Given a first token after 80 ms, others after 20 ms, and one of 60 ms
    server.gap_s = lambda index: {0: 0.08, 3: 0.06}.get(index, 0.02)

    outcomes = await replay(arrivals(5, tokens=6), server.url, "fake")

    for each in outcomes:
        assert each.ttft_s is not None and each.ttft_from_send_s is not None and each.tpot_s is not None
        assert each.ttft_s >= each.ttft_from_send_s > 0.079  # timers may be a millisecond early
        assert each.ttft_from_send_s + 5 * each.tpot_s > 0.08 + 0.06 + 4 * 0.02 - 0.006
        assert each.tpot_s * 5 == pytest.approx(sum(each.gaps_us) / 1e6, abs=1e-4)
        assert each.ended_at_s >= each.arrival.at_s + each.ttft_s + 5 * each.tpot_s - 1e-6


async def test_requests_go_out_at_their_times_although_the_server_stands_still(server: SseServer) -> None:
    # Given a server that says nothing
    server.goes_on.clear()
    asked = arrivals(80, every_s=0.005)
    tally = Tally()
    running = asyncio.create_task(replay(asked, server.url, "fake", tally=tally))

    # When every request has arrived there, without a single answer
    await until(lambda: len(server.arrived_at_s) >= 80)
    assert (tally.sent_count, tally.ended_count) == (80, 0)
    stood_until_s = time.monotonic()
    server.goes_on.set()
    outcomes = await running

    # Then none came early, none was left out, and all the wait is in their TTFT
    assert [each.error for each in outcomes] == [""] * 80
    assert all(each.late_s >= 0 for each in outcomes)
    for each, arrived_at_s in zip(outcomes, sorted(server.arrived_at_s), strict=True):
        assert arrived_at_s >= tally.started_at_s + each.arrival.at_s
        assert each.ttft_s is not None
        assert tally.started_at_s + each.arrival.at_s + each.ttft_s > stood_until_s
    assert len(server.connections) == 80  # none waited for another's


async def test_connections_are_used_again(server: SseServer) -> None:
    await replay(arrivals(40, every_s=0.02, tokens=1), server.url, "fake")
    assert len(server.arrived_at_s) == 40 and len(server.connections) < 20


async def test_a_start_in_the_future_is_waited_for(server: SseServer) -> None:
    start_at_s = time.monotonic() + 0.2
    outcomes = await replay(arrivals(3), server.url, "fake", start_at_s=start_at_s)
    assert min(server.arrived_at_s) >= start_at_s
    assert all(each.sent_at_s >= each.arrival.at_s for each in outcomes)


async def test_connections_that_are_cut_are_errors_with_what_came_until_then(server: SseServer) -> None:
    # Given that every third request, by its length, is cut after two tokens, and one before any
    server.cut_after = lambda body: {10: 0, 13: 2, 16: 2}.get(len(body["prompt"]))
    tally = Tally()

    outcomes = await replay(arrivals(9), server.url, "fake", tally=tally)

    assert [each.error for each in outcomes] == ["cut", "", "", "cut", "", "", "cut", "", ""]
    assert [each.token_count for each in outcomes] == [0, 4, 4, 2, 4, 4, 2, 4, 4]
    assert (outcomes[0].ttft_s is None, outcomes[3].ttft_s is None) == (True, False)
    assert (tally.sent_count, tally.ended_count, tally.failed_count) == (9, 9, 3)


async def test_every_other_error_has_its_kind_and_words(server: SseServer) -> None:
    server.status = 503
    [refused] = await replay([Arrival(0, 5, 4)], server.url, "fake")
    assert refused.error == "http 503" and "no room" in refused.detail
    server.status, server.failure = 200, "out of memory"
    [failed] = await replay([Arrival(0, 5, 4)], server.url, "fake")
    assert (failed.error, failed.detail, failed.token_count) == ("server", "out of memory", 4)
    server.failure, server.short_by = "", 1
    [short] = await replay([Arrival(0, 5, 4)], server.url, "fake")
    assert (short.error, short.detail) == ("short", "3 of 4 tokens")
    server.short_by, server.has_end = 0, False
    [endless] = await replay([Arrival(0, 5, 4)], server.url, "fake")
    assert (endless.error, endless.token_count) == ("cut", 4) and "[DONE]" in endless.detail
    [away] = await replay([Arrival(0, 5, 4)], "http://127.0.0.1:1", "fake")
    assert away.error == "connection" and away.token_count == 0


async def test_answers_that_do_not_come_in_time_are_unfinished(server: SseServer) -> None:
    server.gap_s = lambda index: 0.001 if index < 2 else 60.0
    outcomes = await replay(arrivals(3), server.url, "fake", manner=Manner(drain_s=0.3))
    assert [(each.error, each.token_count) for each in outcomes] == [("unfinished", 2)] * 3


async def test_a_replay_that_is_stopped_ends_with_what_there_is(server: SseServer) -> None:
    # Given one request that is answered, one that is not, and one that is due much later
    server.gap_s = lambda index: 60.0 if index == 4 else 0.0
    tally = Tally()
    asked = [Arrival(0.0, 5, 2), Arrival(0.01, 6, 9), Arrival(3600.0, 5, 2)]
    running = asyncio.create_task(replay(asked, server.url, "fake", tally=tally))
    await until(lambda: tally.ended_count >= 1 and tally.sent_count >= 2)

    tally.stop.set()

    first, second = await running
    assert first.error == "" and first.token_count == 2
    assert second.error == "interrupted" and second.token_count <= 4


async def test_a_chat_is_asked_with_text_and_its_role_is_no_token(server: SseServer) -> None:
    server.gap_s = lambda index: 0.05
    manner = Manner(endpoint="chat", api_key="secret")
    [outcome] = await replay([Arrival(0, 12, 3)], server.url, "fake", manner=manner)
    assert outcome.token_count == 3 and len(outcome.gaps_us) == 2 and not outcome.error
    assert outcome.ttft_s is not None and outcome.ttft_s > 0.045
    assert server.keys == {"Bearer secret"}


async def test_a_server_is_asked_what_it_serves(server: SseServer) -> None:
    found = await find_server(server.url + "/v1")
    assert (found.url, found.model, found.context_tokens) == (server.url, "fake", 4096)
    with pytest.raises(ConfigError, match="has no model 'other'; it has: fake"):
        await find_server(server.url, "other")
    with pytest.raises(ConfigError, match="must be a URL"):
        await find_server("localhost:8000")
    with pytest.raises(ConfigError, match="must be a URL"):
        await find_server("http://127.0.0.1:99999")


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (None, "connection refused"),
        (b"", "it closed the connection, or does not speak HTTP"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "it closed the connection, or does not speak HTTP"),
    ],
)
async def test_a_server_that_cannot_be_asked_is_named_with_the_cause_and_what_to_do(
    answer: bytes | None, cause: str
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer or b"")
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as wrong:
        url = f"http://127.0.0.1:{wrong.sockets[0].getsockname()[1]}"
        if answer is None:
            wrong.close()
        with pytest.raises(EngineError) as refused:
            await find_server(url)
        [outcome] = await replay([Arrival(0, 5, 4)], url, "fake")
        client = Client(url, None)
        with pytest.raises(EngineError) as refused_by_vllm:
            await client.ask("GET", "/v1/models")
        await client.close()
        with pytest.raises(EngineError, match=r"TLS failed|connection refused|closed the connection"):
            await find_server(url.replace("http:", "https:"))

    assert str(refused.value) == f"server {url} cannot be reached: {cause}. Start it, or give the address that it has"
    assert outcome.error in ("connection", "cut") and outcome.detail == cause
    assert str(refused_by_vllm.value).startswith(f"vLLM server {url} cannot be reached: {cause}. Is it running")


# ---------------------------------------------------------------- the command


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


async def rollfab(*words: str, interrupt_when: asyncio.Event | None = None) -> tuple[int, str, str]:
    """The command in a process of its own: its exit code, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollfab", "replay", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "120"},
    )
    if interrupt_when is not None:
        await interrupt_when.wait()
        process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.timeout(60)
async def test_the_command_reports_what_the_server_did(server: SseServer, trace: str, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    words = [trace, "--url", server.url, "--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000"]

    code, out, err = await rollfab(*words, "--json", "--outcomes", str(path))

    assert (code, err) == (0, "")
    report = json.loads(out)
    results = report["results"]
    assert report["name"] == "replay" and report["params"]["server"]["model"] == "fake"
    assert results["request_count"] == 30 and results["token_count"] == 90 and results["error_counts"] == {}
    assert results["attainment"] == {"ttft": 1.0, "tpot": 1.0, "joint": 1.0}
    assert results["ttft_ms"]["count"] == 30 and results["client_cpu_ms"] > 0
    outcomes = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["token_count"] for each in outcomes] == [3] * 30

    # A disk that is full costs the outcomes, not what was measured
    code, out, err = await rollfab(*words, "--outcomes", "/dev/full")
    assert (
        code == 1 and "outcomes cannot be written to /dev/full: No space left" in err and "within the SLO: TTFT" in out
    )

    # A person gets a table; a failed request is an exit code of 1
    server.cut_after = lambda body: 1 if len(body["prompt"]) == 25 else None
    code, out, err = await rollfab(*words)
    assert (code, err) == (1, "")
    assert "failed: 1 cut" in out and "TTFT" in out and "within the SLO: TTFT 96.67%" in out


@pytest.mark.timeout(60)
async def test_ctrl_c_ends_it_with_what_there_is(server: SseServer, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(TRACE + "3600,9,9\n")
    all_arrived = asyncio.Event()
    server.cut_after = lambda body: all_arrived.set() if len(server.bodies) == 30 else None
    server.gap_s = lambda index: 60.0 if index == 2 else 0.0

    code, out, err = await rollfab(str(path), "--url", server.url, interrupt_when=all_arrived)

    assert code == 130 and "Traceback" not in err
    assert "interrupted on their way: 30" in out


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        (["{trace}", "--model", "other"], ConfigError, "it has: fake"),
        (["nothing"], ConfigError, "azure-conv, azure-code"),
        (["{trace}", "--lengths", "1000"], ConfigError, "--lengths"),
        (["{trace}", "--rate", "0"], ConfigError, "must be above 0"),
        (["{trace}", "--outcomes", "/"], InputError, "cannot be written"),
        (["/"], ConfigError, "cannot be read"),
    ],
)
async def test_nothing_is_sent_before_all_of_it_is_right(
    server: SseServer, trace: str, words: list[str], kind: type[FabricError], told: str
) -> None:
    line = ["replay", *(word.format(trace=trace) for word in words), "--url", server.url]
    with pytest.raises(kind, match=told):
        await asyncio.to_thread(app, line, standalone_mode=False)
    assert server.bodies == []
