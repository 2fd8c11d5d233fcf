"""Trajectories that speak in chat messages: is every token one that the policy saw or made, and does it say so?"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import EnvironmentFailed, FabricError
from rollfab.fabric.contract.images import ImagePlace, digest_of
from rollfab.fabric.contract.records import Rollout, RunConfig, Span, TrajectoryJob, TurnJob, TurnResult
from rollfab.fabric.ports.queue import TrajectoryClaim
from rollfab.workers.agent import dialogue
from rollfab.workers.agent.episode import Episode, Limits
from rollfab.workers.engines.model_tokenizer import HubTokenizer
from rollfab.workers.environments.registry import Registry
from tests.support.records import result_of
from tests.unit.fabric.chat.families import FAMILIES, build_tokenizer, chat_template
from tests.unit.fabric.chat.world import PICTURES

KINDS = {
    "replay": "Sums",
    "snapshot": "SumsBySnapshot",
    "process": "SumsInAProcess",
    "meddler": "Meddler",
    "pictures": "Pictures",
    "pictures by snapshot": "PicturesBySnapshot",
}
TWINS = {"inside": "AnswersInside", "process": "AnswersInAProcess"}
PAIRS = [f"{kind}=tests.support.worlds.chat_worlds:{name}" for kind, name in KINDS.items()]
TWIN_PAIRS = [f"{kind}=tests.support.worlds.twin_worlds:{name}" for kind, name in TWINS.items()]
REGISTRY = Registry(PAIRS)
THOUGHT = "look at both"


class Killed(BaseException):
    """The agent is gone from one moment to the next."""


class Tiny(HubTokenizer):
    """The tokenizer of a family, as if it had been loaded."""

    def __init__(self, family: str) -> None:
        self._tokenizer = build_tokenizer(FAMILIES[family])
        if FAMILIES[family].image_token:
            self.chat = chat_template(family)


class Broker:
    """What outlives an agent, and a policy that calls the tool, then answers; `kills`: turns at whose end it dies."""

    def __init__(self, family: str, *, thinks: bool = False, kills: tuple[int, ...] = ()) -> None:
        self.family, self.thinks, self.kills = FAMILIES[family], thinks, set(kills)
        self.tokenizer = Tiny(family)
        self.seen: list[tuple[list[int], list[int]]] = []  # what the engine saw and made, by turn
        self.settled: list[TurnResult] = []
        self.tags: list[str] = []  # the grammars that turns were asked for with
        self.snapshot: bytes | None = None
        self.shown: list[tuple[ImagePlace, ...]] = []  # by call

    def says(self, turn: int) -> list[int]:
        call = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "add", "arguments": json.dumps({"a": turn, "b": 2})},
        }
        message: dict[str, Any] = {"role": "assistant", "content": f"{turn} makes three"}
        if turn % 2 == 0:
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.thinks:
            message["reasoning_content"] = THOUGHT
        text, end = self.family.write(message)
        encoded = self.tokenizer._tokenizer(text + end, add_special_tokens=False)["input_ids"]
        return list(encoded)

    async def ask(self, claim: TrajectoryClaim, job: TurnJob, files: Mapping[str, bytes]) -> TurnResult:
        turn = int(job.turn_id.rsplit(".", 1)[1])
        job = TurnJob.decode(job.encode())
        assert {place.digest for place in job.images} <= files.keys()
        self.shown.append(job.images)
        assert self.says(turn)[-1] in job.sampling.stop_ids
        self.tags.append(job.sampling.guided_tag)
        if turn == len(self.settled):
            ids = self.says(turn)
            self.seen.append((job.prompt_ids.tolist(), ids))
            spans = (Span(0, len(ids), "w", turn),)
            self.settled.append(result_of(job.turn_id, ids, spans=spans, context_digest=job.context_digest))
        if turn in self.kills:
            self.kills.discard(turn)
            raise Killed
        return self.settled[turn]

    async def save(self, claim: TrajectoryClaim, snapshot: bytes) -> None:
        self.snapshot = snapshot


def play(
    broker: Broker,
    kind: str = "replay",
    count: int = 2,
    tokenizer: Any = None,
    sampling: dict[str, Any] | None = None,
    task: Any = None,
    registry: Registry = REGISTRY,
    run: Callable[[Coroutine[Any, Any, Rollout]], Rollout] = asyncio.run,
    **options: Any,
) -> Rollout:
    """Live on, as often as it takes."""
    task = {"count": count} if task is None else task
    job = TrajectoryJob(trajectory_id="g.0", group_id="g", task_id="t", index=0, task=task, seed=7)

    async def live() -> Rollout:
        config = RunConfig(
            run_id="r", model="m", environment=kind, environment_options=options, sampling=sampling or {}
        )
        claim = TrajectoryClaim(
            job=job, worker_id="a", fence=1, attempt=0, loss=0, snapshot=broker.snapshot, turns=tuple(broker.settled)
        )
        limits = Limits(agent_id="a", call_timeout_s=20.0)
        return await Episode(config, claim, registry, tokenizer or broker.tokenizer, limits, broker).run()  # type: ignore[arg-type]

    while True:
        try:
            return run(live())
        except Killed:
            continue


@pytest.fixture(scope="module")
def play_twin() -> Iterator[Callable[..., Rollout]]:
    """Plays in a world of TWINS. They share a loop and the registry, so a process serves one episode after another."""
    with asyncio.Runner() as runner:
        registry = Registry(TWIN_PAIRS)
        yield functools.partial(play, registry=registry, run=runner.run)
        runner.run(registry.close())


def check_exact(broker: Broker, rollout: Rollout) -> None:
    """Along some branch, every turn's tokens stand where the engine made them, behind what it saw; all count once."""
    Rollout.decode(rollout.encode())
    branches = rollout.branches()
    lines = [[*branch.prompt_ids, *branch.completion_ids] for branch in branches]
    for saw, made in broker.seen:
        assert any(line[: len(saw) + len(made)] == saw + made for line in lines)
    made_count = sum(len(made) for _, made in broker.seen)
    assert sum(int(branch.completion_mask.sum()) for branch in branches) == made_count
    assert int(rollout.completion_mask.sum()) == made_count == sum(span.end - span.start for span in rollout.spans)
    for turn, span in enumerate(rollout.spans):
        assert (span.policy_version, rollout.completion_ids[span.start : span.end].tolist()) == (
            turn,
            broker.seen[turn][1],
        )


