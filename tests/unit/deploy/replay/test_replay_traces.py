"""Traces: every format gives the requests that are in it, and what cannot be read is said."""

from __future__ import annotations

import gzip
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.deploy.replay.command import Shaping, workload
from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.replay.scale import Load
from rollfab.deploy.replay.traces import SAMPLES, Part, load_trace, read_trace
from rollfab.fabric.contract.errors import ConfigError, FabricError, InputError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(data: str | bytes, *, is_packed: bool = False) -> Path:
        path = tmp_path / "trace"
        raw = data.encode() if isinstance(data, str) else data
        path.write_bytes(gzip.compress(raw) if is_packed else raw)
        return path

    return written


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "header",
    ["t_s,input_tokens,output_tokens", "t_s,num,input_tokens,x,output_tokens"],
)
def test_our_csv_is_read_by_its_header_packed_or_not(write: Write, header: str, is_packed: bool) -> None:
    extra = header.count(",") == 4
    rows = [(7.5, 30, 4), (5.0, 10, 2), (6.25, 0, 0)]
    lines = [f"{at},9,{prompt},9,{made}" if extra else f"{at},{prompt},{made}" for at, prompt, made in rows]

    arrivals = load_trace(write("\n".join([header, *lines]), is_packed=is_packed))

    # sorted, from zero on, and nothing without a token
    assert arrivals == [Arrival(0.0, 10, 2), Arrival(1.25, 1, 1), Arrival(2.5, 30, 4)]


def test_azures_own_csv_is_read_with_its_dates(write: Write) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:59.9799600,4808,10\r\n2023-11-16 18:18:01.2299600,3180,8\r\n"
    )
    first, second = load_trace(write(text))
    assert (first.prompt_tokens, second.completion_tokens) == (4808, 8)
    assert second.at_s == pytest.approx(1.25)


def test_burstgpts_own_csv_is_read(write: Write) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    )
    assert load_trace(write(text)) == [Arrival(0.0, 472, 18)]


def test_mooncakes_lines_are_milliseconds(write: Write) -> None:
    rows = [{"timestamp": at, "input_length": 10 + at, "output_length": 3, "hash_ids": [1]} for at in (0, 27, 1500)]
    arrivals = load_trace(write("\n".join(map(json.dumps, rows))))
    assert arrivals == [Arrival(0.0, 10, 3), Arrival(0.027, 37, 3), Arrival(1.5, 1510, 3)]


def test_alibabas_lines_are_seconds_and_the_trace_says_so(write: Write) -> None:
    rows = [
        {"chat_id": at, "parent_chat_id": -1, "timestamp": at, "input_length": 9, "output_length": 3} for at in (3, 9)
    ]
    trace = read_trace(write("\n".join(map(json.dumps, rows))))
    assert (trace.arrivals[1].at_s, trace.origin) == (6.0, "as recorded, its times in s")


