"""`deploy/gpu/run`: the acceptance run, step by step; needs nothing but Python until a step does.

- Each step is a process of its own with a time limit (child.py): one that fails or hangs stops no other.
- Results are JSON lines, one a step, written when it ends: a run that was cut off goes on with --resume.
- A step whose limit does not fit into what is left of the budget is not begun; --resume begins it later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from .child import FAILED, PASSED, SKIPPED_STATE, TIMED_OUT, Outcome, run_child
from .plan import GPU, MPS, STEPS, VLLM, Step

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("build/gpu/results.jsonl")
IMPORT_S = 300.0  # the first import of vLLM from a cold disk
TEXT_MAX = 400
FINAL = (PASSED, FAILED, TIMED_OUT)  # what --resume does not run again


class Run:
    """One call. options: as parsed; steps: of the plan, in order."""

    def __init__(self, options: argparse.Namespace, steps: Sequence[Step]) -> None:
        self._options = options
        self._steps = steps
        self._began_s = time.monotonic()
        self._results: Path = options.results
        self._results.parent.mkdir(parents=True, exist_ok=True)

    def run(self) -> list[dict[str, Any]]:
        """Run the steps; returns the records of all that have one by now, in the order of the plan."""
        records = {record["step"]: record for record in read_records(self._results)} if self._options.resume else {}
        with self._results.open("a" if self._options.resume else "w", encoding="utf-8") as lines:
            for step in self._steps:
                if records.get(step.name, {}).get("state") in FINAL:
                    continue
                outcome = self._outcome(step)
                records[step.name] = self._record(step, outcome)
                lines.write(json.dumps(records[step.name]) + "\n")
                lines.flush()
                print(f"{step.name:>22}  {outcome.state:<9}  {outcome.seconds:>7.1f} s", flush=True)
        return [records[step.name] for step in self._steps if step.name in records]

    def _outcome(self, step: Step) -> Outcome:
        limit_s = min(step.limit_s, self._options.limit_s or step.limit_s)
        reason = self._missing(step) or self._budget(limit_s)
        if reason:
            return Outcome(state=SKIPPED_STATE, seconds=0.0, reason=reason)
        report = self._beside(step, "xml") if step.tests else None
        return run_child(
            [sys.executable, *self._words(step, report)],
            limit_s=limit_s,
            log=self._beside(step, "log"),
            environment=self._environment(step.site),
            report=report,
        )

    def _budget(self, limit_s: float) -> str:
        if self._options.budget_s is None:
            return ""
        left_s = self._options.budget_s - (time.monotonic() - self._began_s)
        return "" if limit_s <= left_s else f"{left_s:.0f} s are left, it may take {limit_s:g}: go on with --resume"

    def _words(self, step: Step, report: Path | None) -> list[str]:
        if report is None:
            sizes = ["--tiny"] if self._options.sizes == "tiny" else []
            words = ["--device", self._options.device, *sizes, *step.words]
            module = step.module if "." in step.module else f"{__package__}.steps.{step.module}"
            return ["-m", module, *words]
        chosen = ["-k", step.deselect] if step.deselect and self._options.device != "cpu" else []
        return ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen, *step.tests]

    def _environment(self, site: str) -> dict[str, str]:
        """Return our environment, with the folders of packed wheels that a step sees, and the tree before them."""
        places = [ROOT / "src", ROOT]
        if self._options.site is not None:
            places += [self._options.site / site, self._options.site / "common"]
        path = [str(place) for place in places] + [os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "ROLLFAB_TEST_DEVICE": self._options.device,
        }

    def _beside(self, step: Step, suffix: str) -> Path:
        return self._results.resolve().parent / f"{step.name}.{suffix}"

    # ---- what is there

    def _missing(self, step: Step) -> str:
        """Say why a step can show nothing here; "": it can."""
        if GPU in step.needs and self._options.device == "cpu":
            return "it needs a GPU"
        if MPS in step.needs and shutil.which("nvidia-cuda-mps-control") is None:
            return "it needs MPS: no nvidia-cuda-mps-control is on the path"
        return self._no_vllm if VLLM in step.needs else ""

    @cached_property
    def _no_vllm(self) -> str:
        """The reason why vLLM does not import; looked at once, in a process of its own."""
        found = run_child(
            [sys.executable, "-c", f"import vllm.v1.engine.async_llm\nprint({TOLD!r})"],
            limit_s=IMPORT_S,
            log=self._results.resolve().parent / "import-vllm.log",
            environment=self._environment("vllm"),
        )
        return "" if found.state == PASSED else f"vLLM does not import: {found.reason}"

    def _record(self, step: Step, outcome: Outcome) -> dict[str, Any]:
        where = {"device": self._options.device, "sizes": self._options.sizes, "python": platform.python_version()}
        made = {**asdict(outcome), "seconds": round(outcome.seconds, 1)}
        return {"step": step.name, **made, **where, "shows": step.shows}


TOLD = 'figures: {"imports": true}'


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a file of results, a line that was cut off left out; no records if there is no file."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def line_of(record: Mapping[str, Any]) -> str:
    """Write a record in a line, for people."""
    figures = ", ".join(f"{name} {_short(value)}" for name, value in record["figures"].items())
    text = "; ".join(filter(None, [record["reason"], figures]))
    return f"{record['step']:>22}  {record['state']:<9}  {record['seconds']:>7.1f} s  {text[:TEXT_MAX]}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, dict) else str(value)


def chosen(only: str, steps: Sequence[Step] = STEPS) -> list[Step]:
    """Choose steps by name, or by pattern (vllm-*); all for "".

    Raises:
        SystemExit: there is none of that name.
    """
    names = [word.strip() for word in only.split(",") if word.strip()]
    for name in names:
        if not any(fnmatch(step.name, name) for step in steps):
            raise SystemExit(f"no step is called {name}; there are {', '.join(step.name for step in steps)}")
    return [step for step in steps if not names or any(fnmatch(step.name, name) for name in names)]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="deploy/gpu/run", description="The acceptance run on a GPU; see docs/gpu.md.")
    add = parser.add_argument
    add("--device", default="cuda:0", help="torch's name of it; cpu: a rehearsal")
    add("--sizes", choices=("tiny", "full"), help="of models and loads; by default tiny on a CPU, else full")
    add("--only", default="", metavar="NAMES", help="steps by name or pattern (vllm-*), with commas between")
    add("--list", action="store_true", help="show the steps and their limits, and run none")
    add("--resume", action="store_true", help="go on: leave out what has passed, failed or timed out")
    add("--budget-s", type=float, help="begin no step whose limit does not fit into what is left of it")
    add("--limit-s", type=float, help="a lower limit for every step")
    add("--results", type=Path, default=RESULTS, help=f"JSON lines, logs beside it; by default {RESULTS}")
    add("--site", type=Path, help="where deploy/gpu/pack has unpacked its parts")
    options = parser.parse_args(words)
    options.sizes = options.sizes or ("tiny" if options.device == "cpu" else "full")
    options.site = options.site and options.site.resolve()
    return options


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """Write all records, for people."""
    lines = [line_of(record) for record in records]
    counts: dict[str, int] = {}
    for record in records:
        counts[record["state"]] = counts.get(record["state"], 0) + 1
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items())])


def main(words: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run; returns 1 when a step failed or timed out."""
    options = parse(words)
    wanted = chosen(options.only, steps)
    if options.list:
        print("\n".join(f"{step.name:>22}  {step.limit_s:>4g} s  {step.shows}" for step in wanted))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by which a step's processes are ended, too
    records = Run(options, wanted).run()
    print(f"\n{table(records)}\n{options.results}")
    return int(any(record["state"] in (FAILED, TIMED_OUT) for record in records))


if __name__ == "__main__":
    sys.exit(main())
