"""Fuzz every table of the broker: python -m tests.fuzz.fuzz_tables [--seconds 600] [TABLE …]. See tables.py."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.fuzz.tables import WAIT_S, fuzz_table, tables, world


def main() -> int:
    """Exit code 1: a process ended, a loop stopped, or a good row was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each table")
    parser.add_argument("--wait", type=float, default=WAIT_S, help="seconds for good groups to arrive in the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*", metavar="TABLE", help="those whose name or role holds one of these words")
    given = parser.parse_args()
    chosen = [table for table in tables() if not given.names or any(name in str(table) for name in given.names)]
    failed = 0
    logging.disable()  # the trainer here warns of every bad row that it passes over
    with tempfile.TemporaryDirectory(prefix="rollfab-fuzz-") as folder, world(Path(folder)) as fabric:
        for table in chosen:
            outcome = fuzz_table(fabric, table, given.seconds, given.seed, wait_s=given.wait)
            failed += bool(outcome.problems)
            print(outcome, flush=True)
    print(f"{len(chosen)} tables, {failed} of them with findings")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
