"""Keys, paths, and the routes that open and end sessions, as plain HTTP."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rollfab.fabric.contract.errors import QueueFull, RunUnknown
from rollfab.fabric.contract.limits import HTTP_BODY_BYTES_MAX
from rollfab.fabric.ports.sessions import KEY_BYTES, KEY_PREFIX, Opened
from tests.integration.gateway.conftest import CREATOR_KEY, gateway
from tests.support.fake_sessions import KEY, FakeSession, FakeSessions
from tests.support.until import until

OTHER_KEY = "rfs_" + "o" * 43
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
ALLOWED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
async def http(base: str, sessions: FakeSessions) -> AsyncIterator[httpx.AsyncClient]:
    sessions.by_key[OTHER_KEY] = FakeSession("group.1", "other/model")
    async with httpx.AsyncClient(base_url=base) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("v1/models", bearer(KEY)),
        ("v1/models", {"x-api-key": KEY}),
        ("s/group.0/v1/models", bearer(KEY)),
        (f"s/{KEY}/v1/models", {}),
        (f"s/{KEY}/v1/models", {"authorization": "Bearer"}),
    ],
)
async def test_a_session_is_reached_by_its_key(http: httpx.AsyncClient, path: str, headers: dict[str, str]) -> None:
    answer = await http.get(path, headers=headers)
    assert (answer.status_code, answer.json()["data"][0]["id"]) == (200, "org/model")


async def test_every_wrong_key_gets_the_same_answer(http: httpx.AsyncClient) -> None:
    # When keys are wrong in every way: missing, unknown, a creator's, another session's, of no sensible length
    tries = [
        ("v1/models", {}),
        ("v1/models", bearer("unknown")),
        ("v1/models", bearer(CREATOR_KEY)),
        ("v1/models", bearer("k" * 5000)),
        ("s/group.0/v1/models", bearer(OTHER_KEY)),
        ("s/group.0/v1/models", {}),
        ("s/group.9/v1/models", bearer(KEY)),
        (f"s/{KEY}/v1/models", bearer("EMPTY")),
        (f"s/{KEY}/v1/models", bearer(OTHER_KEY)),
        ("sessions/group.0", bearer(OTHER_KEY)),
        (f"sessions/{KEY}", {}),
        (f"sessions/{KEY}", bearer(KEY)),
        (f"s/{KEY}/v1/models", bearer(KEY)),
        ("sessions/group.0", bearer(CREATOR_KEY)),
    ]
    answers = [await http.get(path, headers=headers) for path, headers in tries]

    # Then nobody learns which of these it was
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.content for answer in answers}) == 1
    error = answers[0].json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)


async def test_a_stranger_s_body_is_not_read(http: httpx.AsyncClient) -> None:
    answer = await http.post("v1/chat/completions", content=b"{", headers=bearer("unknown"))
    assert answer.status_code == 401


async def test_an_address_with_many_wrong_keys_is_told_to_wait_and_a_right_key_still_comes_in(
    http: httpx.AsyncClient,
) -> None:
    answers = [await http.get("v1/models", headers=bearer(f"guess-{number}")) for number in range(22)]
    assert [answer.status_code for answer in answers] == [401] * 20 + [429] * 2
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 61
    spoofed = await http.get("v1/models", headers={**bearer("guess"), "x-forwarded-for": "1.2.3.4"})
    assert spoofed.status_code == 429
    assert (await http.get("v1/models", headers=ALLOWED)).status_code == 200


async def test_clients_of_sessions_that_ended_together_are_all_told_so_at_once(http: httpx.AsyncClient) -> None:
    # Given more sessions behind one address than it may send wrong keys, none of which this gateway knows any more
    keys = [KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES) for _ in range(30)]
    # When their clients go on: then none of them is to wait
    answers = [await http.get("v1/models", headers=bearer(key)) for key in keys]
    assert {answer.status_code for answer in answers} == {401}
    # And guesses are counted all the same
    guesses = [await http.get("v1/models", headers=bearer(key[:-1])) for key in keys]
    assert [guess.status_code for guess in guesses] == [401] * 20 + [429] * 10


async def test_authority_comes_from_the_key_alone(http: httpx.AsyncClient, sessions: FakeSessions) -> None:
    asked = {**ASK, "model": "other/model", "user": "group.1", "metadata": {"session": "group.1"}}
    answer = await http.post("v1/chat/completions", json=asked, headers=ALLOWED)
    assert answer.json()["model"] == "org/model"
    assert len(sessions.session.calls) == 1 and not sessions.by_key[OTHER_KEY].calls


async def test_keys_and_prompts_are_in_no_log(
    http: httpx.AsyncClient, sessions: FakeSessions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sessions.session.script.append(RuntimeError("a prompt of note"))
    asked = {"messages": [{"role": "user", "content": "a prompt of note"}]}
    assert (await http.post(f"s/{KEY}/v1/chat/completions", json=asked)).status_code == 500
    await http.get(f"s/{OTHER_KEY}x/v1/models")
    await http.get(f"s/{KEY}/nowhere")
    ours = [each for each in caplog.records if each.name.startswith(("rollfab", "uvicorn", "asyncio"))]
    told = "".join(str(vars(record)) for record in ours)
    assert "gateway.request_crashed" in told
    for secret in (KEY, OTHER_KEY, "of note"):
        assert secret not in told


# ---------------------------------------------------------------- HTTP


async def test_a_host_that_a_client_claims_is_in_no_answer(http: httpx.AsyncClient) -> None:
    headers = {**ALLOWED, "host": "evil.example", "x-forwarded-host": "evil.example", "origin": "https://evil.example"}
    for path in ("v1/models", "v1/models/", "v1", "s/group.0/v1/models/", "sessions/group.0/", "nowhere"):
        answer = await http.get(path, headers=headers)
        assert answer.status_code in (200, 404) and "evil" not in answer.text
        assert "location" not in answer.headers and "set-cookie" not in answer.headers
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_answers_are_kept_by_nobody(http: httpx.AsyncClient) -> None:
    for answer in (
        await http.post("v1/chat/completions", json=ASK, headers=ALLOWED),
        await http.post("v1/chat/completions", json={**ASK, "stream": True}, headers=ALLOWED),
        await http.get("v1/models"),
    ):
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["docs", "openapi.json", "redoc", "v1/embeddings", "s/x/v1", "metrics"])
async def test_there_is_nothing_else(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path, headers=ALLOWED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_other_methods_are_refused(http: httpx.AsyncClient) -> None:
    for method in ("GET", "OPTIONS", "PUT"):
        answer = await http.request(method, "v1/chat/completions", headers=ALLOWED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_above_its_limit_is_refused(base: str, is_declared: bool) -> None:
    async def more() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * (1 << 20)

    content: Any = b" " * (HTTP_BODY_BYTES_MAX + 1) if is_declared else more()
    async with httpx.AsyncClient(base_url=base) as client:
        answer = await client.post("v1/chat/completions", content=content, headers=ALLOWED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


async def test_bodies_on_their_way_share_a_bound_and_give_their_part_back(sessions: FakeSessions) -> None:
    path, size, rest = "v1/chat/completions", HTTP_BODY_BYTES_MAX, 1 << 20
    head = f"POST /{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {size}\r\n\r\n"
    large = {"content": b" " * 2 * rest, "headers": ALLOWED}
    async with gateway(sessions, arriving_bytes_max=size) as base, httpx.AsyncClient(base_url=base) as client:
        address = httpx.URL(base)
        for is_finished in (True, False):
            # Given a body of which most has come, and not the rest
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(head.encode() + b" " * (size - rest))
            await writer.drain()
            for _ in range(1000):  # the gateway reads it, in this same loop
                await asyncio.sleep(0)
            # When another comes: then it is refused, in its protocol's shape, and a small one is taken
            refused = await client.post(path, **large)
            said = refused.json()["error"]
            assert (refused.status_code, said["code"], refused.headers["retry-after"]) == (503, "unavailable", "1")
            assert "still on their way" in said["message"]
            assert (await client.post(path, json=ASK, headers=ALLOWED)).status_code == 200
            # And when the first is whole, or its client leaves, then there is room again
            if is_finished:
                writer.write(b" " * rest)
                assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
            writer.close()
            await writer.wait_closed()

            async def is_taken() -> bool:
                return (await client.post(path, **large)).status_code == 400  # it is no JSON

            await until(is_taken)


async def test_a_client_that_breaks_off_while_it_sends_costs_nothing(base: str, http: httpx.AsyncClient) -> None:
    url = httpx.URL(base)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 9\r\n\r\n"
    with socket.create_connection((url.host, url.port)) as raw:
        raw.sendall(head.encode() + b"{")
    assert (await http.get("v1/models", headers=ALLOWED)).status_code == 200


async def test_a_repetition_says_that_it_is_one(http: httpx.AsyncClient, sessions: FakeSessions) -> None:
    for headers in ({}, {"idempotency-key": "a", "x-stainless-retry-count": "2"}, {"x-stainless-retry-count": "zzz"}):
        await http.post("v1/chat/completions", json=ASK, headers={**ALLOWED, **headers})
    assert [(each.key, each.is_repeated) for each in sessions.session.calls] == [("", False), ("a", True), ("", False)]
    answer = await http.post("v1/chat/completions", json=ASK, headers={**ALLOWED, "idempotency-key": "k" * 300})
    assert answer.status_code == 400


# ---------------------------------------------------------------- sessions


async def test_a_session_is_opened_rewarded_and_ended(http: httpx.AsyncClient, sessions: FakeSessions) -> None:
    # Given a trajectory to be had
    new = FakeSession("group.2")
    sessions.by_key["new-key"] = new
    sessions.opening = Opened(session=new, key="new-key")

    # When a creator opens it
    answer = await http.post("sessions", json={"run": "run", "wait_s": 3}, headers=bearer(CREATOR_KEY))

    # Then everything that an agent needs is in the answer
    assert answer.status_code == 201
    said = answer.json()
    assert (said["session"], said["key"], said["model"]) == ("group.2", "new-key", "org/model")
    assert (said["base_url_path"], said["path"]) == ("/v1", "/s/group.2/v1")
    assert (said["task"], said["seed"], said["attempt"], said["group"]) == ({"question": "?"}, 7, 1, "group")
    assert (said["calls_max"], said["idle_s"]) == (64, 600.0)
    assert sessions.waits == [3.0]

    # And its key alone rewards and ends it
    rewarded = await http.post("sessions/group.2/reward", json={"reward": 0.5}, headers=bearer("new-key"))
    assert (rewarded.status_code, rewarded.json()["reward"], new.facts.reward) == (200, 0.5, 0.5)
    shown = await http.get("sessions/group.2", headers=bearer("new-key"))
    assert (shown.json()["state"], "key" in shown.json()) == ("open", False)
    body = {"reward": 1, "info": {"steps": 3}}
    ended = await http.post("sessions/group.2/end", json=body, headers=bearer("new-key"))
    assert (ended.json()["state"], ended.json()["reward"]) == ("over", 1.0)
    assert new.ended == [({"steps": 3}, None)]


async def test_a_session_is_ended_without_a_body_or_with_an_error(
    http: httpx.AsyncClient, sessions: FakeSessions
) -> None:
    assert (await http.post("sessions/group.0/end", headers=ALLOWED)).status_code == 200
    assert (await http.post("sessions/group.0/end", json={"error": "fell"}, headers=ALLOWED)).status_code == 200
    assert sessions.session.ended == [(None, None), (None, "fell")]


async def test_a_base_url_that_is_not_this_client_s_is_told_what_it_is(http: httpx.AsyncClient) -> None:
    answer = await http.post("v1/v1/messages", json=ASK, headers=ALLOWED)
    said = answer.json()["error"]
    assert (answer.status_code, said["code"]) == (404, "not_found")
    assert said["message"].startswith("there is no route POST '/v1/v1/messages': a base URL ends with /v1")


async def test_an_end_whose_answer_was_lost_may_be_asked_for_again(
    http: httpx.AsyncClient, sessions: FakeSessions
) -> None:
    # Given a session that was ended and recorded
    sessions.recorded["old-key"] = replace(FakeSession("group.3").facts, reward=0.5)
    # When its client asks again, it hears so; about another session it does not
    again = await http.post("sessions/group.3/end", json={"reward": 0.5}, headers=bearer("old-key"))
    assert (again.status_code, again.json()["state"], again.json()["reward"]) == (200, "over", 0.5)
    assert (await http.post("sessions/group.3/end", headers=bearer("old-key"))).status_code == 200
    other = await http.post("sessions/group.3/end", json={"reward": 1}, headers=bearer("old-key"))
    message = "session group.3 has ended already, with reward 0.5, not with reward 1.0: the first end counts"
    assert (other.status_code, other.json()["error"]["message"]) == (409, message)
    void = await http.post("sessions/group.3/end", json={"error": "fell"}, headers=bearer("old-key"))
    assert (void.status_code, void.json()["error"]["param"]) == (409, "error")
    assert (await http.post("sessions/group.0/end", headers=bearer("old-key"))).status_code == 401
    assert (await http.post("v1/chat/completions", json=ASK, headers=bearer("old-key"))).status_code == 401
    assert not sessions.session.ended


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(RunUnknown("there is no run 'x'"), 404, "run_unknown"), (QueueFull("none came"), 429, "rate_limit_exceeded")],
)
async def test_a_session_that_cannot_be_had_says_why(
    http: httpx.AsyncClient, sessions: FakeSessions, error: Any, status: int, code: str
) -> None:
    sessions.opening = error
    answer = await http.post("sessions", json={"run": "x"}, headers=bearer(CREATOR_KEY))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert sessions.waits == [10.0]


async def test_nobody_s_session_is_waited_for(http: httpx.AsyncClient, sessions: FakeSessions) -> None:
    sessions.opening = asyncio.Event()
    with pytest.raises(httpx.ReadTimeout):
        await http.post("sessions", json={"run": "run"}, headers=bearer(CREATOR_KEY), timeout=0.2)
    await until(lambda: sessions.cancelled_count == 1)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("sessions", {}, "run"),
        ("sessions", {"run": "r", "wait_s": 1e9}, "wait_s"),
        ("sessions", {"run": "r", "wait_s": True}, "wait_s"),
        ("sessions", {"run": "r", "task": 1}, "task"),
        ("sessions/group.0/reward", {}, "reward"),
        ("sessions/group.0/reward", {"reward": "1"}, "reward"),
        ("sessions/group.0/end", {"info": []}, "info"),
        ("sessions/group.0/end", {"error": 1}, "error"),
        ("sessions/group.0/end", {"rewards": 1}, "rewards"),
    ],
)
async def test_a_wrong_field_is_named(
    http: httpx.AsyncClient, sessions: FakeSessions, path: str, body: dict[str, Any], name: str
) -> None:
    key = CREATOR_KEY if path == "sessions" else KEY
    answer = await http.post(path, json=body, headers=bearer(key))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert not sessions.session.ended


async def test_a_session_s_key_opens_no_other(http: httpx.AsyncClient) -> None:
    assert (await http.post("sessions", json={"run": "run"}, headers=ALLOWED)).status_code == 401
