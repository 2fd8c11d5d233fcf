"""Do conversations continue exactly where their templates append, and branch where they rewrite?"""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rollfab.fabric.chat import conversation as module
from rollfab.fabric.chat.conversation import Answer, Ask, Conversation
from rollfab.fabric.chat.template import ChatTemplate
from rollfab.fabric.contract.errors import InputError, PayloadTooLarge
from rollfab.fabric.contract.images import digest_of
from rollfab.fabric.contract.records import Rollout
from tests.support.tried import tried
from tests.unit.fabric.chat.families import FAMILIES, QWEN25, Message, build_tokenizer, chat_template
from tests.unit.fabric.chat.world import PICTURES, TOOLS, World, Wrong, image_part, png, run_world

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "and then?"}


def made(ask: Ask, conversation: Conversation, text: str, *, family: str, finish: str = "stop") -> Answer:
    """Record an answer of this text, with whatever ends it written into it."""
    ids = chat_template(family).encode(text)
    return conversation.answer(ask, ids, np.zeros(len(ids), np.float32), [], finish)


def calling(name: str = "look", reasoning: str = "") -> Message:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": '{"place": "Rome"}'}}
    message: Message = {"role": "assistant", "tool_calls": [call]}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def written(family: str, message: Message) -> str:
    return "".join(FAMILIES[family].write(message))


def result(answer: Answer, content: str = "mild") -> Message:
    return {"role": "tool", "tool_call_id": answer.message["tool_calls"][0]["id"], "content": content}


