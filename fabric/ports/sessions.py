"""The port between a model API (api/gateway) and the trajectories whose agents call it (workers/agent).

A session is one claimed trajectory. Its agent asks for completions through the model API, as often and as many at once
as it likes; each is a turn, or several. A session lives as long as its claim, and its key with it.

Errors of all calls: InputError (PayloadTooLarge among them) and ConfigError, what was asked for cannot be (facts:
is_over_context, the prompt is longer than the model's context; is_conflict, it was said otherwise before);
EngineUnsupported, the engine cannot do it; QueueFull, too many calls at once, or no turns left (facts: is_final);
ClaimLost, the session is over; BrokerError and EngineError, try again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..chat.choice import FREE, ToolChoice
from ..contract.errors import InputError
from ..contract.text import told

KEY_PREFIX = "rfs-"  # by which scanners for leaked keys know a session's key
KEY_BYTES = 32  # random ones
KEY_FORM = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]{43}")  # such bytes as URL-safe base64
ERROR_LENGTH_MAX = 2000  # of what a client says why its attempt failed; the rest is cut off
REMOTE = "gateway"  # the environment of runs that are played through a gateway's sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request for completions, of whatever protocol.

    messages: OpenAI's form; None: `text` is to be continued, as it stands. tools: likewise in OpenAI's form. choice: of
    them. options: further variables of the chat template. sampling: fields of Sampling by name, the client's wishes:
    the run's own settings win. count: how many completions. key: equal in repetitions of one request, or empty.
    is_repeated: the client says that it has sent this before: it gets the answer that it did not receive, not another
    one. size_bytes: of the request, whatever fills it: a large one is rendered and tokenised where it stops nobody
    else.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = FREE
    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    key: str = ""
    is_repeated: bool = False
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token that the policy made: its text alone (a part of a character shows as U+FFFD), natural log-probability.

    top: the likeliest tokens in its place, likeliest first, where they were asked for.
    """

    text: str
    logprob: float
    top: Sequence[Token] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. message: as an assistant's message in OpenAI's form, with reasoning_content where there is some.

    text: all that was written, without the token that ended it. finish: stop, tool_calls or length.
    """

    message: Mapping[str, Any]
    text: str
    finish: str
    tokens: Sequence[Token] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a call. call_id: equal for repetitions. created_s: Unix time. policy_version: the newest."""

    call_id: str
    created_s: int
    prompt_token_count: int
    policy_version: int
    completions: Sequence[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """What a session's client may know of it. reward: given so far, None: none. error: with which it was ended."""

    session_id: str
    run_id: str
    group_id: str
    model: str
    task: Mapping[str, Any] = field(repr=False)
    seed: int
    attempt: int
    call_count: int
    call_count_max: int
    reward: float | None
    idle_s_max: float
    error: str | None = None


def check_same_end(facts: SessionFacts, reward: float | None, error: str | None) -> None:
    """Require of an end that is repeated what the first said, or nothing. Raises InputError (facts: is_conflict)."""
    error = None if error is None else error[:ERROR_LENGTH_MAX]
    if (reward is None and error is None) or (error == facts.error and reward in (None, facts.reward)):
        return
    first, other = _end_of(facts.reward, facts.error), _end_of(reward, error)
    raise InputError(
        f"session {facts.session_id} has ended already, with {first}, not with {other}: the first end counts",
        name="reward" if error is None else "error",
        is_conflict=True,
    )


def _end_of(reward: float | None, error: str | None) -> str:
    return f"reward {told(reward)}" if error is None else f"the error {told(error)}"


class Session(Protocol):
    """A session, as its client reaches it by its key."""

    @property
    def facts(self) -> SessionFacts: ...

    async def ask(self, call: Call) -> Reply:
        """Return completions, each of which is a turn. Cancelling it gives up the turns unless it is soon repeated."""
        ...

    async def count(self, call: Call) -> int:
        """Count the tokens of a call's prompt; nothing is asked for."""
        ...

    def note_refusal(self, told: str) -> None:
        """Take note of what its client was told in place of an answer: the attempt may fail for it."""
        ...

    def reward(self, reward: float) -> None:
        """Set the trajectory's reward. Raises InputError: no number, or the session has ended with another one."""
        ...

    async def end(
        self, *, reward: float | None = None, info: Mapping[str, Any] | None = None, error: str | None = None
    ) -> None:
        """End the session, and wait until its rollout is recorded.

        reward: as `reward` sets it; None: the one that was given. error: why the attempt failed, instead of having
        ended; it is tried again where the run says so.

        Raises:
            InputError: as check_same_end, where it has ended already.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A new session and its key, which is shown this once."""

    session: Session
    key: str = field(repr=False)


class Sessions(Protocol):
    """All sessions of one process."""

    def find(self, key: str) -> Session | None:
        """Return the session of a key, as long as it is not over."""
        ...

    async def find_recorded(self, key: str) -> SessionFacts | None:
        """Return what is known of a session that its client has ended, once its rollout is recorded.

        None: there is no such session, it was another end, or others have ended since that are as many as are kept.
        """
        ...

    async def open(self, run_id: str, *, wait_s: float) -> Opened:
        """Open a session on the next trajectory of a run.

        Raises:
            RunUnknown: there is no such run, or its trajectories are no matter of this process.
            QueueFull: none came within `wait_s` seconds.
        """
        ...
