"""Does the queue bench measure what it says? Structure and safety, never speed: this machine may be busy."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
import redis

from rollfab.deploy.replay.figures import percentile
from rollfab.fabric.broker.embedded import EmbeddedBroker
from tests.bench.measure import Figure, alternate
from tests.bench.queue.life import Shape
from tests.bench.queue.limit import record
from tests.bench.queue.main import QUICK, bench_queue, measure

SMALL = Shape(lane_count=2, batch_count=4, group_size=2, turn_count=2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_quick_run_gives_the_keys_that_others_read(capsys: pytest.CaptureFixture[str]) -> None:
    # When a newcomer runs it quickly
    code = bench_queue(quick=True, json_output=True, url=None)
    # Then one object comes out, with every key that dashboards and comparisons read
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report.keys() >= {"name", "params", "results", "baselines", "ratio", "machine"}
    assert report["name"] == "queue"
    results = report["results"]
    for key in ("jobs_per_s", "claim_ms_p50", "claim_ms_p99", "share_of_broker_limit"):
        assert results[key] > 0
    # And nothing was lost or done twice while it ran
    assert (results["lost"], results["duplicated"]) == (0, 0)
    # And every peer was measured, or says why not
    assert report["baselines"].keys() == {"broker limit", "rq", "dramatiq", "taskiq", "arq"}
    for row in report["baselines"].values():
        assert row["jobs_per_s"] or row["reason"].startswith("not run: ")
    for name in ("rq", "dramatiq", "taskiq"):
        assert report["baselines"][name]["jobs_per_s"] > 0
    assert report["ratio"]["best_peer"] > 0


def test_a_tape_holds_the_same_commands_each_time() -> None:
    first, second = (asyncio.run(record(SMALL)) for _ in range(2))

    def names(step: list[list[bytes]]) -> list[bytes]:
        return [command[0] for command in step]

    assert list(map(names, first.steps)) == list(map(names, second.steps))
    assert first.command_count > 0
    assert not any(command[0] == b"EVAL" for step in first.steps for command in step)


def test_a_broker_that_holds_something_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedBroker.start() as broker, redis.Redis.from_url(broker.url) as client:
        client.set("precious", "1")

        code = bench_queue(quick=True, json_output=True, url=broker.url)

        assert code == 1
        assert "holds keys" in capsys.readouterr().err
        assert client.get("precious") == b"1"


@pytest.mark.timeout(60)
@pytest.mark.slow
@pytest.mark.long
def test_a_given_broker_is_left_empty() -> None:
    settings = dataclasses.replace(QUICK, round_count=1, round_s=0.05, wait_s=0.2, peers=())
    with EmbeddedBroker.start() as broker, redis.Redis.from_url(broker.url) as client:
        report = measure(settings, broker.url)

        assert client.dbsize() == 0
        assert report.ratio["best_peer"] is None


def test_arms_alternate_and_figures_are_medians() -> None:
    order: list[str] = []
    rounds = alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)

    assert order == ["a", "b"] * 3
    assert {name: len(found) for name, found in rounds.items()} == {"a": 3, "b": 3}
    assert Figure((3.0, 1.0, 2.0)).median == 2.0
    assert Figure((3.0, 1.0, 2.0)).spread == (1.0, 3.0)
    assert percentile([float(value) for value in range(100)], 0.99) == 99.0
