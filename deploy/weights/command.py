"""`rollfab weights ls`, `inspect`, `verify`, `repair`, `diff`, `export`: looking at published weights, healing them,
and writing them to disk.

The work is done in fabric/inspect/ (inspection, verify, diff), repair.py and export.py, the tables are view.py's;
this file reads arguments, shows progress and chooses exit codes.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...fabric.contract.errors import BrokerError, ConfigError, InputError, WireError
from ...fabric.format.codec import Bits
from ...fabric.format.layout import Layout
from ...fabric.inspect.diff import TensorDiff, diff_tensor, diff_versions
from ...fabric.inspect.disk_delta import CHECKSUMS, ENCODINGS, XOR, XXH3, Form
from ...fabric.inspect.inspection import Inspection, inspect_version, version_figures
from ...fabric.inspect.safetensors import NAMES, open_checkpoint
from ...fabric.inspect.verify import Verified, verify
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.queue.push import no_such_run
from ...fabric.rules.weights.chain import readable_versions
from ...fabric.versions.held import readable
from ...fabric.versions.reader import fetch_bits
from ..cli.options import AsJson, Run, RunFirst, Url, find_run, need_url, with_ports
from ..cli.printing import Console, show_json
from ..cli.progress import progress
from ..cli.speech import say_nothing
from .export import Exported, export_delta, export_full
from .repair import repair
from .view import (
    diff_object,
    diff_parts,
    exported_parts,
    inspection_object,
    inspection_parts,
    verified_object,
    verified_parts,
    version_table,
)

if TYPE_CHECKING:
    from ...fabric.opened import RedisFabric

Version = Annotated[int, typer.Argument(help="A version that is held.", min=0, show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    weights = typer.Typer(no_args_is_help=True, help="Published weights: what is held, made of, right, different.")
    app.add_typer(weights, name="weights")
    for add in (_add_ls, _add_inspect, _add_verify, _add_repair, _add_diff, _add_export):
        add(weights)


async def list_versions(store: WeightStore, run_id: str) -> list[dict[str, Any]]:
    """Figures of every manifest into a version that can be read, oldest first, with is_head and holder_count.

    What the broker holds besides only leads receivers from older versions on.
    """
    head = await store.head(run_id)
    names = [name for name in await store.held(run_id) if name[0] <= head.version]
    at = [holder.version for holder in await store.holders(run_id)]
    found = (await readable(store, run_id, names)).values()
    there = readable_versions(head.version, [manifest.link for manifest in found])
    rows = [asdict(version_figures(each)) for each in found if each.version in there]
    return [
        {**row, "is_head": row["version"] == head.version, "holder_count": at.count(row["version"])} for row in rows
    ]


def _add_ls(weights: typer.Typer) -> None:
    @weights.command("ls", cls=RunFirst)
    def list_weights(run: Run = None, url: Url = None, json: AsJson = False) -> None:
        """List the versions that the broker holds, and who holds them."""

        async def work(ports: RedisFabric) -> tuple[str, list[dict[str, Any]]]:
            run_id = await _require_run(ports, run)
            return run_id, await list_versions(ports.weights, run_id)

        run_id, rows = with_ports(need_url(url), work)
        if json:
            show_json(rows)
        elif rows:
            Console().print(version_table(rows), highlight=False)
        else:
            say_nothing(f"nothing is published in run {run_id} yet: its trainer does, with run.publish")


def _add_inspect(weights: typer.Typer) -> None:
    @weights.command("inspect", cls=RunFirst)
    def inspect_weights(
        version: Version,
        kind: Annotated[
            str | None, typer.Option(help="delta, jump-8, jump-64 or keyframe. Default: delta, or what there is.")
        ] = None,
        run: Run = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Take a version apart: its manifest, its blocks by mode and by tensor, its distance to the entropy floor."""

        async def work(ports: RedisFabric) -> Inspection:
            run_id = await _require_run(ports, run)
            with progress(f"version {version}", unit="bytes", is_shown=not json) as tell:
                return await inspect_version(ports.weights, run_id, version, kind, progress=tell)

        found = with_ports(need_url(url), work)
        _show(inspection_object(found) if json else inspection_parts(found))


