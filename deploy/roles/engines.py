"""Chooses a rollout worker's engine by what a person typed. An engine's library is imported only if it is chosen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.limits import PROMPT_TOKENS_MAX, SLOT_COUNT_MAX
from ...fabric.contract.text import did_you_mean
from ...fabric.format.layout import DTYPES, check_dtype
from ...fabric.host.options import option
from ...fabric.model.presets import check_model_name, is_preset
from ...workers.engines.base import Engine
from ..cli.printing import Console

if TYPE_CHECKING:
    from ...workers.engines.transformers.engine import TransformersConfig
    from ...workers.engines.vllm.common.config import VllmConfig
    from ...workers.serving.guarding.guard import GuardConfig

ENGINES = ("transformers", "vllm")
CONTEXT_TOKENS_MAX = 512
SEED_MAX = (1 << 63) - 1  # torch's generators take no more
SLOW = {"stall_s": 30.0, "first_token_s": 300.0}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine's options as typed. None: not typed, so the engine chooses."""

    engine: str = option("transformers", f"What generates: {' or '.join(ENGINES)}.", choices=ENGINES)
    model: str = option("", "Preset, path or hub name. Default: tiny.")
    """The name that the server serves, with `server`."""
    slot_count: int = option(64, "Turns it runs at once.", key="slots", least=1, most=SLOT_COUNT_MAX)
    context_tokens_max: int | None = option(
        None,
        "Longest context in tokens. Default: 512; the server's with --server.",
        key="context",
        least=2,
        most=PROMPT_TOKENS_MAX,
    )
    seed: int | None = option(None, "Of sampling; default: fresh.", least=-SEED_MAX - 1, most=SEED_MAX)
    device: str | None = option(None, "cpu, cuda, cuda:1 …; with vLLM set CUDA_VISIBLE_DEVICES.")
    dtype: str = option(
        "auto",
        f"What it holds weights in, as they are published: {', '.join(DTYPES)}. auto: float32 for presets.",
        choices=DTYPES,
    )
    server: str | None = option(None, "vllm: attach to the OpenAI server at this URL.")
    server_key: str | None = option(
        None, "What that server asks for.", variables=("ROLLFAB_SERVER_KEY",), is_secret=True, is_variable_only=True
    )
    log: str | None = option(
        None, "vllm: file for its output; - for where ours goes. Default: in ~/.local/state.", key="engine_log"
    )
    adapter_rank: int | None = option(None, "vllm: the run's weights are a LoRA adapter of this rank.", least=1)
    adapter_alpha: float | None = option(None, "vllm: its scale times the rank. Default: the rank.")
    words: tuple[str, ...] = option(
        (),
        "vllm: its own engine arguments, after `--`: `-- --tensor-parallel-size 2`; `-- --help` lists them.",
        metavar="[-- WORD...]",
        is_positional=True,
    )
    guard: GuardConfig | None = None
    """The guard, if it shares its device with a serving engine."""

    def __post_init__(self) -> None:
        """Name the model where nobody did, and only we choose it."""
        if not self.model and self.server is None:
            object.__setattr__(self, "model", "tiny")

    def for_transformers(self) -> TransformersConfig:
        """Return the settings of the embedded engine."""
        from ...workers.engines.transformers.engine import TransformersConfig

        return TransformersConfig(
            model=self.model,
            slot_count=self.slot_count,
            dtype=self.dtype,
            device=self.device or "cpu",
            context_tokens_max=self.context_tokens_max or CONTEXT_TOKENS_MAX,
            seed=self.seed,
            guard=self.guard,
        )

    def for_vllm(self, log_path: Path | None) -> VllmConfig:
        """Return the settings of vLLM; its own words are read by vLLM, which is imported if there are any."""
        from ...workers.engines.vllm.arguments import parse_words
        from ...workers.engines.vllm.common.config import VllmConfig

        is_ours = self.server is None
        return VllmConfig(
            model=self.model,
            slot_count=self.slot_count,
            context_tokens_max=self.context_tokens_max or (CONTEXT_TOKENS_MAX if is_ours else None),
            seed=self.seed,
            dtype=self.dtype,
            server=self.server,
            api_key=self.server_key,
            arguments=parse_words(self.words),
            log_path=log_path,
            adapter_rank=self.adapter_rank,
            adapter_alpha=self.adapter_alpha,
            guard=self.guard,
        )


