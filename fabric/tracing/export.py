"""Sends a process's spans to an OpenTelemetry collector: OTLP over HTTP, by a thread of its own.

- Off unless an endpoint is named. Then alone OpenTelemetry's packages (`rollfab[otel]`) are imported.
- `take` appends to a bounded queue, and that is all that a role pays beside the thread. A collector that is slow or
  away costs spans, never time or memory: what does not fit is dropped and counted. It is said once, and at the end how
  many.
- Who submits a group decides whether it is traced, all of it or nothing: by OTEL_TRACES_SAMPLER and _SAMPLER_ARG, and
  FRACTION where neither is set. Everybody else follows the traceparent of the job, with any of the samplers.
- OpenTelemetry's own variables hold for the rest: OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT, _COMPRESSION,
  OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_SDK_DISABLED, OTEL_BSP_SCHEDULE_DELAY.
- Names are OpenTelemetry's for generative AI, and our own for the rest. The conventions are in development and change:
  they are pinned here, and nowhere else. `tests/unit/fabric/tracing/test_spans.py` compares them with the package that
  states them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from typing import Any, Literal, NamedTuple

from ..contract.clock import wall_offset_ns
from ..contract.errors import ConfigError
from ..contract.ids import new_trace_id
from .spans import Fact, Place, Spans, TraceSpan

log = logging.getLogger(__name__)

COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"  # the environment variable of its address
QUEUE_COUNT_MAX = 8192  # spans that wait: some 10 MB
BATCH_COUNT_MAX = 2048  # so many are sent at once, without waiting longer: half a megabyte
PAUSE_MS = 5000  # between two batches, as OpenTelemetry's own has it; what a killed process loses
PAUSE_MS_MAX = 60_000
PAUSE_S_MIN = 0.05  # a thread that never waits would take a core
FRACTION = 0.02  # of groups that are traced: all of them cost turns of one token a third more processor time
CLOSE_S = 1.0  # for the last spans, as a process ends
NEEDED = "pip install 'rollfab[otel]'"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # the logger of its failures
SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"  # semantic conventions, gen_ai: of this version
PROVIDER = "rollfab"
Kind = Literal["internal", "client", "producer", "consumer"]


def open_spans(endpoint: str, role: str, worker_id: str) -> Spans:
    """Begin to send spans to a collector's address; "": there is none, and nothing is made or imported.

    What cannot be is no error, as the variables may be meant for other programs: a warning says so.
    """
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or is_off or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return Spans()
    try:
        fraction = fraction_of(os.environ.get("OTEL_TRACES_SAMPLER", ""), os.environ.get("OTEL_TRACES_SAMPLER_ARG", ""))
        pause_s = _number("OTEL_BSP_SCHEDULE_DELAY", PAUSE_MS, PAUSE_MS_MAX, "milliseconds between two batches") / 1000
        exporter = _exporter(endpoint)
    except (ConfigError, ImportError) as error:
        advice = f": {NEEDED}" if isinstance(error, ImportError) else ""
        log.warning("no traces are sent to the collector %.200r: %s%s", endpoint, error, advice)
        return Spans()
    return ExportedSpans(exporter, endpoint, {WORKER: worker_id, ROLE: role}, fraction=fraction, pause_s=pause_s)


def fraction_of(sampler: str, argument: str) -> float:
    """Return the part of groups to trace, in [0, 1], by the texts of OpenTelemetry's two variables; "": not set.

    Raises:
        ConfigError: a sampler that we have not, or an argument that is no part.
    """
    kind = sampler.strip().lower().removeprefix("parentbased_")
    if kind in ("always_on", "always_off"):
        return float(kind == "always_on")
    if kind not in ("", "traceidratio"):
        text = "give parentbased_traceidratio, parentbased_always_on or parentbased_always_off"
        raise ConfigError(f"OTEL_TRACES_SAMPLER is {sampler!r:.40}; {text}")
    return _number("OTEL_TRACES_SAMPLER_ARG", 1.0 if kind else FRACTION, 1.0, "the part of groups to trace", argument)


def _number(name: str, default: float, most: float, what: str, text: str | None = None) -> float:
    """Read a variable that is a number from 0 to `most`. Raises ConfigError: it is none."""
    found = os.environ.get(name, "") if text is None else text
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(found or default)) <= most:
            return number
    raise ConfigError(f"{name} is {found!r:.40}; give {what}, from 0 to {most:g}")


def _exporter(endpoint: str) -> Any:
    """Make OpenTelemetry's exporter. Raises ImportError; ConfigError: the address is none of http."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"it is no http address; give --otlp http://HOST:4318, or set {COLLECTOR} to it")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    given = bool(os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))  # the whole address, which comes before ours
    return OTLPSpanExporter(endpoint=None if given else f"{endpoint.rstrip('/')}/v1/traces")