# ---------------------------------------------------------------- the world


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=tried(25))
@given(dice=st.randoms(use_true_random=False))
def test_a_path_is_what_the_engine_saw_and_made_and_branches_only_where_the_template_rewrites(
    family: str, dice: Random
) -> None:
    counts = World(family, dice).run(6)

    assert counts["continued"] == counts["could continue"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_histories_continue_wherever_they_could() -> None:
    """`python -m tests.unit.fabric.chat.world 10000` goes through ten times as many, and counts by family."""
    total: Counter[str] = Counter()
    for seed in range(1_000):
        total += run_world(list(FAMILIES)[seed % len(FAMILIES)], seed)

    assert total["could continue"] > 1_000
    assert total["continued"] == total["could continue"]


def test_what_asks_begin_with_alike_is_stored_once() -> None:
    """Tokens of the prefix tree of all lines to those stored; asks that share nothing but answers come to 0.4."""
    total: Counter[str] = Counter()
    for seed in range(tried(200)):
        total += run_world(list(FAMILIES)[seed % len(FAMILIES)], seed)

    assert total["needed"] >= 0.95 * total["stored"] > 0


class StopTwice(Conversation):
    """The template's own end of an answer is added behind the policy's."""

    def _rest_after(self, *facts: Any) -> tuple[str, str] | None:
        rest = super()._rest_after(*facts)
        return rest and (rest[0], rest[0] + rest[1])


class NoNewline(Conversation):
    """What the template writes between the end of an answer and the next message is forgotten."""

    def _rest_after(self, *facts: Any) -> tuple[str, str] | None:
        rest = super()._rest_after(*facts)
        return rest and (rest[0], rest[1].lstrip("\n"))


class EncodedAgain(Conversation):
    """The whole context is encoded from its text."""

    def _new_ask(self, parent: int, *facts: Any) -> Ask:
        ask = super()._new_ask(parent, *facts)
        whole = self._template.encode(ask.text)
        return dataclasses.replace(ask, context_ids=whole, added_ids=whole[len(self.ids(parent)) :])


class ReasoningLost(Conversation):
    """The reasoning is not recorded with its message."""

    def answer(self, *facts: Any, **others: Any) -> Answer:
        answer = super().answer(*facts, **others)
        message = {key: each for key, each in answer.message.items() if key != "reasoning_content"}
        self.nodes[answer.node] = dataclasses.replace(self.nodes[answer.node], messages=(message,))
        return answer


class ReasoningUnseen(Conversation):
    """A template that leaves the reasoning out of every rendering seems to append."""

    def _says(self, *facts: Any) -> bool:
        return True


class Timid(Conversation):
    """Every ask begins a path."""

    def _rest_after(self, *facts: Any) -> tuple[str, str] | None:
        return None


class OneTooMany(Conversation):
    """A prompt's last token is counted as the policy's."""

    def _add(self, nodes: list[module.Node]) -> None:
        for node in nodes:
            if not node.is_answer:
                node.mask[-1:] = 1
        super()._add(nodes)


class AddedTwice(Conversation):
    """Each of several answers to one ask has the prompt's tokens once more, behind its sibling's."""

    def answer(self, ask: Ask, *facts: Any, **others: Any) -> Answer:
        answer = super().answer(ask, *facts, **others)
        asked = self.nodes[answer.node].parent
        self._next = {key: answer.node if value == asked else value for key, value in self._next.items()}
        return answer


class SidesMisplaced(Conversation):
    """Of the tokens that an ask adds, side arrays begin a token early."""

    def _asked_nodes(self, place: Any, sides: Any, **facts: Any) -> list[module.Node]:
        moved = [part for side in sides if (part := side.part(side.start, side.end - 1, 1))]
        return super()._asked_nodes(place, moved, **facts)


class SidesWhole(Conversation):
    """A node that is cut in two leaves its side arrays to the first part."""

    def _share(self, place: Any, asked: list[module.Node]) -> None:
        super()._share(place, asked)
        if place.within >= 0:
            self.nodes[place.within] = dataclasses.replace(self.nodes[place.within], sides=())


class LastTokenUntold(Conversation):
    """What the next turn learns of an answer's last token is dropped."""

    def _tell_parent(self, *facts: Any) -> None:
        pass


class SharedTooMuch(Conversation):
    """The token in which two asks part is taken for one that they share."""

    def _place(self, ask: Ask) -> Any:
        place = super()._place(ask)
        return place._replace(id_count=place.id_count + 1)


class SharedMessages(Conversation):
    """Where two asks have the same tokens, they are taken to have the same messages."""

    def _hand_down(self, *facts: Any) -> None:
        return None


class ImagesAlike(Conversation):
    """Two asks share the tokens of an image, whatever it shows."""

    def _place(self, ask: Ask) -> Any:
        def count(one: Any, seen: Any, other: Any, shown: Any) -> int:
            return common_count(one, (), other, ())

        common_count = module._common_count
        with mock.patch.object(module, "_common_count", count):
            return super()._place(ask)


class ImagesMisplaced(Conversation):
    """The images of what is added stand where they stood in it, not in the context."""

    def _new_ask(self, parent: int, *facts: Any) -> Ask:
        ask = super()._new_ask(parent, *facts)
        by = len(ask.context_ids) - len(ask.added_ids)
        moved = [dataclasses.replace(each, start=each.start - by) for each in ask.images if each.start >= by]
        return dataclasses.replace(ask, images=(*ask.images[: len(ask.images) - len(moved)], *moved))


BUGS = (
    StopTwice,
    NoNewline,
    EncodedAgain,
    ReasoningLost,
    ReasoningUnseen,
    Timid,
    OneTooMany,
    AddedTwice,
    SharedTooMuch,
    SidesMisplaced,
    SidesWhole,
    LastTokenUntold,
    SharedMessages,
    ImagesAlike,
    ImagesMisplaced,
)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: type[Conversation]) -> None:
    """In at most 300 histories; those without it go through the same ones."""
    found = 0
    for seed in range(300):
        family = list(FAMILIES)[seed % len(FAMILIES)]
        try:
            counts = run_world(family, seed, conversation=bug)
        except Wrong:
            found += 1
        else:
            found += counts["continued"] < counts["could continue"]
        if found:
            break

    without = run_world(family, seed)
    assert found
    assert without["continued"] == without["could continue"]


# ---------------------------------------------------------------- what continues


def test_tool_calls_and_their_results_continue_with_the_reasoning_that_the_client_dropped() -> None:
    conversation = Conversation(chat_template("qwen3"))
    first = conversation.ask([USER], TOOLS)
    answer = made(first, conversation, written("qwen3", calling(reasoning="hmm")), family="qwen3")
    copy = {key: value for key, value in answer.message.items() if key != "reasoning_content"}

    ask = conversation.ask([USER, copy, result(answer)], TOOLS)

    assert answer.finish == "tool_calls"
    assert ask.parent == answer.node
    assert "hmm" in chat_template("qwen3").decode(ask.context_ids)
    assert chat_template("qwen3").decode(ask.added_ids).startswith("\n<|im_start|>user\n<tool_response>")