def check_engine_options(options: EngineOptions) -> None:
    """Refuse what does not go together, before anything is started.

    Raises:
        ConfigError: the text says what to type instead.
    """
    if options.engine not in ENGINES:
        raise ConfigError(
            f"no engine {options.engine!r} is known: {did_you_mean(options.engine, ENGINES)}", option="--engine"
        )
    check_dtype(options.dtype)
    is_vllm, has_server = options.engine == "vllm", options.server is not None
    has_adapter = options.adapter_rank is not None
    rows = (
        (not is_vllm and options.words, "vLLM's own words", "are for --engine vllm"),
        (not is_vllm and has_server, "--server", "is for --engine vllm"),
        (not is_vllm and options.log, "--engine-log", "is for --engine vllm; this engine writes nothing of its own"),
        (is_vllm and options.device, "--device", "is for --engine transformers; with vLLM set CUDA_VISIBLE_DEVICES"),
        (not is_vllm and has_adapter, "--adapter-rank", "is for --engine vllm"),
        (has_server and has_adapter, "--adapter-rank", "is for a vLLM of our own"),
        (options.adapter_alpha is not None and not has_adapter, "--adapter-alpha", "needs --adapter-rank"),
        (has_server and options.words, "vLLM's own words", "do not reach a server that runs: start it with them"),
        (has_server and options.log, "--engine-log", "is for a vLLM of our own: a server has its own log"),
        (has_server and options.dtype != "auto", "--dtype", "does not reach a server: give it when you start that"),
        (has_server and options.seed is not None, "--seed", "does not reach a server: give it when you start that"),
    )
    for is_wrong, what, why in rows:
        if is_wrong:
            raise ConfigError(f"{what} {why}", option=what)
    if not options.model:
        raise ConfigError(
            "--server needs --model: the name that the server has for it, which is the model of the runs it works for"
        )
    if not has_server:  # whose model may be called anything
        check_model_name(options.model)


def require_engine(engine: str) -> None:
    """Require that workers which are to be started will find their engine.

    Raises:
        EngineError: it is not installed.
    """
    if engine == "vllm":
        from ...workers.engines.vllm.common.environment import require_vllm

        require_vllm()


def new_engine(options: EngineOptions, worker_id: str) -> Engine:
    """Make the engine, not yet started.

    Raises:
        ConfigError: the options do not go together, or vLLM does not know its words.
        EngineError: vLLM is missing or broken.
    """
    if options.engine == "transformers":
        from ...workers.engines.transformers.engine import TransformersEngine

        return TransformersEngine(options.for_transformers())
    from ...workers.engines.vllm.common.environment import import_vllm
    from ...workers.engines.vllm.engine import VllmEngine

    if options.server is not None:
        return VllmEngine(options.for_vllm(None))
    log_path = _log_path(options, worker_id)
    import_vllm(model=options.model, log_path=log_path)
    config = options.for_vllm(log_path)
    if log_path is not None:
        Console(stderr=True).print(f"vLLM is starting; its log: {log_path}", highlight=False, soft_wrap=True)
    return VllmEngine(config)


def _log_path(options: EngineOptions, worker_id: str) -> Path | None:
    if options.log == "-":
        return None
    if options.log is not None:
        return Path(options.log)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rollfab" / f"{worker_id}.vllm.log"


def patience_of(options: EngineOptions) -> dict[str, float]:
    """Return longer times for a CPU, which may read a real model's prompt for many seconds while other turns wait."""
    if options.engine == "vllm":
        from ...workers.engines.vllm.common.environment import has_cpu_build

        is_on_cpu = options.server is None and has_cpu_build()
    else:
        is_on_cpu = (options.device or "cpu") == "cpu"
    return SLOW if is_on_cpu and not is_preset(options.model) else {}
