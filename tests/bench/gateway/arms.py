"""The arms of `rollfab bench gateway`: a vLLM OpenAI server asked directly, and the same server behind the fabric.

- The server is vLLM's own, started as a worker that is attached to it advises (--enable-scale-out). Behind the fabric
  it is attached to a worker by its URL; broker, controller, worker and gateway are processes of their own, and every
  call under way has a session of its own.
- Two arms between them are floors. `told`: asked directly for what a rollout is made of, every token's id and
  log-probability. `forwarded`: asked through a process that only passes bytes on.
- All get chat messages by /v1/chat/completions from the same client, and make as many tokens of each: a token that
  ends answers is never the likeliest. Lengths are checked in every round.
- Every call has a connection of its own, in every arm.
- No prompt comes twice to the server, so prefix caching helps no arm.
- Where there are two cores, vLLM's EngineCore has one for itself, as an engine on a GPU computes beside all others.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import numpy as np
from redis.asyncio import Redis

from rollfab.api.access.keys import add_key
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker, free_port
from rollfab.fabric.contract.errors import EnvironmentUnknown, FabricError
from rollfab.trainer.client import Fabric, Run, connect
from rollfab.workers.engines.vllm.common.environment import ALWAYS, ON_CPU
from tests.bench.measure import child_pids, process_cpu_s, process_title, split_cores
from tests.unit.fabric.chat.families import FAMILIES, build_tokenizer
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config
from tests.vllm.attached.server_process import Server, served

from .forward import forwarding

FAMILY = "qwen2.5"
SEED = 7
SLOT_COUNT = 64
RUN_IDS = "ids"  # for calls with token ids; the worker is lent to the run that has work
START_S = 120.0
CALL_S = 120.0
LETTERS = "abcdefghijklmnopqrstuvwxyz "
SERVER_WORDS = (
    f"--max-num-seqs {SLOT_COUNT} --max-model-len 512 --kv-cache-memory-bytes 268435456 --no-skip-tokenizer-init"
    " --enable-scale-out"
).split()
TOLD = {"logprobs": True, "return_token_ids": True}


@dataclass(frozen=True, kw_only=True)
class Load:
    """A round: so many calls at once, each followed by the next.

    prompt_letters: of the user's message; or so many tokens, where is_ids: token ids are posted, not messages.
    """

    concurrency: int
    calls_each: int
    completion_tokens: int
    prompt_letters: int
    is_ids: bool = False

    @property
    def path(self) -> str:
        """Where its calls go."""
        return "/inference/v1/generate" if self.is_ids else "/v1/chat/completions"

    def body(self, prompt: str, model: str) -> dict[str, Any]:
        """Make a call's body."""
        if self.is_ids:
            sampling = {"max_tokens": self.completion_tokens, "temperature": 0, "logprobs": 1, "detokenize": False}
            return {"token_ids": list(prompt.encode()), "sampling_params": sampling}
        messages = [{"role": "user", "content": prompt}]
        return {"model": model, "max_tokens": self.completion_tokens, "temperature": 0, "messages": messages}

    def read(self, answer: Mapping[str, Any]) -> tuple[str, int]:
        """Return what an answer says, and how many tokens that is."""
        choice = answer["choices"][0]
        if self.is_ids:
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            return str(choice["token_ids"]), len(choice["token_ids"])
        return choice["message"]["content"], answer["usage"]["completion_tokens"]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of one arm. latencies_ms: of each call, from sending it to its last byte; texts: by prompt."""

    duration_s: float
    latencies_ms: list[float]
    texts: dict[str, str]
    token_count: int
    cpu_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a client asks. url: up to /v1. fields: what it asks for beside the rest."""

    url: str
    key: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


