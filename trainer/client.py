"""The trainer's client for synchronous training loops: aio.py's surface without `await`.

One background thread runs one event loop per connection; every call here is handed to it and waited for. So the
connection stays alive between calls, and a slow training step never makes the broker think the trainer is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from ..fabric.broker.clients.url import mask_url
from ..fabric.broker.embedded import EmbeddedBroker
from ..fabric.contract.agreement import Agreement, AlarmRule
from ..fabric.contract.errors import ConfigError, FabricError
from ..fabric.contract.records import Group, RunConfig
from ..fabric.host.forks import Home
from ..fabric.host.helpers import end_all
from ..fabric.ports.queue import RunStatus
from ..fabric.versions.reader import Weights
from . import aio
from .groups import TAKEOVER_S, Submission
from .groups import Groups as AsyncGroups
from .publish.publisher import PublishReport
from .publish.tensors import ComparesOn, given_of

T = TypeVar("T")
EXIT_S = 2.0  # for closing a connection that was left open, as the interpreter ends
SAY_AFTER_S = 2.0  # of waiting for an interrupted call, before a message: a person may have pressed Ctrl-C

log = logging.getLogger(__name__)


class _Selector(selectors.DefaultSelector):
    """A selector that a forked child finds empty: the kernel's watch list is its parent's, and shared with the child.

    Otherwise a child that ends, and drops its copy of the connections, would end the parent's watch of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._home = Home()

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """Do the same as the library; in a forked child, nothing is registered."""
        if not self._home.is_here:
            raise KeyError(fileobj)
        return super().get_key(fileobj)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Do the same as the library; in a forked child, nothing is registered."""
        if not self._home.is_here:
            raise KeyError(fileobj)
        return super().unregister(fileobj)


class _Event:
    """What one thread waits for and another sets. A signal handler may raise in the one that waits.

    threading.Event bears no such exception: its waiter is left registered half made, and setting it fails then.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Wake who waits; call this in one thread alone."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is set, or so many seconds; return whether it is."""
        return self._is_set or self._lock.acquire(timeout=timeout_s) or self._is_set


class _Call(Generic[T]):
    """A coroutine on the loop, and the thread that waits for it."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.is_over = _Event()
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        """Begin; call this in the loop's thread."""
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(lambda _: self.is_over.set())

    def cancel(self) -> None:
        """End it early; call this in the loop's thread."""
        if self._task is not None:
            self._task.cancel()
            return
        self._work.close()  # it was not begun, and will not be: the loop runs callbacks in their order
        self.is_over.set()

    def result(self) -> T:
        """Return its result or raise its error, once it is over."""
        assert self._task is not None
        return self._task.result()

    def end(self) -> None:
        """End it early, and return when it has ended: it may be reading data that its caller goes on to change.

        Further interrupts change nothing: the first one is raised when this is done.
        """
        is_told = is_said = False
        while not self.is_over.is_set():
            with contextlib.suppress(BaseException):
                if not is_told:
                    self._loop.call_soon_threadsafe(self.cancel)
                    is_told = True
                if not self.is_over.wait(SAY_AFTER_S) and not is_said:
                    is_said = True
                    log.warning(
                        "interrupted; %s is waited for, because it may still read what it was given",
                        name_of(self._work),
                    )
        if self._task is not None and not self._task.cancelled():
            self._task.exception()  # the interrupt is raised in its place; asyncio would tell of it as forgotten