@pytest.mark.parametrize("family", ["qwen2.5", "llama-3", "glm-4.5"])
def test_a_dialogue_without_rewriting_is_one_line(family: str) -> None:
    broker = Broker(family)
    rollout = play(broker)
    check_exact(broker, rollout)
    [branch] = rollout.branches()
    assert np.array_equal(branch.prompt_ids, rollout.prompt_ids) and len(rollout.prompt_ids) == len(broker.seen[0][0])
    assert (rollout.reward, rollout.turn_count, rollout.finish_reason) == (1.5, 4, "terminated")
    assert rollout.info["said"] == "3 makes three"
    said = [message["role"] for node in rollout.nodes for message in node.messages]
    assert said == ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(("family", "thinks"), [("qwen3", True), ("mistral", False)])
def test_a_template_that_rewrites_makes_a_branch(family: str, thinks: bool) -> None:
    """Qwen3's drops what was thought for the first question once there is a second; Mistral's moves the tools there."""
    broker = Broker(family, thinks=thinks)
    rollout = play(broker)
    check_exact(broker, rollout)
    assert [len(branch.spans) for branch in rollout.branches()] == [2, 2]  # each with the tokens that its turns saw
    beginning = rollout.prompt_ids.tolist()  # what they share before they part
    assert beginning
    assert all(saw[: len(beginning)] == beginning for saw, _ in broker.seen)


def test_an_answer_without_a_word_has_content_too() -> None:
    template = chat_template("qwen2.5")
    talk = dialogue.Dialogue(template, [{"role": "user", "content": "well?"}], [])
    talk.context()
    (end,) = (each for each, text in template.ends.items() if text == "<|im_end|>")

    action = talk.add_turn(result_of("g.0.0", [end]))

    assert action == {"role": "assistant", "content": ""}
    (node,) = talk.record()["nodes"][-1:]
    assert node.messages == [{"role": "assistant"}], "what is recorded is what was read"


