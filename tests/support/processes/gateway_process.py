"""A `rollfab gateway` as a process of a test's fabric, and sessions at it with unmodified clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from rollfab.api.access.keys import add_key
from rollfab.fabric.broker.embedded import free_port
from tests.support.processes.fabric_processes import Processes


class Gateway:
    """A gateway process, and whoever holds the key that opens sessions."""

    def __init__(self, fabric: Processes, url: str, key: str) -> None:
        self.fabric, self.url = fabric, url
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60.0)

    def open(self, run_id: str, wait_s: float = 20.0) -> Session:
        """Open a session on the run's next trajectory."""
        response = self.http.post("/sessions", json={"run": run_id, "wait_s": wait_s})
        assert response.status_code == 201, response.text
        return Session(self, response.json())

    def answers(self) -> bool:
        """Whether it serves."""
        try:
            return httpx.get(f"{self.url}/healthz").status_code == 200
        except httpx.TransportError:
            return False


class Session:
    """An open session, and the openai client of its agent."""

    def __init__(self, gateway: Gateway, facts: dict[str, Any]) -> None:
        self.facts, self._gateway = facts, gateway
        self.client = openai.OpenAI(base_url=gateway.url + facts["path"], api_key=facts["key"], max_retries=4)

    def say(self, *messages: Any, **settings: Any) -> Any:
        """Ask for a chat completion."""
        settings = {"max_tokens": 6, **settings}
        return self.client.chat.completions.create(model="any", messages=list(messages), **settings)

    def end(self, **said: Any) -> httpx.Response:
        """End it, with its reward or the error for which the attempt failed."""
        path = f"{self._gateway.url}/sessions/{self.facts['session']}/end"
        return httpx.post(path, json=said, headers={"authorization": f"Bearer {self.facts['key']}"}, timeout=60.0)


@contextmanager
def running_gateway(fabric: Processes, directory: Path) -> Iterator[Gateway]:
    """Start a gateway as the fabric's child "gateway"; it ends with the fabric."""
    keys, port = directory / "gateway.keys", free_port()
    key = add_key(keys, "harness", "control")
    fabric.start("gateway", "gateway", "--port", str(port), "--keys", str(keys))
    fabric.wait_for_role("gateway")
    gateway = Gateway(fabric, f"http://127.0.0.1:{port}", key)
    with gateway.http:
        fabric.until(gateway.answers, 30.0, "the gateway answers")
        yield gateway


def user(text: str) -> dict[str, str]:
    """Make a user's message."""
    return {"role": "user", "content": text}
