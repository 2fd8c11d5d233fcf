"""A model API on loopback that answers chat completions by a script, streamed, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedModel:
    """What it is asked, and its answers in turn, as messages of OpenAI's API; the last one again and again."""

    def __init__(self, answers: Sequence[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.base_url = ""

    def answer(self, asked: dict[str, Any]) -> bytes:
        """Answer one request as server-sent events."""
        self.asked.append(asked)
        message = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls", []))]
        delta = {"role": "assistant", **message, **({"tool_calls": calls} if calls else {})}
        ends = [
            {"delta": delta, "finish_reason": None},
            {"delta": {}, "finish_reason": "tool_calls" if calls else "stop"},
        ]
        head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
        usage = {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
        parts = [{**head, "choices": [{"index": 0, **end}]} for end in ends] + [{**head, "choices": [], **usage}]
        return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


@contextmanager
def scripted_model(*answers: dict[str, Any]) -> Iterator[ScriptedModel]:
    """Serve a script until the end of the block."""
    model = ScriptedModel(answers)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            """Answer."""
            said = model.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model.base_url = f"http://127.0.0.1:{server.server_port}/v1"
        yield model
        server.shutdown()