def test_an_answer_that_is_followed_by_its_own_end_continues_without_doubling_it() -> None:
    conversation = Conversation(chat_template("glm-4.5"))
    answer = made(
        conversation.ask([USER], TOOLS), conversation, written("glm-4.5", calling(reasoning="hmm")), family="glm-4.5"
    )

    ask = conversation.ask([USER, answer.message, result(answer)], TOOLS)

    text = chat_template("glm-4.5").decode(ask.context_ids)
    assert ask.is_continued
    assert text.count("<|observation|>") == 1


@pytest.mark.parametrize("end", ["<|user|>", "<|endoftext|>"])
def test_an_answer_that_ended_with_another_token_than_must_follow_branches(end: str) -> None:
    conversation = Conversation(chat_template("glm-4.5"))
    text = written("glm-4.5", calling()).removesuffix("<|observation|>") + end
    answer = made(conversation.ask([USER], TOOLS), conversation, text, family="glm-4.5")

    assert not conversation.ask([USER, answer.message, result(answer)], TOOLS).is_continued


def test_a_client_that_edits_an_answer_branches_at_the_answer_before() -> None:
    conversation = Conversation(chat_template("qwen2.5"))
    first = made(conversation.ask([USER]), conversation, "one<|im_end|>", family="qwen2.5")
    history = [USER, first.message, MORE]
    second = made(conversation.ask(history), conversation, "two<|im_end|>", family="qwen2.5")

    edited = {"role": "assistant", "content": "three"}
    ask = conversation.ask([*history, edited, USER])

    assert ask.parent == first.node
    assert "three" in chat_template("qwen2.5").decode(ask.added_ids)
    assert conversation.ask([*history, second.message, USER]).parent == second.node


def test_a_path_that_was_cut_is_never_extended() -> None:
    conversation = Conversation(chat_template("qwen2.5"))
    first = made(conversation.ask([USER]), conversation, "one<|im_end|>", family="qwen2.5")
    history = [USER, first.message, MORE]
    cut = made(conversation.ask(history), conversation, "tw", family="qwen2.5", finish="length")
    ended = made(conversation.ask(history), conversation, "tw<|im_end|>", family="qwen2.5", finish="length")
    stopped = made(conversation.ask(history), conversation, "by a text", family="qwen2.5")

    assert (cut.finish, ended.finish, stopped.finish) == ("length", "length", "stop")
    for answer in (cut, ended, stopped):
        assert conversation.ask([*history, answer.message, USER]).parent == first.node


def test_several_answers_share_the_tokens_that_were_asked() -> None:
    conversation = Conversation(chat_template("qwen2.5"))
    ask = conversation.ask([USER])
    answers = [made(ask, conversation, f"{word}<|im_end|>", family="qwen2.5") for word in ("one", "two", "three")]

    assert [node.parent for node in conversation.nodes] == [-1, 0, 0, 0]
    assert conversation.paths() == [(0, 1), (0, 2), (0, 3)]
    for answer in answers:
        assert conversation.ask([USER, answer.message, MORE]).parent == answer.node


def test_of_answers_that_read_the_same_an_open_one_goes_on_and_then_the_newest() -> None:
    conversation = Conversation(chat_template("qwen2.5"))
    ask = conversation.ask([USER])
    made(ask, conversation, "one<|im_end|>", family="qwen2.5")
    newer = made(ask, conversation, "one<|im_end|>", family="qwen2.5")
    cut = made(ask, conversation, "one", family="qwen2.5", finish="length")

    assert cut.message == newer.message
    assert conversation.ask([USER, cut.message, MORE]).parent == newer.node


def test_of_answers_that_read_the_same_one_goes_on_that_can() -> None:
    """The client hands no reasoning back, and the template drops it: only the answer without any can be meant."""
    conversation = Conversation(chat_template("deepseek-distilled"))
    ask = conversation.ask([USER])
    end = "<｜end▁of▁sentence｜>"
    plain = made(ask, conversation, f"one{end}", family="deepseek-distilled")
    thought = made(ask, conversation, f"<think>\nhmm\n</think>\n\none{end}", family="deepseek-distilled")

    assert thought.message["content"] == plain.message["content"]
    assert conversation.ask([USER, plain.message, MORE]).parent == plain.node
    assert not conversation.ask([USER, thought.message, MORE]).is_continued


