"""Does a commit in several threads write everything, and say when it could not?"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfab.fabric.versions import commit
from rollfab.fabric.versions.commit import Writes, write


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut writes into many pieces, so that threads share them."""
    monkeypatch.setattr(commit, "PIECE_COUNT", 10)


@pytest.mark.timeout(90)  # in a new clone the compiled loops are compiled first
@pytest.mark.parametrize("thread_count", [1, 2, 5, 200])
def test_several_threads_write_everything(thread_count: int) -> None:
    # Given scattered elements of some tensors and all of another
    random = np.random.default_rng(1)
    bits = {name: random.integers(0, 1 << 16, 1000).astype(np.uint16) for name in "abc"}
    expected = {name: flat.copy() for name, flat in bits.items()}
    writes: dict[str, tuple[NDArray[Any] | None, NDArray[Any]]] = {}
    for name in "ab":
        positions = np.flatnonzero(random.random(1000) < 0.3)
        writes[name] = positions, random.integers(0, 1 << 16, len(positions)).astype(np.uint16)
        expected[name][positions] = writes[name][1]
    writes["c"] = None, random.integers(0, 1 << 16, 1000).astype(np.uint16)
    expected["c"] = writes["c"][1]
    # When they are written
    write(writes, bits, thread_count=thread_count)
    # Then all of it is there, and nothing else has changed
    for name, flat in bits.items():
        assert np.array_equal(flat, expected[name])


@pytest.mark.parametrize("thread_count", [1, 4])
def test_a_write_that_fails_in_any_thread_is_raised(thread_count: int) -> None:
    # Given one tensor of two that cannot be written: the pieces of one come first, those of the other last
    bits = {name: np.zeros(100, np.uint16) for name in "ab"}
    writes: Writes = {name: (None, np.ones(100, np.uint16)) for name in bits}
    for flat in bits.values():
        flat.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            write(writes, bits, thread_count=thread_count)
        flat.flags.writeable = True


def test_a_write_that_fails_in_a_helping_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a fault that hits no thread but a helper
    is_hit = threading.Event()

    def faulty(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            assert is_hit.wait(30)
        else:
            is_hit.set()
            raise MemoryError

    monkeypatch.setattr(commit, "_write", faulty)
    # Then who commits hears of it
    with pytest.raises(MemoryError):
        write({"a": (None, np.ones(100, np.uint16))}, {"a": np.zeros(100, np.uint16)}, thread_count=2)


def test_nothing_to_write_is_written_in_any_number_of_threads() -> None:
    write({}, {}, thread_count=4)