def test_what_was_thought_stays_in_the_record() -> None:
    rollout = play(Broker("qwen3", thinks=True))
    thoughts = [m.get("reasoning_content") for node in rollout.nodes for m in node.messages if m["role"] == "assistant"]
    assert thoughts.count(THOUGHT) >= 4


def untimed(rollout: Rollout) -> bytes:
    """A rollout's bytes, but for when its turns were."""
    return replace(rollout, turn_ms=[]).encode()


@pytest.mark.parametrize("kind", ["replay", "snapshot"])
@pytest.mark.parametrize("kills", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("thinks", [False, True])
def test_another_agent_goes_on_with_the_same_dialogue(kind: str, kills: tuple[int, ...], thinks: bool) -> None:
    undisturbed = play(Broker("qwen3", thinks=thinks), kind)
    broker = Broker("qwen3", thinks=thinks, kills=kills)
    rollout = play(broker, kind)
    check_exact(broker, rollout)
    assert untimed(rollout) == untimed(undisturbed)


@pytest.mark.parametrize("kind", ["pictures", "pictures by snapshot"])
@pytest.mark.parametrize("kills", [(), (0,), (1,), (3,), (0, 1, 2, 3)])
def test_a_world_shows_images_and_another_agent_goes_on_with_them(kind: str, kills: tuple[int, ...]) -> None:
    task = {"count": 2, "pictures": PICTURES[:2]}
    undisturbed = play(Broker("qwen2.5-vl"), kind, task=task)
    broker = Broker("qwen2.5-vl", kills=kills)

    rollout = play(broker, kind, task=task)

    check_exact(broker, rollout)
    assert untimed(rollout) == untimed(undisturbed)
    [branch] = rollout.branches()
    first, second = (digest_of(base64.b64decode(each["image_url"]["url"].partition(",")[2])) for each in PICTURES[:2])
    assert [image.digest for image in branch.images] == [first, second, second, first]
    assert [len(places) for places in broker.shown] == sorted(len(places) for places in broker.shown)
    last, prompt = broker.shown[-1], len(branch.prompt_ids)
    assert [place.start - prompt for place in last] == [image.start for image in branch.images[: len(last)]]


def test_images_for_a_model_that_sees_none_fail_the_attempt_by_name() -> None:
    with pytest.raises(EnvironmentFailed, match=r"qwen2\.5 takes no images: say it in words"):
        play(Broker("qwen2.5"), "pictures", task={"pictures": PICTURES[:1]})


def test_a_world_that_writes_over_what_it_holds_changes_nothing_that_was_said() -> None:
    # Given two trajectories with one run's options, whose worlds change task, options, tools and the policy's messages
    options, calm = {"rules": ["You are a helpful assistant."]}, {"rules": ["You are a helpful assistant."]}
    brokers = Broker("qwen2.5"), Broker("qwen2.5"), Broker("qwen2.5")
    undisturbed = play(brokers[0], "meddler", **calm, meddles=False)
    task: dict[str, Any] = {"count": 2}
    # When both are played, Then each is the one that nobody changed
    for broker in brokers[1:]:
        rollout = play(broker, "meddler", task=task, **options)
        check_exact(broker, rollout)
        assert broker.seen == brokers[0].seen
        assert untimed(rollout) == untimed(undisturbed)
    assert task == {"count": 2}


@pytest.mark.parametrize("kind", ["replay", "snapshot"])
def test_a_template_that_writes_another_date_after_a_take_over_diverges(kind: str) -> None:
    """The messages are the same, the context is not: what the policy made was made in another one."""
    broker = Broker("qwen2.5", kills=(1,))
    tokenizer = broker.tokenizer._tokenizer
    tokenizer.chat_template = "{{- today }}" + tokenizer.chat_template
    apply = tokenizer.apply_chat_template

    def write(*facts: Any, **words: Any) -> Any:
        return apply(*facts, **words, today="Monday" if broker.kills else "Tuesday")

    tokenizer.apply_chat_template = write
    with pytest.raises(EnvironmentFailed, match="turn 0 was made in another context") as refused:
        play(broker, kind)
    assert refused.value.facts["reason"] == "diverged"


@pytest.mark.parametrize("kind", ["replay", "snapshot"])
def test_a_take_over_renders_a_long_dialogue_in_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker("qwen2.5", kills=(3,))
    tokenizer = broker.tokenizer._tokenizer
    apply, threads = tokenizer.apply_chat_template, list[threading.Thread]()

    def write(*facts: Any, **words: Any) -> Any:
        threads.extend([threading.current_thread()] * words["add_generation_prompt"])
        return apply(*facts, **words)

    tokenizer.apply_chat_template = write
    monkeypatch.setattr(dialogue, "BRIEF", 0)
    check_exact(broker, play(broker, kind))
    assert len(threads) >= 2 * 4  # four turns, twice
    assert threading.current_thread() not in threads


def test_what_the_policy_said_counts_for_how_long_a_dialogue_is() -> None:
    broker = Broker("qwen2.5")
    spoken = dialogue.Dialogue(broker.tokenizer.chat, [{"role": "user", "content": "hi"}], [])
    ids = [*broker.tokenizer._tokenizer("one two three " * 2_000)["input_ids"], *broker.tokenizer.chat.stop_ids]
    assert spoken.is_brief
    spoken.context()
    spoken.add_turn(result_of("g.0.0", ids))
    spoken.add_step(0.0, [{"role": "user", "content": "and then?"}])
    assert not spoken.is_brief


def test_messages_cross_to_a_process_and_back() -> None:
    broker = Broker("qwen2.5")
    rollout = play(broker, "process", count=1)
    check_exact(broker, rollout)
    assert rollout.turn_count == 2


@pytest.mark.parametrize("kind", TWINS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, None),
        ({"reset": "a tuple"}, None),
        ({"reset": "None beside messages"}, None),
        ({"reset": "a text and messages"}, "reset gave a text and messages, of which one is heard"),
        ({"reset": "a text and tools"}, "reset gave tools without messages"),
        ({"reset": "a text"}, "step gave messages, though the episode began with a text"),
        ({"reset": "messages that are a text"}, "reset gave Observation.*, expected an Observation with text,"),
        ({"reset": "messages that are 0"}, "reset gave Observation.*, expected an Observation with text,"),
        ({"reset": "tools that are a text"}, "reset gave Observation.*, expected an Observation with text,"),
        ({"reset": "bytes"}, "reset: its messages cannot be sent: TypeError"),
        ({"reset": "a key that is a number"}, "reset: message 0: .*1.* is no key of role user"),
        ({"reset": "info that is no JSON"}, "reset: its info cannot be sent: TypeError"),
        ({"reset": "large messages"}, "reset: its messages are .* the limit"),
        ({"reset": "a large image"}, "reset: .*takes no images"),  # but so large it may be
        ({"reset": "larger images"}, "reset: its messages are .* the limit"),
        ({"reset": "large tools"}, "reset: its tools are .* the limit"),
        ({"step": "a text"}, None),
        ({"step": "a tuple"}, None),
        ({"step": "None beside a text"}, None),
        ({"step": "True"}, None),
        ({"step": "a text and messages"}, "step gave a text and messages, of which one is heard"),
        ({"step": "a text and messages at the end"}, "step gave a text and messages, of which one is heard"),
        ({"step": "a reward in words"}, "gave reward '1': not a number"),
        ({"step": "messages that are a text"}, "step gave Step.*, expected a Step with text or messages"),
        ({"step": "no messages at the end"}, "step: message 0: .*role"),
        ({"step": "large messages at the end"}, "step: its messages are .* the limit"),
        ({"step": "a large text at the end"}, "step: its text is 5,242,880 bytes as UTF-8, the limit is"),
        ({"step": "info that is no JSON"}, "step: its info cannot be sent: TypeError"),
        ({"step": "nothing"}, "step gave no messages and no text"),
    ],
)
def test_what_a_world_may_say_is_the_same_wherever_it_runs(
    play_twin: Callable[..., Rollout], kind: str, options: dict[str, str], says: str | None
) -> None:
    broker = Broker("qwen2.5")
    if says is None:
        check_exact(broker, play_twin(broker, kind, **options))
        return
    with pytest.raises(EnvironmentFailed, match=f"^environment '{kind}':? {says}") as caught:
        play_twin(broker, kind, **options)
    assert str(caught.value).count("environment") == 1


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("reset", "reset: message 0: .*role"),
        ("step", "step: message .*content"),
        ("silent", "no messages and no text"),
    ],
)
def test_what_is_no_message_fails_the_attempt_by_name(broken: str, says: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"environment 'replay'.*{says}"):
        play(Broker("qwen2.5"), broken=broken)