class _Loop:
    """An event loop on a thread of its own, in the process that made it."""

    def __init__(self) -> None:
        self._home = Home()
        self.is_at_exit = False
        self._is_made = _Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="rollfab-client", daemon=True)
        self._thread.start()
        self._is_made.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._loop = asyncio.SelectorEventLoop(_Selector())  # not where Ctrl-C is raised: half a loop complains
        except OSError as error:
            self._error = error
            return
        finally:
            self._is_made.set()
        self._loop.run_forever()

    @property
    def is_open(self) -> bool:
        """Whether it runs, in this process: a forked child has a copy of the loop and no thread that runs it."""
        return self._home.is_here and not self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it. An interrupt here cancels it there, and is raised when it has ended.

        Raises:
            ConnectionForked: this is a child of the process that connected.
            ConfigError: the connection is closed, or this is called by what the loop itself runs.
        """
        try:
            return self._call(work)
        except BaseException:
            if self.is_at_exit and threading.current_thread().daemon:
                threading.Event().wait()  # the interpreter ends, and this thread with it: nobody waits for its result
            raise

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            self._check(name_of(work))
        except BaseException:
            work.close()
            raise
        call = _Call(work, self._loop)
        try:
            self._loop.call_soon_threadsafe(call.start)
            call.is_over.wait()
        except BaseException:
            call.end()
            raise
        return call.result()

    def close(self) -> None:
        if not self.is_open:
            return  # in a child: to touch its copy would reach into the parent's connections
        self.call(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def _check(self, name: str) -> None:
        self._home.check()
        if self._loop.is_closed():
            raise ConfigError(f"{name}: this connection is closed; make another with rollfab.connect()")
        if threading.current_thread() is self._thread:
            raise ConfigError(
                f"{name} is called from within another call of this connection (keep= or refill=), which would wait for"
                " itself: decide from what the function is given, and call it after"
            )


async def _end_tasks() -> None:
    await end_all(task for task in asyncio.all_tasks() if task is not asyncio.current_task())


class Fabric:
    """A connection to one broker. Made by `rollfab.connect`."""

    def __init__(self, loop: _Loop, fabric: aio.AsyncFabric, broker: EmbeddedBroker | None) -> None:
        self._loop = loop
        self._fabric = fabric
        self._broker = broker
        atexit.register(self._close_at_exit)

    @property
    def url(self) -> str:
        """Return the broker's URL, to start workers with."""
        return self._fabric.url

    def run(self, run_id: str, *, model: str | None = None, environment: str | None = None, **settings: Any) -> Run:
        """Open a run; the first one to name it creates it. See `AsyncFabric.run`."""
        return Run(
            self._loop, self._loop.call(self._fabric.run(run_id, model=model, environment=environment, **settings))
        )

    def evaluation(self, run_id: str, version: int | None = None, *, name: str | None = None, **settings: Any) -> Run:
        """Open a run beside another one, pinned to one version of its weights. See `AsyncFabric.evaluation`."""
        return Run(self._loop, self._loop.call(self._fabric.evaluation(run_id, version, name=name, **settings)))

    def runs(self) -> dict[str, RunConfig]:
        """Return every run on this broker."""
        return self._loop.call(self._fabric.runs())

    def close(self) -> None:
        """Close the connection, and stop the broker if it is our own. In a forked child, or again: nothing happens."""
        if not self._loop.is_open:
            return
        atexit.unregister(self._close_at_exit)
        try:
            self._loop.call(self._fabric.close())
        finally:
            self._loop.close()
            if self._broker is not None:
                self._broker.stop()

    def _close_at_exit(self) -> None:
        """Close silently and leave nothing behind when a script ends without `close`, however it ends."""
        if not self._loop.is_open:
            return  # a fork: the connection's thread is not in it
        self._loop.is_at_exit = True
        with contextlib.suppress(Exception):
            self._loop.call(asyncio.wait_for(self._fabric.close(), EXIT_S))
        with contextlib.suppress(Exception):
            self._loop.close()
        if self._broker is not None:
            self._broker.stop()

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Run:
    """One training job's namespace: its tasks, its groups, its weights. See `AsyncRun` for every argument."""

    def __init__(self, loop: _Loop, run: aio.AsyncRun) -> None:
        self._loop = loop
        self._run = run

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self._run.run_id

    @property
    def config(self) -> RunConfig:
        """Return the run's settings."""
        return self._run.config

    def submit(
        self,
        tasks: Iterable[Mapping[str, Any]],
        *,
        group_size: int = 1,
        quorum: int | None = None,
        priority: int = 1,
        deadline: float | None = None,
        group_ids: Sequence[str] | None = None,
        timeout: float = 60.0,
    ) -> list[str]:
        """Push one group of `group_size` trajectories per task; return their group ids.

        An error or interrupt says which groups were taken in: see `AsyncRun.submit`.
        """
        if isinstance(tasks, Iterator):
            tasks = list(tasks)  # here: the caller's code makes them, and may take its time
        submission = Submission()
        wishes = {"quorum": quorum, "priority": priority, "deadline_s": deadline}
        work = self._run.submit_noting(submission, tasks, group_size, group_ids, timeout_s=timeout, **wishes)
        try:
            return self._loop.call(work)
        except FabricError:
            raise
        except BaseException as error:
            submission.note_on(error)
            raise

    def groups(
        self,
        *,
        timeout: float | None = None,
        consumer: str = "trainer",
        count: int | None = None,
        keep: str | Callable[[Group], bool] | None = None,
        refill: Iterable[Mapping[str, Any]] | None = None,
        takeover: float = TAKEOVER_S,
    ) -> Groups:
        """Yield completed groups as they come: `for group in run.groups()`, or `with run.groups(count=16) as groups`.

        `keep` drops groups that teach nothing ("varied": those whose rewards are all equal), `refill` replaces them.
        `takeover` seconds after this process was heard of last, other consumers may have the groups in its hands.
        """
        found = self._run.groups(
            timeout=timeout, consumer=consumer, count=count, keep=keep, refill=refill, takeover=takeover
        )
        return Groups(self._loop, found)

    def peek(self, count: int = 10) -> list[Group]:
        """Return up to `count` complete groups that are not acknowledged, the oldest first, and take none of them."""
        return self._loop.call(self._run.peek(count))

    def publish(
        self,
        named: Any,
        version: int,
        group: Any = None,
        compares_on: ComparesOn = "auto",
        keyframe: bool = False,
        allow_nonfinite: bool = False,
    ) -> PublishReport:
        """Publish weights as `version`: a keyframe first, deltas later, bit-exact. group: of a sharded model.

        keyframe: put a keyframe of this version beside its delta, for new workers. allow_nonfinite: also publish new
        values that are NaN or infinite, which are refused else (WeightsNotFinite).
        """
        if group is None:
            named = given_of(named)  # here: the caller's code makes the tensors
        return self._loop.call(
            self._run.publish(
                named,
                version=version,
                group=group,
                compares_on=compares_on,
                keyframe=keyframe,
                allow_nonfinite=allow_nonfinite,
            )
        )

    def weights(self, version: int | None = None) -> Weights:
        """Return a published version (None: the head) as {name: array}, bit-exact."""
        return self._loop.call(self._run.weights(version))

    def head_version(self) -> int:
        """Return the newest published version; -1 before the first."""
        return self._loop.call(self._run.head_version())

    def report(self, **facts: Any) -> None:
        """Say how training goes (step, reward_mean, loss, …): shown on the page and in `rollfab status`."""
        self._loop.call(self._run.report(**facts))

    def compare(
        self,
        groups: Sequence[Group],
        logprobs: Sequence[Any],
        *,
        version: int | None = None,
        rule: AlarmRule | None = None,
    ) -> Agreement:
        """Show whether workers compute the probabilities that the trainer's model does, and name those that do not."""
        return self._loop.call(self._run.compare(groups, logprobs, version=version, rule=rule))

    def metrics(self, groups: Sequence[Group], *, prefix: str = "rollfab/") -> dict[str, float]:
        """Return a training step in numbers, once a step: `wandb.log(run.metrics(groups))`; docs/metrics.md."""
        return self._loop.call(self._run.metrics(groups, prefix=prefix))

    def cancel(self, group_id: str) -> bool:
        """Drop a group that is not needed any more."""
        return self._loop.call(self._run.cancel(group_id))

    def status(self) -> RunStatus:
        """Return the run in numbers."""
        return self._loop.call(self._run.status())


