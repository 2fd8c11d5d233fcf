"""A Redis Cluster of real servers on this machine, for tests: some primaries that share the slots, and replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.brokers.redis_server import RedisServer, ask, free_port
from tests.support.until import wait_until

SLOT_COUNT = 16384


class RedisCluster:
    """Servers of one cluster: `primaries[i]` holds the i-th part of the slots, `replicas[i]` copies a primary.

    Args:
        directory: exists; short enough for unix sockets below it.
        primary_count: how many share the slots.
        replica_count: how many copy the first primaries, one each.
        config: further lines for every server, as in redis.conf.
    """

    def __init__(self, directory: Path, *config: str, primary_count: int = 3, replica_count: int = 0) -> None:
        lines = ("cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 1000", *config)
        self.servers: list[RedisServer] = []
        for index in range(primary_count + replica_count):
            home = directory / str(index)
            home.mkdir()
            self.servers.append(RedisServer(home, *lines, f"cluster-port {free_port()}"))
        self.primaries = self.servers[:primary_count]
        self.replicas = self.servers[primary_count:]

    @property
    def url(self) -> str:
        """The URL of one node: a client finds the others."""
        return self.primaries[0].url

    @property
    def explicit_url(self) -> str:
        """A URL that names every primary."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{server.port}' for server in self.primaries)}"

    def start(self) -> None:
        """Start the servers and make them one cluster; returns once each of them says that all is well."""
        for server in self.servers:
            server.start()
        for index, server in enumerate(self.servers):
            ask(server, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for index, server in enumerate(self.primaries):
            start, end = (SLOT_COUNT * at // len(self.primaries) for at in (index, index + 1))
            ask(server, "CLUSTER", "ADDSLOTSRANGE", start, end - 1)
        for server in self.servers[1:]:
            bus_port = ask(self.servers[0], "CONFIG", "GET", "cluster-port")[1]
            ask(server, "CLUSTER", "MEET", "127.0.0.1", self.servers[0].port, int(bus_port))
        wait_until(lambda: all(self._knows_all(server) for server in self.servers), "every node knows the others")
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            ask(replica, "CLUSTER", "REPLICATE", ask(primary, "CLUSTER", "MYID").decode())
        wait_until(self.is_well, "the cluster is well")

    def is_well(self) -> bool:
        """Whether every server holds the cluster for whole, and the replicas have caught up."""
        states = [b"cluster_state:ok" in ask(server, "CLUSTER", "INFO") for server in self.servers]
        links = [b"master_link_status:up" in ask(server, "INFO", "replication") for server in self.replicas]
        return all(states) and all(links)

    @staticmethod
    def holds(server: RedisServer, slot: int) -> bool:
        """Whether a node serves a slot."""
        me = ask(server, "CLUSTER", "MYID")
        return any(low <= slot <= high and holder[2] == me for low, high, holder, *_ in ask(server, "CLUSTER", "SLOTS"))

    @staticmethod
    def begin_move(slot: int, source: RedisServer, target: RedisServer) -> None:
        """From now on the source sends on, by ASK, for the keys of this slot that it does not have."""
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ask(source, "CLUSTER", "MYID").decode())
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ask(target, "CLUSTER", "MYID").decode())

    @staticmethod
    def end_move(slot: int, source: RedisServer, target: RedisServer) -> None:
        """Hand over the keys that are left, and the slot; from now on the source sends on by MOVED."""
        while names := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 10):
            ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
        for server in (target, source):
            ask(server, "CLUSTER", "SETSLOT", slot, "NODE", ask(target, "CLUSTER", "MYID").decode())

    def flush(self) -> None:
        """Delete every key."""
        for server in self.primaries:
            ask(server, "FLUSHALL")

    def kill(self) -> None:
        """End all servers as a crash would."""
        for server in self.servers:
            server.kill()

    def _knows_all(self, server: RedisServer) -> bool:
        rows = ask(server, "CLUSTER", "NODES").decode().splitlines()
        return len(rows) == len(self.servers) and not any("handshake" in row or "noaddr" in row for row in rows)


@contextmanager
def redis_cluster(
    directory: Path, *config: str, primary_count: int = 3, replica_count: int = 0
) -> Iterator[RedisCluster]:
    """A running cluster, killed at the end."""
    cluster = RedisCluster(directory, *config, primary_count=primary_count, replica_count=replica_count)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
