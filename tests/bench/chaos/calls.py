"""Chat calls under chaos: an agent written against `openai` alone, what its lives write down, and the verdict.

- `play` is the agent as an environment; `Players` play it in sessions at gateways. Both talk alike.
- A group is one trajectory, so that its name is enough to know a call by.
- Each life of an agent has a journal: `call` and `answer` of each call, `error` of each try that failed, as the client
  saw it, and `failed` of each call that the client gave up. A call is known by its trajectory and its index, so that a
  later life's repetition is the same call.
- What was asked for under a name of CALM was answered before the first fault: the measure of all other answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import xxhash

from .journal import Journal, Line, Verdict, read_journal

CALM = "calm"
KIND_COUNT = 6  # of tasks: each is played undisturbed first
AT_ONCE_COUNT = 2  # calls that sub-agents make side by side, before the others come one after the other
OPEN_S = 2.0  # for which a gateway waits for a trajectory
PAUSE_S = 0.3
END_TRY_COUNT = 60
OVER = frozenset({401, 410})  # the session is over, as docs/gateway.md says: open a new one
AGAIN = frozenset({408, 409, 429})  # and all from 500 on, and every broken connection


@dataclass(frozen=True, kw_only=True)
class Talk:
    """How an agent talks. pace_s: between two calls, as tools take it; it costs no CPU."""

    turn_count: int
    completion_tokens: int
    pace_s: float


class Counted(openai.DefaultAsyncHttpxClient):
    """The HTTP client that `openai` makes for itself, which also writes down what goes wrong."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    async def send(self, request: Any, **options: Any) -> Any:
        """Send a request, once."""
        try:
            response = await super().send(request, **options)
        except Exception as error:
            self._journal.write("error", status=type(error).__name__)
            raise
        if response.status_code >= 400:
            self._journal.write("error", status=response.status_code)
        return response


def new_journal(directory: Path) -> Journal:
    """Begin the journal of a life."""
    return Journal(directory / f"calls-{secrets.token_hex(8)}.journal")


# ---------------------------------------------------------------- the agent


async def play(
    task: dict[str, Any],
    client: Any,
    directory: str,
    turn_count: int,
    completion_tokens: int,
    pace_s: float,
) -> float:
    """Talk, as an environment; the reward is one per call."""
    journal = new_journal(Path(directory))
    settings = Talk(turn_count=turn_count, completion_tokens=completion_tokens, pace_s=pace_s)
    async with Counted(journal) as http:
        await talk(client.with_options(http_client=http), journal, task, settings)
    return float(turn_count)


async def talk(client: Any, journal: Journal, task: Mapping[str, Any], settings: Talk) -> None:
    """Ask side by side, then go on with the first answer, call by call.

    task: its name, which is its trajectory's own, and the seed that says the kind of it.

    Raises:
        openai.OpenAIError: a call failed for good, or the session is over.
    """
    name, kind = task["name"], kind_of(task["seed"])

    async def ask(index: int, messages: list[Any]) -> Any:
        who = {"trajectory": name, "index": index, "kind": kind}
        journal.write("call", **who)
        try:
            reply = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=settings.completion_tokens
            )
        except openai.APIError as error:
            journal.write("failed", error=str(error)[:300], status=getattr(error, "status_code", 0), **who)
            raise
        message = reply.choices[0].message
        journal.write("answer", answer=xxhash.xxh64_hexdigest((message.content or "").encode()), **who)
        return message

    texts = [f"{chr(ord('a') + kind + index) * 8}" for index in range(AT_ONCE_COUNT)]
    asked = (ask(index, [_user(text)]) for index, text in enumerate(texts))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    messages = [_user(texts[0]), answers[0]]
    for index in range(AT_ONCE_COUNT, settings.turn_count):
        await asyncio.sleep(settings.pace_s)
        messages.append(_user(chr(ord("a") + kind + index)))
        messages.append(await ask(index, messages))


def kind_of(seed: int) -> int:
    """Return which of the KIND_COUNT talks a task asks for."""
    return seed % KIND_COUNT


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# ---------------------------------------------------------------- agents elsewhere


