"""Every table of the broker that a role may write, given rows that are none, by that role's own user, while real
processes read it.

    make fuzz                       ten minutes a table       make fuzz SECONDS_A_TABLE=30 TABLES="runs counters"
    make fuzz TOGETHER=12           twelve tables at once, in the same fabric

- Good groups are pushed all the time, before and beside the bad rows. In the end every one of them has arrived whole,
  no process has ended, and no loop has stopped: a new group comes back, and the api and the status answer.
- After a finding the next tables get a new fabric, and of several that were written at once each half is tried again,
  with the same rows, until the table is found; a finding that no half has alone needs several tables.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import redis

from rollfab.fabric.contract.errors import FabricError
from tests.fuzz.tables import Table, tables, write_row
from tests.fuzz.world import PUSH_S, WAIT_S, World, world

PACE_S = 0.01  # between two bad rows: the readers must come to read them


@dataclass
class Rows:
    """How many rows were written into a table."""

    table: Table
    written: int = 0
    refused: int = 0
    timed_out: int = 0

    def __str__(self) -> str:
        late = f", {self.timed_out} timed out" if self.timed_out else ""
        return f"{self.table!s:32} {self.written:6} rows written, {self.refused:5} refused{late}"


@dataclass
class Outcome:
    """What came of the tables that were written at once."""

    rows: list[Rows]
    good_groups: int = 0
    bad_rows_named: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        end = "; ".join(self.problems) or "well"
        named = f"{self.bad_rows_named:3} named, {self.good_groups:3} good groups: {end}"
        if len(self.rows) == 1:
            return f"{self.rows[0]}, {named}"
        return "\n".join([*map(str, self.rows), f"{len(self.rows)} tables at once: {named}"])


def fuzz_batch(
    at: World, batch: Sequence[Table], seconds: float, seed: int, *, wait_s: float = WAIT_S, pace_s: float = PACE_S
) -> Outcome:
    """Write bad rows into all of these at once for so long, or until a process ends; then look."""
    outcome, before = Outcome([Rows(table) for table in batch]), len(at.pushed)
    is_over, until_s = threading.Event(), time.monotonic() + seconds
    with ThreadPoolExecutor(len(batch)) as pool:
        writers = [pool.submit(_write, at, rows, seed, pace_s, is_over) for rows in outcome.rows]
        try:
            while time.monotonic() < until_s and not at.ended():
                at.push()
                at.take(min(PUSH_S, max(0.01, until_s - time.monotonic())))
        except Exception:  # noqa: BLE001 - whatever it is, the trainer is one of those who must go on
            outcome.problems.append(f"the trainer failed:\n{traceback.format_exc()}")
        finally:
            is_over.set()
        for writer in writers:
            writer.result()
    with contextlib.suppress(FabricError):
        at.push()
    outcome.problems += at.problems(wait_s)
    with contextlib.suppress(Exception):
        outcome.bad_rows_named = len(at.named())
        at.tidy()
    outcome.good_groups = len(at.pushed) - before
    return outcome


def _write(at: World, rows: Rows, seed: int, pace_s: float, is_over: threading.Event) -> None:
    dice, number = random.Random(f"{seed} {rows.table}"), 0
    with at.broker.client(rows.table.role) as client:
        while not is_over.wait(pace_s):
            try:
                write_row(at.broker.admin, client, rows.table, at.victim, dice, number)
                rows.written += 1
            except redis.exceptions.ResponseError:
                rows.refused += 1
            except (
                redis.exceptions.TimeoutError
            ):  # the machine has too much to do; whether the fabric lives is seen below
                rows.timed_out += 1
            number += 1


def fuzz_all(
    directory: Path, batches: Sequence[Sequence[Table]], seconds: float, seed: int, wait_s: float
) -> Iterator[Outcome]:
    """Each batch, and the halves of those with findings."""
    waiting, count = list(batches), 0
    while waiting:
        count += 1
        place = directory / f"fabric-{count}"
        place.mkdir()
        with world(place) as fabric:
            while waiting:
                batch = waiting.pop(0)
                outcome = fuzz_batch(fabric, batch, seconds, seed, wait_s=wait_s)
                yield outcome
                if outcome.problems:
                    half = len(batch) // 2
                    waiting[:0] = [part for part in (batch[:half], batch[half:]) if half]
                    break


def main() -> int:
    """Exit code 1: a process ended, a loop stopped, or a good row was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.fuzz_tables")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each table")
    parser.add_argument("--together", type=int, default=1, help="tables at once")
    parser.add_argument("--wait", type=float, default=WAIT_S, help="seconds for good groups to arrive in the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="new; keeps the logs of the processes")
    parser.add_argument("names", nargs="*", metavar="TABLE", help="those whose name or role holds one of these words")
    given = parser.parse_args()
    chosen = [table for table in tables() if not given.names or any(name in str(table) for name in given.names)]
    batches = [chosen[start : start + given.together] for start in range(0, len(chosen), given.together)]
    failed = 0
    logging.disable()  # the trainer here warns of every bad row that it passes over
    with contextlib.ExitStack() as stack:
        folder = given.directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollfab-fuzz-")))
        folder.mkdir(exist_ok=given.directory is None, parents=True)
        for outcome in fuzz_all(folder, batches, given.seconds, given.seed, given.wait):
            failed += bool(outcome.problems)
            print(outcome, flush=True)
    print(f"{len(chosen)} tables, {failed} findings")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
