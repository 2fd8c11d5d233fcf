"""SkyRL's unmodified RemoteInferenceClient at an engine's address; runs in .venv-clients, which has the package.

    skyrl_client.py ADDRESS    of the gateway, with the key in its path

Two prompts of one session each, then what its trainer calls around an update of the weights. Prints what came as JSON.
Only the client's own modules are run: `skyrl.backends` would import the whole trainer, whose dependencies exclude those
of other clients here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
LONG_COUNT = 64
SAMPLING = {
    "max_tokens": 12,
    "temperature": 0.0,
    "logprobs": 1,
    "min_tokens": 1,
    "top_p": 1.0,
    "top_k": -1,
    "stop": None,
}


def find_client() -> Any:
    """Return the class, from the package as it is installed."""
    found = importlib.util.find_spec("skyrl")
    assert found is not None and found.origin is not None
    for name in ("skyrl.backends", "skyrl.backends.skyrl_train"):
        place = Path(found.origin).parent.joinpath(*name.split(".")[1:])
        package = ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package
    name = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"
    return importlib.import_module(name).RemoteInferenceClient


async def main(address: str) -> None:
    """Make the calls."""
    from aiohttp import ClientResponseError

    told: dict[str, Any] = {}
    async with find_client()(proxy_url=address, server_urls=[address], data_parallel_size=1) as client:
        told["world"] = await client.get_world_size()
        asked = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "session_ids": ["a", "b"], "cache_salt": "0"}
        told["made"] = dict(await client.generate(asked))
        for session in ("a", "b"):
            await client.finish_session(session)
        # Paused, a request waits; resumed, it is answered
        told["paused"] = await client.pause_generation()
        waiting = asyncio.create_task(client.generate(asked))
        await asyncio.sleep(1.0)
        told["waits"] = not waiting.done()
        await client.reset_prefix_cache()
        await client.resume_generation()
        told["again"] = dict(await waiting)
        # Given up, it has no tokens; so many that no machine is through with all of them by then
        long = asyncio.create_task(
            client.generate(
                {
                    "prompt_token_ids": [[5, 6, each] for each in range(LONG_COUNT)],
                    "session_ids": [f"long {each}" for each in range(LONG_COUNT)],
                    "sampling_params": {"max_tokens": 400, "ignore_eos": True},
                    "cache_salt": "0",
                }
            )
        )
        await asyncio.sleep(0.5)
        await client.pause("abort")
        told["aborted"] = dict(await long)
        await client.resume()
        told["refused"] = []
        for call in (
            client.start_weight_update(),
            client.update_named_weights({"names": []}),
            client.sleep(),
            client.load_lora_adapter("a", "/tmp/a"),
            client.tokenize(["a"]),
        ):
            try:
                await call
            except ClientResponseError as error:
                told["refused"].append([error.status, error.message])
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
