"""`rollfab weights verify` and `repair` as a person meets them after damage, with a trainer that lives and without."""

from __future__ import annotations

import json

import numpy as np
import pytest
from redis import Redis

import rollfab
from rollfab.fabric.queue.keys import WeightKeys
from rollfab.trainer.client import Run
from tests.integration.cli.test_cli_weights import RUN, said, tool, weights
from tests.support.weights.weight_models import chunk_key

pytestmark = pytest.mark.timeout(60)
KEYS = WeightKeys(RUN)


def publish(url: str, count: int, **settings: int) -> tuple[rollfab.trainer.client.Fabric, Run]:
    fabric = rollfab.connect(url)
    run = fabric.run(RUN, model="any", environment="frozenlake", **settings)
    for version in range(count):
        run.publish(weights(version), version=version)
    return fabric, run


def gone(redis: Redis) -> None:
    """The trainer's word that it lives is over."""
    redis.delete(KEYS.tending)


def test_verify_says_not_all_right_and_names_every_version_that_cannot_be_read(url: str, redis: Redis) -> None:
    # Given a keyframe without its chunk, and a delta that is a list
    publish(url, 4)[0].close()
    key, delta = chunk_key(redis, RUN, 0, "keyframe"), chunk_key(redis, RUN, 2, "delta")
    redis.delete(key, delta)
    redis.rpush(delta, "x")

    # When
    done = tool("verify", RUN, "--all", url=url)

    # Then
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "not all right" in text and "version 0 (keyframe): chunk 0 is not there" in text
    assert "version 2 (delta): chunk 0 is not there" in text
    assert said_unreadable(url) == [0, 1, 2, 3]


def said_unreadable(url: str) -> list[int]:
    found = json.loads(tool("verify", RUN, "--all", "--json", url=url).stdout)
    assert found["is_right"] == (not found["unreadable"])
    return list(found["unreadable"])


def test_a_head_whose_manifest_is_gone_is_not_all_right(url: str, redis: Redis) -> None:
    publish(url, 3)[0].close()
    redis.hdel(KEYS.manifests, "2:delta")
    done = tool("verify", RUN, "--all", url=url)
    assert done.returncode == 1
    assert "version 2 (delta): its manifest is not there" in " ".join(done.stdout.split())


def test_repair_has_the_trainer_that_lives_heal(url: str, redis: Redis) -> None:
    # Given a trainer that reads nothing without a report, and damage
    fabric, run = publish(url, 4, scrub_bytes_per_s=0)
    redis.delete(chunk_key(redis, RUN, 0, "keyframe"))
    epoch = redis.hget(KEYS.head, "epoch")

    # When
    done = tool("repair", RUN, url=url)

    # Then it was told, healed, and is still in charge
    assert done.returncode == 0, done.stdout
    assert "the run's publisher lives" in done.stdout and "healed" in done.stdout
    assert redis.hget(KEYS.head, "epoch") == epoch
    assert tool("verify", RUN, "--all", url=url).returncode == 0
    run.publish(weights(4), version=4)
    np.testing.assert_array_equal(run.weights()["w"], weights(4)["w"])
    fabric.close()
    assert "nothing to repair" in tool("repair", RUN, url=url).stdout


def test_repair_without_a_trainer_rebuilds_what_can_be_read_and_deletes_the_rest(url: str, redis: Redis) -> None:
    # Given no trainer, a jump over what is damaged, and more damage
    publish(url, 10)[0].close()
    gone(redis)
    redis.set(chunk_key(redis, RUN, 3, "delta"), b"damaged")
    redis.hset(KEYS.manifests, "5:delta", b"damaged")
    assert said_unreadable(url) == [3, 4, 5, 6, 7]

    # When
    done = tool("repair", RUN, url=url)

    # Then
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, text
    assert "no publisher of this run lives" in text and "rebuilt: a keyframe of the head, version 9" in text
    assert "version 3 (delta); the version is lost" in text and "version 5 (delta); the version is lost" in text
    assert said_unreadable(url) == []
    assert {row["version"] for row in said("ls", RUN, url=url)} == {0, 1, 2, 8, 9}

    # And a trainer goes on from there
    fabric = rollfab.connect(url)
    assert fabric.run(RUN).publish(weights(10), version=10).kind == "delta"
    fabric.close()


def test_repair_writes_a_keyframe_of_the_head_again_byte_for_byte(url: str, redis: Redis) -> None:
    # Given
    fabric, run = publish(url, 3)
    run.publish(weights(3), version=3, keyframe=True)
    fabric.close()
    gone(redis)
    key = chunk_key(redis, RUN, 3, "keyframe")
    right = redis.get(key)
    redis.set(key, b"damaged")

    # When
    done = tool("repair", RUN, url=url)

    # Then
    assert done.returncode == 0 and "byte for byte" in " ".join(done.stdout.split()), done.stdout
    assert redis.get(key) == right


def test_repair_of_a_head_that_nothing_leads_to_says_what_is_lost_and_deletes_nothing(url: str, redis: Redis) -> None:
    # Given
    publish(url, 3)[0].close()
    gone(redis)
    redis.delete(chunk_key(redis, RUN, 0, "keyframe"))
    before = redis.hkeys(KEYS.manifests)

    # When
    done = tool("repair", RUN, url=url)

    # Then
    text = " ".join(done.stdout.split())
    assert done.returncode == 1 and "lost: no way that is held leads to the head, version 2" in text
    assert "Start the trainer again" in text
    assert redis.hkeys(KEYS.manifests) == before

    # And its trainer heals it with the next version
    fabric = rollfab.connect(url)
    run = fabric.run(RUN)
    assert run.publish(weights(3), version=3).kind == "keyframe"
    np.testing.assert_array_equal(run.weights()["w"], weights(3)["w"])
    assert tool("repair", RUN, url=url).returncode == 0
    assert tool("verify", RUN, "--all", url=url).returncode == 0
    fabric.close()
