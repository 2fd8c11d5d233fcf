"""What a serving team allows follows from all that it said: the strictest word, the smallest cap, hours that agree."""

from __future__ import annotations

import dataclasses
import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import InputError
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.contract.sharing import LendSetting, SharingReport
from rollfab.fabric.queue.rows import lend_row, sharing_row
from rollfab.fabric.rules.lending.hours import is_within, minute_of_week, parse_hours
from rollfab.fabric.rules.lending.terms import (
    CAPS,
    changed,
    check_known,
    check_setting,
    concerns,
    lent_by_name,
    setting_of,
    switch_facts,
    terms,
)

SUBJECTS = ("w1", "pool:chat", "*")
FRIDAY_2300 = 4 * 1440 + 23 * 60
HOURS = ("mon-fri 22:00-06:00", "sat,sun", "00:00-24:00", "fri-mon 23:30-00:10", "12:00-13:00")

settings = st.builds(
    LendSetting,
    mode=st.sampled_from(["on", "observe", "off"]),
    slot_count_max=st.none() | st.integers(0, 9),
    compute_fraction_max=st.none() | st.floats(0, 1),
    memory_fraction_max=st.none() | st.floats(0, 1),
    hours=st.lists(st.sampled_from(HOURS), max_size=2),
    names=st.lists(st.sampled_from(("w1", "pool:chat", "w2", "pool:batch")), max_size=2),
)
said = st.dictionaries(st.sampled_from((*SUBJECTS, "w2", "pool:batch")), settings)


def holds(said_of: dict[str, LendSetting], minute: int = 0, pool: str = "chat") -> str:
    return terms(said_of, "w1", pool, minute).mode


def test_nothing_said_is_observe_and_what_is_said_of_others_changes_nothing() -> None:
    found = terms({"w2": LendSetting(mode="on"), "pool:batch": LendSetting(mode="off")}, "w1", "chat", 0)
    assert (found.mode, found.may_lend) == ("observe", False)
    assert "rollfab lend on --pool chat" in found.reason


@given(said, st.integers(0, 10079))
def test_off_anywhere_wins_and_no_cap_is_ever_exceeded(said_of: dict[str, LendSetting], minute: int) -> None:
    found = terms(said_of, "w1", "chat", minute)
    own = [said_of[subject] for subject in SUBJECTS if subject in said_of]
    if any(each.mode == "off" for each in own):
        assert found.mode == "off"
    for name in CAPS:
        caps = [getattr(each, name) for each in own if getattr(each, name) is not None]
        assert getattr(found, name) == min(caps, default=None)
        assert not (0 in caps and found.may_lend)
    is_lent = all(
        each.mode == "on" and is_within(each.hours, minute) and 0 not in [getattr(each, name) for name in CAPS]
        for each in own
    )
    grants = [each for subject, each in said_of.items() if subject in ("w1", "pool:chat")]
    grants += [each for subject, each in said_of.items() if subject == "*" and {"w1", "pool:chat"} & set(each.names)]
    assert found.may_lend == (is_lent and grants != [])
    assert found.reason


@given(said, st.integers(0, 10079), st.sampled_from(SUBJECTS), settings)
def test_one_word_more_never_allows_more(
    said_of: dict[str, LendSetting], minute: int, subject: str, more: LendSetting
) -> None:
    before = terms(said_of, "w1", "chat", minute)
    if before.may_lend and subject not in said_of:
        after = terms({**said_of, subject: more}, "w1", "chat", minute)
        for name in CAPS:
            old, new = getattr(before, name), getattr(after, name)
            assert old is None or (new is not None and new <= old)


def test_the_reason_names_who_said_what_of_whom() -> None:
    words = {
        "*": LendSetting(mode="on", said_by="ann", names=["w9"]),
        "w1": LendSetting(mode="off", said_by="bo", reason="hot"),
    }
    assert terms(words, "w1", "", 0).reason == "w1: off, said by bo: hot"
    assert terms(words, "w9", "", 0).reason == "all serving workers: on, said by ann"
    night = {"pool:chat": LendSetting(mode="on", hours=["22:00-06:00"])}
    assert terms(night, "w1", "chat", 720).reason == "pool chat: outside of its hours (22:00-06:00 UTC)"
    for cap, told in (
        ("slot_count_max", "rollout slots"),
        ("compute_fraction_max", "compute for rollouts"),
        ("memory_fraction_max", "KV cache for rollouts"),
    ):
        zero = LendSetting(mode="on", **{cap: 0})  # type: ignore[arg-type]
        assert terms({"w1": zero}, "w1", "", 0).reason == f"w1: at most 0 {told}"