def test_sub_agents_share_no_more_than_their_beginning() -> None:
    conversation = Conversation(chat_template("qwen2.5"))
    main = made(conversation.ask([USER]), conversation, "one<|im_end|>", family="qwen2.5")
    other = [{"role": "system", "content": "You summarise."}, USER]
    side = made(conversation.ask(other), conversation, "two<|im_end|>", family="qwen2.5")

    assert conversation.ask([USER, main.message, MORE]).parent == main.node
    assert conversation.ask([*other, side.message, MORE]).parent == side.node
    [shared] = set(conversation.path(main.node)) & set(conversation.path(side.node))
    assert chat_template("qwen2.5").decode(conversation.ids(shared)) == "<|im_start|>system\nYou"


@pytest.mark.parametrize("family", ["qwen3", "mistral", "deepseek-r1", "gpt-oss"])
def test_a_template_that_rewrites_each_turn_stores_no_turn_twice(family: str) -> None:
    """Nearly none: a history says in other tokens what the policy said, so an answer is there as made and as told."""
    stored, message_counts = [], []
    for turn_count in (10, 20):
        conversation = Conversation(chat_template(family))
        history: list[Message] = [{"role": "system", "content": "rules"}]
        for turn in range(turn_count):
            history.append({"role": "user", "content": f"question {turn}, and then one two three four five"})
            answer = made(
                conversation.ask(history, TOOLS),
                conversation,
                written(family, {"role": "assistant", "content": f"answer {turn}", "reasoning_content": "hmm"}),
                family=family,
            )
            history.append(answer.message)
        stored.append(sum(len(node.ids) for node in conversation.nodes))
        message_counts.append(sum(len(node.messages) for node in conversation.nodes))

    assert stored[1] < 2.1 * stored[0]
    assert message_counts[1] < 2.1 * message_counts[0]


def dated(days: list[str]) -> Conversation:
    """A conversation whose template writes the last of these days."""
    family = FAMILIES["qwen2.5"]
    tokenizer = build_tokenizer(dataclasses.replace(family, template="{{- today }}" + family.template))
    apply = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *facts, **words: apply(*facts, **words, today=days[-1])
    return Conversation(ChatTemplate(tokenizer))


def test_the_same_messages_in_other_tokens_are_another_ask() -> None:
    """A template may write the date."""
    days = ["Monday"]
    conversation = dated(days)
    asks = [conversation.ask([USER])]
    days.append("Tuesday")
    asks.append(conversation.ask([USER]))

    for ask in asks:
        answer = made(ask, conversation, "one<|im_end|>", family="qwen2.5")
        assert np.array_equal(conversation.ids(conversation.nodes[answer.node].parent), ask.context_ids)


def test_other_tools_or_options_begin_a_path() -> None:
    conversation = Conversation(chat_template("qwen3"))
    answer = made(conversation.ask([USER]), conversation, "<think>\n\n</think>\n\none<|im_end|>", family="qwen3")
    history = [USER, answer.message, MORE]

    assert not conversation.ask(history, TOOLS).is_continued
    assert not conversation.ask(history, None, {"enable_thinking": False}).is_continued


def test_a_template_that_writes_the_date_branches_on_the_next_day() -> None:
    days = ["Monday"]
    conversation = dated(days)
    answer = made(conversation.ask([USER]), conversation, "one<|im_end|>", family="qwen2.5")
    history = [USER, answer.message, MORE]
    same_day = conversation.ask(history)

    days.append("Tuesday")

    assert same_day.is_continued
    assert not conversation.ask(history).is_continued


