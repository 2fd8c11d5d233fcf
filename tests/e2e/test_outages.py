"""The page while its api fails, stands still or has no broker: it says so within seconds, and goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker
from tests.e2e.chromium import Browser
from tests.e2e.test_views import furnish
from tests.support.processes.api_server import ApiWorld, running_api
from tests.support.processes.fabric_processes import PYTHONPATH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SAID_S = 6.0  # a broken call and the api's own patience; two looks of the page
BACK_S = 10.0
STALE = "document.body.classList.contains('stale')"


async def test_an_answer_of_500_is_told_and_passes(
    api: ApiWorld, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a page that is live
    await api.beat("w1", "dedicated", slot_count=8)
    page = await browser.open(f"{api.url}workers")
    await page.wait_text("[data-worker=w1]", "w1", timeout_s=BACK_S)

    # When the api fails in a way that nobody foresaw
    async def fails() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(api.fabric.board, "sharing", fails)
        await page.wait_text("#state", "error", timeout_s=SAID_S)
        await page.wait_text("#banner", "the api failed on this request: its log has the traceback")
        await page.wait_text("#banner", "Trying again every second. What you see is")
        await page.wait_text("[data-worker=w1]", "w1")

    # Then it goes on when the api does
    await page.wait_text("#state", "live", timeout_s=BACK_S)
    await page.wait_gone("#banner", timeout_s=BACK_S)
    assert not await page.evaluate(STALE)


@pytest.mark.parametrize(
    ("place", "asked", "selector", "expected"),
    [
        ("runs/r1/trajectories/g9.2", "*/trajectories/g9.2*", "[data-f=state]", "running"),
        ("serving", "*/v1/sharing*", "[data-sharing=serving-1]", "777"),
    ],
)
async def test_what_one_view_reads_is_told_where_it_stands_and_comes_by_itself(
    api: ApiWorld, browser: Browser, place: str, asked: str, selector: str, expected: str
) -> None:
    """The browser lets the view's own call not through; the status comes."""
    await furnish(api)
    page = await browser.open(api.url)
    await page.wait_text("#state", "live", timeout_s=BACK_S)
    await page.call("Network.setBlockedURLs", urls=[asked])
    await page.call("Page.navigate", url=f"{api.url}{place}")
    await page.wait_text("#view .notice", "Trying again.", timeout_s=SAID_S)
    await page.call("Network.setBlockedURLs", urls=[])
    await page.wait_text(selector, expected, timeout_s=BACK_S)
    await page.wait_gone("#view .notice", timeout_s=BACK_S)


@pytest.mark.parametrize("way", ["killed", "stopped"])
async def test_a_broker_that_is_away_is_named_and_waited_for(browser: Browser, tmp_path: Path, way: str) -> None:
    home = tmp_path / "broker"
    with contextlib.ExitStack() as stack:
        broker = EmbeddedBroker.start(home, transport="tcp")
        stack.callback(lambda: broker.stop())
        async with running_api(broker.url) as api:
            await api.beat("controller-1", "controller")
            await api.beat("w1", "dedicated", slot_count=8)
            page = await browser.open(f"{api.url}workers")
            await page.wait_text("[data-worker=w1]", "w1", timeout_s=BACK_S)

            # When the broker dies behind the api, or stands still
            os.kill(broker.pid, signal.SIGKILL if way == "killed" else signal.SIGSTOP)
            await page.wait_text("#state", "broker unreachable", timeout_s=2 * SAID_S)
            await page.wait_text("#banner", "Trying again every second. What you see is")
            assert await page.evaluate(STALE)
            await page.wait_text("[data-worker=w1]", "w1")

            # Then all comes back with it, without a reload
            if way == "stopped":
                os.kill(broker.pid, signal.SIGCONT)
            else:
                broker.stop()
                broker = EmbeddedBroker.start(home, transport="tcp")
            await page.wait_text("#state", "live", timeout_s=2 * BACK_S)
            await api.beat("w2", "dedicated", slot_count=8)
            await page.wait_text("[data-worker=w2]", "w2", timeout_s=BACK_S)
            await page.wait_gone("#banner", timeout_s=BACK_S)
            assert not await page.evaluate(STALE)


