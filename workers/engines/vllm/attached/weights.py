"""Changing the weights of a vLLM server, by whichever way it offers.

- "deltas": it runs our weight-transfer backend. Where it shares our memory (this machine, this user), its ranks stage
  while it generates, as those of a vLLM of our own do (inplace/by_rank.py); else parcels travel to it as bytes, and are
  written as they come: it has no other way to them.
- "reload": its development mode loads a whole checkpoint that we write into a directory that both see.
- "fixed": it keeps what it has. Those very weights are accepted, everything else is refused.
- For "reload" and "fixed" the weights are known from the checkpoint files that the server was started with.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .....fabric.contract.errors import EngineError, EngineUnsupported, FabricError, InputError, WeightError
from .....fabric.format.layout import Layout
from .....fabric.inspect.safetensors import NAMES, StoredTensor, open_checkpoint, save_bits
from ...base import Bits, Writes
from ..common.arena import Mirror, pack, posted
from ..common.layout import checkpoint_layout
from ..common.names import BACKEND
from ..common.shared import aside
from .client import Client
from .model import ServedModel

log = logging.getLogger(__name__)

UPDATE_S = 900.0  # loading a large model
DEVELOPMENT = "--host 127.0.0.1, VLLM_SERVER_DEV_MODE=1 in its environment"
START_WITH = (
    f"""start the server with --weight-transfer-config '{{"backend":"{BACKEND}"}}', {DEVELOPMENT}, and rollfab"""
    " installed beside it"
)


class ServerWeights(Protocol):
    """The weights of a server. kind: as in Abilities. notes: what is missing. layout: what it takes."""

    kind: str
    notes: tuple[str, ...]
    layout: Layout

    async def write(self, writes: Writes, version: int) -> None: ...

    async def read(self, into: Mirror) -> None: ...

    async def close(self) -> None: ...


async def find_weights(client: Client, model: ServedModel) -> ServerWeights:
    """Find the best way to change the server's weights, by trying.

    Raises:
        EngineUnsupported: it computes with quantised weights, which no published version has.
    """
    if model.quantization is not None:
        raise EngineUnsupported(
            f"vLLM server {client.url} computes with quantised weights ({model.quantization}), and no published version"
            " has those: start it with the unquantised model, and without --quantization",
            quantization=model.quantization,
        )
    if model.info is None:
        note = f"its weights cannot be changed, as it is not in development mode: {START_WITH}"
        return FixedWeights(client, model, (note,))
    if model.moves_experts:
        note = (
            "its weights cannot be changed, as it moves experts between ranks: start the server without --enable-eplb"
        )
        return FixedWeights(client, model, (note,))
    deltas = DeltaWeights(client, model, await asyncio.to_thread(checkpoint_layout, model.root, model.dtype))
    try:
        await deltas.open()
        return deltas
    except EngineError as error:
        note = f"whole checkpoints are loaded for every version instead of deltas ({error}): {START_WITH}"
    reload = ReloadedWeights(client, model, (note,))
    try:
        await reload.open()
        return reload
    except (FabricError, OSError) as error:
        await reload.close()
        note = f"its weights cannot be changed ({error}): {START_WITH}"
        return FixedWeights(client, model, (note,))


class FixedWeights:
    """Keeps the weights of the server's own checkpoint, for ever."""

    kind = "fixed"

    def __init__(self, client: Client, model: ServedModel, notes: tuple[str, ...]) -> None:
        self._client = client
        self._model = model
        self.notes = notes
        self.layout = model.layout

    async def write(self, writes: Writes, version: int) -> None:
        """Accept the weights that the server has already. Raises WeightError: they differ."""
        other = await asyncio.to_thread(self._first_other, writes)
        if other is not None:
            raise WeightError(
                f"version {version} was not applied: vLLM server {self._client.url} keeps the weights that it was"
                f" started with, and {other!r} differs from them. To have it take weights, {START_WITH}",
                version=version,
                name=other,
            )

    def _first_other(self, writes: Writes) -> str | None:
        with CheckpointFiles(self._model.checkpoint_files(), self.layout) as files:
            for name, (indices, values) in writes.items():
                own = files.bits(name)
                if not np.array_equal(own if indices is None else own[indices], values):
                    return name
        return None

    async def read(self, into: Mirror) -> None:
        """Read the stored bits out of the checkpoint files."""
        await asyncio.to_thread(_read_files, self._model, self.layout, into.bits)

    async def close(self) -> None:
        pass


