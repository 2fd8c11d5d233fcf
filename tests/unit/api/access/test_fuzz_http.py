"""Whatever is sent to the api, it answers in its own words: never with a 500, never with a traceback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollfab.api.access.config import ApiConfig
from rollfab.api.app import make_app
from rollfab.fabric.contract.limits import HTTP_BODY_BYTES_MAX
from rollfab.fabric.contract.records import RunConfig, WorkerInfo
from tests.fuzz.damage import damaged
from tests.standin.fabric import StandInFabric

CONTROL_KEY = "a-key-that-may-do-everything"
BODIES = (b'{"value": "on"}', b'{"value": 8}', b"[]", b'{"value": {"a": [1e308, null]}}')
PATHS = ("v1/workers/serving-1/lend", "v1/workers/*/lend", "v1/workers/%00/lend", "v1/runs", "")
ALLOWED = {200, 400, 401, 403, 404, 405, 413, 422}
few = settings(
    max_examples=settings.default.max_examples * 3 // 2,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=["open", "locked"])
def app(request: pytest.FixtureRequest) -> FastAPI:
    fabric = StandInFabric()

    async def fill() -> None:
        await fabric.board.create_run(RunConfig(run_id="r1", model="tiny", environment="frozenlake"))
        await fabric.board.heartbeat(WorkerInfo(worker_id="serving-1", role="serving", pid=1, host="box"))

    asyncio.run(fill())
    keys = (CONTROL_KEY,) if request.param == "locked" else ()
    return make_app(fabric, ApiConfig(control_keys=keys))


@pytest.fixture
def bearer(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"authorization": f"Bearer {CONTROL_KEY}"}


@asynccontextmanager
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield http


def check(answer: httpx.Response) -> None:
    assert answer.status_code in ALLOWED, (answer.status_code, answer.text)
    assert "Traceback" not in answer.text
    if answer.status_code >= 400:
        assert set(answer.json()) == {"error", "message", "facts"}


@pytest.mark.timeout(60)
def test_any_body_gets_an_answer(app: FastAPI, bearer: dict[str, str]) -> None:
    @few
    @given(damaged(BODIES), st.sampled_from(PATHS), st.sampled_from(["application/json", "text/plain", "x"]))
    def attack(body: bytes, path: str, kind: str) -> None:
        async def send() -> None:
            async with client(app) as http:
                check(await http.post(path, content=body, headers={"content-type": kind, **bearer}))

        asyncio.run(send())

    attack()


@pytest.mark.timeout(60)
def test_any_key_event_id_and_query_get_an_answer(app: FastAPI) -> None:
    words = st.binary(max_size=40).filter(lambda word: b"\n" not in word and b"\r" not in word and b"\0" not in word)

    @few
    @given(words, st.text(max_size=20), st.integers(-(1 << 70), 1 << 70))
    def attack(word: bytes, text: str, count: int) -> None:
        async def send() -> None:
            async with client(app) as http:
                headers = [(b"authorization", b"Bearer " + word), (b"last-event-id", b"x" + word), (b"origin", word)]
                check(await http.get("v1/status", headers=headers))
                check(await http.get("v1/events", headers=headers, params={"after": text}))
                check(await http.get(f"v1/runs/{text.encode('utf-8', 'replace').hex()}/dead-letters?count={count}"))
                check(await http.post("v1/workers/*/lend", headers=headers, json={"value": "on"}))

        asyncio.run(send())

    attack()


async def test_a_body_above_its_limit_is_refused_by_its_header(app: FastAPI, bearer: dict[str, str]) -> None:
    async with client(app) as http:
        headers = {"content-length": str(HTTP_BODY_BYTES_MAX + 1), **bearer}
        answer = await http.post("v1/workers/*/lend", content=b"{}", headers=headers)
    assert answer.status_code == 413
    assert "8,388,608 bytes" in answer.json()["message"]


async def test_a_body_that_hides_its_length_is_read_no_further_than_its_limit(
    app: FastAPI, bearer: dict[str, str]
) -> None:
    # Given a body of unknown length that would never end
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            assert sent < 4 * HTTP_BODY_BYTES_MAX, "the api reads on and on"
            yield b" " * (1 << 20)

    # When it is sent
    async with client(app) as http:
        headers = {"content-type": "application/json", **bearer}
        answer = await http.post("v1/workers/*/lend", content=endless(), headers=headers)

    # Then the api stops reading just above the limit
    assert answer.status_code == 413
    assert sent <= HTTP_BODY_BYTES_MAX + (2 << 20)
    assert "8,388,608 bytes" in answer.json()["message"]


async def test_a_stranger_s_body_is_not_read_at_all(bearer: dict[str, str]) -> None:
    app = make_app(StandInFabric(), ApiConfig(control_keys=(CONTROL_KEY,)))

    def body() -> Iterator[bytes]:
        raise AssertionError("it is read before the key is looked at")
        yield b""

    async def send() -> AsyncIterator[bytes]:
        for part in body():
            yield part

    async with client(app) as http:
        answer = await http.post("v1/workers/*/lend", content=send(), headers={"authorization": "Bearer nobody's"})
    assert answer.status_code == 401


async def test_a_websocket_does_not_pass_the_guard(app: FastAPI) -> None:
    sent = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/status", "headers": [], "query_string": b"", "subprotocols": []}
    await app(scope, receive, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_the_undamaged_bodies_reach_the_model(app: FastAPI, bearer: dict[str, str]) -> None:
    async with client(app) as http:
        answers = [
            await http.post(PATHS[0], content=body, headers={"content-type": "application/json", **bearer})
            for body in BODIES
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 422, 422]


@pytest.mark.parametrize("body", [b'"\xff"', b"[" * 200_000, b"9" * 5_000], ids=["no UTF-8", "too deep", "too long"])
async def test_a_body_that_json_gives_no_place_for_is_bad_input(
    app: FastAPI, bearer: dict[str, str], body: bytes
) -> None:
    async with client(app) as http:
        answer = await http.post(PATHS[0], content=body, headers={"content-type": "application/json", **bearer})
    assert answer.status_code == 422
    (found,) = answer.json()["facts"]["problems"]
    assert found["at"] == "body" and found["message"].startswith("no JSON that can be read: ")
