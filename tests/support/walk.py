"""Where something is, from first to last: which files of the package keep it, and by which it is handed on.

Records of the walk are told by a predicate; what holds them only as bytes does not know them. A file

- *keeps* a record when, while the event loop waits, one of its suspended functions has it in a local variable, or an
  object of one of its classes in an attribute (in lists and dicts there, too; a future's result is on its way back);
- *hands it on* when one of its functions calls one of another file with it, or returns it to one.

The files of the walk are those that keep it. A function that is given a record and returns before the loop waits keeps
nothing: it is a helper of the file that called it, and is listed apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

PACKAGE = "rollfab"
ROOMS = ("fabric", "workers", "trainer")
SUSPENDED = (CoroutineType, GeneratorType, AsyncGeneratorType)
HANDLES = (functools.partial, MethodType, FunctionType)
PLAIN = (list, tuple, set, frozenset, deque)


class Walk:
    """Follows what `is_record` knows, through one event loop and the thread that calls it.

    Attributes:
        kept: files that keep a record. touched: files that were ever given one or returned one, in order of the first
        time. hands: (from, to), in the order in which they first happened.
    """

    def __init__(self, is_record: Callable[[Any], bool]) -> None:
        self._is_record = is_record
        self.kept: set[str] = set()
        self.touched: dict[str, None] = {}
        self._steps: dict[tuple[tuple[str, ...], str, bool], None] = {}  # callers, innermost first; callee; is a return
        self._seen: set[int] = set()

    @property
    def files(self) -> list[str]:
        """The files of the walk, in the order in which it comes to them."""
        return [*(name for name in self.touched if name in self.kept), *sorted(self.kept - self.touched.keys())]

    @property
    def helpers(self) -> list[str]:
        """Files that are called with it, and return."""
        return [name for name in self.touched if name not in self.kept]

    @property
    def hands(self) -> list[tuple[str, str]]:
        """From which file of the walk to which; what only passes through another file is its caller's."""
        found: dict[tuple[str, str], None] = {}
        for callers, callee, is_return in self._steps:
            caller = next((name for name in callers if name in self.kept), callee)
            if callee in self.kept and caller != callee:
                found[(callee, caller) if is_return else (caller, callee)] = None
        return list(found)

    @property
    def detours(self) -> list[tuple[str, str]]:
        """Where it is handed on to a file that is neither the next nor the one before."""
        place = {name: index for index, name in enumerate(self.files)}
        return [(a, b) for a, b in self.hands if abs(place[a] - place[b]) != 1]

    @contextlib.contextmanager
    def following(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Look on while the block lasts. `loop` runs in another thread."""
        caller, selector = threading.get_ident(), loop._selector  # type: ignore[attr-defined]
        select, begun = selector.select, threading.Event()

        def look_and_select(timeout: float | None = None) -> Any:
            self._look(loop, caller)
            return select(timeout)

        def begin(profile: Callable[..., None] | None) -> None:
            sys.setprofile(profile)
            begun.set()

        selector.select = look_and_select
        sys.setprofile(self._note)
        loop.call_soon_threadsafe(begin, self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            assert begun.wait(30)
            begun.clear()
            loop.call_soon_threadsafe(begin, None)
            assert begun.wait(30)
            selector.select = select

    # ---- who hands it on

    def _note(self, frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "return") or (callee := file_of(frame.f_code.co_filename)) is None:
            return
        code = frame.f_code
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if not any(map(self._finds, given if event == "call" else [value])):
            return
        self.touched.setdefault(callee)
        self._steps.setdefault((_callers(frame, callee), callee, event == "return"))

    def _finds(self, value: Any, depth: int = 3) -> bool:
        """Whether a value is a record, or a list of some."""
        if isinstance(value, (*PLAIN, dict)) and depth and len(value) <= 100:
            return any(self._finds(each, depth - 1) for each in (value.values() if type(value) is dict else value))
        return self._is_record(value)

    # ---- who keeps it

    def _look(self, loop: asyncio.AbstractEventLoop, caller: int) -> None:
        profile = sys.getprofile()
        sys.setprofile(None)
        self._seen = set()
        for task in asyncio.all_tasks(loop):
            self._visit_suspended(task.get_coro())
        frame = sys._current_frames().get(caller)
        while frame is not None:
            self._visit_frame(frame)
            frame = frame.f_back
        sys.setprofile(profile)

    def _visit_suspended(self, work: Any) -> None:
        while work is not None and id(work) not in self._seen:
            self._seen.add(id(work))
            frame = next((getattr(work, n) for n in ("cr_frame", "gi_frame", "ag_frame") if hasattr(work, n)), None)
            if frame is not None:
                self._visit_frame(frame)
            inner = next((getattr(work, n) for n in ("cr_await", "gi_yieldfrom", "ag_await") if hasattr(work, n)), None)
            if inner is not None and not isinstance(inner, (*SUSPENDED, asyncio.Future)):  # a step of a generator
                inner = next((each for each in gc.get_referents(inner) if isinstance(each, SUSPENDED)), None)
            work = inner

    def _visit_frame(self, frame: FrameType) -> None:
        owner = file_of(frame.f_code.co_filename)
        for value in list(frame.f_locals.values()):
            self._visit(value, owner)

    def _visit(self, value: Any, owner: str | None, depth: int = 6) -> None:
        """Note the owner of records in a value, and look into what can have owners of its own."""
        if self._is_record(value):
            if owner is not None:
                self.kept.add(owner)
        elif isinstance(value, (*PLAIN, dict)):
            for each in list(value.values() if isinstance(value, dict) else value) if depth else ():
                self._visit(each, owner, depth - 1)
        elif isinstance(value, SUSPENDED):
            self._visit_suspended(value)
        elif id(value) not in self._seen and _is_ours(value):
            self._seen.add(id(value))
            self._visit(*_parts(value, owner))


def _is_ours(value: Any) -> bool:
    return isinstance(value, HANDLES) or type(value).__module__.startswith(f"{PACKAGE}.")


def _parts(value: Any, owner: str | None) -> tuple[list[Any], str | None]:
    """What a function is bound to, or an object is made of; and the file that keeps it."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords], owner
    if isinstance(value, MethodType):
        return [value.__self__], owner
    if isinstance(value, FunctionType):
        return list(_captured(value)), file_of(value.__code__.co_filename)
    kind = type(value)
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
    attributes = [*list(getattr(value, "__dict__", {}).values()), *(getattr(value, name, None) for name in slots)]
    return attributes, file_of(sys.modules[kind.__module__].__file__ or "")


def _captured(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it holds nothing yet
            yield cell.cell_contents


@functools.cache
def file_of(path: str) -> str | None:
    """A file of the package, by its path in it; None: it is none, or of a room that nothing is walked through."""
    _, found, name = path.rpartition(f"/{PACKAGE}/")
    return name if found and name.split("/")[0] in ROOMS else None


def _callers(frame: FrameType, callee: str) -> tuple[str, ...]:
    """The files of the functions that wait for this one, without repetition, up to where the file itself is again."""
    found: dict[str, None] = {}
    above = frame.f_back
    while above is not None:
        name = file_of(above.f_code.co_filename)
        if name == callee:
            break
        if name is not None:
            found.setdefault(name)
        above = above.f_back
    return tuple(found)
