"""Control of the engine as vLLM and SGLang have it: what they say of themselves, pause and resume, and new weights.

- Weights come from a directory of safetensors files that this machine reads, and are published as the run's next
  version: workers take the difference by themselves. Routes that would have workers join a collective are refused.
- Pausing holds requests back here. It is not needed for new weights: workers put them in between two steps, and each
  token says of which version it is.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...fabric.contract.errors import InputError
from ...fabric.contract.sampling import shown
from ...fabric.ports.inference import ABORT, KEEP, PAUSE_MODES, Inference, PauseMode, ServerFacts
from ..access.problems import Refused
from ..gateway.body import Body, read_json
from ..gateway.problems import answer
from .fields import version_named

GET, POST, BOTH = ("GET",), ("POST",), ("GET", "POST")
CONTROLS = (  # methods, path, and the method of Control
    (GET, "/server_info", "info"),
    (GET, "/get_server_info", "info"),
    (GET, "/model_info", "info"),
    (GET, "/get_model_info", "info"),
    (GET, "/weight_info", "weight_info"),
    (GET, "/get_weight_version", "weight_info"),
    (GET, "/get_world_size", "world_size"),
    (GET, "/is_paused", "is_paused"),
    (POST, "/pause", "pause"),
    (POST, "/resume", "resume"),
    (POST, "/abort_requests", "abort"),
    (POST, "/inference/v1/abort_requests", "abort"),
    (POST, "/update_weights", "update_weights"),
    (POST, "/reset_prefix_cache", "nothing_to_flush"),
    (POST, "/finish_session", "nothing_to_finish"),
    (POST, "/pause_generation", "pause_generation"),
    (POST, "/continue_generation", "resume"),
    (POST, "/abort_request", "abort_request"),
    (POST, "/update_weights_from_disk", "update_from_disk"),
    (BOTH, "/flush_cache", "nothing_to_flush"),
)
COLLECTIVE = (
    "workers here join no collective of a trainer, as they come and go: save the weights as safetensors files in the "
    "directory that the gateway takes weights from, and POST their path to /update_weights_from_disk (model_path) or "
    "/update_weights (weight_dir)"
)
SLEEP = "the fleet's workers are lent and put to sleep by their controller: leave this call out"
TOKENIZER = "make tokens of texts with the model's own tokenizer: SkyRL's client takes one (tokenizer)"
ADAPTERS = "there are no adapters: merge them into the weights before these are published"
LABEL = "versions are counted, not labelled: give weight_version with the weights themselves"
TRAINING = "nothing is trained here: your trainer publishes its weights, and these routes sample with them"
TRAINED = "create_model forward forward_backward optim_step save_weights save_weights_for_sampler load_weights"
REFUSED = {  # routes that there are at vLLM, SGLang or Tinker, and why not here
    **{f"/api/v1/{name}": TRAINING for name in TRAINED.split()},
    "/init_weight_transfer_engine": COLLECTIVE,
    "/shutdown_weight_transfer_engine": COLLECTIVE,
    "/start_weight_update": COLLECTIVE,
    "/start_draft_weight_update": COLLECTIVE,
    "/finish_weight_update": COLLECTIVE,
    "/collective_rpc": COLLECTIVE,
    "/init_broadcaster": COLLECTIVE,
    "/init_weights_update_group": COLLECTIVE,
    "/destroy_weights_update_group": COLLECTIVE,
    "/update_weights_from_distributed": COLLECTIVE,
    "/update_weights_from_tensor": COLLECTIVE,
    "/update_weight_version": LABEL,
    "/sleep": SLEEP,
    "/wake_up": SLEEP,
    "/release_memory_occupation": SLEEP,
    "/resume_memory_occupation": SLEEP,
    "/tokenize": TOKENIZER,
    "/skyrl/v1/generate": "leave SkyRL's enable_return_routed_experts out: these routes tell of no experts",
    "/skyrl/v1/load_lora_adapter": ADAPTERS,
    "/v1/load_lora_adapter": ADAPTERS,
    "/v1/unload_lora_adapter": ADAPTERS,
    "/load_lora_adapter": ADAPTERS,
    "/unload_lora_adapter": ADAPTERS,
}
SGLANG_MODES: dict[str, PauseMode] = {"abort": ABORT, "retract": KEEP, "in_place": KEEP}
FLUSHED = "nothing is reused across versions, unless the run says so"
UNUSED = "a session ends by itself, when nothing is asked in it for a minute"
OF_ONE_ENGINE = (  # of SGLang's update_weights_from_disk: how one process loads files
    "load_format",
    "flush_cache",
    "is_async",
    "torch_empty_cache",
    "keep_pause",
    "recapture_cuda_graph",
    "token_step",
    "tokenizer_path",
)


class Control:
    """What each control route does."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def refuse(self, request: Request) -> Response:
        """Say why a route is not here."""
        path = max((each for each in REFUSED if request.url.path.endswith(each)), key=len)
        raise Refused(400, "not_offered", f"{path} is not offered: {REFUSED[path]}")

    async def info(self, _: Request) -> Response:
        """Say what there is, in vLLM's, SGLang's and Stitch's words."""
        return answer(_info(await self._inference.facts()))

    async def weight_info(self, _: Request) -> Response:
        """Say which version is the head."""
        return answer({"weight_version": str((await self._inference.facts()).head_version)})

    async def world_size(self, _: Request) -> Response:
        """Say that there is one: nobody here joins a collective."""
        return answer({"world_size": 1})

    async def is_paused(self, _: Request) -> Response:
        """Say whether requests are held back."""
        return answer({"is_paused": (await self._inference.facts()).is_paused})

    async def pause(self, request: Request) -> Response:
        """Hold requests back, as vLLM does: its settings are in the query."""
        mode = _mode_asked(request) or ABORT
        if mode not in PAUSE_MODES:
            raise InputError(f"mode is {shown(mode)}, expected {', '.join(PAUSE_MODES)}", name="mode")
        await self._inference.pause(mode)
        return answer({"status": "paused"})

    async def pause_generation(self, request: Request) -> Response:
        """Hold requests back, as SGLang does."""
        body = await _body(request)
        mode = body.optional("mode", str) or ABORT
        body.close()
        if mode not in SGLANG_MODES:
            raise InputError(f"mode is {shown(mode)}, expected {', '.join(SGLANG_MODES)}", name="mode")
        await self._inference.pause(SGLANG_MODES[mode])
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: Request) -> Response:
        """Let requests in again."""
        await self._inference.resume()
        return answer({"message": "Generation continued successfully.", "status": "resumed"})

    async def abort(self, request: Request) -> Response:
        """Give requests up, as vLLM does: all where none is named."""
        body = await _body(request)
        names = body.optional("request_ids", list)
        body.close()
        count = self._inference.abort([str(each) for each in names] if names else None)
        return answer({"status": "aborted", "aborted": count})

    async def abort_request(self, request: Request) -> Response:
        """Give requests up, as SGLang does."""
        body = await _body(request)
        name, is_all = body.optional("rid", str), body.flag("abort_all")
        body.ignore("abort_message")
        body.close()
        if not name and not is_all:
            raise InputError("the request names nothing to give up: send rid, or abort_all", name="rid")
        return answer({"status": "aborted", "aborted": self._inference.abort(None if is_all else [str(name)])})

    async def nothing_to_flush(self, _: Request) -> Response:
        """Say that caches are no matter of the caller's."""
        return answer({"status": "ok", "message": FLUSHED})

    async def nothing_to_finish(self, _: Request) -> Response:
        """Say that a session needs no end: a minute without a request ends it."""
        return answer({"status": "ok", "message": UNUSED})

    async def update_weights(self, request: Request) -> Response:
        """Publish a directory, as prime-rl's server does. vLLM's own update_info is a collective's."""
        body = await _body(request)
        path, version = body.optional("weight_dir", str), version_named(body.take("weight_version"))
        if path is None:
            raise Refused(400, "not_offered", f"/update_weights without a weight_dir is not offered: {COLLECTIVE}")
        allow_nonfinite = body.flag("allow_nonfinite")
        body.close()
        published = await self._inference.publish(path, version, allow_nonfinite=allow_nonfinite)
        return answer({"status": "ok", "message": "Weights updated", "weight_version": str(published)})

    async def update_from_disk(self, request: Request) -> Response:
        """Publish a directory, as SGLang does."""
        body = await _body(request)
        path, version = body.required("model_path", str), version_named(body.take("weight_version"))
        must_abort, allow_nonfinite = body.flag("abort_all_requests"), body.flag("allow_nonfinite")
        body.ignore(*OF_ONE_ENGINE)
        body.allow("manifest", advice="give model_path alone")
        body.close()
        published = await self._inference.publish(path, version, allow_nonfinite=allow_nonfinite)
        if must_abort:  # not before: an update that is refused costs nobody an answer
            self._inference.abort(None)
        told: dict[str, Any] = {"success": True, "message": f"published as version {published}"}
        return answer({**told, "num_paused_requests": 0, "weight_version": str(published)})


