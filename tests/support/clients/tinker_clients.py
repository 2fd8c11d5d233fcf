"""Tinker's unmodified SDK at an engine's address; runs in .venv-clients, which has it.

    tinker_clients.py CLIENT_COUNT SAMPLE_COUNT LENGTH    the address in TINKER_BASE_URL, a key in TINKER_API_KEY

So many clients at once, each of which samples so many prompts of its own, greedily, two answers each. Prints "ready"
once all clients are there, and then a JSON list of (prompt, tokens, log-probabilities, the prompt's, reason of the end,
sequence ids). "-" in place of the count of clients: one client shows what else there is, and what is not.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import tinker
from tinker import types


async def sample(client: Any, prompt: list[int], length: int, **more: Any) -> list[Any]:
    params = types.SamplingParams(max_tokens=length, temperature=0.0, stop=[])
    asked = types.ModelInput.from_ints(prompt)
    found = await client.sample(
        prompt=asked, num_samples=2, sampling_params=params, include_prompt_logprobs=True, **more
    )
    one, two = found.sequences
    assert list(one.tokens) == list(two.tokens), "greedy answers differ"
    ids = [each.sequence_id for each in found.sequences]
    return [prompt, list(one.tokens), list(one.logprobs), list(found.prompt_logprobs), one.stop_reason, ids]


async def many(client_count: int, sample_count: int, length: int) -> list[Any]:
    services = [tinker.ServiceClient() for _ in range(client_count)]
    clients = [await each.create_sampling_client(base_model="tiny") for each in services]
    print("ready", flush=True)
    return await asyncio.gather(
        *(
            sample(client, [5 + place, 6, 7 + index], length)
            for place, client in enumerate(clients)
            for index in range(sample_count)
        )
    )


async def shown(length: int) -> dict[str, Any]:
    """What one client is told beside tokens, and of what is not there."""
    service = tinker.ServiceClient()
    known = await tinker.RestClient().get_server_capabilities()
    models = [(each.model_name, each.trainable) for each in known.supported_models]
    client = await service.create_sampling_client(base_model="tiny")
    params = types.SamplingParams(max_tokens=length, temperature=0.0, stop=[])
    told = await client.sample(
        prompt=types.ModelInput.from_ints([5, 6, 7]),
        num_samples=1,
        sampling_params=params,
        topk_sample_logprobs=3,
        topk_prompt_logprobs=2,
    )
    refused = []
    for make in (
        lambda: service.create_sampling_client(base_model="another"),
        lambda: service.create_sampling_client(model_path="tinker://policy/99"),
        lambda: service.create_sampling_client(model_path="tinker://another/sampler_weights/1"),
        lambda: service.create_lora_training_client(base_model="tiny"),
    ):
        try:
            made = await make()
            await sample(made, [5, 6, 7], length)
        except Exception as error:  # noqa: BLE001  whatever the SDK makes of it
            refused.append(str(error))
    pinned = await service.create_sampling_client(model_path="tinker://policy/0")
    return {
        "models": models,
        "tokens": list(told.sequences[0].tokens),
        "tops": told.sequences[0].topk_logprobs,
        "prompt_tops": told.topk_prompt_logprobs,
        "logprobs": await client.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])),
        "pinned": (await sample(pinned, [5, 6, 7], length))[1],
        "refused": refused,
    }


def main(clients: str, samples: str, length: str) -> None:
    work = shown(int(length)) if clients == "-" else many(int(clients), int(samples), int(length))
    print(json.dumps(asyncio.run(work)))


if __name__ == "__main__":
    main(*sys.argv[1:])
