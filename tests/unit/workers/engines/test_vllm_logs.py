"""What went wrong with a vLLM, from logs and errors that vllm 0.32.0 on a CPU has really left (only shortened)."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollfab.fabric.contract.errors import EngineError
from rollfab.workers.engines.vllm.common.logs import MARK, cause_of, find_cause, output_into, root_cause
from rollfab.workers.engines.vllm.local import naming_damage

FAILED_AT_START = """\
(EngineCore pid=7512) ERROR 11-21 12:25:06 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7512) ERROR 11-21 12:25:06 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7512) ERROR 11-21 12:25:06 [core.py:1510]   File "/site-packages/vllm/v1/worker/cpu_worker.py", line 219
(EngineCore pid=7512) ERROR 11-21 12:25:06 [core.py:1510]     raise ValueError(
(EngineCore pid=7512) ERROR 11-21 12:25:06 [core.py:1510] ValueError: Available memory on node 0 (12.67/13.46 GiB) on \
kv cache allocation is less than requested memory for kv (931.32 GiB). Decrease --kv-cache-memory-bytes.
Process EngineCore:
Traceback (most recent call last):
  File "/site-packages/vllm/v1/worker/cpu_worker.py", line 219, in determine_available_memory
    raise ValueError(
ValueError: Available memory on node 0 (12.67/13.46 GiB) on kv cache allocation is less than requested memory for kv \
(931.32 GiB). Decrease --kv-cache-memory-bytes.
(MainProcess pid=7411) INFO 11-21 12:25:10 [utils.py:628] [shutdown] Process manager: send sigterm to process EngineCore
"""
FAILED_AT_FIRST_STEP = """\
(EngineCore pid=7453) ERROR 11-21 12:25:03 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=7453) ERROR 11-21 12:25:03 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7453) ERROR 11-21 12:25:03 [core.py:1512]     return self._op(*args, **kwargs)
(EngineCore pid=7453) ERROR 11-21 12:25:03 [core.py:1512]            ^^^^^^^^^^^^^^^^^^^^^^^^^
(EngineCore pid=7453) ERROR 11-21 12:25:03 [core.py:1512] RuntimeError: Unsupported CPU attention configuration: \
head_dim=16 isa=2 kv_cache_idx=0
(MainProcess pid=7411) ERROR 11-21 12:25:03 [async_llm.py:906] AsyncLLM output_handler failed.
(MainProcess pid=7411) ERROR 11-21 12:25:03 [async_llm.py:906] Traceback (most recent call last):
(MainProcess pid=7411) ERROR 11-21 12:25:03 [async_llm.py:906]     raise self._format_exception(outputs) from None
(MainProcess pid=7411) ERROR 11-21 12:25:03 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
"""
KILLED = """\
(EngineCore pid=29057) WARNING 11-21 12:47:58 [cpu_worker.py:114] libiomp is not found in LD_PRELOAD.
(MainProcess pid=28374) ERROR 11-21 12:47:58 [async_llm.py:906] AsyncLLM output_handler failed.
(MainProcess pid=28374) ERROR 11-21 12:47:58 [async_llm.py:906] Traceback (most recent call last):
(MainProcess pid=28374) ERROR 11-21 12:47:58 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
"""
NO_CONFIG = """\
1 validation error for ModelConfig
  Value error, Invalid repository ID or local directory specified: '/models/none'.