def test_on_for_all_is_said_of_those_that_are_known_then_and_off_of_later_ones_too() -> None:
    there = [
        WorkerInfo(worker_id=name, role=role, pid=1, host="h", pool=pool)
        for name, role, pool in (("w1", "serving", "chat"), ("w2", "serving", ""), ("d1", "dedicated", ""))
    ]
    lent = {"*": lent_by_name("*", LendSetting(mode="on", compute_fraction_max=0.3), there)}
    assert lent["*"].names == ["pool:chat", "w2"]
    assert [terms(lent, *each, 0).mode for each in (("w1", "chat"), ("w9", "chat"), ("w2", ""))] == ["on"] * 3
    for later in (("w3", ""), ("w3", "batch"), ("w1", "batch"), ("d1", "")):
        found = terms(lent, *later, 0)
        assert (found.mode, found.compute_fraction_max) == ("observe", 0.3)
        assert "came after" in found.reason
    # A later one is lent by its own name, under the caps of all, and what restricts all holds for it
    found = terms({**lent, "pool:batch": LendSetting(mode="on")}, "w3", "batch", 0)
    assert (found.mode, found.compute_fraction_max) == ("on", 0.3)
    for mode in ("off", "observe"):
        assert lent_by_name("*", LendSetting(mode=mode), there).names == []
        assert terms({"*": LendSetting(mode=mode), "w3": LendSetting(mode="on")}, "w3", "batch", 0).mode == mode
    # What was kept before names were says on of nobody
    assert terms({"*": LendSetting(mode="on")}, "w1", "chat", 0).mode == "observe"


def test_a_name_that_nobody_has_is_refused_with_the_nearest_ones() -> None:
    infos = [
        WorkerInfo(worker_id=name, role=role, pid=1, host="h", pool=pool)
        for name, role, pool in (("w1", "serving", "chat"), ("w2", "serving", ""), ("d1", "dedicated", ""))
    ]
    for known in ("*", "pool:chat", "w1", "w2", "pool:said"):
        check_known(known, infos, ["pool:said"])
    for unknown, text in (
        ("pool:caht", "did you mean chat"),
        ("pool:w1", "there are chat, said"),
        ("chat", "there are w1, w2"),
        ("d1", "dedicated worker"),
    ):
        with pytest.raises(InputError, match=text):
            check_known(unknown, infos, ["pool:said"])
    with pytest.raises(InputError, match=r"there are none\. Start a serving worker: `rollfab worker --role serving"):
        check_known("pool:chat", [], [])


def test_a_setting_that_is_not_understood_is_off() -> None:
    assert holds({"*": LendSetting(mode="maybe")}) == "off"
    assert holds({"*": LendSetting(mode="on", hours=["whenever"])}) == "off"


