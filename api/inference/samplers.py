"""The routes of Tinker's sampling API: what its SDK asks for, from its first call to its last.

    create_session ──▶ create_sampling_session ──▶ asample ──▶ a future ──▶ retrieve_future, again and again ──▶ answer

An SDK whose future is unknown (410: another process, or given up) asks for the sample again by itself.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from ...fabric.contract.errors import EngineError, FabricError
from ...fabric.ports.inference import ABORT, Completions, Inference
from ..access.problems import Refused
from ..gateway.body import Body
from ..gateway.door import CallGate
from ..gateway.problems import HEADERS, WORDS, answer, problem_of
from . import tinker
from .fields import read_body
from .futures import Futures

WAIT_S = 30.0  # of one retrieve_future; the SDK gives it 45
GET, POST = ("GET",), ("POST",)
BASE = "/api/v1"
SAMPLERS = (  # methods, path, and the method of Samplers
    (GET, f"{BASE}/healthz", "health"),
    (GET, f"{BASE}/get_server_capabilities", "capabilities"),
    (POST, f"{BASE}/client/config", "config"),
    (POST, f"{BASE}/client/dynamic_config", "dynamic_config"),
    (POST, f"{BASE}/create_session", "create_session"),
    (POST, f"{BASE}/session_heartbeat", "heartbeat"),
    (POST, f"{BASE}/telemetry", "telemetry"),
    (POST, f"{BASE}/create_sampling_session", "create_sampler"),
    (GET, f"{BASE}/samplers/{{sampler}}", "sampler"),
    (POST, f"{BASE}/asample", "sample"),
    (POST, f"{BASE}/retrieve_future", "retrieve"),
    (POST, f"{BASE}/cancel_future", "cancel"),
)


class Samplers:
    """What the routes do."""

    def __init__(self, inference: Inference, gate: CallGate) -> None:
        self._inference = inference
        self._gate = gate
        self._futures = Futures()

    async def close(self) -> None:
        """Give up what is under way."""
        await self._futures.close()

    # ---- sessions

    async def health(self, _: Request) -> Response:
        """Say that it serves."""
        return answer({"status": "ok"})

    async def capabilities(self, _: Request) -> Response:
        """Say which model there is."""
        facts = await self._inference.facts()
        length = facts.context_tokens_max or None
        model = {"model_name": facts.model, "max_context_length": length, "trainable": False, "sampleable": True}
        return answer({"supported_models": [model]})

    async def config(self, _: Request) -> Response:
        """Tell the SDK how to ask: with its key as it is, and for each future by itself."""
        return answer({"pjwt_auth_enabled": False, "sample_use_retrieve_futures": False})

    async def dynamic_config(self, _: Request) -> Response:
        """Tell the SDK to say which samples it does not need any more."""
        return answer({"sample_cancel_enabled": True})

    async def create_session(self, _: Request) -> Response:
        """Name a session; nothing about it is kept."""
        return answer({"type": "create_session", "session_id": tinker.new_session()})

    async def heartbeat(self, _: Request) -> Response:
        """Hear that a session lives."""
        return answer({"type": "session_heartbeat"})

    async def telemetry(self, _: Request) -> Response:
        """Take what the SDK tells of itself, and keep none of it."""
        return answer({"status": "accepted"})

    async def create_sampler(self, request: Request) -> Response:
        """Name a sampling session."""
        facts = await self._inference.facts()
        name = await read_body(request, lambda body: tinker.read_sampler(body, facts.run_id, facts.model))
        return answer({"type": "create_sampling_session", "sampling_session_id": name})

    async def sampler(self, request: Request) -> Response:
        """Say which model a sampling session has."""
        name = request.path_params["sampler"]
        tinker.pin_of(name)
        return answer({"sampler_id": name, "base_model": self._inference.model})

    # ---- samples

    async def sample(self, request: Request) -> Response:
        """Begin a sample, once, however often it is asked for."""
        asked: tinker.Asked = await read_body(request, tinker.read_sample)
        if not self._futures.has(asked.name):
            with ExitStack() as room:
                room.enter_context(self._gate.room())
                self._futures.begin(asked.name, self._made(asked), on_end=room.pop_all().close)
        return answer({"request_id": asked.name, "sample_sequence_ids": asked.sequence_ids})

    async def _made(self, asked: tinker.Asked) -> Response:
        """Make the answer, also that of a failure: an error that is kept would keep the prompt with it."""
        try:
            completions: Completions = await self._inference.generate(asked.prompt, outlasts_broker=True)
        except FabricError as error:
            return _failed(error)
        if any(made.finish == ABORT for made in completions.made):
            return _failed(EngineError("the sample was given up: requests were aborted"))
        return Response(tinker.sampled(asked, completions), 200, HEADERS, "application/x-protobuf")

    async def retrieve(self, request: Request) -> Response:
        """Answer a sample, or say that it is not made yet."""
        name = await read_body(request, _name)
        if not self._futures.has(name):
            raise Refused(410, "unknown_request", "no sample of this request_id is known here: ask for it again")
        ended = await self._futures.ended(name, WAIT_S)
        if ended is None:
            why = WORDS.say(await self._inference.why_waiting())
            state = {"queue_state": "paused_capacity", "queue_state_reason": why} if why else {"queue_state": "active"}
            return answer({"type": "try_again", "request_id": name, **state}, 408)
        return _told(ended)

    async def cancel(self, request: Request) -> Response:
        """Give a sample up."""
        self._futures.cancel(await read_body(request, _name))
        return answer({})


def _told(ended: asyncio.Task[Response]) -> Response:
    """Answer with a sample, or tell why there is none: a 500 would have the SDK ask again without a pause."""
    if ended.cancelled():
        raise Refused(410, "unknown_request", "the sample was given up: ask for it again")
    error = ended.exception()
    if error is None:
        return ended.result()
    assert isinstance(error, Exception)
    return _failed(error)


def _failed(error: Exception) -> Response:
    problem = problem_of(error, "/api/v1/asample")
    return answer({"error": problem.message, "category": "user" if problem.status < 500 else "server"})


def _name(body: Body) -> str:
    name = body.required("request_id", str)
    body.ignore("allow_metadata_only")
    return name