@pytest.mark.parametrize("kind", TWINS)
def test_a_world_forces_calls_of_its_tools(play_twin: Callable[..., Rollout], kind: str) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("auto", "required", named):
        broker = Broker("qwen2.5")
        check_exact(broker, play_twin(broker, kind, tool_choice=choice))
        assert len(broker.tags) == 2 and len(set(broker.tags)) == 1
        head = '<tool_call>\\n{\\"name\\": \\"add\\", \\"arguments\\": '
        assert (head in broker.tags[0], '"star"' in broker.tags[0]) == (choice != "auto", choice == "required")


@pytest.mark.parametrize(
    ("choice", "sampling", "says"),
    [
        ("none", {}, 'tool_choice is \'none\', expected "auto", "required" or'),
        ({"type": "function"}, {}, "tool_choice is .*, expected"),
        ({"type": "function", "function": {"name": "sum"}}, {}, "reset: tool_choice names 'sum'"),
        ("required", {"guided_regex": "a"}, "tool_choice forces calls, but its turns are guided"),
    ],
)
def test_a_choice_that_cannot_be_kept_fails_the_attempt_by_name(
    play_twin: Callable[..., Rollout], choice: Any, sampling: Any, says: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=f"environment 'inside'.*{says}"):
        play_twin(Broker("qwen2.5"), "inside", tool_choice=choice, sampling=sampling)