Please verify the following requirements:
1. Provide a valid Hugging Face repository ID.
 [type=value_error, input_value=ArgsKwargs((), {'model': ...nderer_num_workers': 1}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""
CORE_FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"


def test_the_exception_of_the_engine_core_is_the_cause_and_not_who_noticed_it():
    assert find_cause(FAILED_AT_START).startswith(
        "ValueError: Available memory on node 0 (12.67/13.46 GiB) on kv cache"
    )
    assert find_cause(FAILED_AT_FIRST_STEP) == (
        "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
    )


def test_of_several_lines_all_and_of_very_many_the_first_are_told():
    found = find_cause("Traceback (most recent call last):\nRuntimeError: one\ntwo\n  three\nProcess EngineCore:\n")
    assert found == "RuntimeError: one two three"
    assert len(find_cause("ValueError: " + "long " * 10_000)) == 400


def test_a_process_that_was_killed_has_said_nothing():
    assert find_cause(KILLED) == ""
    assert find_cause("") == ""


def test_an_error_that_is_no_exception_counts_where_there_is_none():
    line = "(MainProcess pid=7) ERROR 11-21 12:25:03 [core_client.py:700] Engine core proc died unexpectedly."
    assert find_cause(line) == "Engine core proc died unexpectedly"
    assert find_cause(line.replace("ERROR", "WARNING")) == ""
    assert find_cause("Fatal Python error: Segmentation fault\n").startswith("Fatal Python error")


def test_what_an_earlier_vllm_said_is_not_the_cause_of_this_ones_end(tmp_path: Path):
    log = tmp_path / "vllm.log"
    log.write_text(f"{FAILED_AT_START}{MARK} for process 7\nall is well\n")
    assert root_cause(log) == ""
    log.write_text(f"{MARK} for process 7\n{FAILED_AT_START}")
    assert root_cause(log).startswith("ValueError")
    assert root_cause(tmp_path / "none.log") == ""


def test_an_error_that_says_what_is_wrong_is_told_without_what_a_validator_adds(tmp_path: Path):
    assert cause_of(ValueError(NO_CONFIG), None).removeprefix("ValueError: ").startswith("1 validation error")
    kind = type("ValidationError", (ValueError,), {})
    assert cause_of(kind(NO_CONFIG), tmp_path / "none.log") == (
        "Invalid repository ID or local directory specified: '/models/none'. Please verify the following requirements:"
        " 1. Provide a valid Hugging Face repository ID"
    )


def test_an_error_that_points_elsewhere_is_answered_from_the_log(tmp_path: Path):
    log = tmp_path / "vllm.log"
    log.write_text(FAILED_AT_START)
    assert cause_of(RuntimeError(CORE_FAILED), log).startswith("ValueError: Available memory")
    assert cause_of(None, log).startswith("ValueError: Available memory")
    assert cause_of(RuntimeError(CORE_FAILED), None).startswith("RuntimeError: Engine core")
    assert cause_of(KeyError("own words"), log) == "KeyError: 'own words'"


PROGRAM = """
import logging, os, subprocess, sys
from pathlib import Path
from rollfab.workers.engines.vllm.common.logs import output_into
own = logging.StreamHandler(sys.stderr)
logging.getLogger("rollfab").addHandler(own)
theirs = logging.getLogger("vllm")
theirs.addHandler(logging.StreamHandler(sys.stdout))
with output_into(Path(sys.argv[1])):
    os.write(2, b"from C++\\n")
    print("from Python")
    script = "read line; echo from a child; echo its error >&2"
    child = subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE)
    forked = os.fork()
    if forked == 0:
        sys.stderr.write("from a fork\\n"); sys.stderr.flush()
        os._exit(0)
os.waitpid(forked, 0)
child.communicate(b"go\\n")
theirs.error("their logger")
logging.getLogger("rollfab").error("our logger")
print("our output")
"""


def test_all_of_a_vllm_goes_to_its_log_and_all_of_ours_stays(tmp_path: Path):
    log = tmp_path / "new" / "vllm.log"
    ended = subprocess.run([sys.executable, "-c", PROGRAM, log], capture_output=True, text=True, check=True)
    text = log.read_text()
    for line in ("from C++", "from Python", "from a child", "its error", "from a fork", "their logger"):
        assert f"{line}\n" in text
    assert text.startswith(MARK)
    assert ended.stdout == "our output\n"
    assert ended.stderr == "our logger\n"
    assert log.stat().st_mode & 0o077 == 0


def test_a_log_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EngineError, match=r"file/vllm\.log cannot be written"),
        output_into(tmp_path / "file" / "vllm.log"),
    ):
        pass


def test_without_a_log_nothing_is_moved(capfd: pytest.CaptureFixture[str]):
    with output_into(None):
        os.write(2, b"seen\n")
    assert capfd.readouterr().err == "seen\n"
    assert not logging.getLogger("vllm").handlers


def test_a_start_that_fails_on_a_damaged_checkpoint_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    says = r"model.safetensors cannot be read as safetensors: .*The file is damaged, "
    with pytest.raises(EngineError, match=says), naming_damage(tmp_path):
        raise RuntimeError("Engine core initialization failed")
    # And what is whole, or not here, is not blamed
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    for model in (tmp_path, Path("org/model")):
        with pytest.raises(RuntimeError, match="initialization failed"), naming_damage(model):
            raise RuntimeError("Engine core initialization failed")