def _read_files(model: ServedModel, layout: Layout, into: Mapping[str, Bits]) -> None:
    with CheckpointFiles(model.checkpoint_files(), layout) as files:
        for name, bits in into.items():
            bits[:] = files.bits(name)


class ReloadedWeights:
    """Loads a whole checkpoint for every version.

    A load that fails leaves the server's model torn (vLLM has taken it apart by then); only a complete one mends it.
    """

    kind = "reload"

    def __init__(self, client: Client, model: ServedModel, notes: tuple[str, ...]) -> None:
        self._client = client
        self._model = model
        self.notes = notes
        self.layout = model.layout
        self._directory: Path | None = None
        self._bits: dict[str, Bits] = {}

    async def open(self) -> None:
        """Check that the server sees our directory: have it load one small tensor that it has.

        Raises:
            EngineError: it does not; it is as it was.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="rollfab-weights-"))
        self._directory.chmod(0o711)  # the server may be another user's: it reads a name that it knows, and lists none
        bits = {spec.name: np.empty(spec.element_count, spec.bits_dtype) for spec in self.layout.tensors}
        await asyncio.to_thread(_read_files, self._model, self.layout, bits)
        norms = [spec for spec in self.layout.tensors if len(spec.shape) == 1 and "norm" in spec.name]
        part = Layout((norms[0],)) if norms else self.layout
        try:
            await self._load(part, bits, "trial")
        except EngineError as error:
            await self._reload(self._model.root)
            raise EngineError(f"it does not load checkpoints from {self._directory}: {error}") from error
        self._bits = bits
        if part is not self.layout:  # an earlier worker may have left any version there
            await self._load(self.layout, bits, "whole")

    async def write(self, writes: Writes, version: int) -> None:
        """Write a checkpoint and have the server load it. Raises EngineError: it could not, and its model is torn."""
        changed = dict(self._bits)
        for name, (indices, values) in writes.items():
            changed[name] = changed[name].copy()
            changed[name][slice(None) if indices is None else indices] = values
        await self._load(self.layout, changed, f"v{version}")
        self._bits = changed

    async def _load(self, layout: Layout, bits: Mapping[str, Bits], name: str) -> None:
        assert self._directory is not None, "the weights are not open"
        directory = self._directory / f"{name}-{secrets.token_hex(16)}"
        try:
            await asyncio.to_thread(_save, directory, layout, bits)
        except OSError as error:
            raise WeightError(f"no room for a checkpoint in {directory}: {error}. Set TMPDIR elsewhere") from error
        try:
            await self._reload(str(directory))
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _reload(self, path: str) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._client.ask("POST", "/collective_rpc", call, timeout_s=UPDATE_S)
        await _forget_prefixes(self._client)

    async def read(self, into: Mirror) -> None:
        """Read what was loaded last."""
        for name, bits in into.bits.items():
            bits[:] = self._bits[name]

    async def close(self) -> None:
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)


def _save(directory: Path, layout: Layout, bits: Mapping[str, Bits]) -> None:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)  # whatever the umask is: its name is the secret
    save_bits(directory / "model.safetensors", layout, bits)


class DeltaWeights:
    """Writes parcels in place. layout: in the dtype in which the server computes."""

    kind = "deltas"

    def __init__(self, client: Client, model: ServedModel, layout: Layout) -> None:
        self._client = client
        self._model = model
        self.layout = layout
        self.notes: tuple[str, ...] = ()
        self._shares_memory = False
        self._bits: dict[str, Bits] = {}  # of a server that does not share our memory: what it was given last

    async def open(self) -> None:
        """Set up weight transfer. Raises EngineError: the server has another backend, or none."""
        await self._client.ask("POST", "/init_weight_transfer_engine", {"init_info": {"layout": self.layout.rows()}})
        await self._client.call("POST", "/finish_weight_update", {})  # of a client that ended in the middle of one
        try:
            await self._send(pack({}), by_path=True)
            self._shares_memory = True
        except EngineError:
            bits = {spec.name: np.empty(spec.element_count, spec.bits_dtype) for spec in self.layout.tensors}
            await asyncio.to_thread(_read_files, self._model, self.layout, bits)
            await self.write({name: (None, each) for name, each in bits.items()}, -1)  # whatever it held before us
            await self.forget_prefixes()
            self._bits = bits
            self.notes = (
                "it does not share this process' memory: weights travel to it over HTTP, whole parcels at a time",
            )

    async def write(self, writes: Writes, version: int) -> None:
        size = sum(values.nbytes for _, values in writes.values())
        await self._send(await aside(size, pack, writes), by_path=self._shares_memory, version=version)
        for name, (indices, values) in writes.items() if self._bits else ():
            self._bits[name][slice(None) if indices is None else indices] = values

    async def _send(self, parcel: memoryview, *, by_path: bool, version: int | None = None) -> None:
        if not by_path:
            await self.update({"data": base64.b64encode(parcel).decode()}, version)
            return
        async with posted(parcel) as path:
            await self.update({"parcel": path}, version)

    @property
    def rank_count(self) -> int:
        """Processes that hold parts of the model, see by_rank.RankDoor."""
        parallel = (self._model.info or {}).get("parallel_config") or {}
        is_one = self._shares_memory and parallel.get("data_parallel_size") == 1
        return int(parallel.get("world_size") or 0) if is_one else 0

    async def forget_prefixes(self) -> None:
        """Have the server forget prefixes. Raises EngineError: it did not."""
        await _forget_prefixes(self._client)

    async def update(self, information: dict[str, Any], version: int | None = None) -> None:
        """Make one weight update (transfer.UpdateInfo). Raises EngineError."""
        name = {} if version is None else {"weight_version": str(version)}
        await self._client.ask("POST", "/start_weight_update", timeout_s=UPDATE_S)
        try:
            await self._client.ask("POST", "/update_weights", {"update_info": information}, timeout_s=UPDATE_S)
        except EngineError:
            with contextlib.suppress(EngineError):  # of the ranks that had nothing against it
                await self._client.call("POST", "/finish_weight_update", {})
            raise
        await self._client.ask("POST", "/finish_weight_update", name, timeout_s=UPDATE_S)

    async def read(self, into: Mirror) -> None:
        """Read what the server computes with, where it shares our memory; else what it was given last."""
        if self._shares_memory:
            await self.update({"export": str(into.path)})
        else:
            for name, bits in into.bits.items():
                bits[:] = self._bits[name]

    async def close(self) -> None:
        pass


async def _forget_prefixes(client: Client) -> None:
    data = await client.ask("POST", "/reset_prefix_cache?reset_running_requests=true")
    if not data["success"]:
        raise EngineError(f"vLLM server {client.url} still holds prefixes that older weights computed: restart it")


# ---------------------------------------------------------------- checkpoint files
#
# The checkpoint files of one model, read as stored bits of a layout.


class CheckpointFiles:
    """The files of one model; a context manager, because the arrays that it gives out are views of its maps."""

    def __init__(self, paths: Sequence[Path], layout: Layout) -> None:
        """Raises EngineError: a file is not of this format."""
        self._specs = {spec.name: spec for spec in layout.tensors}
        self._tensors: dict[str, StoredTensor] = {}
        try:
            for path in paths:
                self._tensors |= open_checkpoint(path)
        except InputError as error:
            raise EngineError(f"checkpoint {error.message}", **error.facts) from error

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tensors.clear()  # the maps end with the last array of them

    def bits(self, name: str) -> Bits:
        """Return the stored bits of a tensor of the layout, flat, read only.

        Raises:
            EngineError: the files have no such tensor, or in another form.
        """
        spec, tensor = self._specs[name], self._tensors.get(name)
        if tensor is None:
            raise EngineError(f"the checkpoint files have no tensor {name!r}", name=name)
        if (tensor.dtype, tensor.shape) != (NAMES[spec.dtype], spec.shape):
            raise EngineError(
                f"{tensor.file} has {name!r} as {tensor.dtype}{list(tensor.shape)}, expected {spec}", name=name
            )
        try:
            return tensor.bits()
        except InputError as error:
            raise EngineError(error.message, name=name) from error
