"""What spans and their attributes are called: OpenTelemetry's names for generative AI, and our own for the rest.

The conventions are in development and change: they are pinned here, and nowhere else.
`tests/unit/fabric/tracing/test_names.py` compares them with the package that states them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from .spans import Fact, TraceSpan

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"  # semantic conventions, gen_ai: of this version
PROVIDER = "rollfab"
Kind = Literal["internal", "client", "producer", "consumer"]


class Named(NamedTuple):
    """How a span is called. title: its name, before the fact `of`, if any. operation: gen_ai.operation.name."""

    title: str
    kind: Kind = "internal"
    operation: str = ""
    of: str = ""


SPANS = {
    "submit": Named("rollfab.submit", "producer"),
    "trajectory_queue": Named("rollfab.trajectory_queue"),
    "trajectory": Named("invoke_agent", "internal", "invoke_agent", "environment"),
    "turn": Named("text_completion", "client", "text_completion", "model"),
    "turn_queue": Named("rollfab.turn_queue"),
    "prefill": Named("rollfab.prefill"),
    "decode": Named("rollfab.decode"),
    "environment_step": Named("execute_tool", "internal", "execute_tool", "tool"),
    "reward": Named("rollfab.reward", "internal", "", "reward_name"),
    "consume": Named("rollfab.consume", "consumer"),
}
ATTRIBUTES = {
    "environment": "gen_ai.agent.name",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "input_tokens": "gen_ai.usage.input_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
    "model": "gen_ai.request.model",
    "output_tokens": "gen_ai.usage.output_tokens",
    "reward": "gen_ai.evaluation.score.value",
    "reward_name": "gen_ai.evaluation.name",
    "temperature": "gen_ai.request.temperature",
    "tool": "gen_ai.tool.name",
    "trajectory_id": "gen_ai.conversation.id",
    # our own
    "attempt": "rollfab.attempt",
    "ended_by": "rollfab.group.ended_by",
    "generated_tokens": "rollfab.generated_tokens",  # by this claim alone
    "group_id": "rollfab.group.id",
    "group_size": "rollfab.group.size",
    "is_handed_over": "rollfab.is_handed_over",  # an earlier claim began the turn
    "is_redelivered": "rollfab.group.is_redelivered",
    "outcome": "rollfab.outcome",
    "policy_version": "rollfab.policy.version",
    "prior_tokens": "rollfab.prior_tokens",  # of earlier claims, which it goes on from
    "run_id": "rollfab.run.id",
    "turn_count": "rollfab.turn.count",
    "turn_id": "rollfab.turn.id",
    "worker_ids": "rollfab.worker.ids",
}
OPERATION, PROVIDER_NAME, ERROR = "gen_ai.operation.name", "gen_ai.provider.name", "error.type"
WORKER, ROLE = "service.instance.id", "rollfab.role"  # of the process


def title_of(span: TraceSpan) -> str:
    """Return the name of a span: of few different ones."""
    named = SPANS[span.what]
    return f"{named.title} {span.facts[named.of]}" if named.of in span.facts else named.title


def attributes_of(span: TraceSpan) -> dict[str, Fact]:
    found: dict[str, Fact] = {ATTRIBUTES[name]: fact for name, fact in span.facts.items()}
    if operation := SPANS[span.what].operation:
        found |= {OPERATION: operation, PROVIDER_NAME: PROVIDER}
    return found | {ERROR: span.error} if span.error else found
