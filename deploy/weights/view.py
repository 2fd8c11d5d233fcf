"""Draws `rollfab weights`: tables for people, plain objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...fabric.contract.text import counted
from ...fabric.format.manifest import BROKER
from ...fabric.inspect.diff import TensorDiff
from ...fabric.inspect.inspection import Inspection, version_figures
from ...fabric.inspect.verify import Verified
from ..cli.printing import brief, cells, new_table
from .export import Exported

ROWS_SHOWN_MAX = 24  # of tensors and chunks, the largest first; --json has all
NAMES_SHOWN_MAX = 5


def version_table(rows: Sequence[dict[str, Any]]) -> Table:
    """`weights ls`."""
    figures = ("base", "bytes", "changed", "density", "B each", "floor", "smaller")
    table = new_table("version", "kind", *figures, "", left=("kind", ""))
    for row in rows:
        is_keyframe = row["density"] is None
        marks = ["head"] if row["is_head"] else []
        marks += [f"{row['holder_count']} holding"] if row["holder_count"] else []
        marks += [row["carrier"]] if row["carrier"] != BROKER else []
        table.add_row(
            *cells(
                str(row["version"]),
                row["kind"],
                "" if is_keyframe else str(row["base_version"]),
                brief(row["payload_bytes"]),
                "all" if is_keyframe else brief(row["changed_count"]),
                "" if is_keyframe else percent(row["density"]),
                _figure(row["bytes_per_changed"], ".2f"),
                _figure(row["of_entropy_floor"], ".0%"),
                _figure(row["dense_over_payload"], ".1f", "x"),
                ", ".join(marks),
            )
        )
    return table


def inspection_object(found: Inspection) -> dict[str, Any]:
    """`weights inspect --json`."""
    manifest = found.manifest
    specs = {spec.name: spec for spec in manifest.tensors.tensors}
    sizes = manifest.chunk_bytes.tolist()
    return {
        "run_id": manifest.run_id,
        "epoch": manifest.epoch,
        **asdict(version_figures(manifest)),
        "codec": manifest.codec,
        "layout_digest": manifest.layout_digest,
        "cut_digest": manifest.cut_digest,
        "state_digest": manifest.state_digest,
        "floor_bytes": found.floor.byte_count,
        "of_entropy_floor": found.of_entropy_floor,
        "modes": [{"mode": mode, **asdict(tally)} for mode, tally in sorted(found.modes.items())],
        "tensors": [
            {"name": name, "dtype": specs[name].dtype, "shape": specs[name].shape, **asdict(tally)}
            | {"element_count": specs[name].element_count, "density": tally.changed_count / specs[name].element_count}
            for name, tally in found.tensors.items()
        ],
        "chunks": [
            {"index": index, "bytes": size, "digest": digest}
            for index, (size, digest) in enumerate(zip(sizes, manifest.chunk_digests, strict=True))
        ],
    }


def inspection_parts(found: Inspection) -> list[RenderableType]:
    """`weights inspect`."""
    row = inspection_object(found)
    base = "" if row["density"] is None else f" from version {row['base_version']}"
    lines = [f"version {row['version']}, {row['kind']}{base}, epoch {row['epoch']}, codec {row['codec']}"]
    if row["carrier"] != BROKER:
        lines[0] += f", carried by {row['carrier']}"
    lines.append(f"layout {row['layout_digest']}  cut {row['cut_digest']}  state {row['state_digest']}")
    lines.append(f"{row['payload_bytes']:,} bytes, {_figure(row['dense_over_payload'], '.1f', 'x')} under dense")
    if row["density"] is not None:
        lines[-1] += f"; {row['changed_count']:,} of {row['element_count']:,} elements changed"
        lines[-1] += f" ({percent(row['density'])}), {_figure(row['bytes_per_changed'], '.3f')} bytes each"
    if row["of_entropy_floor"] is not None:
        lines.append(f"entropy floor {row['floor_bytes']:,.0f} bytes, {row['of_entropy_floor']:.1%} of the payload")
    tensors = sorted(row["tensors"], key=lambda each: -each["byte_count"])
    chunks = sorted(row["chunks"], key=lambda each: -each["bytes"])
    return [
        Text("\n".join(lines)),
        _modes(row["modes"]),
        _tensors(tensors[:ROWS_SHOWN_MAX]),
        *_rest(len(tensors), "tensors"),
        _chunks(chunks[:ROWS_SHOWN_MAX]),
        *_rest(len(chunks), "chunks"),
    ]


def verified_object(found: Verified) -> dict[str, Any]:
    """`weights verify --json`."""
    rows: dict[str, Any] = {
        name: [{"version": v, "kind": k} for v, k in getattr(found, name)] for name in ("checked", "unreached")
    }
    counts = {"byte_count": found.byte_count, "chunk_count": found.chunk_count, "block_count": found.block_count}
    rows |= {"unreadable": found.unreadable}
    return {"is_right": not found.faults, **rows, **counts, "faults": [asdict(fault) for fault in found.faults]}


def verified_parts(found: Verified) -> list[RenderableType]:
    """`weights verify`."""
    parts: list[RenderableType] = [
        Text(f"version {fault.version} ({fault.kind}): {fault.text}", style="red") for fault in found.faults
    ]
    if found.unreached:
        names = ", ".join(f"{version} ({kind})" for version, kind in found.unreached)
        parts.append(
            Text(f"not staged, because nothing right that is held leads to their base: {names}", style="yellow")
        )
    versions = {version for version, _ in found.checked}
    size = ", ".join(
        counted(count, noun)
        for count, noun in ((found.chunk_count, "chunk"), (found.block_count, "block"), (found.byte_count, "byte"))
    )
    if found.unreadable:
        names = ", ".join(map(str, found.unreadable))
        parts.append(Text(f"cannot be read by anybody who has nothing: version {names}", style="red"))
    verdict = (
        "all right" if not found.faults else f"not all right, {len(found.faults)} fault{'s' * (len(found.faults) > 1)}"
    )
    staged = f"{counted(len(found.checked), 'manifest')} of {counted(len(versions), 'version')} staged"
    parts.append(f"{verdict}: {staged}; right are {size}")
    return parts


def diff_object(
    tensors: Sequence[TensorDiff], missing: Sequence[str] = (), unknown: Sequence[str] = ()
) -> dict[str, Any]:
    """`weights diff --json`: tensors that differ, and sums over all."""
    counts = ("element_count", "changed_count", "one_step_count", "few_steps_count", "many_steps_count")
    total: dict[str, Any] = {name: sum(getattr(each, name) for each in tensors) for name in counts}
    changes = [each.change_max for each in tensors if each.change_max is not None]
    total |= {"tensor_count": len(tensors), "change_max": max(changes, default=None)}
    total["density"] = total["changed_count"] / max(1, total["element_count"])
    rows = [{**asdict(each), "density": each.density} for each in tensors if each.changed_count]
    return {"total": total, "tensors": rows, "missing": list(missing), "unknown": list(unknown)}


def diff_parts(found: dict[str, Any]) -> list[RenderableType]:
    """`weights diff`."""
    parts: list[RenderableType] = []
    for names, where in ((found["missing"], "only in the run"), (found["unknown"], "only in the checkpoint")):
        if names:
            more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
            parts.append(Text(f"{where}: {', '.join(names[:NAMES_SHOWN_MAX])}{more}", style="yellow"))
    if not found["tensors"]:
        parts.append(f"equal, bit by bit: {found['total']['tensor_count']} tensors")
        return parts
    headings = ("tensor", "changed", "density", "1 step", "2-3", "more", "largest")
    table = new_table(*headings, left=("tensor",))
    rows = sorted(found["tensors"], key=lambda each: -each["changed_count"])
    for row in rows[:ROWS_SHOWN_MAX]:
        table.add_row(*cells(row["name"], *_difference(row)))
    table.add_row(*cells(f"all {found['total']['tensor_count']}", *_difference(found["total"])), style="bold")
    return [*parts, table, *_rest(len(rows), "tensors that differ")]


def exported_parts(found: Exported) -> list[Text]:
    """`weights export`."""
    count = counted(found.tensor_count, "tensor")
    what = f"all {count}" if found.base_version is None else f"{count} that changed since version {found.base_version}"
    return [Text(f"{found.path}: version {found.version}, {what}, {found.file_bytes:,} bytes")]


def percent(fraction: float) -> str:
    """0.00964 as 0.964 %: three digits, as densities go from 0.02 % to 100 %."""
    return f"{100 * fraction:.3g} %"


def _difference(row: dict[str, Any]) -> list[str]:
    changed = max(1, row["changed_count"])
    steps = [f"{row[name] / changed:.1%}" for name in ("one_step_count", "few_steps_count", "many_steps_count")]
    counts = [brief(row["changed_count"]), percent(row["density"])]
    return [*counts, *steps, _figure(row["change_max"], ".3g")]


def _modes(rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table("mode", "blocks", "bytes", "changed", "density", left=("mode",))
    for row in rows:
        density = percent(row["changed_count"] / max(1, row["element_count"]))
        counts = (f"{row[name]:,}" for name in ("block_count", "byte_count", "changed_count"))
        table.add_row(*cells(row["mode"], *counts, density))
    return table


def _tensors(rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table("tensor", "dtype", "blocks", "bytes", "changed", "density", "B each", left=("tensor", "dtype"))
    for row in rows:
        each = row["byte_count"] / max(1, row["changed_count"])
        counts = (brief(row[name]) for name in ("block_count", "byte_count", "changed_count"))
        table.add_row(*cells(row["name"], row["dtype"], *counts, percent(row["density"]), f"{each:.2f}"))
    return table


def _chunks(rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table("chunk", "bytes", "digest", left=("digest",))
    for row in rows:
        table.add_row(*cells(str(row["index"]), f"{row['bytes']:,}", row["digest"]))
    return table


def _rest(count: int, what: str) -> list[Text]:
    return [Text(f"the {ROWS_SHOWN_MAX} largest of {count} {what}; --json has all")] if count > ROWS_SHOWN_MAX else []


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
