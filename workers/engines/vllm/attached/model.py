"""Finds what a vLLM server serves: the model's name, sizes and tensors, and where its files are.

- The model's config and files are read on this machine, by the path or hub name that the server was started with.
- `info` is there only in the server's development mode; without it the server is taken to serve the dtype of its files.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .....fabric.contract.errors import EngineError
from .....fabric.format.layout import Layout
from ..common.layout import checkpoint_layout, quantization_of, vocabulary_size
from .client import Client

INFO_S = 120.0  # the server looks at its whole machine before it answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """root: path or hub name of its files. layout: in the dtype that its config says. info: its settings, or None.
    quantization: how its weights are quantised, as far as that is said; None: they are not.
    """

    name: str
    root: str
    context_tokens_max: int | None
    vocabulary_size: int
    layout: Layout
    server_version: str
    info: dict[str, Any] | None
    quantization: str | None = None

    @classmethod
    async def find(cls, client: Client, wanted: str) -> ServedModel:
        """Find the model that is served as `wanted`; "": the first that is no adapter.

        Raises:
            EngineError: no server, no such model, or its config is not on this machine.
        """
        reply = await client.ask("GET", "/v1/models")
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), list):
            raise EngineError(
                f"{client.url} answers /v1/models as no vLLM server would: is this its address?", url=client.url
            )
        models = reply["data"]
        served = [model for model in models if not model.get("parent")]
        chosen = [model for model in served if wanted in ("", model["id"])]
        if not chosen:
            names = ", ".join(model["id"] for model in served)
            raise EngineError(f"vLLM server {client.url} does not serve {wanted!r}: it serves {names}", model=wanted)
        root = str(chosen[0].get("root") or chosen[0]["id"])
        try:
            layout = await asyncio.to_thread(checkpoint_layout, root, "auto")
            quantization = await asyncio.to_thread(quantization_of, root)
        except EngineError as error:
            raise EngineError(
                f"the model of vLLM server {client.url} is {root!r} there, and not to be found here: {error}. Have its"
                " files at that path on this machine too, or start the server with a hub name",
                model=root,
            ) from error
        reply = await client.call("GET", "/server_info?config_format=json", timeout_s=INFO_S)
        info = reply.data["vllm_config"] if reply.is_ok else None
        version = await client.call("GET", "/version")
        return cls(
            name=str(chosen[0]["id"]),
            root=root,
            context_tokens_max=chosen[0].get("max_model_len"),
            vocabulary_size=await asyncio.to_thread(vocabulary_size, root),
            layout=layout,
            server_version=version.data["version"] if version.is_ok else "of an unknown version",
            info=info,
            quantization=(info and info["model_config"].get("quantization")) or quantization,
        )

    @property
    def dtype(self) -> str:
        """The dtype in which the server computes: torch's name without the prefix, or "auto" if it is not known."""
        return str(self.info["model_config"]["dtype"]).removeprefix("torch.") if self.info else "auto"

    @property
    def moves_experts(self) -> bool:
        """True if it moves experts between its ranks while it runs."""
        return bool(self.info and self.info.get("parallel_config", {}).get("enable_eplb"))

    @property
    def can_sleep(self) -> bool:
        """True if sleeping would give memory back; on a CPU vLLM says yes and does nothing."""
        if self.info is None:
            return False
        is_on_cpu = "cpu" in str(self.info["device_config"])
        return bool(self.info["model_config"].get("enable_sleep_mode")) and not is_on_cpu

    def checkpoint_files(self) -> list[Path]:
        """List its safetensors files on this machine; may download them from the hub.

        Raises:
            EngineError: there are none.
        """
        directory = Path(self.root)
        if not directory.is_dir():
            from huggingface_hub import snapshot_download

            try:
                directory = Path(snapshot_download(self.root, allow_patterns=["*.safetensors"]))
            except (OSError, ValueError) as error:
                raise EngineError(f"the files of model {self.root!r} are not on this machine: {error}") from error
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise EngineError(
                f"model {self.root!r} has no *.safetensors files on this machine, so its weights are not known",
                model=self.root,
            )
        return files
