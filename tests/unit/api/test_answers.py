"""What the api promises of its answers, and how they come of the fabric's records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollfab.api.access.config import ApiConfig
from rollfab.api.app import make_app
from rollfab.api.reading.views import agreement_view, worker_view
from rollfab.api.schemas.answers import BadRowView, LeaseView, Workers, WorkerView
from rollfab.api.schemas.base import all_requests, shown
from rollfab.api.training.ports import Runs
from rollfab.api.training.routes import router
from rollfab.api.training.uploads import WeightFiles
from rollfab.fabric.contract.agreement import Agreement, AlarmRule, Figures, WorkerFigures
from rollfab.fabric.contract.records import Lease, WorkerInfo
from rollfab.fabric.ports.queue import BadRow
from tests.standin.fabric import StandInFabric

PROMISES = Path(__file__).parent / "promises.txt"
INFO = WorkerInfo(worker_id="w1", role="serving", pid=1, host="box")
LEASE = Lease(worker_id="w1", run_id="r1", lease_epoch=7, slot_count=2, lease_until_ms=None, reason="spare")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    training = router(Runs(StandInTrainer()), WeightFiles(None))
    return make_app(StandInFabric(), ApiConfig(), training=training).openapi()


class StandInTrainer:
    """Nobody asks it: the document is written without a run."""

    async def run(self, run_id: str, **_: Any) -> Any:
        raise AssertionError

    async def evaluation(self, run_id: str, *_: Any, **__: Any) -> Any:
        raise AssertionError


def type_text(schema: dict[str, Any]) -> str:
    """A type in one word; fails on what has none, as arrays and foreign objects would not."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(type_text(each) for each in schema["anyOf"])
    bounds = {key: schema[key] for key in ("enum", "const", "minimum", "maximum", "format") if key in schema}
    tail = f" {json.dumps(bounds)}" if bounds else ""
    if schema["type"] == "array":
        return f"[{type_text(schema['items'])}]{tail}"
    if schema["type"] == "object":
        values = schema["additionalProperties"]
        return f"{{{'any' if values is True else type_text(values)}}}{tail}"
    return f"{schema['type']}{tail}"


def promises(document: dict[str, Any]) -> Iterator[str]:
    """All that a client may rely on, a line each; ? marks what may be left out."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path}"
            for each in operation.get("parameters", ()):
                mark = "" if each["required"] else "?"
                yield f"{route} {each['in']} {each['name']}{mark}: {type_text(each['schema'])}"
            if "requestBody" in operation:
                for kind, content in operation["requestBody"]["content"].items():
                    yield f"{route} body: {type_text(content['schema']) if content else kind}"
            for status, answer in operation["responses"].items():
                for kind, content in answer.get("content", {}).items():
                    schema = content.get("schema")
                    yield f"{route} {status} {kind}" + (f": {type_text(schema)}" if schema else "")
    for name, schema in document["components"]["schemas"].items():
        for field, each in schema["properties"].items():
            yield f"{name}.{field}{'' if field in schema.get('required', ()) else '?'}: {type_text(each)}"


def test_the_api_promises_what_is_written_down(document: dict[str, Any]) -> None:
    written, found = set(PROMISES.read_text().splitlines()), set(promises(document))
    assert not written - found, "promises that clients rely on are broken: mend them, or say so in CHANGELOG.md"
    assert not found - written, f"new promises, a record's new field perhaps: write them into {PROMISES.name}"


def test_an_answer_always_carries_all_its_fields_and_a_request_need_not(document: dict[str, Any]) -> None:
    optional = {line.partition(".")[0] for line in promises(document) if "?:" in line and " " not in line.split(":")[0]}
    assert optional <= {"LendRequest", *(each.__name__ for each in all_requests())}


def test_what_extends_a_record_is_described_by_the_record(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["WorkerView"]["properties"]["wake_ms"]["description"].startswith("What waking its engine")
    assert schemas["WorkerAgreement"]["properties"]["k3_kl"] == schemas["Figures"]["properties"]["k3_kl"]
    assert schemas["WorkerView"]["properties"]["tokens_per_s"]["description"].startswith("Over the last few seconds")


def test_no_array_and_no_bytes_are_promised(document: dict[str, Any]) -> None:
    assert not [line for line in promises(document) if "format" in line]  # binary is how bytes would show


def worker(info: WorkerInfo) -> dict[str, Any]:
    view = worker_view(info, 5, found=None, heads={}, lease=shown(LeaseView, LEASE), tokens_per_s=0)
    found: dict[str, Any] = json.loads(Workers(workers=[view]).model_dump_json())["workers"][0]
    return found


def test_a_number_that_json_does_not_know_is_null() -> None:
    assert worker(WorkerInfo(**{**INFO.__dict__, "headroom_fraction": math.nan}))["headroom_fraction"] is None
    assert worker(WorkerInfo(**{**INFO.__dict__, "pause_ms": math.inf}))["pause_ms"] is None


def test_a_whole_number_in_place_of_a_fraction_is_shown_without_a_warning() -> None:
    assert worker(WorkerInfo(**{**INFO.__dict__, "headroom_fraction": 1}))["headroom_fraction"] == 1


def test_a_worker_is_its_heartbeat_with_what_the_api_knows() -> None:
    found = worker(INFO)
    assert set(INFO.__dict__) < set(found)
    assert found["tokens_per_s"] == 0.0, "the rate that the api measured, not the heartbeat's"
    assert found["lease"]["is_standing"] is True


def test_the_reason_of_a_lease_which_nobody_writes_down_is_not_shown() -> None:
    assert "reason" not in worker(INFO)["lease"]


def test_what_the_api_knows_is_never_left_to_a_default_of_the_record() -> None:
    with pytest.raises(TypeError, match="is_standing"):
        LeaseView(worker_id="w1", run_id="r1", lease_epoch=7, slot_count=2, lease_until_ms=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="tokens_per_s"):
        WorkerView(worker_id="w1", role="agent", pid=1, host="box")  # type: ignore[call-arg]


def test_a_property_of_a_record_is_shown_as_a_field() -> None:
    row = BadRow("runs", "r1", "it is no record")
    assert shown(BadRowView, row).step == row.step != ""


def test_an_agreement_is_shown_with_its_rule_by_name_and_who_is_over() -> None:
    row = WorkerFigures(worker_id="w1", policy_version=3, token_count=5)
    rule = AlarmRule(name="bfloat16", difference_mean_limit=0.5)
    view = agreement_view(Agreement(policy_version=3, rule=rule, workers=(row,), fresh=Figures(token_count=5)))
    found = json.loads(view.model_dump_json())
    assert (found["rule"], found["difference_mean_limit"]) == ("bfloat16", 0.5)
    assert found["fresh"]["token_count"] == found["workers"][0]["token_count"] == 5
    assert found["workers"][0]["is_over"] is False