class Players:
    """Agents in this process, each of which opens a session at one of the gateways, plays it, and opens the next."""

    def __init__(self, urls: Sequence[str], key: str, run_id: str, directory: Path, settings: Talk) -> None:
        self._urls = urls
        self._key = key
        self._run_id = run_id
        self._directory = directory
        self._settings = settings

    async def play(self, count: int) -> None:
        """Play for ever, so many at once."""
        for name in ("httpx", "httpx2", "openai"):  # they log every request
            logging.getLogger(name).setLevel(logging.WARNING)
        await asyncio.gather(*(self._play_on(index) for index in range(count)))

    async def _play_on(self, index: int) -> None:
        while True:
            await self._play_once(self._urls[index % len(self._urls)])
            index += 1

    async def _play_once(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:
            opened = await _post(http, None, "/sessions", self._key, run=self._run_id, wait_s=OPEN_S)
            if not isinstance(opened, dict):
                await asyncio.sleep(PAUSE_S)
                return
            journal, key, end = new_journal(self._directory), opened["key"], f"/sessions/{opened['session']}/end"
            base_url, http_client = url + opened["path"], Counted(journal)
            async with openai.AsyncOpenAI(base_url=base_url, api_key=key, http_client=http_client) as client:
                said: dict[str, Any] = {"reward": float(self._settings.turn_count)}
                try:
                    await talk(client, journal, opened["task"], self._settings)
                except openai.APIConnectionError:  # its process has died, and the session with it
                    return
                except openai.APIStatusError as error:
                    if error.status_code in OVER:
                        return
                    said = {"error": str(error)[:300]}
            for _ in range(END_TRY_COUNT):
                ended = await _post(http, journal, end, key, **said)
                if isinstance(ended, dict) or ended in OVER:
                    return
                await asyncio.sleep(PAUSE_S)


async def _post(http: httpx.AsyncClient, journal: Journal | None, path: str, key: str, **body: Any) -> Any:
    """Return the answer, or what went wrong: a status, or the name of an error."""
    found: int | str
    try:
        response = await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    except httpx.TransportError as error:
        found = type(error).__name__
    else:
        if response.is_success:
            return response.json()
        found = response.status_code
    if journal is not None:
        journal.write("error", status=found)
    return found


# ---------------------------------------------------------------- the verdict


def read_calls(directory: Path) -> list[Line]:
    """Return what all lives wrote, in the order of time."""
    lines = [line for path in directory.glob("calls-*.journal") for line in read_journal(path)]
    return sorted(lines, key=lambda line: line["at_ns"])


def judge_calls(lines: Iterable[Line], verdict: Verdict, calm: Mapping[int, str], turn_count: int) -> dict[str, Any]:
    """Count what became of the calls, once nothing is under way any more.

    Args:
        lines: of all lives.
        verdict: over what the trainers got.
        calm: digest of the undisturbed rollout of each kind of task.
        turn_count: calls of each trajectory.

    Returns:
        calls, calls_completed, calls_lost: by trajectory and index. calls_again: asked for once more, by a later life.
        calls_given_up: by their client, after its own retries; a later session asks again.
        errors_retryable: tries by status, or by the error of a broken connection. errors_final: tries that no
        repetition helps. sessions_over: tries that met the end of their session.
        turns_doubled: turns in the record beyond one for each call. answers_differing: answers, and rollouts, that are
        not those of the undisturbed run.
    """
    known: dict[tuple[int, int], str] = {}
    asked: Counter[tuple[str, int]] = Counter()
    answered: set[tuple[str, int]] = set()
    errors: Counter[str] = Counter()
    found: Counter[str] = Counter()
    differing, final = [], []
    for line in lines:
        event, status = line["event"], line.get("status", 0)
        if event == "error":
            sort = sort_of(status)
            found[sort] += 1
            if sort == "retryable":
                errors[str(status)] += 1
            continue
        call, place = (line["trajectory"], line["index"]), (line["kind"], line["index"])
        is_calm = line["trajectory"].startswith(CALM)
        if event == "call" and not is_calm:
            asked[call] += 1
        elif event == "answer" and is_calm:
            known.setdefault(place, line["answer"])
        elif event == "answer":
            answered.add(call)
            if known.get(place) != line["answer"]:
                differing.append(f"call {call[1]} of {call[0]} has another answer")
        elif event == "failed":
            found["given_up"] += sort_of(status) == "retryable"
            if sort_of(status) == "final":
                final.append(f"{status}: {line['error']}")
    wrong = [
        f"the rollout of {name} is another" for name, seed, digest in verdict.rollouts if calm[kind_of(seed)] != digest
    ]
    lost = [f"call {index} of {name} has no answer" for name, index in sorted(set(asked) - answered)]
    return {
        "calls": len(asked),
        "calls_completed": len(answered),
        "calls_lost": len(lost),
        "calls_again": asked.total() - len(asked),
        "calls_given_up": found["given_up"],
        "sessions_over": found["over"],
        "errors_retryable": dict(errors),
        "errors_final": found["final"],
        "turns_doubled": verdict.turn_count - turn_count * verdict.rollout_count,
        "answers_differing": len(differing) + len(wrong),
        "call_examples": [*final[:3], *lost[:3], *differing[:3], *wrong[:3]],
    }


def sort_of(status: int | str) -> str:
    """Say what a client may do about a try that failed: repeat it (retryable), open a new session (over), nothing."""
    if isinstance(status, str) or status == 0 or status in AGAIN or status >= 500:
        return "retryable"
    return "over" if status in OVER else "final"
