"""verifiers' unmodified TrainClient at an engine's address; runs in .venv-clients, which has verifiers.

    train_client.py BASE_URL TOKENIZER_DIRECTORY    the key in TRAINER_KEY

Two turns of one conversation in one session. Prints a JSON list of what each brought: prompt ids, completion ids,
log-probabilities, text and finish reason. The renderer is of the tiny preset's characters: it takes the place of the
model's chat template, and nothing else of the client is ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from renderers.base import ParsedResponse, RenderedTokens
from renderers.configs import BaseRendererConfig, CustomRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

END, FIRST = 2, 5  # of the tiny preset: the end of a sequence, and the token of a space


class CharacterConfig(BaseRendererConfig):
    """Settings of it: none."""

    name: str = "custom"


class CharacterRenderer:
    """Writes messages one after the other, a token a character."""

    config_class = CharacterConfig
    is_prefix_stable = True
    supports_tools = False

    def __init__(self, tokenizer: Any, config: CharacterConfig) -> None:
        """tokenizer: the client loads one; it is of no use here."""

    def render(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> RenderedTokens:
        """Return the tokens of messages, each attributed to its own."""
        ids: list[int] = []
        owners: list[int] = []
        for index, message in enumerate(messages):
            own = [FIRST + ord(character) - ord(" ") for character in message["content"]] + [END]
            ids += own
            owners += [index] * len(own)
        roles = [message["role"] for message in messages]
        return RenderedTokens(token_ids=ids, message_indices=owners, message_roles=roles)

    def render_ids(self, messages: list[Any], **more: Any) -> list[int]:
        """Return their tokens alone."""
        return self.render(messages, **more).token_ids

    def parse_response(self, token_ids: list[int], **_: Any) -> ParsedResponse:
        """Return the text of tokens."""
        return ParsedResponse(content="".join(chr(each - FIRST + ord(" ")) for each in token_ids if each >= FIRST))

    def get_stop_token_ids(self) -> list[int]:
        """Return what ends an answer."""
        return [END]

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> None:
        """Leave it to a full rendering."""


async def main(base_url: str, tokenizer: str) -> None:
    renderer = CustomRendererConfig(import_path=f"{__file__}:CharacterRenderer")
    config = TrainClientConfig(
        base_url=base_url, api_key_var="TRAINER_KEY", renderer=renderer, renderer_model_name=tokenizer
    )
    client = TrainClient(config)
    messages: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
    found = []
    for _ in range(2):
        sampling = SamplingConfig(temperature=0.0, max_tokens=20)
        body = {"model": "tiny", "messages": messages}
        reply = await client.get_response(ChatDialect(), body, sampling, session_id="trace-1")
        tokens, said = reply.tokens, reply.message.content or ""
        found.append([tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs, said, reply.finish_reason])
        messages += [{"role": "assistant", "content": said or "-"}, {"role": "user", "content": "on"}]
    await client.close()
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