@pytest.mark.parametrize(
    ("text", "goes_on"), [("one", True), ('<tool_call>\n{"name":"look","arguments":{}}\n</tool_call>', False)]
)
def test_a_template_that_writes_no_history_that_ends_with_an_answer_goes_on_after_one_that_stands_word_for_word(
    text: str, goes_on: bool
) -> None:
    family = FAMILIES["qwen2.5"]
    guard = "{%- if messages[-1].role != 'user' %}{{- raise_exception('a user must be last') }}{% endif %}"
    conversation = Conversation(ChatTemplate(build_tokenizer(dataclasses.replace(family, template=guard + QWEN25))))
    answer = made(conversation.ask([USER]), conversation, f"{text}<|im_end|>", family="qwen2.5")

    assert conversation.ask([USER, answer.message, MORE]).is_continued == goes_on


def test_an_answer_that_stands_word_for_word_costs_no_second_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_template("qwen2.5")
    conversation = Conversation(chat)
    answer = made(conversation.ask([USER]), conversation, "one<|im_end|>", family="qwen2.5")
    rendered: list[int] = []
    render = chat.render

    def counted(messages: Sequence[Message], *args: Any, **options: Any) -> str:
        rendered.append(len(messages))
        return render(messages, *args, **options)

    monkeypatch.setattr(chat, "render", counted)

    assert conversation.ask([USER, answer.message, MORE]).is_continued
    assert rendered == [3]


def test_the_digest_of_an_ask_is_of_its_messages_whether_some_were_recorded_or_not() -> None:
    recorded, fresh = Conversation(chat_template("qwen2.5")), Conversation(chat_template("qwen2.5"))
    answer = made(recorded.ask([USER]), recorded, "one<|im_end|>", family="qwen2.5")
    said = [USER, answer.message, MORE]

    assert recorded.ask(said).digest == recorded.ask(said).digest == fresh.ask(said).digest
    assert recorded.ask(said).digest != recorded.ask([USER, answer.message, USER]).digest
    assert recorded.ask(said).digest != recorded.ask(said, options={"enable_thinking": False}).digest


def test_a_conversation_without_an_answer_is_recorded_as_nothing() -> None:
    record = Conversation(chat_template("qwen2.5")).record()

    assert {name: len(each) for name, each in record.items()} == dict.fromkeys(
        ("prompt_ids", "completion_ids", "logprobs", "completion_mask", "spans", "sides", "nodes"), 0
    )


# ---------------------------------------------------------------- what is refused


def test_an_answer_that_the_client_began_is_refused() -> None:
    with pytest.raises(InputError, match="message 1, the last, is the assistant's"):
        Conversation(chat_template("qwen2.5")).ask([USER, {"role": "assistant", "content": "I think"}])


def test_what_the_template_refuses_is_said_in_its_words() -> None:
    with pytest.raises(InputError, match="gemma refuses the messages: Conversation roles must alternate"):
        Conversation(chat_template("gemma")).ask([USER, MORE])


def test_a_conversation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(chat_template("qwen2.5"))
    ask = conversation.ask([USER])
    made(ask, conversation, "one<|im_end|>", family="qwen2.5")

    monkeypatch.setattr(module, "NODE_COUNT_MAX", 2)
    with pytest.raises(PayloadTooLarge, match="3 nodes"):
        made(ask, conversation, "two<|im_end|>", family="qwen2.5")
    monkeypatch.setattr(module, "NODE_COUNT_MAX", 99)
    monkeypatch.setattr(module, "CONVERSATION_BYTES_MAX", 600)
    with pytest.raises(PayloadTooLarge, match="end the trajectory"):
        made(ask, conversation, "two " * 200, family="qwen2.5")

    assert len(conversation.nodes) == 2


def test_many_small_answers_are_as_much_as_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(chat_template("qwen2.5"))
    ask = conversation.ask([USER])
    monkeypatch.setattr(module, "CONVERSATION_BYTES_MAX", 20_000)

    def answer_on() -> None:
        for number in range(1000):
            made(ask, conversation, f"answer {number}<|im_end|>", family="qwen2.5")

    with pytest.raises(PayloadTooLarge, match="20,000: end the trajectory"):
        answer_on()
    assert 2 < len(conversation.nodes) < 1000


# ---------------------------------------------------------------- images


