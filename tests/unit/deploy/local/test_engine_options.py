"""Which engine a worker gets of what was typed, without any engine's library."""

import os

import pytest

from rollfab.deploy.roles.engines import EngineOptions, check_engine_options, patience_of
from rollfab.fabric.contract.errors import ConfigError, EngineUnsupported
from rollfab.workers.engines.vllm.arguments import CPU_BLOCK_TOKENS, engine_arguments
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.common.environment import ALWAYS, ON_CPU, prepare_environment


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (EngineOptions(engine="llama"), "no engine 'llama' is known: did you mean vllm?"),
        (EngineOptions(words=("--block-size", "32")), "vLLM's own words"),
        (EngineOptions(server="http://here"), "--server"),
        (EngineOptions(log="x.log"), "--engine-log"),
        (EngineOptions(engine="vllm", device="cuda:1"), "CUDA_VISIBLE_DEVICES"),
        (EngineOptions(engine="vllm", server="http://here", words=("--seed", "3")), "start it with them"),
        (EngineOptions(engine="vllm", server="http://here", seed=3), "--seed"),
        (EngineOptions(engine="vllm", server="http://here", dtype="float32"), "--dtype does not reach a server"),
        (EngineOptions(dtype="bfloat17"), "--dtype bfloat17: weights are held as they are published"),
        (EngineOptions(engine="vllm", dtype="fp8"), "never quantised: there are auto, bfloat16"),
        (EngineOptions(engine="vllm", server="http://here", log="x.log"), "--engine-log"),
        (EngineOptions(adapter_rank=8), "--adapter-rank is for --engine vllm"),
        (EngineOptions(engine="vllm", server="http://here", adapter_rank=8), "--adapter-rank is for a vLLM of our own"),
        (EngineOptions(engine="vllm", adapter_alpha=8.0), "--adapter-alpha needs --adapter-rank"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_what_to_type(options: EngineOptions, named: str):
    with pytest.raises(ConfigError) as caught:
        check_engine_options(options)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(device="cuda", context_tokens_max=64, seed=1),
        EngineOptions(engine="vllm", context_tokens_max=64, seed=1, words=("--block-size", "32"), log="-"),
        EngineOptions(engine="vllm", server="http://here", model="org/name", context_tokens_max=64),
    ],
)
def test_options_that_go_together_pass(options: EngineOptions):
    check_engine_options(options)


def test_the_server_key_is_not_shown():
    assert "secret" not in repr(EngineOptions(server_key="secret"))


def test_a_real_model_on_a_cpu_is_waited_for_longer():
    assert patience_of(EngineOptions()) == {}
    assert patience_of(EngineOptions(model="org/name", device="cuda")) == {}
    assert patience_of(EngineOptions(model="org/name"))["first_token_s"] > 20


# ---------------------------------------------------------------- vLLM's arguments


def test_a_preset_on_a_cpu_gets_room_for_all_its_slots_and_no_files_of_its_own():
    found = engine_arguments(VllmConfig(slot_count=8, context_tokens_max=100), "/made", on_cpu=True)
    assert found["model"] == "/made"
    assert found["num_gpu_blocks_override"] == 8 * 4 + 1
    assert (found["max_num_seqs"], found["max_model_len"], found["dtype"]) == (8, 100, "float32")
    assert found["skip_tokenizer_init"] and found["load_format"] == "dummy"
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["weight_transfer_config"] == {"backend": "rollfab"}


def test_the_presets_own_positions_bound_the_context():
    assert engine_arguments(VllmConfig(context_tokens_max=4096), "/made", on_cpu=True)["max_model_len"] == 512
    assert engine_arguments(VllmConfig(context_tokens_max=None), "/made", on_cpu=True)["max_model_len"] == 512


def test_on_a_gpu_only_what_the_fabric_needs_is_said():
    found = engine_arguments(VllmConfig(model="org/name", context_tokens_max=None), "org/name", on_cpu=False)
    assert set(found) == {"model", "seed", "logprobs_mode", "max_num_seqs", "weight_transfer_config"}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_preset_is_float32_on_every_device(on_cpu: bool):
    # On a GPU vLLM's own "auto" makes bfloat16 of a float32 config, and no published preset would fit it.
    assert engine_arguments(VllmConfig(), "/made", on_cpu=on_cpu)["dtype"] == "float32"
    assert engine_arguments(VllmConfig(dtype="bfloat16"), "/made", on_cpu=on_cpu)["dtype"] == "bfloat16"


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_preset_is_float32_on_every_device_of_the_embedded_engine(device: str):
    assert EngineOptions(device=device).for_transformers().held_dtype == "float32"
    assert EngineOptions(device=device, dtype="float16").for_transformers().held_dtype == "float16"
    own = EngineOptions(device=device, model="org/name").for_transformers().held_dtype
    assert own == {"cpu": "float32", "cuda:1": "bfloat16"}[device]


