"""Each role's own user tries what is not its work, live: the broker refuses it, or nobody does what it asks for."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from redis import Redis, exceptions
from rq import Queue
from rq.job import Retry
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from rollfab.fabric.queue.acl import RIGHTS, commands_of
from rollfab.fabric.queue.keys import key_of
from rollfab.workers.rewards.jobs import QUEUE_NAME, _Puller, job_class
from tests.support.brokers.guarded_broker import Guarded, guarded_broker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

# What is tried → command, and the roles whose work it is.
WORK: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "make a run": (("HSET", key_of("runs"), "x", "1"), {"trainer", "inference", "operator"}),
    "give a lease": (("HSET", key_of("r1.0:leases"), "w", "1 1 0"), {"controller", "operator"}),
    "lead": (("SET", key_of("leader"), "me 1 1"), {"controller", "operator"}),
    "lend": (("HSET", key_of("lends"), "*", "on"), {"api-control", "api-trajectories", "operator"}),
    "move the head": (("HSET", key_of("r1.w:head"), "version", "9"), {"trainer", "inference", "operator"}),
    "write weights": (("SET", key_of("r1.w:chunk:0:keyframe.1:0"), "x"), {"trainer", "inference", "operator"}),
    "write a manifest": (("HSET", key_of("r1.w:manifests"), "0:keyframe", "x"), {"trainer", "inference", "operator"}),
    "publish a collective": (("SET", key_of("r1.w:offer"), "x"), {"trainer", "inference", "operator"}),
    "read where weights are served": (
        ("HGET", key_of("r1.w:addresses"), "w"),
        {"trainer", "inference", "worker", "operator"},
    ),
    "hand in a rollout": (
        ("HSET", key_of("r1.0:rollouts:g"), "g.0", "x"),
        {"trainer", "inference", "agent", "gateway", "reward", "operator"},
    ),
    "read a rollout": (
        ("HGETALL", key_of("r1.0:rollouts:g")),
        {"trainer", "inference", "agent", "gateway", "reward", "api-trajectories", "operator"},
    ),
    "read a task": (
        ("HGET", key_of("r1.0:trajectory:job"), "g.0"),
        {"trainer", "inference", "agent", "gateway", "reward", "api-trajectories", "operator"},
    ),
    "read a prompt": (
        ("HGET", key_of("r1.0:turn:job"), "g.0.0"),
        {"trainer", "inference", "agent", "gateway", "worker", "reward", "api-trajectories", "operator"},
    ),
    "put a job on rq's queue": (("RPUSH", f"rq:queue:{QUEUE_NAME}", "x"), {"agent", "gateway", "reward"}),
    "write another program's key": (("SET", "session:1", "x"), set()),
    "take weights away": (("HDEL", key_of("r1.w:manifests"), "1:delta"), {"trainer", "inference", "operator"}),
    "read weights": (
        ("GET", key_of("r1.w:chunk:0:keyframe.1:0")),
        {"trainer", "inference", "worker", "operator"},
    ),
    "delete a run": (("HDEL", key_of("runs"), "r1"), {"trainer", "inference", "operator"}),
    "unlink a table": (("UNLINK", key_of("r1.0:turn:job")), {"trainer", "inference", "operator"}),
    "find keys": (("SCAN", "0"), {"operator"}),
    "ask for a turn": (
        ("HSET", key_of("r1.0:turn:job"), "g.0.0", "x"),
        {"trainer", "inference", "agent", "gateway", "worker", "reward", "operator"},
    ),
    "tell an event": (
        ("XADD", key_of("events"), "*", "kind", "x"),
        {"trainer", "controller", "api-control", "api-trajectories", "operator"},
    ),
    "see rq's workers": (("SMEMBERS", "rq:workers"), {"reward"}),
    "hear what others are told": (("SUBSCRIBE", "anything"), set()),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_broker(tmp_path_factory.mktemp("roles")) as broker:
        yield broker


@pytest.mark.parametrize("what", WORK)
def test_only_those_whose_work_it_is_may_do_it_also_inside_a_script(broker: Guarded, what: str) -> None:
    words, whose = WORK[what]
    allowed = {role for role in whose if _sends(role, words[0])}
    for way in (words, ("EVAL", "return redis.call(unpack(ARGV))", "0", *words)):
        assert {role for role in RIGHTS if _may(broker, role, way)} == allowed
    broker.admin.flushall()


def _may(broker: Guarded, role: str, command: tuple[str, ...]) -> bool:
    with broker.client(role) as client:
        try:
            client.execute_command(*command)
        except (exceptions.NoPermissionError, exceptions.ConnectionError):
            return False
        except exceptions.ResponseError as error:  # else it was not refused for who asks
            return not re.search("ACL failure in script|not allowed from script|No perm", str(error))
    return True


def _sends(role: str, command: str) -> bool:
    """Whether a role sends that command at all: what it writes by scripts alone it may not write otherwise."""
    return command.lower() in commands_of(role)


@pytest.mark.filterwarnings("ignore:CLIENT LIST")  # rq would like to know its own address, and does without
def test_no_role_s_job_makes_the_reward_worker_ask_anybody_for_anything(broker: Guarded) -> None:
    # Given the job of the exploit, put there by every role's user that can: webhooks, retries, and a foreign function
    asked = _Listener()
    planted = set()
    for role in RIGHTS:
        with broker.client(role) as client:
            try:
                _plant(client, asked.url)
                planted.add(role)
            except exceptions.NoPermissionError:
                continue
    assert planted == {"agent", "gateway", "reward"}

    # When a reward worker with its own user takes all of it
    ran: list[str] = []
    with broker.client("reward") as client:
        queue = Queue(QUEUE_NAME, connection=client, serializer=JSONSerializer)
        kind = job_class({"score": lambda name, rows: ran.append(name)})

        def until_empty() -> tuple[list[Queue], float]:
            if queue.count == 0:
                raise SystemExit  # what rq takes for the end of its work
            return [queue], 0.2

        worker = _Puller([queue], connection=client, serializer=JSONSerializer, job_class=kind)
        worker.queues_now = until_empty
        with contextlib.suppress(SystemExit):
            worker.work(logging_level="CRITICAL")
        assert queue.count == 0

    # Then it did its work, once each, and asked nobody
    assert ran == ["none"] * len(planted)
    assert asked.close() == 0


def _plant(client: Redis, url: str) -> None:
    queue = Queue(QUEUE_NAME, connection=client, serializer=JSONSerializer)
    hooks = [Webhook(url, "finished"), Webhook(url, "failed")]
    for name in ("score", "os.system"):
        queue.enqueue_call(name, args=["none", []], webhooks=hooks, retry=Retry(3))


class _Listener:
    """A port that counts who comes."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.2)
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}/"
        self._count = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            connection.close()
            self._count += 1

    def close(self) -> int:
        """How often somebody came."""
        self._is_over.set()
        self._thread.join()
        self._server.close()
        return self._count
