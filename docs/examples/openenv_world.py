"""A world of OpenEnv's, which is a server: each episode has a session of its own there.

Offer it from an agent worker, then name it in a run:

    rollfab agent --environment echo=docs.examples.openenv_world:World
    fabric.run("echo", model=…, environment="echo", environment_options={"url": "http://127.0.0.1:8000"})
"""

from __future__ import annotations

from typing import Any

from rollfab.workers.environments.base import TextSampling


class World:
    """A session. action, observation: the fields of the server's records that hold the texts."""

    sampling = TextSampling(max_tokens=256)
    turn_count_max = 20

    def __init__(self, url: str, action: str = "message", observation: str = "echoed_message") -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._action, self._observation = action, observation
        self._client = GenericEnvClient(base_url=url).sync()
        self._client.connect()

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin."""
        result = self._client.reset(seed=seed)
        return str(result.observation[self._observation]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send what the policy wrote."""
        result = self._client.step({self._action: action})
        text = str(result.observation[self._observation])
        return text, float(result.reward or 0.0), bool(result.done), False, dict(result.metadata or {})

    def close(self) -> None:
        """End the session."""
        self._client.close()