@contextlib.asynccontextmanager
async def api_process(broker_url: str, directory: Path) -> AsyncIterator[tuple[str, int]]:
    """The api as a process of its own: address, pid."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    with Supervisor(directory) as supervisor:
        place = {"PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": broker_url}
        supervisor.add("api", ["api", "--port", str(port)], is_restarted=False, environment=place)
        child = supervisor.children["api"]
        async with httpx.AsyncClient() as http:
            for _ in range(300):
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{url}v1/status")).status_code == 200:
                        break
                assert child.is_running, child.tail()
                await asyncio.sleep(0.1)
        assert child.pid is not None
        yield url, child.pid


async def test_an_api_that_stands_still_is_waited_for(
    api: ApiWorld, browser: Browser, broker_url: str, tmp_path: Path
) -> None:
    await api.fabric.board.add_event("worker.failed", {"worker_id": "w1"})
    async with api_process(broker_url, tmp_path / "logs") as (url, pid):
        page = await browser.open(f"{url}events")
        await page.wait_text("#all-events", "worker.failed", timeout_s=BACK_S)
        await page.wait_text("#state", "live", timeout_s=BACK_S)
        os.kill(pid, signal.SIGSTOP)
        try:
            await page.wait_text("#state", "waiting for the api", timeout_s=SAID_S)
            await page.wait_text("#banner", "The api has not answered for 2 s.")
            await page.wait_text("#state", "api unreachable", timeout_s=BACK_S)
            await page.wait_text(
                "#banner", "The api does not answer: it did not answer within 6 s. Is its process running?"
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        await page.wait_text("#state", "live", timeout_s=BACK_S)
        await page.wait_gone("#banner", timeout_s=BACK_S)
        await api.fabric.board.add_event("lease.granted", {"worker_id": "w7"})
        await page.wait_text("#all-events", "lease.granted", timeout_s=BACK_S)


async def test_a_stream_of_events_that_broke_off_is_not_called_broken_when_it_is_back(
    broker_url: str, browser: Browser
) -> None:
    async with running_api(broker_url) as api:
        port = int(api.url.rstrip("/").rpartition(":")[2])
        page = await browser.open(f"{api.url}events")
        await page.wait_text("#view", "Nothing has happened yet.", timeout_s=BACK_S)
    await page.wait_text("#view .notice", "The stream of events is interrupted", timeout_s=SAID_S)
    await page.wait_text("#state", "api unreachable", timeout_s=SAID_S)
    async with running_api(broker_url, port=port):
        await page.wait_text("#state", "not ready", timeout_s=BACK_S)
        await page.wait_gone("#view .notice", timeout_s=BACK_S)


SHORTENED = "import('./static/client.js').then(({ patience }) => (patience.silentMs = 400))"


class SilentStream:
    """A proxy of an api that answers /v1/events itself: one event a connection, and then no sign of life."""

    def __init__(self, api: ApiWorld) -> None:
        self._api = api.url.removeprefix("http://").rstrip("/").rpartition(":")
        self.asked: list[str] = []  # what each connection wanted to follow after
        self.is_ended: list[bool] = []  # whether the page has closed it

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        path = request.split(b" ", 2)[1].decode()
        with contextlib.suppress(ConnectionError):
            await (self._fall_silent(path, reader, writer) if "/v1/events" in path else self._pass_on(request, writer))
        writer.close()

    async def _fall_silent(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.asked)
        self.asked.append(path.partition("after=")[2])
        self.is_ended.append(False)
        event = {
            "event_id": f"{number + 1}-0",
            "time_ms": 1,
            "kind": "worker.failed",
            "facts": {"worker_id": f"w{number}"},
        }
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(f"id: {number + 1}-0\ndata: {json.dumps(event)}\n\n".encode())
        await writer.drain()
        await reader.read()  # until the page hangs up
        self.is_ended[number] = True

    async def _pass_on(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._api[0], int(self._api[2]))
        back.write(request.replace(b"keep-alive", b"close"))
        while data := await there.read(65536):
            writer.write(data)
        back.close()


async def test_a_stream_of_events_that_falls_silent_is_told_left_and_followed_anew(
    api: ApiWorld, browser: Browser
) -> None:
    stub = SilentStream(api)
    async with await asyncio.start_server(stub.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        page = await browser.open(url)
        await page.wait_text("#state", "live", timeout_s=BACK_S)
        await page.evaluate(SHORTENED)
        # Given a stream that sends an event, and then neither another nor a comment nor an end
        await page.click("#nav a[href$=events]")
        await page.wait_text("#all-events", "w0", timeout_s=BACK_S)
        # Then the page says so, hangs up, and follows anew after what it has
        await page.wait_text(
            "#view .notice", "The stream of events is interrupted: the stream broke off", timeout_s=SAID_S
        )
        await page.wait_text("#all-events", "w1", timeout_s=BACK_S)
        assert stub.asked[:2] == ["0", "1-0"]
        assert stub.is_ended[0]
        await page.wait_text("#all-events", "w0")
        assert not await page.evaluate(STALE)  # the api itself answers
        assert page.complaints() == []
