"""Scripts name their keys: the loader knows every name, and each call gets the keys that the names say."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollfab.fabric.contract.fields import WHOLE_MAX
from rollfab.fabric.ports.queue import FENCES_PER_CLAIM
from rollfab.fabric.queue import keys as names
from rollfab.fabric.queue import scripts
from rollfab.fabric.queue.keys import ShardKeys, WeightKeys
from rollfab.fabric.queue.scripts import head_of, keys_of, load_script, script_names, script_text

FOLDER = Path(scripts.__file__).parent / "lua"
SHARD = ShardKeys("r1", 2)


def text_of(head: str, body: str = "") -> dict[str, str]:
    return {"typed": "", "script": f"-- script()\n{head}\n{body}\n"}


def test_every_script_names_keys_that_exist() -> None:
    assert [name for name in script_names() if not load_script(name)] == []
    assert len(script_names()) == len([path for path in FOLDER.rglob("*.lua") if path.parent.name != "use"])


def test_no_script_counts_its_keys() -> None:
    counting = [path.name for path in FOLDER.rglob("*.lua") if re.search(r"\bKEYS\b", path.read_text("utf-8"))]

    assert counting == []


def test_every_folder_of_scripts_is_small() -> None:
    sizes = Counter(str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("*.lua"))

    assert {folder: size for folder, size in sizes.items() if size > 15 or folder == "."} == {}


@pytest.mark.parametrize("word", ["shard.countres", "sahrd.counters", "turn.reward", "fabric.run", "weights.heads"])
def test_a_key_that_does_not_exist_is_refused_at_load(word: str) -> None:
    with pytest.raises(ValueError, match=f"script script declares {word}"):
        script_text("script", text_of(f"-- keys {word}"))


def test_a_key_that_is_not_declared_is_refused_at_load() -> None:
    body = "-- shard.late\nredis.call('HGET', shard.run, shard.rewards)"

    with pytest.raises(ValueError, match=r"script script does not declare shard\.rewards$"):
        script_text("script", text_of("-- keys shard.run", body))


@pytest.mark.parametrize("words", ["shard.run weights.head", "fabric.runs shard.run", "turn.record fabric.clock"])
def test_keys_of_several_slots_are_refused_at_load(words: str) -> None:
    with pytest.raises(ValueError, match="several slots"):
        head_of("script", text_of(f"-- keys {words}"))


def test_keys_come_in_the_order_of_the_head_whoever_hands_them_over() -> None:
    turn = SHARD.turn
    head = head_of("script", text_of("-- keys turn.record group.row shard.run\n-- keys jobs.ready bell chunks..."))

    found = head.keys([SHARD.trajectory, f"{SHARD.base}:bell", SHARD.of_group("g"), SHARD, f"{SHARD.base}:0"])

    kept = [turn.record, SHARD.group("g"), SHARD.run, *SHARD.trajectory.ready]
    assert found == [*kept, f"{SHARD.base}:bell", f"{SHARD.base}:0"]


def test_the_fabrics_keys_are_handed_over_by_nobody() -> None:
    assert keys_of("set_plan", []) == [names.LEASE_EPOCH, names.PLAN]


def test_names_are_bound_to_the_places_of_their_keys() -> None:
    texts = text_of("-- keys shard.run turn.ready shard.open bell chunks...", "return chunks")

    assert script_text("script", texts).split("\n")[1:6] == [
        "local shard = {run = KEYS[1], open = KEYS[5]}",
        "local turn = {ready = {KEYS[2], KEYS[3], KEYS[4]}}",
        "local bell = KEYS[6]",
        "local chunks = {}",
        "for n = 7, #KEYS do chunks[n - 6] = KEYS[n] end",
    ]


def test_functions_that_a_script_uses_bring_their_keys() -> None:
    texts = {
        "typed": "",
        "part": "-- Says.\n-- keys shard.open shard.run\nlocal function say() return shard.open end\n",
        "script": "-- script()\n-- keys shard.run shard.late\n-- use part\nreturn say()\n",
    }

    assert list(head_of("script", texts).counts) == ["shard.open", "shard.run", "shard.late"]


@pytest.mark.parametrize(
    ("name", "owners"),
    [
        ("assign", []),
        ("answer", ["rf:{r1.w}:answers:a", "rf:{r1.w}:answers:b"]),
        ("push_turns", [SHARD, ShardKeys("r1", 0).inbox("a")]),
        ("mend", [WeightKeys("r1"), WeightKeys("r2").chunk(0, "delta.1", 0)]),
    ],
)
def test_a_call_with_other_keys_than_the_head_says_is_refused(name: str, owners: list[scripts.Owner]) -> None:
    with pytest.raises(AssertionError):
        keys_of(name, owners)


TOOLS = """
local ONE = 1
local function a(x) return b(x) end
local function spare(x)
  return c(x)
end
local function b(x)
  return ONE + x
end
"""


def test_a_script_brings_no_function_that_it_does_not_call() -> None:
    texts = {"tools": TOOLS, "script": "-- use tools\nreturn a(1) -- not spare\n", "typed": ""}
    text = scripts.script_text("script", texts)
    assert "function a(x)" in text and "function b(x)" in text and "local ONE" in text and "spare(x)" not in text


@pytest.mark.parametrize("name", scripts.script_names())
def test_no_script_lacks_a_function(name: str) -> None:
    known = {found.group(1) for text in scripts._texts().values() for found in scripts.FUNCTION.finditer(text)}
    text = scripts.COMMENT.sub("", scripts.load_script(name))
    defined = set(re.findall(r"local function (\w+)", text)) | set(re.findall(r"local (\w+) = function", text))
    assert known & set(re.findall(r"(?<![\w.])(\w+)\(", text)) <= defined


def test_a_turns_fences_are_numbers_that_lua_counts_in() -> None:
    wall_ms = int(datetime(2056, 1, 1, tzinfo=UTC).timestamp() * 1000)
    assert (wall_ms // names.FENCE_MS + 1_000_000) * FENCES_PER_CLAIM < WHOLE_MAX
