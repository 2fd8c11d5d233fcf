"""`rollfab weights` as a person meets it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

import rollfab
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.inspect.safetensors import save_bits
from tests.integration.cli.test_cli import rollfab as command

RUN = "weights"
HEAD = 9
LAYOUT = Layout((TensorSpec("norm", "float32", (64,)), TensorSpec("w", "bfloat16", (200, 100))))


def weights(version: int) -> dict[str, Any]:
    """Of a version: `w` moves by one step in a hundred places, `norm` in one."""
    w = np.random.default_rng(0).integers(0, 0x7000, 20000, dtype=np.uint16)
    for each in range(version):
        w[each * 100 : each * 100 + 100] += 1
    norm = np.ones(64, np.float32)
    norm[:version] += 0.25
    return {"w": w.reshape(200, 100), "norm": norm}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A broker with versions 0 to HEAD: the last jump, its deltas, and the next delta."""
    with EmbeddedBroker.start() as broker:
        with rollfab.connect(broker.url) as fabric:
            run = fabric.run(RUN, model="any", environment="frozenlake")
            for version in range(HEAD + 1):
                run.publish(weights(version), version=version)
        yield broker.url


def tool(*words: str, url: str) -> subprocess.CompletedProcess[str]:
    """`rollfab weights …`; its tables have all the room that they want."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        return command("weights", *words, url=url)


def said(*words: str, url: str) -> Any:
    done = tool(*words, "--json", url=url)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ls_lists_what_is_held_with_its_figures(url: str) -> None:
    rows = said("ls", RUN, url=url)
    assert [row["version"] for row in rows if row["is_head"]] == [HEAD]
    assert {row["kind"] for row in rows} == {"keyframe", "delta", "jump-8"}
    assert (rows[0]["kind"], rows[0]["density"], rows[0]["bytes_per_changed"]) == ("keyframe", None, None)
    last = rows[-1]
    assert (last["changed_count"], last["element_count"], last["base_version"]) == (101, 20064, HEAD - 1)
    assert last["density"] == pytest.approx(101 / 20064)
    assert last["bytes_per_changed"] == pytest.approx(last["payload_bytes"] / 101)
    assert last["dense_over_payload"] == pytest.approx((2 * 20000 + 4 * 64) / last["payload_bytes"])
    shown = tool("ls", RUN, url=url).stdout
    assert "jump-8" in shown and "head" in shown


def test_a_run_that_is_not_there_or_has_no_weights_is_told_apart(url: str) -> None:
    done = tool("ls", "nope", url=url)
    assert (done.returncode, "run 'nope' does not exist" in done.stderr) == (2, True)
    with rollfab.connect(url) as fabric:
        fabric.run("fresh", model="tiny", environment="frozenlake")
    done = tool("ls", "fresh", url=url)
    nothing = "nothing is published in run fresh yet: its trainer does, with run.publish"
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "", nothing)
    assert said("ls", "fresh", url=url) == []
    done = tool("verify", "fresh", url=url)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "nothing" in done.stderr


def test_inspect_takes_a_version_apart(url: str) -> None:
    seen = said("inspect", RUN, "8", "--kind", "jump-8", url=url)
    assert (seen["kind"], seen["base_version"], seen["changed_count"]) == ("jump-8", 0, 808)
    assert {row["name"]: row["changed_count"] for row in seen["tensors"]} == {"norm": 8, "w": 800}
    assert sum(row["byte_count"] for row in seen["modes"]) == seen["payload_bytes"]
    assert sum(row["bytes"] for row in seen["chunks"]) == seen["payload_bytes"]
    assert seen["of_entropy_floor"] == pytest.approx(seen["floor_bytes"] / seen["payload_bytes"])
    shown = tool("inspect", RUN, "8", url=url).stdout
    assert "version 8, delta from version 7" in shown and "entropy floor" in shown
    done = tool("inspect", RUN, "99", url=url)
    assert (done.returncode, "version 99 of run 'weights' is not held" in done.stderr) == (1, True)


def test_verify_says_that_all_is_right(url: str) -> None:
    head = said("verify", RUN, url=url)
    assert head["is_right"] and head["faults"] == []
    assert {(row["version"], row["kind"]) for row in head["checked"]} >= {(0, "keyframe"), (HEAD, "delta")}
    everything = said("verify", RUN, "--all", url=url)
    held = {(row["version"], row["kind"]) for row in said("ls", RUN, url=url)}
    assert {(row["version"], row["kind"]) for row in everything["checked"]} == held
    assert "all right" in tool("verify", RUN, "8", url=url).stdout
    assert tool("verify", RUN, "8", "--all", url=url).returncode == 2


@pytest.mark.timeout(60)  # one real process, a second or more to start
def test_verify_names_the_chunk_and_the_tensors_that_are_wrong(url: str) -> None:
    # Given a version one of whose bytes turned over in the broker
    client = Redis.from_url(url)
    (key,) = client.scan_iter(match=f"rf:{{{RUN}.w}}:chunk:{HEAD}:delta*", count=1000)
    right = client.get(key)
    assert isinstance(right, bytes)
    client.setrange(key, 20, bytes([right[20] ^ 1]))
    try:
        # Then it says so, and fails
        done = tool("verify", RUN, url=url)
        assert done.returncode == 1
        assert f"version {HEAD} (delta): chunk 0 is corrupt" in " ".join(done.stdout.split())
        done = command("weights", "verify", RUN, "--json", url=url)
        assert done.returncode == 1, done.stderr
        (fault,) = json.loads(done.stdout)["faults"]
        assert (fault["version"], fault["chunk"], fault["tensors"]) == (HEAD, 0, ["norm", "w"])
        assert tool("verify", RUN, "8", url=url).returncode == 0
    finally:
        client.set(key, right)
        client.close()


def test_diff_compares_versions_and_checkpoints(url: str, tmp_path: Path) -> None:
    seen = said("diff", RUN, str(HEAD), "8", url=url)
    assert seen["total"]["changed_count"] == 101
    assert {row["name"]: row["one_step_count"] for row in seen["tensors"]} == {"norm": 0, "w": 100}
    assert seen["tensors"][0]["change_max"] == 0.25
    # A checkpoint of version 8 on disk is that version, and differs from the next one as that does
    file = tmp_path / "model.safetensors"
    save_bits(file, LAYOUT, {name: np.ascontiguousarray(each).reshape(-1) for name, each in weights(8).items()})
    same = tool("diff", RUN, "8", "--checkpoint", str(tmp_path), url=url)
    assert (same.returncode, "equal, bit by bit: 2 tensors" in same.stdout) == (0, True)
    other = said("diff", RUN, str(HEAD), "--checkpoint", str(file), url=url)
    assert other["tensors"] == seen["tensors"] and other["missing"] == other["unknown"] == []
    for words in ((str(HEAD),), (str(HEAD), "8", "--checkpoint", str(file))):
        assert tool("diff", RUN, *words, url=url).returncode == 2


def test_a_checkpoint_that_cannot_be_compared_is_named(url: str, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        done = tool("diff", RUN, str(HEAD), "--checkpoint", str(path), url=url)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        return " ".join(done.stderr.split())

    assert "no *.safetensors in" in refused(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"not a checkpoint")
    assert "cannot be read as safetensors" in refused(file)
    bits = {"w": np.zeros(20000, np.uint16), "norm": np.zeros(64, np.uint32)}
    save_bits(file, LAYOUT, bits)
    file.write_bytes(file.read_bytes()[:-8])
    assert "is cut off" in refused(file)
    wide = Layout((TensorSpec("norm", "float32", (64,)), TensorSpec("w", "float32", (200, 100))))
    save_bits(file, wide, {**bits, "w": np.zeros(20000, np.uint32)})
    assert "has 'w' as F32[200, 100], published is w bfloat16[200, 100]" in refused(file)
    save_bits(file, Layout((TensorSpec("other", "float32", (64,)),)), {"other": np.zeros(64, np.uint32)})
    assert f"has none of the tensors of run {RUN!r}: it has other" in refused(file)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [200, 100], "data_offsets": [0.0, 40000.0]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(40000))
    assert "the entry of tensor 'w' cannot be read" in refused(file)


def test_names_on_one_side_only_are_listed(url: str, tmp_path: Path) -> None:
    layout = Layout((TensorSpec("lm_head", "bfloat16", (2,)), TensorSpec("w", "bfloat16", (200, 100))))
    file = tmp_path / "model.safetensors"
    bits = {"lm_head": np.zeros(2, np.uint16), "w": weights(HEAD)["w"].reshape(-1)}
    save_bits(file, layout, bits)
    seen = said("diff", RUN, str(HEAD), "--checkpoint", str(file), url=url)
    assert (seen["missing"], seen["unknown"], seen["total"]["tensor_count"]) == (["norm"], ["lm_head"], 1)
    shown = tool("diff", RUN, str(HEAD), "--checkpoint", str(file), url=url).stdout
    assert "only in the run: norm" in shown and "only in the checkpoint: lm_head" in shown


def test_a_run_is_exported_and_followed_by_another_one(url: str, tmp_path: Path) -> None:
    # Given a version on disk, and the next ones as deltas
    assert said("export", RUN, "7", str(tmp_path), url=url)["tensor_count"] == 2
    wrote = tool("export", RUN, "8", str(tmp_path), "--delta-from", "7", "--encoding", "overwrite", url=url)
    assert wrote.returncode == 0, wrote.stderr
    assert "version 8, 2 tensors that changed since version 7, " in " ".join(wrote.stdout.split())
    seen = said("export", RUN, "9", str(tmp_path), "--delta-from", "8", "--checksum", "adler32", url=url)
    assert seen["path"] == str(tmp_path / "weight_v000009")
    assert (seen["run_id"], seen["version"], seen["base_version"], seen["tensor_count"]) == (RUN, 9, 8, 2)
    for words in (
        ["9", str(tmp_path), "--delta-from", "9"],
        ["9", str(tmp_path), "--delta-from", "1", "--files-from", "."],
    ):
        assert tool("export", RUN, *words, url=url).returncode == 2
    assert "is there already" in tool("export", RUN, "7", str(tmp_path), url=url).stderr

    # When another trainer publishes these directories, by the one call that publishes
    with rollfab.connect(url) as fabric:
        run = fabric.run("follower", model="any", environment="frozenlake")
        for version in (7, 8, 9):
            run.publish(tmp_path / f"weight_v00000{version}", version=version)

        # Then its run has the same weights, bit by bit
        for version in (7, 8, 9):
            for name, array in run.weights(version).items():
                np.testing.assert_array_equal(array, weights(version)[name])
        with pytest.raises(FabricError, match="change of version 7, and run 'follower' holds version 9"):
            run.publish(tmp_path / "weight_v000008", version=8)