def asked(*content: Any) -> list[Message]:
    return [{"role": "user", "content": list(content)}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_an_image_has_as_many_tokens_as_pieces_and_is_kept_once() -> None:
    conversation = Conversation(chat_template("qwen2.5-vl"))
    wide = PICTURES[3]

    ask = conversation.ask(asked(text("look"), PICTURES[0], wide, PICTURES[0]))

    assert [place.end - place.start for place in ask.images] == [4, 3, 4]  # of 28 x 28 pixels each
    assert len({place.digest for place in ask.images}) == len(conversation.files) == 2
    for place in ask.images:
        assert digest_of(conversation.files[place.digest]) == place.digest
    assert "base64" not in str(ask.messages)


def test_an_image_may_be_named_once_it_came() -> None:
    conversation = Conversation(chat_template("qwen2.5-vl"))
    (first,) = conversation.ask(asked(PICTURES[0])).images
    named = {"type": "image", "digest": first.digest}

    assert conversation.ask(asked(named)).images == (first,)
    with pytest.raises(InputError, match=f"no image with the digest {'0' * 32}"):
        conversation.ask(asked({"type": "image", "digest": "0" * 32}))


def test_a_rollout_holds_the_files_of_its_images() -> None:
    conversation = Conversation(chat_template("qwen2.5-vl"))
    ask = conversation.ask(asked(text("left"), PICTURES[0], text("or right"), PICTURES[1]))
    made(ask, conversation, "left<|im_end|>", family="qwen2.5-vl")

    facts: dict[str, Any] = dict.fromkeys(("trajectory_id", "group_id", "task_id", "finish_reason"), "x")
    rollout = Rollout(**facts, reward=1.0, turn_count=1, attempt=0, seed=0, **conversation.record())
    (branch,) = Rollout.decode(rollout.encode()).branches()

    assert [image.data for image in branch.images] == list(conversation.files.values())
    whole = len(branch.prompt_ids)
    assert [(each.start + whole, each.end + whole) for each in branch.images] == [
        (place.start, place.end) for place in ask.images
    ]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "no base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "has 0 bytes"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "none of PNG, JPEG, WEBP"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}, "detail is 'low'"),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, "expected"),
        ({"type": "image", "digest": "../../etc"}, "expected"),
        ({"type": "input_audio", "input_audio": {}}, "part 0 is of type 'input_audio', expected a dict of type text"),
        (5, "part 0 is 5, expected a dict of type text or image_url"),
        (image_part(png(0, 2, 900)), "takes no image of 2 x 900"),
    ],
)
def test_what_is_no_image_is_refused(content: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        Conversation(chat_template("qwen2.5-vl")).ask(asked(content))


@pytest.mark.parametrize("width", [6_000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_a_small_file_of_a_huge_image_is_refused_before_it_is_unpacked(width: int) -> None:
    bomb = io.BytesIO()
    Image.new("1", (width, width)).save(bomb, "PNG")

    with pytest.raises(InputError, match="an image is too large"):
        Conversation(chat_template("qwen2.5-vl")).ask(asked(image_part(bomb.getvalue())))


def test_who_sees_nothing_is_shown_nothing() -> None:
    with pytest.raises(InputError, match=r"qwen2\.5 takes no images: say it in words"):
        Conversation(chat_template("qwen2.5")).ask(asked(PICTURES[0]))
    for role in ("system", "assistant"):
        with pytest.raises(InputError, match="messages of role user and tool alone"):
            Conversation(chat_template("qwen2.5-vl")).ask([{"role": role, "content": [PICTURES[0]]}, USER])


def test_a_template_that_leaves_an_image_out_is_found_out() -> None:
    silent = FAMILIES["qwen2.5-vl"].template.replace("<|image_pad|>", "")
    tokenizer = build_tokenizer(dataclasses.replace(FAMILIES["qwen2.5-vl"], template=silent))
    template = ChatTemplate(tokenizer, vision=chat_template("qwen2.5-vl")._vision)

    with pytest.raises(InputError, match="writes 0 of 1 images"):
        Conversation(template).ask(asked(PICTURES[0]))


def test_the_images_of_a_conversation_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IMAGES_BYTES_MAX", 15_000)
    conversation = Conversation(chat_template("qwen2.5-vl"))
    conversation.ask(asked(PICTURES[0], PICTURES[0]))

    with pytest.raises(PayloadTooLarge, match="the limit is 15,000"):
        conversation.ask(asked(PICTURES[0], PICTURES[1]))
    assert len(conversation.files) == 1
