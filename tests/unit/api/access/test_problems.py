"""Errors as answers: whoever is gone in the middle of a body costs no traceback."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import FastAPI, Request

from rollfab.api.access.problems import install_problems
from rollfab.api.training.words import TRAINING


async def test_a_client_that_leaves_in_the_middle_of_a_body_costs_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = FastAPI()
    install_problems(app, TRAINING)

    @app.put("/piece")
    async def piece(request: Request) -> int:
        return len(await request.body())

    comes = [{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return comes.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "PUT", "path": "/piece", "headers": [], "query_string": b"", "scheme": "http"}
    with caplog.at_level(logging.WARNING):
        await app({**scope, "server": ("h", 80), "client": ("c", 1), "http_version": "1.1"}, receive, send)

    assert sent[0]["status"] == 400 and caplog.records == []
