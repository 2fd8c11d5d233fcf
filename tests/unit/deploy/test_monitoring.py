"""Dashboards, alert rules and docs/metrics.md name what /metrics prints, with its labels, and nothing else."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.core import HistogramMetricFamily, Metric

from rollfab.api.metrics.answer import StatusCollector
from rollfab.api.schemas.answers import Readiness, Status
from rollfab.fabric.rules.serving.tax import sharing_totals
from tests.house.test_deploy import check_words

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "monitoring"
PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
BOARDS = sorted(FOLDER.glob("*.json"))
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROMETHEUS = {"up": {"job", "instance"}}
PANELS = {"timeseries", "stat"}
UNITS = {"short", "ops", "s", "percentunit", "bytes", "Bps"}


def families() -> Iterator[Metric]:
    nothing: dict[str, Any] = {name: [] for name in ("runs", "workers", "leases", "weights")}
    ready = Readiness(is_ready=True, missing=[])
    status = Status.model_construct(readiness=ready, sharing=sharing_totals([]), **nothing)
    return iter(StatusCollector(status, {}).collect())


FAMILIES = list(families())
LABELS = {
    family.name + ending: {*family._labelnames, *(["le"] if ending == "_bucket" else [])}  # type: ignore[attr-defined]
    for family in FAMILIES
    for ending in ENDINGS[family.type]
} | OF_PROMETHEUS


def panels(board: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(board.read_text("utf-8"))["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[Any]:
    for board in BOARDS:
        for panel in panels(board):
            for target in panel["targets"]:
                text = target["expr"].replace("$__rate_interval", "5m").replace("$run", "r")
                legend = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                yield pytest.param(text, legend, id=f"{board.stem}: {panel['title']} {target['refId']}")
    for rule in RULES:
        used = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        yield pytest.param(rule["expr"], used, id=rule["alert"])


def labels_of(node: Any) -> set[str]:
    """The labels that what an expression gives may have; asserts that all it names is printed.

    Where two sides meet, both have the labels that one of them is matched by.
    """
    if isinstance(node, promql.VectorSelector):
        assert node.name in LABELS, f"/metrics prints no {node.name}"
        asked = {matcher.name for matcher in node.matchers.matchers}
        assert asked <= LABELS[node.name], f"{node.name} has no label {asked - LABELS[node.name]}"
        return LABELS[node.name]
    if isinstance(node, promql.MatrixSelector):
        return labels_of(node.vector_selector)
    if isinstance(node, promql.AggregateExpr):
        inner, kept = labels_of(node.expr), set(node.modifier.labels if node.modifier else ())
        assert kept <= inner, f"summed by {kept - inner}, which nothing in it has"
        return kept
    if isinstance(node, promql.BinaryExpr):
        left, right = labels_of(node.lhs), labels_of(node.rhs)
        assert not left or not right or left == right, f"{left} is never matched by {right}"
        return left | right
    if isinstance(node, promql.Call):
        found: set[str] = set().union(*(labels_of(argument) for argument in node.args))
        if node.func.name == "histogram_quantile":
            assert "le" in found
        if node.func.name in ("rate", "increase"):
            selector = node.args[0].vector_selector
            assert selector.name.endswith(("_total", "_bucket", "_sum", "_count")), f"{selector.name} is no counter"
        return found - {"le"} if node.func.name == "histogram_quantile" else found
    if isinstance(node, promql.ParenExpr):
        return labels_of(node.expr)
    assert isinstance(node, promql.NumberLiteral), node
    return set()


@pytest.mark.parametrize(("text", "shown"), list(expressions()))
def test_each_expression_asks_for_what_is_printed(text: str, shown: list[str]) -> None:
    assert set(shown) <= labels_of(promql.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "rollfab_made_up",
        'rollfab_ready{run="r"}',
        "sum by (worker) (rollfab_trajectories)",
        "rate(rollfab_ready[5m])",
        "rollfab_trajectories / rollfab_trajectories_open",
    ],
)
def test_an_expression_that_is_wrong_is_found(text: str) -> None:
    with pytest.raises(AssertionError):
        labels_of(promql.parse(text))


# ---------------------------------------------------------------- dashboards

UNSHOWN = {  # metrics that no dashboard and no alert names, and why
    "rollfab_weights_payload_bytes": "rollfab_head_payload_bytes is that of the newest version; by kind: the page",
    "rollfab_weights_bytes_per_changed": "for who works on the format; the page has it by version",
    "rollfab_weights_of_entropy_floor_ratio": "for who works on the format; the page has it by version",
    "rollfab_weights_manifests": "rollfab_weights_held_bytes is what may not fit",
    "rollfab_worker_weights_version": "rollfab_worker_weights_versions_behind says whether that is good",
    "rollfab_worker_weights_stage_seconds": "the last one alone; rollfab_weights_stage_seconds has all",
    "rollfab_worker_weights_pause_seconds": "the last one alone; rollfab_weights_switch_seconds has all",
    "rollfab_worker_weights_payload_bytes": "the last one alone; rollfab_weights_published_bytes has the flow",
}


def test_every_metric_is_in_a_dashboard_or_an_alert_or_left_out_with_a_reason() -> None:
    asked = " ".join(str(expression.values[0]) for expression in expressions())
    named = set(re.findall(r"rollfab_\w+", asked))
    unnamed = {each.name for each in FAMILIES if not named & {each.name + end for end in ENDINGS[each.type]}}
    assert unnamed == UNSHOWN.keys()


def test_there_is_a_dashboard_for_each_kind_of_people() -> None:
    heads = [json.loads(board.read_text("utf-8")) for board in BOARDS]
    assert [head["uid"] for head in heads] == ["rollfab-learning", "rollfab-operating", "rollfab-serving"]
    assert all(f"`{board.name}`" in PAGE for board in BOARDS)


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one_that_grafana_takes_anywhere(board: Path) -> None:
    text = board.read_text("utf-8")
    head = json.loads(text)
    assert head["schemaVersion"] == 39 and not re.search(r"https?://", text)
    variables = {each["name"]: each for each in head["templating"]["list"]}
    assert list(variables) == ["datasource", "run"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert len({panel["id"] for panel in head["panels"]}) == len(head["panels"])
    places = [tuple(panel["gridPos"][name] for name in "xywh") for panel in head["panels"]]
    for at, (x, y, w, h) in enumerate(places):
        assert x >= 0 and x + w <= 24
        assert not [1 for a, b, c, d in places[:at] if x < a + c and a < x + w and y < b + d and b < y + h], (
            "they overlap"
        )
    for panel in panels(board):
        assert panel["type"] in PANELS and panel["fieldConfig"]["defaults"]["unit"] in UNITS
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


# ---------------------------------------------------------------- alerts


def test_each_alert_says_what_is_wrong_and_where_to_read_on() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"] == f"docs/metrics.md#{rule['alert'].lower()}"
    assert re.findall(r"^### (Rollfab\w+)$", PAGE, re.MULTILINE) == names


def runbook_commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [re.split(r"\s+(?:#|\|)", line)[0] for block in blocks for line in block.splitlines()]
    words = [shlex.split(line.replace("VERSION", "3")) for line in lines if line.startswith("rollfab ")]
    return [each[1:] for each in words]


@pytest.mark.parametrize("words", runbook_commands(), ids=" ".join)
def test_what_a_runbook_says_to_type_can_be_typed(words: list[str]) -> None:
    check_words(words)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules_and_the_example() -> None:
    for words in (["rules", "alerts.yml"], ["config", "--syntax-only", "prometheus.yml"]):
        done = subprocess.run(["promtool", "check", *words], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_scrapes_with_these_rules() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))
    assert all((FOLDER / name).exists() for name in config["rule_files"])
    assert [each["job_name"] for each in config["scrape_configs"]] == ["rollfab"]


# ---------------------------------------------------------------- the page


def table() -> list[str]:
    return [
        f"| `{family.name}{ENDINGS[family.type][0] if family.type == 'counter' else ''}` | {family.type} | "
        f"{', '.join(family._labelnames)} | {family.documentation.replace('|', chr(92) + '|')} |"  # type: ignore[attr-defined]
        for family in FAMILIES
    ]


def test_the_page_lists_every_metric_and_no_other() -> None:
    shown = [line for line in PAGE.splitlines() if line.startswith("| `rollfab_")]
    assert shown == table(), "write docs/metrics.md's table anew:\n" + "\n".join(table())


def test_what_takes_time_is_a_histogram_in_seconds() -> None:
    timed = [family for family in FAMILIES if isinstance(family, HistogramMetricFamily)]
    assert len(timed) == 12 and all(family.name.endswith("_seconds") and family.unit == "seconds" for family in timed)
