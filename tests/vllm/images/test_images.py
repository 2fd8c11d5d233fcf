"""Images in vLLM: what it holds of them, what it computes, and what is refused. Two families, one engine each: the one
is seen to compute with the eyes that are written to it, the other schedules a step ahead, as on a GPU.

Truth is a plain forward pass of transformers over what Vision.arrays makes, in another process. Weights are large and
random: a greedy turn says other tokens of another image.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollfab.fabric.chat.vision import Vision, find_vision
from rollfab.fabric.contract.errors import EngineError, EngineUnsupported
from rollfab.fabric.contract.images import Image, digest_of
from rollfab.fabric.contract.records import Float32, Sampling
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import EngineLimits, Generation, GenerationRequest, Writes
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from rollfab.workers.engines.vllm.local import LocalDoor
from tests.support.processes.scheduling_ahead import scheduling_ahead
from tests.support.seeing_model import random_weights, write_seeing_model
from tests.support.until import until
from tests.support.weights.engine_sides import catch
from tests.support.weights.reference import seeing_logprobs_elsewhere
from tests.unit.fabric.chat.world import png

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
FIRST, SECOND, WIDE = png(1, 84, 84), png(2, 84, 84), png(3, 112, 28)  # of 9, 9 and 4 tokens
TEXT = list(range(5, 45))  # more than a block of KV cache


class Seeing:
    """An engine whose model sees."""

    def __init__(self, model: str, vision: Vision, *, probes_writes: bool) -> None:
        self.model, self.vision = model, vision
        self.engine = VllmEngine(
            VllmConfig(
                model=model, slot_count=4, context_tokens_max=256, probes_writes=probes_writes, arguments={"seed": 0}
            )
        )

    def request(self, name: str, *parts: list[int] | bytes, count: int = 24, **options: Any) -> GenerationRequest:
        """A greedy request for tokens after texts and images."""
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, bytes):
                end = len(ids) + self.vision.token_count(part)
                images.append(Image(start=len(ids), end=end, digest=digest_of(part), data=part))
                part = [self.vision.token_id] * (end - len(ids))
            ids += part
        sampling = Sampling(temperature=0.0, max_tokens=count, **options.pop("sampling", {}))
        prompt = np.array(ids, np.int32)
        return GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling, images=tuple(images), **options)

    async def answer(self, request: GenerationRequest) -> Generation:
        self.engine.generate(request)
        return await self.ended()

    async def ended(self) -> Generation:
        (generation,) = await self.engine.finished(30.0)
        assert generation.error is None, generation.error
        assert self.vision.token_id not in generation.completion_ids  # which the reference would take for an image's
        return generation

    def true_logprobs(self, request: GenerationRequest, made: Generation) -> Float32:
        """Of the tokens made, by the weights that the engine has now."""
        bits = self.engine.weight_bits()
        logprobs_T_V = seeing_logprobs_elsewhere(
            self.model, bits, request.prompt_ids, made.completion_ids, request.images
        )
        own: Float32 = logprobs_T_V[np.arange(len(made.completion_ids)), made.completion_ids]
        return own

    async def bring(self, version: int, seed: int, only: str = "", **options: Any) -> None:
        """Have other weights, of the tensors with `only` in their names."""
        weights = random_weights(Path(self.model), seed)
        writes = {name: (None, each.reshape(-1).view(np.uint32)) for name, each in weights.items() if only in name}
        await self.engine.apply(Staged(version, writes), **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["qwen2_vl", "qwen2_5_vl"])
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seeing]:
    model = str(write_seeing_model(tmp_path_factory.mktemp("seeing"), request.param))
    vision = find_vision(model)
    assert vision is not None
    is_first = request.param == "qwen2_vl"
    seeing = Seeing(model, vision, probes_writes=is_first)
    with contextlib.nullcontext() if is_first else scheduling_ahead():
        await seeing.engine.start()
    yield seeing
    await seeing.engine.check_integrity()
    await seeing.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def seeing(shared: Seeing) -> Seeing:
    """With the weights of its checkpoint."""
    await shared.bring(0, 1, turns="recompute")
    return shared


def close(made: Float32, true: Float32) -> None:
    np.testing.assert_allclose(made, true, atol=1e-4)


async def test_what_vllm_computes_of_images_is_what_a_trainer_computes(seeing: Seeing) -> None:
    request = seeing.request("r", TEXT, FIRST, [7], WIDE, [8, 9])
    made = await seeing.answer(request)
    close(made.logprobs, seeing.true_logprobs(request, made))


async def test_vllm_holds_the_very_ids_and_places_that_it_was_given(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given who looks at what goes to vLLM's core
    core = seeing.engine._door._llm.engine_core  # type: ignore[attr-defined]
    held, add = [], core.add_request_async

    async def look_and_add(request: Any) -> None:
        held.append(request)
        await add(request)

    monkeypatch.setattr(core, "add_request_async", look_and_add)
    # When a context with two images, one of them twice, is continued from the middle of a turn
    prior = np.array([11, 12], np.int32)
    request = seeing.request("r", [5], FIRST, SECOND, [6], FIRST, [7], prior_ids=prior, cache_salt="mine")
    await seeing.answer(request)
    # Then its ids are those, and each image is what its arrays are, under its own name and salt
    (there,) = held
    assert there.prompt_token_ids == [*request.prompt_ids.tolist(), 11, 12]
    places = [(each.mm_position.offset, each.mm_position.length) for each in there.mm_features]
    assert places == [(image.start, image.end - image.start) for image in request.images]
    names = [each.identifier for each in there.mm_features]
    assert names[0] == names[2] != names[1] and all(name.endswith(digest_of(FIRST)) for name in names[::2])
    assert all(
        name.removesuffix(image.digest).endswith("mine.") for name, image in zip(names, request.images, strict=True)
    )
    arrays = seeing.vision.arrays([image.data for image in request.images])
    pixels = [each.data["pixel_values"].data.numpy() for each in there.mm_features]
    assert np.concatenate(pixels).tobytes() == arrays["pixel_values"].tobytes()


async def test_two_images_of_equal_size_share_nothing_but_what_is_before_them(seeing: Seeing) -> None:
    # Given an answer to one image, and to another in the same place, asked with a salt of its own
    rest = list(range(50, 90))
    alone = await seeing.answer(seeing.request("alone", TEXT, SECOND, rest, cache_salt="alone"))
    first = await seeing.answer(seeing.request("first", TEXT, FIRST, rest))
    before = seeing.engine.stats().cached_token_count
    # When the other is asked where the first has left its prefix
    second = await seeing.answer(seeing.request("second", TEXT, SECOND, rest))
    # Then it takes the block of text before the image alone, and answers as without
    assert seeing.engine.stats().cached_token_count - before == 32
    assert second.completion_ids.tolist() == alone.completion_ids.tolist() != first.completion_ids.tolist()
    close(second.logprobs, alone.logprobs)
    # And one's own image is found, but not under another salt
    await seeing.answer(seeing.request("again", TEXT, FIRST, rest))
    assert seeing.engine.stats().cached_token_count - before == 32 + 64
    await seeing.answer(seeing.request("other", TEXT, FIRST, rest, cache_salt="other"))
    assert seeing.engine.stats().cached_token_count - before == 32 + 64


async def test_a_turn_with_images_that_is_handed_over_goes_on_as_if_undisturbed(seeing: Seeing) -> None:
    parts: list[Any] = [TEXT, FIRST, [7], WIDE]
    whole = await seeing.answer(seeing.request("whole", *parts))
    for count in (1, 10):
        prior, salt = whole.completion_ids[:count], f"elsewhere {count}"
        rest = await seeing.answer(seeing.request("rest", *parts, prior_ids=prior, cache_salt=salt))
        assert rest.completion_ids.tolist() == whole.completion_ids[count:].tolist()
        close(rest.logprobs, whole.logprobs[count:])


async def test_an_image_that_is_read_in_pieces_is_the_same_image(seeing: Seeing) -> None:
    request = seeing.request("r", TEXT, FIRST, [7], cache_salt="pieces")
    seeing.engine.set_limits(EngineLimits(step_tokens=4))
    made = await seeing.answer(request)
    seeing.engine.set_limits(EngineLimits())
    close(made.logprobs, seeing.true_logprobs(request, made))


async def test_a_turn_that_is_aborted_before_its_images_are_read_ends(seeing: Seeing) -> None:
    seeing.engine.generate(seeing.request("r", FIRST, [7]))
    (ended,) = await seeing.engine.abort(["r"])
    assert ended.finish_reason == "abort" and not ended.error


async def test_other_eyes_see_an_image_anew_and_nobody_gets_what_older_ones_saw(seeing: Seeing) -> None:
    # Given a request that waits for its first token, held, and an image that the old eyes have seen
    request = seeing.request("r", TEXT, FIRST, [7])
    old = await seeing.answer(request)
    await seeing.engine.pause("test")
    seeing.engine.generate(request)
    await until(lambda: seeing.engine._open["r"].has_begun)
    # When only the eyes change, and what runs may keep its KV cache
    await seeing.bring(1, 2, only="visual", turns="keep")
    await seeing.engine.resume("test")
    # Then it begins anew, as one that comes later
    waited = await seeing.ended()
    later = await seeing.answer(request)
    assert waited.completion_ids.tolist() == later.completion_ids.tolist() != old.completion_ids.tolist()
    assert [each[2] for each in waited.versions] == [1]
    close(waited.logprobs, seeing.true_logprobs(request, waited))


async def test_a_turn_in_flight_whose_context_is_computed_again_is_seen_by_the_new_eyes(seeing: Seeing) -> None:
    # Given a turn that has made some tokens
    request = seeing.request("r", TEXT, FIRST, [7], count=150)
    await catch(seeing.engine, request, at_least=4)
    # When only the eyes change, and all is computed again
    await seeing.bring(1, 4, only="visual", turns="recompute")
    made = await seeing.ended()
    # Then its further tokens are those that the new eyes make likely
    (_, old_end, old_version), (start, _, version) = made.versions
    assert (old_version, version) == (0, 1) and old_end == start > 0
    close(made.logprobs[start:], seeing.true_logprobs(request, made)[start:])


async def test_weights_named_as_trainers_name_them_come_in_and_go_out_bit_by_bit(seeing: Seeing) -> None:
    weights = random_weights(Path(seeing.model), 3)
    names = {spec.name for spec in seeing.engine.layout.tensors}
    assert names == weights.keys()
    assert {name.split(".")[1] for name in names} == {"visual", "language_model", "weight"}  # the last: lm_head's
    await seeing.bring(1, 3)
    live = await seeing.engine.read_weights()
    assert all((live[name] == each.reshape(-1).view(np.uint32)).all() for name, each in weights.items())
    request = seeing.request("r", TEXT, FIRST, [7])
    made = await seeing.answer(request)
    close(made.logprobs, seeing.true_logprobs(request, made))


async def test_a_context_whose_images_are_not_where_its_tokens_say_is_refused(seeing: Seeing) -> None:
    right = seeing.request("r", TEXT, FIRST, [7], SECOND)
    first, second = right.images

    def moved(image: Image, start: int, end: int) -> Image:
        return Image(start=start, end=end, digest=image.digest, data=image.data)

    wrong = {
        "one too far": (moved(first, first.start + 1, first.end + 1), second),
        "one token short": (moved(first, first.start, first.end - 1), second),
        "of another size": (Image(start=first.start, end=first.end, digest=digest_of(WIDE), data=WIDE), second),
        "twice in one place": (first, first),
        "past the end": (first, moved(second, second.start + 1, second.end + 1)),
        "no image": (Image(start=first.start, end=first.end, digest=digest_of(b"text"), data=b"text"), second),
    }
    for images in wrong.values():
        request = GenerationRequest(request_id="r", prompt_ids=right.prompt_ids, sampling=right.sampling, images=images)
        with pytest.raises(EngineUnsupported, match=r"request 'r'.*(has an image at tokens|none of PNG)"):
            seeing.engine.generate(request)
    assert seeing.engine.stats().waiting_count == 0


async def test_a_file_that_breaks_off_ends_its_turn_for_good_and_no_other(seeing: Seeing) -> None:
    broken = FIRST[: len(FIRST) // 2]
    seeing.engine.generate(seeing.request("broken", broken, [7]))
    seeing.engine.generate(seeing.request("whole", FIRST, [7]))
    ended: dict[str, Generation] = {}
    while len(ended) < 2:
        ended |= {each.request_id: each for each in await seeing.engine.finished(30.0)}
    assert ended["broken"].finish_reason == "refused" and "cannot be read" in str(ended["broken"].error)
    assert ended["whole"].finish_reason == "length"


async def test_eyes_that_are_written_and_never_seen_with_are_found_at_start(tmp_path: Path) -> None:
    class BlindDoor(LocalDoor):
        """Fake fault: the eyes compute with copies of their weights; no ranks to ask."""

        rank_count = 0

        async def write(self, writes: Writes, version: int) -> None:
            others = {name: write for name, write in writes.items() if ".visual." not in name}
            await super().write(others, version)

    model = str(write_seeing_model(tmp_path))
    config = VllmConfig(model=model, slot_count=1, context_tokens_max=64)
    with pytest.raises(EngineError, match=r"copies of model\.visual\.blocks\.0\.attn\.proj\.bias, model\.visual"):
        await VllmEngine(config, door=BlindDoor(config)).start()