@pytest.mark.parametrize(("unit", "per_second"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
@pytest.mark.parametrize("is_csv", [True, False])
def test_stamps_since_1970_tell_their_unit(write: Write, unit: str, per_second: int, *, is_csv: bool) -> None:
    stamps = [(1_715_299_200 + at) * per_second for at in (0, 2, 1)]
    lines = [json.dumps({"timestamp": stamp, "input_length": 9, "output_length": 3}) for stamp in stamps]
    if is_csv:
        lines = ["t_s,input_tokens,output_tokens", *(f"{stamp},9,3" for stamp in stamps)]

    trace = read_trace(write("\n".join(lines)))

    assert [round(each.at_s, 6) for each in trace.arrivals] == [0, 1, 2]
    assert trace.origin.endswith(f"its times in {unit} since 1970")


def test_dates_without_a_zone_are_utc_wherever_they_are_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a night in which clocks are put back, on a machine whose clock is
    monkeypatch.setenv("TZ", "Europe/London")
    time.tzset()
    try:
        rows = [f"2024-10-27 {hour}:30:00,1,1" for hour in ("00", "01", "02")]
        lines = [{"timestamp": row[:19] + "Z", "input_length": 1, "output_length": 1} for row in rows]
        read = [load_trace(write(text)) for text in (AZURE + "\n".join(rows), "\n".join(map(json.dumps, lines)))]
    finally:
        monkeypatch.undo()
        time.tzset()

    assert [[each.at_s for each in arrivals] for arrivals in read] == [[0, 3600, 7200]] * 2


def test_requests_that_failed_are_left_out_and_counted(write: Write) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = [f"{at},ChatGPT,472,{made},{472 + made},API log" for at, made in ((5, 0), (45, 0), (118, 7), (120, 8))]
    trace = read_trace(write("\n".join([header, *rows])))
    assert trace.arrivals == [Arrival(0.0, 472, 7), Arrival(2.0, 472, 8)]
    assert trace.origin.endswith("2 requests that failed left out")


@pytest.mark.parametrize("mark", ["utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_text_is_read_as_other_programs_write_it(write: Write, mark: str, end: str) -> None:
    lines = [[json.dumps({"timestamp": 1000 * at, "input_length": 9, "output_length": 3}) for at in (5, 7)]]
    lines += [
        ["t_s;input_tokens;output_tokens", "5;9;3", "7;9;3"],
        ["t_s, input_tokens, output_tokens", "5, 9, 3", "7,9,3"],
    ]
    lines += [["[", f"{lines[0][0]},", lines[0][1], "]"]]
    begin = "\ufeff" if mark == "utf-16-be" else ""
    for each in lines:
        assert load_trace(write((begin + end.join(each)).encode(mark))) == [Arrival(0.0, 9, 3), Arrival(2.0, 9, 3)]


def test_a_packed_trace_of_more_than_a_machine_has_room_for_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollfab.deploy.replay.traces.BYTES_MAX", 1000)
    with pytest.raises(ConfigError, match="more than 1,000 bytes when unpacked"):
        load_trace(write(AZURE + "0,1,1\n" * 1000, is_packed=True))


def test_stamps_of_three_seconds_are_spread_over_them(write: Write) -> None:
    rows = [{"timestamp": 3000 * (n // 50), "input_length": n + 1, "output_length": 3} for n in range(200)]
    path = write("\n".join(map(json.dumps, rows)))

    arrivals = load_trace(path, Part(seed=1))

    assert len({each.at_s for each in arrivals}) == 200
    assert arrivals == load_trace(path, Part(seed=1)) != load_trace(path, Part(seed=2))
    first_s = next(each.at_s for each in arrivals if each.prompt_tokens == 1)  # unknown: where in its 3 s the first was
    assert all(-3 < each.at_s - first_s - 3 * ((each.prompt_tokens - 1) // 50) < 3 for each in arrivals)


def test_a_rate_curve_is_followed_with_the_lengths_of_another_trace(write: Write) -> None:
    # Given an hour that begins with 60 requests a minute and ends with 600
    path = write("t_s,req_per_min,lo,hi\n100,60,0,0\n3700,600,0,0\n")

    trace = read_trace(path, Part(seed=3))

    assert len(trace.arrivals) == 3600 * 330 / 60
    at_s = np.array([each.at_s for each in trace.arrivals])
    ratio = (at_s >= 3000).sum() / (at_s < 600).sum()
    assert ratio == pytest.approx((600 + 510) / (60 + 150), rel=0.1)  # trapezia
    known = {(each.prompt_tokens, each.completion_tokens) for each in load_trace("azure-conv")}
    assert {(each.prompt_tokens, each.completion_tokens) for each in trace.arrivals} <= known


def test_burstgpts_aggregates_give_its_minutes_at_the_wanted_rate(write: Write) -> None:
    data = {"week1_minute_tps": [[0, 10.0], [2, 30.0], [3, 30.0]], "daily_req_tok": [[10, 1000], [10, 3000]]}
    path = write(json.dumps(data))

    recorded = load_trace(path)
    wanted = load_trace(path, Part(rate_per_s=5))

    # 200 tokens a request: rates 0.05, 0, 0.15 a second at 0, 60 and 120 s, straight between, so 15 until 180 s
    assert len(recorded) == 15
    assert len(wanted) == 5 * 180
    counts = np.histogram([each.at_s for each in wanted], bins=[0, 60, 120, 180])[0]
    assert counts / len(wanted) == pytest.approx([1.5 / 15, 4.5 / 15, 9 / 15], abs=0.05)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DAMAGED = [
    ("many", "its input_length is 'many'"),
    (None, "it has no input_length"),
    (True, "its input_length is true"),
    (-5, "its input_length is -5: expected a number from 0"),
    (1e300, "its input_length is 1e"),
]
DAMAGED_ROWS = [
    ("nan,1,1", "line 2 is no request: its t_s is 'nan'"),
    ("inf,1,1", "its t_s is 'inf'"),
    ("0,nan,1", "its input_tokens is 'nan'"),
    ("0,1,inf", "its output_tokens is 'inf'"),
    ("0,-1,1", "its input_tokens is '-1'"),
    ("2024-99-01,1,1", "its t_s is '2024-99-01'"),
    (f'0,"{"x" * 200_000}",1', "a field of it is longer than any number"),
]


def servegen(**changed: Any) -> bytes:
    """Two windows of three clients: steady, bursty without lengths of its own, silent."""
    quantiles = np.array([[[10, 20, 30]], [[-1, -1, -1]], [[900, 900, 900]]], dtype=np.int32)
    arrays: dict[str, Any] = {
        "rate_rps": np.array([[1.0, 1.0], [0.0, 2.0], [0.0, 0.0]], dtype=np.float32),
        "pattern": np.array([[1, 1], [0, 2], [0, 0]], dtype=np.uint8),
        "pat_shape": np.array([[50.0, 50.0], [0.0, 0.3], [0.0, 0.0]], dtype=np.float32),
        "quantile_levels": np.array([0.0, 0.5, 1.0]),
        "input_tokens_q": quantiles,
        "output_tokens_q": np.where(quantiles > 0, quantiles + 100, -1).astype(np.int32),
        **changed,
    }
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return file.getvalue()


def test_servegens_clients_come_at_their_rates_with_their_gaps_and_lengths(write: Write) -> None:
    path = write(servegen())

    trace = read_trace(path, Part(seed=5))

    at_s = np.array([each.at_s for each in trace.arrivals])
    first, second = (at_s < 600).sum(), ((at_s >= 600) & (at_s < 1200)).sum()
    assert trace.span_s == 1200
    assert first == pytest.approx(600, rel=0.2) and second == pytest.approx(1800, rel=0.2)
    # The steady client is more even than Poisson, the Weibull of 0.3 far burstier
    calm = Load.of([each for each in trace.arrivals if each.at_s < 600], 600)
    wild = Load.of([Arrival(each.at_s - 600, 1, 1) for each in trace.arrivals if each.at_s >= 600], 600)
    assert calm.idc < 0.5 and wild.idc > 2
    # Lengths that are not known are those of a client that is there, by its traffic: not the silent one's
    assert {each.prompt_tokens for each in trace.arrivals} <= set(range(10, 31))
    assert {each.completion_tokens for each in trace.arrivals} <= set(range(110, 131))


def test_more_of_servegen_is_more_of_every_client_and_a_longer_part_begins_alike(write: Write) -> None:
    path = write(servegen())
    assert len(load_trace(path, Part(rate_per_s=20, seed=1))) == pytest.approx(20 * 1200, rel=0.05)
    part, longer = (load_trace(path, Part(start_s=300, duration_s=s, seed=1)) for s in (200.0, 800.0))
    assert part == [each for each in longer if each.at_s < 200]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_shipped_samples_are_twenty_minutes_of_real_load(name: str) -> None:
    trace = read_trace(name)
    load = Load.of(trace.arrivals, trace.span_s)
    expected = {"azure-conv": (5985, 3.0, 1.16), "azure-code": (3628, 22.2, 15.2)}[name]
    assert (load.count, round(load.max_over_mean, 1)) == expected[:2]
    assert load.idc == pytest.approx(expected[2], abs=0.01)
    assert 1195 < trace.span_s < 1200


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a,b,c\n1,2,3\n", "no column t_s or TIMESTAMP or Timestamp in its first line: 'a, b, c'"),
        ("t_s,input_tokens,output_tokens\n0,1,1\n1,many,3\n", "line 3"),
        ("t_s,input_tokens,output_tokens\n", "no request"),
        ("t_s,input_tokens,output_tokens\n0,1,1\n1,2\n", "line 3"),
        ('{"timestamp": 1, "input_length": 2}\n', "line 1"),
        ('{"week1_minute_tps": 1}', "BurstGPT"),
        ("t_s,req_per_min\n1,2\n", "two points"),
        (b"\xff\xfe\xff", "neither CSV"),
        (b"\x1f\x8b\x08\x00broken", "cannot be unpacked. The file is damaged"),
        (b"PK\x03\x04broken", "not an npz of arrays of numbers. The file is damaged"),
        (servegen(pattern=None), "pattern missing"),
        (servegen(pattern=np.ones((1, 1), np.uint8)), "not of the same clients"),
        (servegen(quantile_levels=np.array([0.0])), "not of these clients"),
        (servegen(rate_rps=np.full((3, 2), np.nan)), "rate_rps: expected numbers"),
        *((f"t_s,input_tokens,output_tokens\n{row}\n", words) for row, words in DAMAGED_ROWS),
        *((json.dumps({"timestamp": 1, "input_length": value, "output_length": 2}), words) for value, words in DAMAGED),
        ("[1]\n{}", "it begins as a list of JSON and is none"),
        ('{"timestamp": 1, "inp', "line 1 is no request: not JSON: it is cut off at column 22"),
        ('{"week1_minute_tps": "x"}', "its week1_minute_tps is no list of pairs of numbers"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n[1]', "line 2 is no request: it is no JSON object"),
        ("t_s,req_per_min\n0,nan\n9,1\n", "line 2: its req_per_min is 'nan'"),
        ("t_s,req_per_min\n0,-1\n9,1\n", "expected a number from 0"),
        ("t_s,req_per_min\n5,1\n5,1\n", "at different times"),
        ('{"week1_minute_tps": [[1e12, 5]], "daily_req_tok": [[1, 1]]}', "the minutes of week1_minute_tps"),
        ('{"week1_minute_tps": [[1, 5]], "daily_req_tok": [[0, 0]]}', "the sums of daily_req_tok"),
        (b"", "it is empty"),
        ("[1]", "item 1 is no request: it is no JSON object"),
        ('[{"conversations": "' + 200_000 * "x" + '"}]', "item 1 is no request: it has no timestamp$"),
        ('{"session_id": "a", "delay": 5, "input_length": 1, "output_length": 1}', "only a delay"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (f"{'x' * 200_000},b\n", "line 1 is no request: a field of it is longer than any number"),
        (f"{'x,' * 20_000}\n", "no column .{,200}$"),
        ("t_s,input_tokens,output_tokens\n11/16/2023 18:15,1,1\n", "expected a number, or a date and time"),
        (AZURE + "2024-05-10 00:00:00,1,1\n5,1,1\n", "line 3 is no request: its TIMESTAMP is '5': expected a date"),
        (AZURE + "0,1,1\n2024-05-10 00:00:00,1,1\n", "line 3 is no request: its TIMESTAMP is '2024-05-10 00:00:00'"),
        (AZURE + "0,1,1\n1e18,1,1\n", "its times in s, are more than"),
        ("t_s,input_tokens,output_tokens\n20240510,1,1\n,1,1", "line 3 is no request: its t_s is ''"),
    ],
)
def test_what_is_no_trace_is_named_with_its_cause(write: Write, data: str | bytes, words: str) -> None:
    path = write(data)
    with pytest.raises(InputError, match=words) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part(start_s=5000), "ends at 1,200 s"),
        (Part(duration_s=1300), "ends at 1,200 s"),
        (Part(rate_per_s=1e12), "requests would have to be made, 10,000,000 at most"),
        (Part(start_s=0.0001, duration_s=0.001), "no request"),
    ],
)
def test_a_part_that_is_not_there_is_refused(part: Part, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_trace("azure-conv", part)


def test_an_unknown_trace_is_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="azure-conv, azure-code"):
        load_trace(tmp_path / "none")
    with pytest.raises(FabricError, match="cannot be read"):
        load_trace(tmp_path)


def test_a_workload_is_part_rate_bursts_speed_and_lengths_and_says_so() -> None:
    part = Part(start_s=100, duration_s=400, rate_per_s=6, seed=2)
    shaping = Shaping(peak_over_mean=4.22, lengths_factor=0.1, speed=2)

    load = workload("azure-conv", part, shaping, context_tokens=256)

    sent = Load.of(load.arrivals, load.span_s)
    assert load.span_s == 200 and sent.count == 1200 and sent.mean_per_s == 6  # --rate is what the server sees
    assert max(each.prompt_tokens + each.completion_tokens for each in load.arrivals) <= 256
    told = "; ".join(load.notes)
    for words in ("thinned", "4.22 x mean", "compressed 2 times", "times 0.1", "cut to the model's 256 tokens"):
        assert words in told
    assert load == workload("azure-conv", part, shaping, context_tokens=256)


def test_a_context_that_is_too_small_for_most_is_refused_with_a_factor_that_helps() -> None:
    with pytest.raises(ConfigError, match=r"--lengths (\S+)") as caught:
        workload("azure-conv", Part(duration_s=100), context_tokens=256)
    factor = float(caught.value.message.split()[-1])
    load = workload("azure-conv", Part(duration_s=100), Shaping(lengths_factor=factor), context_tokens=256)
    assert any(note.startswith("prompts and completions times") for note in load.notes)