class ExportedSpans(Spans):
    """Spans on their way to a collector. `sent_count` and `dropped_count` tell of those that are not any more."""

    is_on = True

    def __init__(
        self,
        exporter: Any,
        endpoint: str,
        process: dict[str, str],
        *,
        fraction: float = 1.0,
        pause_s: float = PAUSE_MS / 1000,
    ) -> None:
        """Begin to send.

        Args:
            exporter: has OpenTelemetry's `export(spans)` and `shutdown()`.
            endpoint: its address, for messages.
            process: attributes of all spans.
            fraction: of the groups that this process submits, those that are traced.
            pause_s: how long spans wait for more.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.sent_count = self.dropped_count = 0
        self._sent = SpanExportResult.SUCCESS
        self._exporter = exporter
        self._endpoint = endpoint
        self._fraction, self._bound = fraction, round(fraction * (1 << 64))
        self._pause_s = max(PAUSE_S_MIN, pause_s)
        self._make = _Maker(process)
        self._waiting: deque[TraceSpan] = deque()
        self._is_closed = False
        self._is_due = threading.Event()  # a whole batch waits, or it ends
        self._has_warned = self._has_said = False
        self._quiet = _Quiet()
        logging.getLogger(EXPORTER).addFilter(self._quiet)
        self._thread = threading.Thread(target=self._run, name="rollfab-traces", daemon=True)
        self._thread.start()

    def root(self) -> Place | None:
        """Begin a trace; None: its group is none of those that are traced."""
        if not self._has_said:
            self._has_said = True
            text = "traces: %g of the groups go to %s; OTEL_TRACES_SAMPLER_ARG sets the part"
            log.info(text, self._fraction, self._endpoint)
        trace_id = new_trace_id()
        return Place(trace_id, trace_id[:16]) if int(trace_id[16:], 16) < self._bound else None

    def take(self, span: TraceSpan) -> None:
        """Keep a span to be sent, or count it as dropped."""
        if len(self._waiting) < QUEUE_COUNT_MAX:
            self._waiting.append(span)
            if len(self._waiting) >= BATCH_COUNT_MAX and not self._is_due.is_set():
                self._is_due.set()
        else:
            self.dropped_count += 1

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most; say how much was dropped."""
        self._is_closed = True
        self._is_due.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()
        self._thread.join(CLOSE_S)
        logging.getLogger(EXPORTER).removeFilter(self._quiet)
        self.dropped_count += len(self._waiting)
        if self.dropped_count:
            text = "traces: %d spans reached %s, %d were dropped"
            log.warning(text, self.sent_count, self._endpoint, self.dropped_count)

    def _run(self) -> None:
        self._quiet.thread_id = threading.get_ident()
        while not self._is_closed:
            self._is_due.wait(self._pause_s)
            self._is_due.clear()
            self._send()
        self._send()

    def _send(self) -> None:
        """Send what waits now, in batches; after a failure the rest waits for the next time."""
        for _ in range(-(-len(self._waiting) // BATCH_COUNT_MAX)):
            batch = [self._waiting.popleft() for _ in range(min(BATCH_COUNT_MAX, len(self._waiting)))]
            try:
                is_sent = self._exporter.export(self._make.spans(batch)) is self._sent
            except Exception as error:  # noqa: BLE001 - these spans are lost, and the next batch is tried
                is_sent, self._quiet.reason = False, repr(error)
            if is_sent:
                self.sent_count += len(batch)
                continue
            self.dropped_count += len(batch)
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the collector at %s takes no traces, which are dropped (said once): %s. Start it, or name another "
                    "one by --otlp or OTEL_EXPORTER_OTLP_ENDPOINT; work goes on without it",
                    self._endpoint,
                    self._quiet.reason or "no answer",
                )
            return


class _Quiet(logging.Filter):
    """Keeps what the exporter logs in our thread as the reason of a failure; it would log every retry."""

    thread_id: int | None = None
    reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread_id:
            return True
        self.reason = record.getMessage()[:300]
        return False


class _Maker:
    """Makes OpenTelemetry's spans of ours."""

    def __init__(self, process: dict[str, str]) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "rollfab"}
        self._trace = trace
        self._span = ReadableSpan
        self._resource = Resource.create({**name, **process})
        self._scope = InstrumentationScope("rollfab", schema_url=SCHEMA_URL)
        self._kinds = {kind.name.lower(): kind for kind in trace.SpanKind}
        self._ok, self._error = trace.Status(), trace.Status(trace.StatusCode.ERROR)

    def spans(self, found: list[TraceSpan]) -> list[Any]:
        """Make spans whose times are of the wall clock as it is now."""
        offset_ns = wall_offset_ns()
        return [
            self._span(
                title_of(each),
                self._at(each.place),
                None if each.parent is None else self._at(each.parent),
                attributes=attributes_of(each),
                links=[self._trace.Link(self._at(link)) for link in each.links],
                kind=self._kinds[SPANS[each.what].kind],
                status=self._error if each.error else self._ok,
                start_time=offset_ns + int(each.begun_s * 1e9),
                end_time=offset_ns + int(each.ended_s * 1e9),
                resource=self._resource,
                instrumentation_scope=self._scope,
            )
            for each in found
        ]

    def _at(self, place: Place) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(int(place.trace_id, 16), int(place.span_id, 16), False, flags)


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
