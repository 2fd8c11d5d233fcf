"""Places in traces, what spans are called, and what happens where no collector takes them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from rollfab.fabric.contract.records import NO_IDS, Sampling, TurnJob
from rollfab.fabric.ports.queue import TurnClaim
from rollfab.fabric.tracing import export
from rollfab.fabric.tracing.export import (
    BATCH_COUNT_MAX,
    FRACTION,
    QUEUE_COUNT_MAX,
    ExportedSpans,
    fraction_of,
    open_spans,
)
from rollfab.fabric.tracing.spans import Place, Spans, place_of
from rollfab.workers.rollout.turns import trace_claim

HERE = Place("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An exporter that fails until it is told otherwise; it waits where `gate` is not set."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.takes, self.is_shut = False, False
        self.titles: list[str] = []

    def export(self, spans: list[Any]) -> SpanExportResult:
        self.begun.set()
        self.gate.wait()
        if not self.takes:
            logging.getLogger(export.EXPORTER).error("nobody answers there")
            return SpanExportResult.FAILURE
        self.titles += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.is_shut = True
        self.gate.set()


def test_a_traceparent_is_read_as_it_is_written() -> None:
    assert place_of(PARENT) == HERE
    assert HERE.traceparent == PARENT


@pytest.mark.parametrize(
    "text", ["", PARENT[:-2] + "00", "01" + PARENT[2:], PARENT.upper(), PARENT + "-x", "00-" + "0" * 32 + PARENT[35:]]
)
def test_what_is_no_traceparent_or_not_sampled_is_no_place(text: str) -> None:
    assert place_of(text) is None


def test_places_below_differ_by_name_and_parent_alone() -> None:
    first = HERE.child("g.0", 0)
    assert first == place_of(PARENT).child("g.0", 0)  # type: ignore[union-attr]
    others = {HERE, first, HERE.child("g.0", 1), HERE.child("g.1", 0), first.child("queue"), HERE.child("queue")}
    assert len({place.span_id for place in others}) == 6


def test_a_job_that_nobody_traces_has_the_bytes_of_one_that_knows_no_traces() -> None:
    job = TurnJob(turn_id="g.0.0", agent_id="a", sampling=Sampling(), prompt_ids=NO_IDS)
    traced = TurnJob(turn_id="g.0.0", agent_id="a", sampling=Sampling(), prompt_ids=NO_IDS, traceparent=PARENT)
    assert b"traceparent" not in job.encode()
    assert TurnJob.decode(job.encode()).traceparent == ""
    assert TurnJob.decode(traced.encode()).traceparent == PARENT


def test_names_of_generative_ai_are_those_of_the_conventions() -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    used = {name for name in export.ATTRIBUTES.values() if name.startswith("gen_ai.")}
    assert used | {export.OPERATION, export.PROVIDER_NAME} <= known
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {named.operation for named in export.SPANS.values()} - {""} <= operations
    assert {named.of for named in export.SPANS.values()} - {""} <= export.ATTRIBUTES.keys()


def test_a_collector_that_takes_nothing_costs_spans_alone_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    # Given a collector that hangs, and more spans than may wait
    collector = Collector()
    spans = ExportedSpans(collector, "http://there:4318", {}, pause_s=0.1)
    spans.add("turn", HERE, None, 0.0, 1.0)
    assert collector.begun.wait(30.0)
    for _ in range(QUEUE_COUNT_MAX + 7):
        spans.add("turn", HERE, None, 0.0, 1.0, model="tiny")

    # When it goes on, and refuses them
    assert (spans.dropped_count, spans.sent_count) == (7, 0)
    collector.gate.set()
    spans.close()

    # Then all are counted, and two lines tell of it, none of them the library's
    assert collector.is_shut
    assert (spans.dropped_count, spans.sent_count) == (QUEUE_COUNT_MAX + 8, 0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "http://there:4318 takes no traces" in said[0] and "nobody answers there" in said[0]
    assert f"{QUEUE_COUNT_MAX + 8} were dropped" in said[1]


def test_what_waits_at_the_end_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    collector.takes = True
    collector.gate.set()
    spans = ExportedSpans(collector, "http://there:4318", {})
    for _ in range(BATCH_COUNT_MAX + 1):
        spans.add("turn", HERE, None, 0.0, 1.0, model="tiny")
    spans.close()
    assert collector.titles == ["text_completion tiny"] * (BATCH_COUNT_MAX + 1)
    assert (spans.sent_count, spans.dropped_count, caplog.records) == (BATCH_COUNT_MAX + 1, 0, [])


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, (0, 0)), (1.0, (400, 400)), (0.5, (120, 280))])
def test_a_part_of_the_groups_is_traced(fraction: float, expected: tuple[int, int]) -> None:
    spans = ExportedSpans(Collector(), "http://there:4318", {}, fraction=fraction)
    count = sum(spans.root() is not None for _ in range(400))
    spans.close()
    assert expected[0] <= count <= expected[1]


@pytest.mark.parametrize(
    ("sampler", "argument", "expected"),
    [
        ("", "", FRACTION),
        ("", "0.5", 0.5),
        ("parentbased_traceidratio", "0.25", 0.25),
        ("traceidratio", "", 1.0),  # the standard's own default
        ("parentbased_always_on", "0.5", 1.0),
        ("always_off", "", 0.0),
    ],
)
def test_the_standards_variables_say_which_part_is_traced(sampler: str, argument: str, expected: float) -> None:
    assert fraction_of(sampler, argument) == expected


def test_what_is_traced_unasked_is_a_small_part() -> None:
    assert 0 < FRACTION <= 0.1


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "give parentbased_traceidratio"),
        ({"OTEL_TRACES_SAMPLER_ARG": "2"}, "the part of groups to trace, from 0 to 1"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "soon"}, "milliseconds between two batches, from 0 to 60000"),
    ],
)
def test_a_variable_that_cannot_be_is_told_and_stops_nothing(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not open_spans("http://there:4318", "agent", "a1").is_on
    assert told in caplog.text


def test_a_whole_batch_is_sent_without_waiting_longer() -> None:
    collector = Collector()
    collector.takes = True
    collector.gate.set()
    spans = ExportedSpans(collector, "http://there:4318", {}, pause_s=3600.0)
    for _ in range(BATCH_COUNT_MAX):
        spans.add("turn", HERE, None, 0.0, 1.0)
    assert collector.begun.wait(30.0)
    spans.close()
    assert spans.sent_count == BATCH_COUNT_MAX


def test_of_a_trajectory_that_is_not_traced_a_worker_makes_nothing() -> None:
    class Counted(Spans):
        is_on = True

        def take(self, span: Any) -> None:
            raise AssertionError(span)

    job = TurnJob(turn_id="g.0.0", agent_id="a", sampling=Sampling(), prompt_ids=NO_IDS)
    claim = TurnClaim(job=job, fence=1, loss=0)
    trace_claim(Counted(), claim, "w", None, begun_s=0.0, now_s=1.0, outcome="stop")


@pytest.mark.parametrize("address", ["localhost:4317", "grpc://there"])
def test_an_address_that_cannot_be_is_told_and_stops_nothing(address: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not open_spans(address, "agent", "a1").is_on
    assert "it is no http address" in caplog.text


def test_without_the_packages_a_warning_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert not open_spans("http://there:4318", "agent", "a1").is_on
    assert "pip install 'rollfab[otel]'" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_standards_own_switches_turn_it_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not open_spans("http://there:4318", "agent", "a1").is_on


def test_nothing_of_opentelemetry_is_imported_where_no_collector_is_named() -> None:
    code = (  # the client of Redis loads what it finds of OpenTelemetry's metrics
        "PARTS = 'opentelemetry.exporter', 'opentelemetry.sdk.trace', 'opentelemetry.proto', 'google.protobuf'\n"
        "import sys; import rollfab.trainer.client, rollfab.deploy.roles.run\n"
        "from rollfab.fabric.tracing.export import open_spans\n"
        "open_spans('', 'agent', 'a1').add('turn', None, None, 0.0, 1.0)\n"
        "print([name for name in sys.modules if name.startswith(PARTS)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_spans_that_are_off_take_nothing() -> None:
    class Counted(Spans):
        def take(self, span: Any) -> None:
            raise AssertionError(span)

    Counted().add("turn", HERE, None, 0.0, 1.0)
    assert Counted().root() is None