def _mode_asked(request: Request) -> str | None:
    """Return the query's mode, if it has one. Raises InputError: a mistyped one would give all requests up."""
    asked = request.query_params.multi_items()
    names = [name for name, _ in asked]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"the query has {shown(twice)} {names.count(twice)} times: give it once", name=twice)
    query = Body(dict(asked), "the query")
    mode = query.optional("mode", str)
    query.ignore("clear_cache")
    query.close()
    return mode


async def _body(request: Request) -> Body:
    return Body(read_json(await request.body()))


def _info(facts: ServerFacts) -> dict[str, Any]:
    model = {
        "model": facts.model,
        "served_model_name": facts.model,
        "dtype": f"torch.{facts.dtype}" if facts.dtype else None,
        "max_model_len": facts.context_tokens_max or None,
    }
    is_published = facts.head_version >= 0
    return {
        "ready": True,
        "applied": f"{facts.run_id}/weight_v{facts.head_version:06d}" if is_published else None,
        "sync_state": "IDLE",
        "run_id": facts.run_id,
        "active_requests": facts.running_count,
        "is_paused": facts.is_paused,
        "model_path": facts.model,
        "tokenizer_path": facts.model,
        "is_generation": True,
        "weight_version": str(facts.head_version),
        "vllm_config": {"model_config": model, "parallel_config": {"world_size": 1, "data_parallel_size": 1}},
    }
