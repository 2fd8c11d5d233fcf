"""The door to an existing vLLM OpenAI server, by its URL.

- The server is unmodified. What it can do is found by trying (routes.py, weights.py); `abilities.notes` says what it
  cannot do, and how to start it so that it can.
- Nobody else may use it while it rolls out: all its users share commits and the prefix cache.
- Requests are streams that outlive holds and lost connections (streams.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .....fabric.contract.errors import EngineError, EngineUnsupported
from .....fabric.contract.sampling import CUTS, GUIDED, PENALTIES
from ....serving.guarding.guard import GuardOrders
from ...base import EngineLimits, TurnsAtCommit, Writes
from ..common.arena import Mirror
from ..common.backend import Abilities, Ask, Chunk, LifeSigns, ModelFacts
from ..common.beside import CANNOT as UNTOLD
from .admission import ServerRequests
from .client import UNIX, Client
from .model import ServedModel
from .routes import PROCESSED, CompletionsRoute, find_logprob_count_max, find_route, reports_processed_logprobs
from .streams import Streams
from .weights import DeltaWeights, ServerWeights, find_weights

API_KEY_VARIABLE = "VLLM_API_KEY"
SLEEP_S = 120.0

RAW_NOTE = f"it samples at temperature 1 or 0 only, as its log-probabilities are those before temperature: {PROCESSED}"
RAW = f"its log-probabilities would be those of another distribution: start the server with {PROCESSED}"
CUT_OFF = (
    "requests at a server are cut and asked again at every commit and hold, and it would not know what came before as"
    " the turn's own: take a vLLM in the worker's own process"
)
BLIND = (
    "what a server's own image processor makes of an image is not known here: take a vLLM in the worker's own process"
)
CANNOT = {
    **dict.fromkeys((*GUIDED, "presence_penalty", "frequency_penalty"), CUT_OFF),
    **UNTOLD,
    "images": BLIND,
    "prompt_logprobs": "a server tells them in no stream: take a vLLM in the worker's own process",
}
TEXT_NOTE = "it also turns tokens into text, which costs it time: start it with --enable-scale-out"
SLEEP_NOTE = "it cannot sleep: that needs a GPU, --enable-sleep-mode, and VLLM_SERVER_DEV_MODE=1 in its environment"
NOTES = (
    "a limit on the tokens of a step cannot be set from outside: start the server with --max-num-batched-tokens",
    "how full its KV cache is, is not shown here: see its /metrics",
)


class ServerDoor:
    """A door to a server; common/backend.py says what each method promises."""

    def __init__(
        self,
        url: str,
        *,
        slot_count: int,
        context_tokens_max: int | None,
        api_key: str | None = None,
        model: str = "",
    ) -> None:
        """api_key: None: the environment's VLLM_API_KEY. model: the name that it is served by; "": the first.

        Raises:
            ConfigError: `url` is none.
        """
        self._client = Client(url, api_key or os.environ.get(API_KEY_VARIABLE))
        self._context_tokens_max = context_tokens_max
        self._model = model
        self._requests = ServerRequests(slot_count)
        self._facts: ModelFacts | None = None
        self._abilities: Abilities | None = None
        self._weights: ServerWeights | None = None
        self._streams: Streams | None = None
        self._is_processed = False

    @property
    def facts(self) -> ModelFacts:
        assert self._facts is not None, "the door is not open"
        return self._facts

    @property
    def abilities(self) -> Abilities:
        assert self._abilities is not None, "the door is not open"
        return self._abilities

    # ---- opening and closing

    async def open(self) -> None:
        client = self._client
        model = await ServedModel.find(client, self._model)
        if model.info is not None:
            check_place(client.url)
        logprob_count_max = await find_logprob_count_max(client, model.name, model.vocabulary_size)
        route = await find_route(client, model.name, logprob_count_max)
        self._is_processed = await reports_processed_logprobs(client, model.name)
        weights = self._weights = await find_weights(client, model)
        limits = [limit for limit in (self._context_tokens_max, model.context_tokens_max) if limit is not None]
        self._facts = ModelFacts(
            name=model.name,
            layout=weights.layout,
            context_tokens_max=min(limits),
            vocabulary_size=model.vocabulary_size,
            tokenizer=model.root,
            logprob_count_max=logprob_count_max,
        )
        self._abilities = Abilities(
            name=f"vllm server {model.server_version}",
            weights=weights.kind,
            sleeps=model.can_sleep,
            notes=(*weights.notes, *self._notes(model, makes_text=isinstance(route, CompletionsRoute))),
            cannot=CANNOT if self._is_processed else CANNOT | dict.fromkeys((*CUTS, *PENALTIES, "logit_bias"), RAW),
        )
        self._streams = Streams(client, route, self._requests, CompletionsRoute(model.name))

    def _notes(self, model: ServedModel, *, makes_text: bool) -> Iterator[str]:
        if not self._is_processed:
            yield RAW_NOTE
        if makes_text:
            yield TEXT_NOTE
        if not model.can_sleep:
            yield SLEEP_NOTE
        yield from NOTES

    async def close(self) -> None:
        """End our requests; the server runs on."""
        if self._streams is not None:
            await self._streams.close()
        with contextlib.suppress(EngineError, OSError):
            if self._weights is not None:
                await self._weights.close()
        await self._client.close()

    @property
    def _open_streams(self) -> Streams:
        if self._streams is None:
            raise EngineError("the server's door is not open")
        return self._streams

    def check(self) -> None:
        self._open_streams.check()

    # ---- requests

    def stream(self, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """Begin a request. Raises EngineError: at its temperature the server reports other log-probabilities."""
        if not self._is_processed and ask.sampling.temperature not in (0.0, 1.0):
            raise EngineError(
                f"temperature {ask.sampling.temperature} cannot be used with vLLM server {self._client.url}, which"
                f" reports log-probabilities before temperature: start it with {PROCESSED}, or sample at 1",
                temperature=ask.sampling.temperature,
            )
        return self._open_streams.stream(ask)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._requests.abort(request_ids)

    # ---- holding and limits

    async def hold(self) -> None:
        self._requests.hold(True)

    async def release(self) -> None:
        self._requests.hold(False)

    def set_limits(self, limits: EngineLimits) -> None:
        self._requests.set_limits(limits)

    def life_signs(self) -> LifeSigns:
        """Return signs of life. step_count: events that brought tokens. kv_used_fraction: 0, as it is not known."""
        running_count = self._requests.running_count
        return LifeSigns(step_count=self._open_streams.event_count, running_count=running_count, kv_used_fraction=0.0)

    # ---- weights

    def guard_from_now(self) -> None:
        """Do nothing: the server's guard, if it has one, is its owner's."""

    def order(self, orders: GuardOrders) -> None:
        """Do nothing, as `guard_from_now`."""

    def guard_said(self) -> bytes | None:
        return None

    def check_turns(self, turns: TurnsAtCommit) -> None:
        """Refuse "keep": a held request is ended at the server and asked again, so its KV cache is gone."""
        if turns == "keep":
            raise EngineUnsupported(
                f"vLLM server {self._client.url} cannot keep the KV cache of requests in flight at a commit: it is"
                " computed again. A vLLM in the worker's own process keeps it",
                url=self._client.url,
            )

    async def write(self, writes: Writes, version: int) -> None:
        self.check()
        assert self._weights is not None
        await self._weights.write(writes, version)

    @property
    def rank_count(self) -> int:
        """Processes that hold parts of the model, see by_rank.RankDoor."""
        return self._weights.rank_count if isinstance(self._weights, DeltaWeights) else 0

    async def update(self, information: dict[str, Any], what: str, version: int | None = None) -> None:
        """Make one weight update on every rank, see by_rank.RankDoor."""
        self.check()
        assert isinstance(self._weights, DeltaWeights)
        try:
            await self._weights.update(information, version)
        except EngineError as error:
            raise EngineError(f"{what}: {error.message}", **error.facts) from error

    async def forget_prefixes(self, turns: TurnsAtCommit) -> None:
        """Have the server forget prefixes; loading a checkpoint has done so already."""
        if isinstance(self._weights, DeltaWeights):
            await self._weights.forget_prefixes()

    async def read(self, into: Mirror) -> None:
        self.check()
        assert self._weights is not None
        await self._weights.read(into)

    # ---- sleeping

    async def sleep(self) -> None:
        """Have the server sleep. Unverified on a GPU."""
        self._check_sleeps()
        await self._client.ask("POST", "/sleep?level=1&mode=keep", timeout_s=SLEEP_S)

    async def wake(self) -> None:
        """Wake the server. Unverified on a GPU."""
        self._check_sleeps()
        reply = await self._client.ask("POST", "/wake_up", timeout_s=SLEEP_S)
        if reply["status"] != "awake":
            raise EngineError(f"vLLM server {self._client.url} is still partly asleep after waking: see its log")

    async def release_kv(self) -> None:
        raise EngineUnsupported(f"vLLM server {self._client.url} has no route for giving its KV cache's memory back")

    async def take_kv(self) -> None:
        """Do nothing: there is nothing to take."""

    def _check_sleeps(self) -> None:
        if not self.abilities.sleeps:
            raise EngineUnsupported(f"vLLM server {self._client.url}: {SLEEP_NOTE}")


# ---------------------------------------------------------------- place
#
# The places of a vLLM server in development mode: it lets anybody who reaches it write weights, without a key.
#
# - Reached over loopback or a unix socket only.
# - And listening there only, as far as this machine's own table of sockets says: vLLM's own default is every address.
#   Its operator must know what the table does not show (a tunnel's far end, another network namespace, no Linux).


TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
LISTENS = "0A"
PORTS = {"http": 80, "https": 443}


def check_place(url: str) -> None:
    """Require that only this machine reaches the server.

    Raises:
        EngineError: others may; says what to start it with.
    """
    if url.startswith(UNIX):
        return
    parts = urlsplit(url)
    where = "" if is_loopback(parts.hostname or "") else f"is reached at {parts.hostname}"
    for address in () if where else listeners(parts.port or PORTS[parts.scheme]):
        where = where or ("" if is_loopback(str(address)) else f"listens at {address}")
    if where:
        raise EngineError(
            f"vLLM server {url} is in development mode (VLLM_SERVER_DEV_MODE=1) and {where}: whoever reaches it there"
            f" can write its weights without a key. Start it with --host 127.0.0.1, or --uds PATH and --server"
            f" {UNIX}/PATH, with its worker on the same machine",
            url=url,
        )


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address means this machine alone."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def listeners(port: int) -> Iterator[IPv4Address | IPv6Address]:
    """List the addresses at which this machine listens on a port; none where that cannot be read."""
    for table in TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, place, _, state, *_ = line.split()
            address, _, own_port = place.partition(":")
            if state == LISTENS and int(own_port, 16) == port:
                yield _address(address)


def _address(text: str) -> IPv4Address | IPv6Address:
    """Read an address from the kernel's hex, whose words are in the machine's order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    data = b"".join(words)
    return IPv4Address(data) if len(data) == 4 else IPv6Address(data)