class Prompts:
    """Texts of which none comes twice, and whose beginnings differ."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)

    def take(self, load: Load) -> list[str]:
        """Make the texts of a round."""
        count = load.concurrency * load.calls_each
        return ["".join(self._random.choices(LETTERS, k=load.prompt_letters)) for _ in range(count)]


class Stage:
    """The server, the fabric before it, and a client; use as a context."""

    def __init__(self, directory: Path, loads: Sequence[Load]) -> None:
        self._directory = directory
        self._session_calls = max(load.calls_each for load in loads)
        self._stack = ExitStack()
        self._runner = asyncio.Runner()
        self.prompts = Prompts()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._runner.close()

    def _start(self) -> None:
        directory, enter = self._directory, self._stack.enter_context
        self.model = directory / "model"
        tensors = write_model(self.model)
        self._server: Server = enter(
            served(self.model, directory, *SERVER_WORDS, **ALWAYS, **ON_CPU, OMP_NUM_THREADS="1")
        )
        self.engine_has_a_core = enter(_apart(self._server.process.pid))
        self._broker = enter(EmbeddedBroker.start(directory / "broker"))
        self._supervisor = enter(Supervisor(directory / "logs"))
        keys = directory / "gateway.keys"
        self._key = add_key(keys, "bench", "control")
        ports = {name: free_port() for name in ("gateway", "inference")}
        self._gateway, self._inference = (f"http://127.0.0.1:{port}" for port in ports.values())
        asked = {name: ["gateway", "--port", str(port), "--keys", str(keys)] for name, port in ports.items()}
        model = ["--model", str(self.model)]
        for name, words in {
            "controller": ["controller"],
            "worker": ["worker", "--engine", "vllm", "--server", self._server.url, *model, "--slots", str(SLOT_COUNT)],
            "gateway": asked["gateway"],
            "inference": [*asked["inference"], "--inference", RUN_IDS, *model],
        }.items():
            place = {"ROLLFAB_URL": self._broker.url}
            self._supervisor.add(name, words, is_restarted=False, environment=place)
        port = free_port()
        self._forwarder = f"http://127.0.0.1:{port}"
        self._forwarding = enter(forwarding(self._server.url, port))
        self._run = self._open_run(enter(connect(self._broker.url)))
        self._run.publish(tensors, version=0)
        for url in (f"{self._gateway}/healthz", f"{self._inference}/health"):
            self._runner.run(self._until_healthy(url))

    def _open_run(self, fabric: Fabric) -> Run:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return fabric.run(
                    "gateway", model=str(self.model), environment="gateway", turn_count_max=self._session_calls
                )
            except EnvironmentUnknown:  # no gateway is up yet
                self._check_alive()
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)

    async def _until_healthy(self, url: str) -> None:
        deadline_s = time.monotonic() + START_S
        async with aiohttp.ClientSession() as client:
            while True:
                self._check_alive()
                try:
                    async with client.get(url):
                        return
                except aiohttp.ClientError as error:
                    if time.monotonic() > deadline_s:
                        raise FabricError(f"{url} did not answer: {error}") from error
                    await asyncio.sleep(0.1)

    def _check_alive(self) -> None:
        for name, child in self._supervisor.children.items():
            if not child.is_running:
                raise FabricError(f"the bench's {name} has ended, its last lines:\n{child.tail()}")

    # ---- rounds

    def direct(self, load: Load, prompts: list[str]) -> Round:
        """Ask the server."""
        places = [Place(url=self._server.url)] * load.concurrency
        return self._runner.run(self._play(places, load, prompts))

    def told(self, load: Load, prompts: list[str]) -> Round:
        """Ask the server for log-probabilities and the tokens' ids too."""
        places = [Place(url=self._server.url, fields=TOLD)] * load.concurrency
        return self._runner.run(self._play(places, load, prompts))

    def forwarded(self, load: Load, prompts: list[str]) -> Round:
        """Ask the process that passes bytes on."""
        places = [Place(url=self._forwarder)] * load.concurrency
        return self._runner.run(self._play(places, load, prompts))

    def through(self, load: Load, prompts: list[str]) -> Round:
        """Ask the gateway: chat in sessions that are opened before and ended after what is measured."""
        if load.is_ids:
            places = [Place(url=self._inference, key=self._key)] * load.concurrency
            return self._runner.run(self._play(places, load, prompts))
        return self._runner.run(self._through(load, prompts))

    async def _through(self, load: Load, prompts: list[str]) -> Round:
        async with self._sessions(load.concurrency) as places:
            return await self._play(places, load, prompts)

    @asynccontextmanager
    async def _sessions(self, count: int) -> AsyncIterator[list[Place]]:
        await asyncio.to_thread(self._run.submit, [{}], group_size=count)
        # A round may take longer than a connection is kept: on one that the gateway is closing a request would be lost.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:

            async def open_one() -> dict[str, Any]:
                body = {"run": self._run.run_id, "wait_s": 60}
                return await _post(client, f"{self._gateway}/sessions", self._key, body, status=201)

            opened = await asyncio.gather(*(open_one() for _ in range(count)))
            yield [Place(url=f"{self._gateway}{each['path'].removesuffix('/v1')}", key=each["key"]) for each in opened]
            for each in opened:
                await _post(client, f"{self._gateway}/sessions/{each['session']}/end", each["key"], {"reward": 1.0})
        await asyncio.to_thread(self._take_group)

    def _take_group(self) -> None:
        if not list(self._run.groups(timeout=START_S, count=1)):
            raise FabricError("the rollouts of a round did not come")

    async def _play(self, places: list[Place], load: Load, prompts: list[str]) -> Round:
        waiting, latencies_ms, texts = list(prompts), list[float](), dict[str, str]()

        async def one(client: aiohttp.ClientSession, place: Place) -> None:
            for _ in range(load.calls_each):
                prompt = waiting.pop()
                body = {**load.body(prompt, str(self.model)), **place.fields}
                start_s = time.perf_counter()
                answer = await _post(client, f"{place.url}{load.path}", place.key, body)
                latencies_ms.append(1000 * (time.perf_counter() - start_s))
                texts[prompt], count = load.read(answer)
                if count != load.completion_tokens:
                    raise FabricError(f"{place.url} made {count} tokens, not {load.completion_tokens}")

        timeout = aiohttp.ClientTimeout(CALL_S)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout
        ) as client:
            cpu_s, start_s = self._cpu_s(), time.perf_counter()
            await asyncio.gather(*(one(client, place) for place in places))
            duration_s = time.perf_counter() - start_s
            used_s = {name: used - cpu_s[name] for name, used in self._cpu_s().items()}
        count = len(latencies_ms) * load.completion_tokens
        return Round(duration_s=duration_s, latencies_ms=latencies_ms, texts=texts, token_count=count, cpu_s=used_s)

    def _cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by process."""
        server = self._server.process.pid
        pids = {"client": os.getpid(), "broker": self._broker.pid, "server": server}
        pids["forwarder"] = self._forwarding.pid
        pids |= {name: child.pid for name, child in self._supervisor.children.items() if child.pid}
        cores = sum(map(process_cpu_s, child_pids(server)))
        return {**{name: process_cpu_s(pid) for name, pid in pids.items()}, "engine core": cores}

    # ---- the floor

    def floor_ms(self, count: int) -> dict[str, float]:
        """Medians: a round trip to the broker, and to the gateway for nothing."""
        return self._runner.run(self._floor_ms(count))

    async def _floor_ms(self, count: int) -> dict[str, float]:
        async with Redis.from_url(self._broker.url) as redis, aiohttp.ClientSession() as client:

            async def hop() -> None:
                async with client.get(f"{self._gateway}/healthz") as response:
                    await response.read()

            return {"broker": await _median_ms(redis.ping, count), "gateway": await _median_ms(hop, count)}


def write_model(directory: Path) -> dict[str, Any]:
    """Write a tiny checkpoint with a tokenizer and a chat template; return its tensors.

    Tokens that end answers have embeddings of zero, so their logits are 0, and other tokens are likelier.
    """
    tokenizer = build_tokenizer(FAMILIES[FAMILY])
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    write_config(directory, **sizes)
    tokenizer.save_pretrained(directory)
    tensors = random_tensors(directory, SEED)
    for token in tokenizer.added_tokens_decoder:
        tensors["model.embed_tokens.weight"][token] = np.float32(0)
    write_checkpoint(directory, tensors, **sizes)
    return tensors


@contextmanager
def _apart(server_pid: int) -> Iterator[bool]:
    """Give vLLM's EngineCore a core, and another to its front end, this process and all that it starts."""
    engine = next((pid for pid in child_pids(server_pid) if "EngineCore" in process_title(pid)), None)
    with split_cores(engine) as is_done:
        for thread in os.listdir(f"/proc/{server_pid}/task") if is_done else ():
            os.sched_setaffinity(int(thread), os.sched_getaffinity(0))
        yield is_done


async def _post(client: aiohttp.ClientSession, url: str, key: str, body: Any, *, status: int = 200) -> dict[str, Any]:
    """Raises FabricError: it is answered with another status."""
    async with client.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as response:
        answer: dict[str, Any] = await response.json()
        if response.status != status:
            raise FabricError(f"{url} answered {response.status}: {answer}")
        return answer


async def _median_ms(call: Callable[[], Awaitable[Any]], count: int) -> float:
    found = []
    for _ in range(count):
        start_s = time.perf_counter()
        await call()
        found.append(1000 * (time.perf_counter() - start_s))
    return statistics.median(found)
