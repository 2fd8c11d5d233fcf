"""Images on their way into a vLLM of our own: what its model reads of them, and the prompt that holds that.

- vLLM's own image processor is not asked: the arrays are made here, by the code that trainers make them with, and given
  to it with the places of their tokens. So its prompt has the very ids that it was given.
- vLLM hashes an image's name into every block of KV cache that holds a token of it, and keeps what it has computed of
  an image by the same name: a salt, and the digest of the file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ....fabric.chat.vision import FAMILIES, Vision, find_vision
from ....fabric.contract.errors import ConfigError
from ....fabric.contract.images import Image, digest_of
from ....fabric.model.presets import is_preset
from .common.backend import Ask, Seen

if TYPE_CHECKING:
    from vllm.inputs import EngineInput

ARRAYS_BYTES_MAX = 1 << 30  # some 40 megapixels: a trajectory shows all its images again at every turn


def find_eyes(model: str) -> tuple[Eyes | None, str]:
    """Load the eyes of a model that vLLM has loaded; or None, and why it takes no images. May take seconds."""
    try:
        vision = None if is_preset(model) else find_vision(model)
    except ConfigError as error:
        return None, error.message
    if vision is None:
        return None, f"model {model!r} reads tokens alone. Models that see: {' and '.join(FAMILIES)}"
    return Eyes(vision), ""


class Eyes:
    """What a model reads of images, made once as long as there is room. Asked by several threads."""

    def __init__(self, vision: Vision, *, bytes_max: int = ARRAYS_BYTES_MAX) -> None:
        """bytes_max: of the arrays that are kept; those that were not asked for longest go."""
        self.vision = vision
        self._bytes_max = bytes_max
        self._byte_count = 0
        self._lock = threading.Lock()
        self._arrays: OrderedDict[str, Mapping[str, NDArray[Any]]] = OrderedDict()

    def look(self, images: Sequence[Image]) -> tuple[Seen, ...]:
        """Return what the model reads of images. Raises InputError, as Vision.arrays."""
        seen = []
        for image in images:
            digest = digest_of(image.data)
            arrays = self._kept(digest)
            if arrays is None:
                arrays = self.vision.arrays([image.data])
                self._keep(digest, arrays)
            pixels, grid = arrays["pixel_values"], arrays["image_grid_thw"][0]
            seen.append(Seen(start=image.start, end=image.end, digest=digest, pixel_values=pixels, image_grid_thw=grid))
        return tuple(seen)

    def _kept(self, digest: str) -> Mapping[str, NDArray[Any]] | None:
        with self._lock:
            if digest in self._arrays:
                self._arrays.move_to_end(digest)
            return self._arrays.get(digest)

    def _keep(self, digest: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        with self._lock:
            if digest not in self._arrays:  # two threads may have made them
                self._arrays[digest] = arrays
                self._byte_count += arrays["pixel_values"].nbytes
            while self._byte_count > self._bytes_max:
                _, oldest = self._arrays.popitem(last=False)
                self._byte_count -= oldest["pixel_values"].nbytes


def prompt_of(ask: Ask, *, salt: str) -> EngineInput:
    """Return a prompt as vLLM's engine takes it, past all that would look at its tokens."""
    from vllm.inputs import mm_input, tokens_input

    if not ask.images:
        return tokens_input(prompt_token_ids=ask.input_ids, cache_salt=salt)
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    return mm_input(
        prompt_token_ids=ask.input_ids,
        mm_kwargs=MultiModalKwargsItems({"image": [_item(each) for each in ask.images]}),
        mm_hashes={"image": [f"{salt}.{each.digest}" for each in ask.images]},
        mm_placeholders={"image": [PlaceholderRange(each.start, each.end - each.start) for each in ask.images]},
        cache_salt=salt,
    )


def _item(seen: Seen) -> Any:
    """Arrays of one image as the models of Qwen2-VL and Qwen2.5-VL declare them in vLLM."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem

    pieces = MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([len(seen.pixel_values)]))
    grids = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    (pixel_values,) = pieces.build_elems("pixel_values", torch.from_numpy(seen.pixel_values))
    (image_grid_thw,) = grids.build_elems("image_grid_thw", torch.from_numpy(seen.image_grid_thw)[None])
    return MultiModalKwargsItem({"pixel_values": pixel_values, "image_grid_thw": image_grid_thw})