def _add_verify(weights: typer.Typer) -> None:
    @weights.command("verify", cls=RunFirst)
    def verify_weights(
        version: Annotated[int | None, typer.Argument(help="Default: the head.", min=0, show_default=False)] = None,
        is_all: Annotated[bool, typer.Option("--all", help="Every version that is held.")] = False,
        run: Run = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Fetch and check everything: chunks, blocks, states, and that all ways to a version lead to one state."""
        if is_all and version is not None:
            raise ConfigError("verify takes a version or --all, not both")

        async def work(ports: RedisFabric) -> Verified:
            run_id = await _require_run(ports, run)
            chosen = None if is_all else version if version is not None else (await ports.weights.head(run_id)).version
            with progress("verifying", unit="bytes", is_shown=not json) as tell:
                return await verify(ports.weights, run_id, chosen, progress=tell)

        found = with_ports(need_url(url), work)
        _show(verified_object(found) if json else verified_parts(found))
        raise typer.Exit(1 if found.faults else 0)


def _add_repair(weights: typer.Typer) -> None:
    @weights.command("repair", cls=RunFirst)
    def repair_weights(
        timeout: Annotated[float, typer.Option(help="Seconds to wait for the publisher that lives.", min=0)] = 60.0,
        run: Run = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Have damage to published weights healed: by the trainer that lives; without one, as far as can be from here.

        Exits with 0 once the head, and all that is held, can be read, and with 1 where something stays damaged.
        """

        told: list[str] = []

        def say(text: str) -> None:
            told.append(text)
            if not json:
                Console().print(text, highlight=False, soft_wrap=True)

        async def work(ports: RedisFabric) -> tuple[str, bool]:
            run_id = await _require_run(ports, run)
            with progress("looking at all that is held", unit="bytes") as tell:
                return run_id, await repair(ports.weights, run_id, say=say, progress=tell, timeout_s=timeout)

        run_id, is_right = with_ports(need_url(url), work)
        if json:
            show_json({"run_id": run_id, "is_right": is_right, "done": told})
        raise typer.Exit(0 if is_right else 1)


def _add_diff(weights: typer.Typer) -> None:
    @weights.command("diff", cls=RunFirst)
    def diff_weights(
        first: Annotated[int, typer.Argument(metavar="FROM", help="A version.", min=0, show_default=False)],
        second: Annotated[
            int | None, typer.Argument(metavar="[TO]", help="Another version.", min=0, show_default=False)
        ] = None,
        checkpoint: Annotated[
            Path | None, typer.Option(help="Instead of TO: a .safetensors file, or a directory of them.", exists=True)
        ] = None,
        run: Run = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Compare two versions, or one with a checkpoint: per tensor how many elements differ, and by how much."""
        if (second is None) == (checkpoint is None):
            raise ConfigError("diff takes a second version or --checkpoint, and not both")

        async def work(ports: RedisFabric) -> dict[str, Any]:
            run_id = await _require_run(ports, run)
            with progress("comparing", is_shown=not json):
                if second is not None:
                    rows = diff_object(await diff_versions(ports.weights, run_id, first, second))
                else:
                    assert checkpoint is not None
                    there = await diff_checkpoint(ports.weights, run_id, first, checkpoint)
                    rows = diff_object(there.tensors, missing=there.missing, unknown=there.unknown)
            return {"run_id": run_id, "from": first, "to": second, **rows}

        found = with_ports(need_url(url), work)
        _show(found if json else diff_parts(found))


def _add_export(weights: typer.Typer) -> None:
    @weights.command("export", cls=RunFirst)
    def export_weights(
        version: Version,
        directory: Annotated[Path, typer.Argument(help="Where its directory weight_v… is made.", show_default=False)],
        delta_from: Annotated[
            int | None,
            typer.Option(help="Write the change from this version. Engines go one by one: the version before.", min=0),
        ] = None,
        encoding: Annotated[str, typer.Option(help=f"Of a delta: {' or '.join(ENCODINGS)}.")] = XOR,
        checksum: Annotated[str, typer.Option(help=f"Of a delta: {', '.join(CHECKSUMS)}.")] = XXH3,
        files_from: Annotated[
            Path | None,
            typer.Option(
                help="A checkpoint whose config and tokenizer go beside full weights.", exists=True, file_okay=False
            ),
        ] = None,
        run: Run = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Write a version as a checkpoint in safetensors, or as a delta that slime, miles and Stitch read."""
        if delta_from is not None and files_from is not None:
            raise ConfigError("export takes --delta-from or --files-from, not both: a delta has weights alone")

        async def work(ports: RedisFabric) -> tuple[str, Exported]:
            run_id = await _require_run(ports, run)
            with progress(f"writing version {version}", is_shown=not json):
                if delta_from is None:
                    return run_id, await export_full(ports.weights, run_id, version, directory, files_from)
                form = Form(version=version, base_version=delta_from, encoding=encoding, checksum=checksum)
                return run_id, await export_delta(ports.weights, run_id, form, directory)

        run_id, found = with_ports(need_url(url), work)
        _show({"run_id": run_id, **asdict(found)} if json else exported_parts(found))


async def _require_run(ports: RedisFabric, named: str | None) -> str:
    """Return the run's name; None named: that of the only run.

    Raises:
        RunUnknown: nothing was ever published or pushed under that name. WireError: its head cannot be read.
    """
    run = named or (await find_run(ports, None)).run_id
    try:
        head = await ports.weights.head(run)
    except WireError:
        await _require_head(ports, run)
        raise
    if head.version < 0:
        await _require_head(ports, run)
    if head.epoch == 0 and run not in (runs := await ports.board.runs()):
        raise no_such_run(run, known=runs)
    return run


async def _require_head(ports: RedisFabric, run: str) -> None:
    """Raises WireError: a row of the head cannot be read, so that it looks as if nothing were published."""
    try:
        found = (await ports.board.survey_rows([f"{run}.w:head"])).bad_rows
    except BrokerError:  # another user than the operator's may not look
        return
    for row in found:
        what = f"row {row.row!r} of table {row.table}" if row.row else f"table {row.table}"
        raise WireError(
            f"the head of run {run!r} cannot be read: {what}: {row.problem}. Remove it: `{row.step}`; then have its "
            "trainer publish a keyframe"
        )


def _show(found: dict[str, Any] | list[Any]) -> None:
    if isinstance(found, dict):
        show_json(found)
        return
    console = Console()
    for part in found:
        console.print(part, highlight=False)


# ---------------------------------------------------------------- checkpoint
#
# Published weights compared with a checkpoint on disk, bit by bit.


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """tensors: those on both sides. missing: names that only the run has. unknown: names that only the files have."""

    tensors: list[TensorDiff]
    missing: list[str]
    unknown: list[str]


async def diff_checkpoint(store: WeightStore, run_id: str, version: int, path: Path) -> CheckpointDiff:
    """Compare a version with a checkpoint on disk, bit by bit.

    Raises:
        InputError: as read_checkpoint, or no tensor is on both sides.
        VersionUnknown, ChainBroken, DigestMismatch: as fetch_bits.
    """
    manifest, bits = await fetch_bits(store, run_id, version)
    specs = manifest.tensors.tensors
    there, unknown = await asyncio.to_thread(read_checkpoint, path, manifest.tensors)
    both = [spec for spec in specs if spec.name in there]
    if not both:
        has = ", ".join(unknown[:3]) or "nothing"
        raise InputError(
            f"{path} has none of the tensors of run {run_id!r}: it has {has}, published is {specs[0].name}, …; give a"
            " checkpoint of that model",
            path=str(path),
        )
    rows = [await asyncio.to_thread(diff_tensor, spec, bits[spec.name], there[spec.name]) for spec in both]
    return CheckpointDiff(rows, [spec.name for spec in specs if spec.name not in there], unknown)


def read_checkpoint(path: Path, layout: Layout) -> tuple[dict[str, Bits], list[str]]:
    """The tensors of `layout` in a .safetensors file, or in a directory of them, and the names of others there.

    Returns:
        name → flat stored bits, read only; tensors that are not there are left out.

    Raises:
        InputError: as open_checkpoint, or a tensor has another dtype or shape.
    """
    specs = {spec.name: spec for spec in layout.tensors}
    found: dict[str, Bits] = {}
    others: list[str] = []
    for name, tensor in open_checkpoint(path).items():
        spec = specs.get(name)
        if spec is None:
            others.append(name)
        elif (tensor.dtype, tensor.shape) != (NAMES[spec.dtype], spec.shape):
            raise InputError(
                f"{tensor.file} has {name!r} as {tensor.dtype}{list(tensor.shape)}, published is {spec}: only stored"
                " bits of one form can be compared; save the checkpoint in the published dtype",
                name=name,
            )
        else:
            found[name] = tensor.bits()
    return found, sorted(others)