def test_a_model_without_a_chat_template_is_named(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(FAMILIES["qwen2.5"])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(FabricError, match=rf"{tmp_path} has no chat template: put chat_template.jinja beside"):
        play(Broker("qwen2.5"), tokenizer=HubTokenizer(str(tmp_path)))


def test_as_many_stop_ids_as_a_run_may_name_travel_with_the_models_ends() -> None:
    broker = Broker("qwen2.5")
    asked = list(range(1_000, 2_024))
    check_exact(broker, play(broker, sampling={"stop_ids": asked}))
    assert len(asked) == 1_024


def test_a_turn_ends_with_any_id_that_the_model_names(tmp_path: Path) -> None:
    build_tokenizer(FAMILIES["qwen2.5"]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert {7, 8} < set(HubTokenizer(str(tmp_path)).chat.stop_ids)


class Loading(Tiny):
    """A tokenizer that tells which threads made its chat template."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.threads: list[threading.Thread] = []

    @property
    def chat(self) -> Any:  # type: ignore[override]
        self.threads.append(threading.current_thread())
        return super().chat


@pytest.mark.parametrize("kills", [(), (0,)])
def test_a_chat_template_is_made_beside_the_loop_that_serves_all_other_trajectories(kills: tuple[int, ...]) -> None:
    for kind in ("replay", "snapshot"):
        broker, tokenizer = Broker("qwen2.5", kills=kills), Loading("qwen2.5")
        play(broker, kind, tokenizer=tokenizer)
        assert len(tokenizer.threads) == 1 + len(kills)
        assert threading.main_thread() not in tokenizer.threads


AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.workers.engines.model_tokenizer import chat_of
with ThreadPoolExecutor(8) as threads:
    print({type(each).__name__ for each in threads.map(lambda _: chat_of(CharTokenizer(), "tiny"), range(8))})
"""


@pytest.mark.timeout(60)
def test_trajectories_that_begin_together_in_a_new_process_all_get_their_chat_template() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("{'ChatTemplate'}\n", 0), done.stderr[-2000:]