class Groups:
    """Completed groups; acknowledged one by one in a plain loop, all together at the end of a `with` block.

    See `groups.Groups`.
    """

    def __init__(self, loop: _Loop, groups: AsyncGroups) -> None:
        self._loop = loop
        self._groups = groups

    @property
    def dropped_count(self) -> int:
        """Groups that `keep` refused so far."""
        return self._groups.dropped_count

    @property
    def ended_why(self) -> str:
        """Why the iteration ended; empty before."""
        return self._groups.ended_why

    def __iter__(self) -> Iterator[Group]:
        return self

    def __next__(self) -> Group:
        before = self._groups.given_count
        try:
            return self._loop.call(self._groups.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
        except BaseException:  # an interrupt may come when the group is here, and the caller does not have it yet
            if self._groups.given_count != before:
                self._loop.call(self._groups.put_back_latest())
            raise

    def __enter__(self) -> Groups:
        self._loop.call(self._groups.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call(self._groups.__aexit__(kind, error, trace))


def name_of(work: Coroutine[Any, Any, Any]) -> str:
    """Return the name of a call for people: the method's, as a caller of this module wrote it."""
    name = str(getattr(work, "__qualname__", work)).removeprefix("Async")
    return {"Run.submit_noting": "Run.submit", "Groups.__anext__": "the next of Run.groups"}.get(name, name)


def connect(url: str | None = None, *, data_directory: str | Path | None = None) -> Fabric:
    """Connect to a broker, or start a private one.

    Args:
        url: redis://, rediss://, unix:// or redis+sentinel://; any node of a cluster. Default: the environment's
            ROLLFAB_URL; without it a private real server is started, and stopped when this connection is closed.
        data_directory: where a private server keeps its data; default: in a temporary directory, and says so.

    Raises:
        ConfigError: the URL is not one of ours.
        BrokerError: unreachable, refused, too old, or it would evict keys.
    """
    if data_directory is not None and not isinstance(data_directory, (str, Path)):
        raise ConfigError(f"data_directory is {type(data_directory).__name__}, expected a path")
    url = url or os.environ.get("ROLLFAB_URL") or None
    broker = None
    if isinstance(url, str) and data_directory is not None:
        log.warning(
            "connect() uses the broker at %s, and not data_directory, where one of its own would keep its data: to "
            "have one, give no URL, and do not set ROLLFAB_URL",
            mask_url(url),
        )
    if url is None:
        broker = EmbeddedBroker.start(Path(data_directory) if data_directory is not None else None)
        url = broker.url
        if data_directory is None:  # else it is clearly meant
            log.warning(
                "connect() was given no URL and ROLLFAB_URL is not set: this fabric is the program's own, at %s, and"
                " ends with it. To use one that runs, set ROLLFAB_URL to what `rollfab up` printed there",
                mask_url(url),
            )
    loop = _Loop()
    try:
        return Fabric(loop, loop.call(aio.connect(url)), broker)
    except BaseException:
        loop.close()
        if broker is not None:
            broker.stop()
        raise