def test_a_window_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    night = ["mon-fri 22:00-06:00"]
    assert [is_within(night, FRIDAY_2300 + 60 * hours) for hours in (-2, -1, 0, 6, 7)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert not is_within(night, 60)  # Monday 01:00 would be Sunday's night
    sunday = ["sun 23:00-01:00"]
    assert [is_within(sunday, minute) for minute in (0, 59, 60, 6 * 1440 + 1380)] == [True, True, False, True]
    assert is_within([], 77)


@given(st.sampled_from(HOURS), st.integers(0, 2_000_000_000))
def test_hours_are_those_of_the_calendar(text: str, at_s: int) -> None:
    at = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    minute = minute_of_week(at_s * 1000)
    assert minute == at.weekday() * 1440 + at.hour * 60 + at.minute
    day = at.strftime("%a").lower()
    spelt = {"sat,sun": day in ("sat", "sun"), "00:00-24:00": True, "12:00-13:00": at.hour == 12}
    if text in spelt:
        assert is_within([text], minute) == spelt[text]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected days"),
        ("mon-fry 22:00-06:00", "'fry' is no day"),
        ("mon 22:00-22:00", "is empty"),
        ("25:00-26:00", "'25:00' is no time"),
        ("22:61-23:00", "'22:61' is no time"),
        ("22:00", "'' is no time"),
        ("22-06", "'22' is no day"),
        ("22:00-06:00 mon", "expected days"),
        ("mon tue wed", "expected days"),
        ("mon 22", "'22' is no time"),
        ("24:00-06:00", "is empty"),
        ("mon 2²:00-06:00", "is no time"),
    ],
)
def test_hours_that_are_none_are_named_with_what_to_write(text: str, fault: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_hours(text)
    assert repr(text) in str(caught.value) and fault in str(caught.value)


def test_hours_that_are_too_long_are_not_repeated_whole() -> None:
    with pytest.raises(InputError, match="have 402 characters, at most 100") as caught:
        parse_hours("mon," * 100 + "xx")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "maybe"},
        {"slot_count_max": -1},
        {"slot_count_max": True},
        {"compute_fraction_max": 1.5},
        {"memory_fraction_max": float("nan")},
        {"hours": ["noon"]},
        {"hours": ["sat"] * 33},
        {"hours": ["sat," * 100 + "sat"]},
        {"reason": "x" * 501},
        {"said_by": "x" * 501},
    ],
)
def test_a_setting_that_cannot_be_obeyed_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InputError):
        check_setting(LendSetting(**{"mode": "on", **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize("subject", ["", "pool:", "a b", "pool:*", "**", "a:b", "pool:pool:x"])
def test_a_subject_that_is_none_is_refused(subject: str) -> None:
    with pytest.raises(InputError, match="nothing that can be lent"):
        setting_of(subject, "on")


def test_one_word_is_a_setting_too() -> None:
    assert setting_of("*", "4") == LendSetting(mode="on", slot_count_max=4)
    assert [setting_of("w1", word).mode for word in ("on", "observe", "off", "clear")] == [
        "on",
        "observe",
        "off",
        "clear",
    ]
    with pytest.raises(InputError, match="expected on, observe, off"):
        setting_of("*", "maybe")


def test_caps_and_hours_outlive_taking_everything_back_and_lending_again() -> None:
    night = changed(None, {"mode": "on", "slot_count_max": 4, "hours": ["22:00-06:00"], "reason": "trial"})
    off = changed(night, {"mode": "off", "reason": "incident"})
    again = changed(off, {"mode": "on", "reason": ""})
    assert again == dataclasses.replace(night, reason="")
    assert changed(again, {"slot_count_max": None}).slot_count_max is None
    assert changed(None, {"slot_count_max": 4}).mode == "observe"  # a bound alone lends nothing
    assert switch_facts("*", night) == {
        "worker_id": "*",
        "value": "on",
        "slot_count_max": 4,
        "hours": ["22:00-06:00"],
        "said_by": "",
        "reason": "trial",
    }


def test_only_serving_workers_are_concerned() -> None:
    worker = WorkerInfo(worker_id="w1", role="serving", pid=1, host="h", pool="chat")
    assert [concerns(subject, worker) for subject in (*SUBJECTS, "w2", "pool:")] == [True, True, True, False, False]
    assert not concerns("pool:", dataclasses.replace(worker, pool=""))
    assert not concerns("*", dataclasses.replace(worker, role="dedicated"))


def test_a_word_that_cannot_be_read_is_off_and_a_plain_one_is_understood() -> None:
    night = LendSetting(mode="on", hours=["22:00-06:00"])
    assert lend_row(night.encode()) == night
    assert (lend_row(b"on").mode, lend_row(b"3").slot_count_max) == ("on", 3)
    hostile = [LendSetting(mode="on", slot_count_max=-5), LendSetting(mode="on", hours=["x"]), LendSetting(mode="yes")]
    for raw in (b"", b"maybe", b"\xff", b"rf\x01\x0agarbage", *(each.encode() for each in hostile)):
        assert lend_row(raw).mode == "off", raw


def test_a_report_that_cannot_be_read_is_left_out() -> None:
    report = SharingReport(worker_id="w1", alone={"request_count": 3, "ttft_ms_p99": 1.5})
    assert sharing_row(report.encode()) == report
    wrong = SharingReport(worker_id="w1", shared={"request_count": "many"})  # type: ignore[dict-item]
    assert [sharing_row(raw) for raw in (b"", b"x" * 99, wrong.encode())] == [None] * 3