def test_the_dtype_that_was_typed_reaches_vllm():
    assert EngineOptions(engine="vllm", dtype="float16").for_vllm(None).dtype == "float16"


def test_what_the_user_gives_wins():
    given = {"dtype": "bfloat16", "gpu_memory_utilization": 0.5, "enforce_eager": False, "seed": 5}
    found = engine_arguments(VllmConfig(arguments=given), "/made", on_cpu=True)
    assert {name: found[name] for name in given} == given
    assert found["block_size"] == CPU_BLOCK_TOKENS
    assert "num_gpu_blocks_override" not in found and "kv_cache_memory_bytes" not in found


def test_a_model_that_sees_is_given_whole_arrays_and_no_adapter():
    config = VllmConfig(model="org/name")
    found = engine_arguments(config, "org/name", on_cpu=True, sees=True)
    assert (found["mm_device_do_normalize"], found["mm_processor_cache_gb"]) == (False, 0.0)
    assert found["limit_mm_per_prompt"] == {"video": 0} and found["skip_mm_profiling"]
    assert "skip_mm_profiling" not in engine_arguments(config, "org/name", on_cpu=False, sees=True)
    wrong = VllmConfig(model="org/name", arguments={"mm_device_do_normalize": True})
    with pytest.raises(ConfigError, match="--mm-device-do-normalize is true, must be false"):
        engine_arguments(wrong, "org/name", on_cpu=True, sees=True)
    with pytest.raises(EngineUnsupported, match=r"'org/name' sees.*leave out --adapter-rank"):
        engine_arguments(VllmConfig(model="org/name", adapter_rank=8), "org/name", on_cpu=True, sees=True)


def test_two_workers_do_not_draw_the_same_tokens_unless_they_are_told_to():
    first, second = (engine_arguments(VllmConfig(), "/made", on_cpu=True)["seed"] for _ in range(2))
    assert first != second
    assert engine_arguments(VllmConfig(seed=3), "/made", on_cpu=True)["seed"] == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode"),
        ({"max_num_seqs": 65}, "--slots"),
        ({"max_model_len": 100}, "--context"),
        ({"seed": 4}, "--seed"),
        ({"dtype": "float16"}, "--dtype"),
        ({"model": "org/other"}, "--model"),
        ({"load_format": "auto"}, "--load-format"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "--weight-transfer-config"),
        ({"scheduler_cls": "mine.Scheduler"}, "--scheduler-cls"),
        ({"data_parallel_size": 2}, "one worker per replica"),
    ],
)
def test_what_the_fabric_decides_is_not_silently_changed(arguments: dict[str, object], named: str):
    with pytest.raises(ConfigError) as caught:
        engine_arguments(VllmConfig(seed=3, dtype="float32", arguments=arguments), "/made", on_cpu=True)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"quantization": "fp8"}, r"quantised weights \(fp8\).*leave out --quantization"),
        ({"enable_eplb": True, "enable_expert_parallel": True}, "--enable-eplb moves experts between ranks"),
    ],
)
def test_weights_that_could_not_be_written_in_place_are_refused_at_the_start(arguments: dict[str, object], named: str):
    with pytest.raises(EngineUnsupported, match=named):
        engine_arguments(VllmConfig(model="org/name", arguments=arguments), "org/name", on_cpu=False)
    beside = VllmConfig(model="org/name", arguments=arguments, adapter_rank=8)  # the model stays as it was loaded
    assert arguments.items() <= engine_arguments(beside, "org/name", on_cpu=False).items()


def test_a_value_that_the_fabric_would_choose_itself_is_no_contradiction():
    given = {
        "max_num_seqs": 64,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": "rollfab"},
    }
    engine_arguments(VllmConfig(arguments=given), "/made", on_cpu=True)


def test_what_the_user_has_set_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch):
    for name in (*ALWAYS, *ON_CPU, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    prepare_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
