"""What is read from vLLM's /metrics: texts recorded from a real server, 12 requests of 40 + 200 tokens in 8 slots."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from rollfab.fabric.rules.serving.facts import ServingState, StepWork
from rollfab.workers.serving.probes.metrics import UNKNOWN_PROMPT_TOKENS, Histogram, Metrics, ScrapeHistory, parse

RECORDED = Path(__file__).parent / "vllm_metrics"


def scraped(name: str) -> Metrics:
    metrics = parse((RECORDED / f"{name}.txt").read_bytes())
    assert metrics is not None
    return metrics


def played(*names: str) -> tuple[ScrapeHistory, ServingState]:
    """A history after these scrapes, one a second from 10 s on, and the last state."""
    history = ScrapeHistory()
    for second, name in enumerate(names):
        seen = history.take(scraped(name), 10.0 + second)
    return history, seen.state


def test_the_needed_lines_are_read_and_the_others_skipped() -> None:
    metrics = scraped("busy0")
    assert metrics.value("num_requests_running") == 8 and metrics.value("num_requests_waiting") == 4
    assert metrics.kv_capacity_tokens == 65536
    assert metrics.histograms["time_to_first_token_seconds"][0.06] == 6
    assert "process_cpu_seconds_total" not in metrics.values


def test_a_text_of_another_program_is_no_scrape() -> None:
    assert parse(b"# HELP up\nup 1\n") is None
    assert parse(b"<html>502 Bad Gateway</html>") is None


def test_several_engines_of_one_server_are_added_up() -> None:
    text = b"""vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 3.0
vllm:num_requests_waiting{engine="0"} 0.0
"""
    metrics = parse(text)
    assert metrics is not None and metrics.value("num_requests_running") == 5


def test_requests_that_wait_count_from_before_the_scrape_that_first_showed_them() -> None:
    _, state = played("one", "busy0")
    assert [each.arrived_at_s for each in state.waiting] == [10.0] * 4
    assert {each.prefill_tokens for each in state.waiting} == {UNKNOWN_PROMPT_TOKENS}  # one prompt has ended: too few
    assert len(state.running) == 8
    assert {(each.first_token_at_s, each.token_count) for each in state.running} == {(10.0, 1)}
    assert state.step is not None and state.step.decode_count == 8 and state.step_began_at_s == 10.0
    assert state.kv_used_tokens == 1057


def test_tokens_are_shared_out_and_never_over_counted() -> None:
    # Given eight requests that run, of which none ends or comes, while 83 tokens are made
    history, before = played("one", "busy0")
    metrics = scraped("busy0")
    values = {**metrics.values, "generation_tokens_total": metrics.value("generation_tokens_total") + 83}

    # When they are scraped again
    state = history.take(replace(metrics, values=values), 12.0).state

    # Then each has had its share, rounded down
    assert [each.token_count for each in state.running] == [11] * 8
    assert state.waiting == before.waiting, "who waited goes on waiting since then"


def test_those_that_waited_run_and_the_others_have_ended() -> None:
    _, state = played("one", "busy0", "busy3")
    assert state.waiting == ()
    assert len(state.running) == 4
    _, state = played("one", "busy0", "busy3", "busy5")
    assert state.running == () and state.step is None


def test_latencies_are_the_upper_bounds_of_what_ended_between_two_scrapes() -> None:
    history, _ = played("one", "busy0")
    seen = history.take(scraped("busy3"), 12.0)
    assert len(seen.ends) == 8
    assert {end.tpot_s for end in seen.ends} == {0.01}  # the lowest bucket of vLLM: real ones were 1.6 ms
    assert sorted(end.ttft_s for end in seen.ends) == [0.06] * 5 + [0.08] * 3
    seen = history.take(scraped("busy5"), 13.0)
    assert [end.ttft_s for end in seen.ends] == [0.5] * 4, "those that waited for a slot"


def test_arrivals_and_steps_are_counted_between_two_scrapes() -> None:
    history, _ = played("one")
    seen = history.take(scraped("busy0"), 11.0)
    assert len(seen.arrivals) == 12
    assert seen.step is not None and seen.step.work == StepWork(prefill_tokens=3, decode_count=8, context_tokens=1057)
    assert 0.0016 < seen.step.duration_s < 0.0017
    assert history.take(scraped("busy0"), 12.0).step is None, "nothing was decoded"


def test_a_server_that_was_started_anew_begins_anew() -> None:
    history, _ = played("busy0", "busy3")
    seen = history.take(scraped("one"), 20.0)
    assert seen.state.running == () and seen.state.waiting == () and seen.ends == () and seen.arrivals == ()


def test_what_is_known_of_a_server_that_fell_is_forgotten_though_as_many_run_and_wait() -> None:
    history, _ = played("one", "busy0")
    busy = scraped("busy0")
    fallen = replace(busy, values={**busy.values, "generation_tokens_total": 0.0})
    state = history.take(fallen, 12.0).state
    assert {each.arrived_at_s for each in state.waiting} == {12.0}
    assert {(each.first_token_at_s, each.token_count) for each in state.running} == {(12.0, 1)}
    ended = {**fallen.histograms, "request_time_per_output_token_seconds": {0.01: 99.0, inf: 99.0}}
    assert history.take(replace(fallen, histograms=ended), 13.0).ends == (), "none of its requests had a first token"


@pytest.mark.parametrize(
    ("counts", "guess"),
    [
        ({128.0: 19.0, inf: 19.0}, UNKNOWN_PROMPT_TOKENS),
        ({128.0: 19.0, 256.0: 20.0, inf: 20.0}, 128),
        ({128.0: 18.0, 256.0: 20.0, inf: 20.0}, 256),
        ({128.0: 18.0, inf: 20.0}, UNKNOWN_PROMPT_TOKENS),
    ],
)
def test_a_prompt_that_waits_is_taken_to_be_as_long_as_most_that_have_ended(counts: Histogram, guess: int) -> None:
    values = {"num_requests_running": 0.0, "num_requests_waiting": 1.0}
    metrics = Metrics(values=values, histograms={"request_prompt_tokens": counts})
    (waiting,) = ScrapeHistory().take(metrics, 1.0).state.waiting
    assert waiting.prefill_tokens == guess
