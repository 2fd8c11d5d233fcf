"""The versions that a store holds of a run, as far as they can be read.

An unreadable manifest, damaged or of another release, must not keep readers from the ways around it: it is logged, and
counts as not held.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..contract.errors import WireError
from ..format.manifest import WeightManifest
from ..ports.weights import WeightStore

log = logging.getLogger(__name__)

Name = tuple[int, str]  # version, kind


async def readable(store: WeightStore, run_id: str, names: Sequence[Name]) -> dict[Name, WeightManifest]:
    """Return the manifests that are held and can be read, by name; in that order."""
    try:
        found = await store.manifests(run_id, names)
    except WireError:
        found = [await _one(store, run_id, name) for name in names]
    rows = zip(names, found, strict=True)
    return {name: manifest for name, manifest in rows if manifest is not None and _is_named(manifest, run_id, name)}


async def weights_digest(store: WeightStore, run_id: str, version: int) -> str:
    """Tell what a version's weights are, in one text that is the same for the same weights; "": it is not held."""
    names = [name for name in await store.held(run_id) if name[0] == version]
    for manifest in (await readable(store, run_id, names)).values():
        return manifest.state_digest
    return ""


async def _one(store: WeightStore, run_id: str, name: Name) -> WeightManifest | None:
    try:
        (manifest,) = await store.manifests(run_id, [name])
    except WireError as error:
        _tell(run_id, name, str(error))
        return None
    return manifest


def _is_named(manifest: WeightManifest, run_id: str, name: Name) -> bool:
    """Tell whether the manifest has the name asked for: a damaged one would bring its weights under another version."""
    if (manifest.run_id, manifest.version, manifest.kind) == (run_id, *name):
        return True
    _tell(run_id, name, f"it says that it is version {manifest.version} ({manifest.kind}) of {manifest.run_id!r}")
    return False


def _tell(run_id: str, name: Name, error: str) -> None:
    facts = {"run_id": run_id, "version": name[0], "kind": name[1], "error": error}
    log.warning("weights.manifest_unreadable", extra=facts)
