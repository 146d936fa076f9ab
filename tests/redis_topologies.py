"""Redis as operators run it, on loopback: a cluster of three primaries and three replicas, and a
primary with two replicas that three Sentinels watch.

The servers are the program that the suite uses anyway. Ports are random; processes are ended by
their own ids. redis-py asks and steers, so that the client under test does not judge itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis as redis_py
from redis.backoff import NoBackoff
from redis.retry import Retry

from tenure.store.embedded.programs import redis_program
from tenure.store.redis.address import parse_address
from tenure.store.redis.bulk import locate
from tests.ports import free_port

NODE_TIMEOUT_MS = 1_500
DOWN_AFTER_MS = 1_000
SERVICE = "orders"
_START_WITHIN_S = 30.0
_BUS = 10_000  # a node's bus listens this far above its port


def until(holds: Callable[[], Any], what: str, within_s: float = _START_WITHIN_S) -> Any:
    """What `holds` returns as soon as that is true; the servers have no event to wait for."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            found = holds()
        except redis_py.RedisError:
            found = None
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)  # then look again


class Server:
    """One process of the program, with a redis-py client as `admin`."""

    def __init__(self, folder: Path, port: int, *settings: str, sentinel: bool = False) -> None:
        self.port = port
        self.admin: Any = redis_py.Redis(port=port, socket_timeout=5, retry=Retry(NoBackoff(), 0))
        self._folder = folder / str(port)
        self._folder.mkdir()
        self._config = self._folder / "server.conf"
        fixed = (f"port {port}", "bind 127.0.0.1", f"dir {self._folder}", "daemonize no")
        self._config.write_text("\n".join([*fixed, *settings, ""]))
        self._sentinel = sentinel
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, *, wait: bool = True) -> None:
        """Start it, with the data it had; returns when it answers, unless told not to wait."""
        command = [str(redis_program()), str(self._config), *(["--sentinel"] * self._sentinel)]
        log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()
        if wait:
            until(self.admin.ping, f"the server at {self.port} answers")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def start_again(self) -> None:
        """Start it, with the data it had, if it was killed."""
        if self._process is not None and self._process.poll() is not None:
            self.start()

    def follow(self, primary: Server) -> None:
        """Become a replica, and be in step when this returns."""
        self.admin.replicaof("127.0.0.1", primary.port)
        until(lambda: _follows(self), f"{self.port} follows {primary.port}")

    def cut_replicas(self) -> None:
        """Its replicas lag from now on: they are cut off, and may not come back."""
        self.admin.execute_command("ACL SETUSER", "default", "-psync", "-sync")
        self.admin.execute_command("CLIENT KILL", "TYPE", "replica")

    def end(self) -> None:
        """End it, in whatever state it is."""
        self.admin.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _ports(count: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        port = free_port()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port + _BUS))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports


# -- cluster ---------------------------------------------------------------------------------------


class RedisCluster:
    """Three primaries, which own a third of the slots each, and a replica of each."""

    def __init__(self, folder: Path, *, replicas: bool = True) -> None:
        settings = (
            "cluster-enabled yes",
            f"cluster-node-timeout {NODE_TIMEOUT_MS}",
            "cluster-replica-validity-factor 0",
            "repl-diskless-sync-delay 0",
            "appendonly no",
            'save ""',
        )
        count = 6 if replicas else 3
        self.servers = [Server(folder, port, *settings) for port in _ports(count)]
        self._form()

    @property
    def url(self) -> str:
        """It names two of the nodes."""
        return f"redis+cluster://127.0.0.1:{self.servers[0].port},127.0.0.1:{self.servers[1].port}"

    def _form(self) -> None:
        first, *others = self.servers
        for number, server in enumerate(self.servers):
            server.admin.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server in others:
            server.admin.execute_command("CLUSTER MEET", "127.0.0.1", first.port)
        ranges = [(0, 5460), (5461, 10922), (10923, 16383)]
        for server, (start, end) in zip(self.servers, ranges, strict=False):
            server.admin.execute_command("CLUSTER ADDSLOTS", *range(start, end + 1))
        count = len(self.servers)
        until(lambda: all(len(self.view(each)) == count for each in self.servers), "they met")
        for primary, replica in zip(self.servers[:3], self.servers[3:], strict=False):
            replica.admin.execute_command("CLUSTER REPLICATE", self.node_id(primary))
        until(self.is_whole, "all is in place")

    def is_whole(self) -> bool:
        """Whether all nodes see three primaries and their replicas, all of them in step."""
        try:
            return all(self._is_settled(each) for each in self.servers)
        except redis_py.RedisError:
            return False

    def _is_settled(self, server: Server) -> bool:
        nodes = [node for node in self.view(server).values() if "fail" not in node["flags"]]
        replicas = [node for node in nodes if "slave" in node["flags"]]
        linked = server.admin.info("replication").get("master_link_status", "up") == "up"
        state = server.admin.execute_command("CLUSTER INFO")["cluster_state"]
        there = (len(nodes), len(replicas)) == (len(self.servers), len(self.servers) - 3)
        return there and linked and state == "ok"

    def view(self, server: Server) -> dict[str, Any]:
        """The nodes as one of them sees them, by address."""
        return dict(server.admin.execute_command("CLUSTER NODES"))

    def node_id(self, server: Server) -> str:
        """The name of a node in the cluster."""
        return _text(server.admin.execute_command("CLUSTER MYID"))

    def owner(self, slot: int) -> Server:
        """The server that owns a slot, by those that are up."""

        def found() -> Server | None:
            for server in self.servers:
                try:
                    if self._owns(server, slot):
                        return server
                except redis_py.RedisError:
                    continue
            return None

        server: Server = until(found, f"slot {slot} has an owner")
        return server

    def _owns(self, server: Server, slot: int) -> bool:
        me = next(node for node in self.view(server).values() if "myself" in node["flags"])
        ranges = [[int(part) for part in each] for each in me["slots"] if each[0].isdigit()]
        return "master" in me["flags"] and any(each[0] <= slot <= each[-1] for each in ranges)

    def another_primary(self, server: Server) -> Server:
        """A primary that is not this one."""
        for other in self.servers:
            if other is not server and other.admin.role()[0] == b"master":
                return other
        raise AssertionError("there is one primary only")

    def replica_of(self, server: Server) -> Server:
        """A replica of a primary."""
        for other in self.servers:
            role = other.admin.role()
            if role[0] == b"slave" and role[2] == server.port:
                return other
        raise AssertionError(f"{server.port} has no replica")

    def fail_over(self, slot: int) -> Server:
        """A planned failover of a slot's owner to its replica; returns the new owner."""
        replica = self.replica_of(self.owner(slot))
        replica.admin.execute_command("CLUSTER FAILOVER")
        until(lambda: self.owner(slot) is replica, "the replica took over")
        return replica

    def begin_move(self, slot: int) -> tuple[Server, Server]:
        """Say that a slot moves; returns the source and the target."""
        source = self.owner(slot)
        target = self.another_primary(source)
        state = "CLUSTER SETSLOT"
        target.admin.execute_command(state, slot, "IMPORTING", self.node_id(source))
        source.admin.execute_command(state, slot, "MIGRATING", self.node_id(target))
        return source, target

    def move_keys(self, slot: int, source: Server, target: Server, count: int = 10) -> int:
        """Move some keys of a slot, as redis-cli does; returns how many."""
        keys = source.admin.execute_command("CLUSTER GETKEYSINSLOT", slot, count)
        if keys:
            source.admin.execute_command(
                "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys
            )
        return len(keys)

    def end_move(self, slot: int, source: Server, target: Server) -> None:
        """Give the slot to the target."""
        for server in (target, source):
            server.admin.execute_command("CLUSTER SETSLOT", slot, "NODE", self.node_id(target))

    def give(self, slot: int, target: Server) -> Server:
        """Give a slot without keys to a primary; returns its owner before, when all nodes know."""
        source = self.owner(slot)
        state = "CLUSTER SETSLOT"
        target.admin.execute_command(state, slot, "IMPORTING", self.node_id(source))
        source.admin.execute_command(state, slot, "MIGRATING", self.node_id(target))
        self.end_move(slot, source, target)
        until(
            lambda: all(self._named_owner(each, slot) == target.port for each in self.servers),
            f"all nodes know the new owner of slot {slot}",
        )
        return source

    def _named_owner(self, server: Server, slot: int) -> int | None:
        """The port of the owner of a slot, as one of the nodes sees it."""
        for name, node in self.view(server).items():
            ranges = [[int(part) for part in each] for each in node["slots"] if each[0].isdigit()]
            if "master" in node["flags"] and any(each[0] <= slot <= each[-1] for each in ranges):
                return int(name.rpartition(":")[2])
        return None

    def end(self) -> None:
        """End all servers."""
        for server in self.servers:
            server.end()


# -- Sentinel --------------------------------------------------------------------------------------


class SentinelSet:
    """A primary with two replicas, watched by three Sentinels."""

    def __init__(self, folder: Path) -> None:
        settings = ("repl-diskless-sync-delay 0", "appendonly no", 'save ""')
        self.servers = [Server(folder, free_port(), *settings) for _ in range(3)]
        first = self.servers[0]
        for server in self.servers[1:]:
            server.follow(first)
        watch = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {first.port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 3000",
        )
        self.sentinels = [Server(folder, free_port(), *watch, sentinel=True) for _ in range(3)]
        until(self._know_each_other, "the Sentinels know each other and the replicas")

    @property
    def url(self) -> str:
        """It names all Sentinels."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def _know_each_other(self) -> bool:
        states = [each.admin.sentinel_master(SERVICE) for each in self.sentinels]
        return all(
            state["num-other-sentinels"] == 2 and state["num-slaves"] == 2 for state in states
        )

    def owner(self, slot: int) -> Server:
        """The primary, which has all slots."""
        return self.primary()

    def primary(self) -> Server:
        """The primary, when all Sentinels that answer name the same one."""

        def named() -> int | None:
            ports = self._named()
            return ports.pop() if len(ports) == 1 else None

        port = until(named, "the Sentinels agree")
        return next(server for server in self.servers if server.port == port)

    def _named(self) -> set[int]:
        """The ports of the primaries that the Sentinels name."""
        ask = "SENTINEL GET-MASTER-ADDR-BY-NAME"
        return {int(each.admin.execute_command(ask, SERVICE)[1]) for each in self.sentinels}

    def fail_over(self, slot: int = 0) -> Server:
        """A planned failover; returns the new primary.

        On a busy machine a replica may not be promoted within failover-timeout. Then the Sentinel
        gives the failover up, and it is asked again, as an operator would.
        """
        before = self.primary()
        asked = self.sentinels[0].admin

        def replaced() -> bool:
            state = asked.sentinel_master(SERVICE)
            if state["port"] == before.port and "failover_in_progress" not in state["flags"]:
                asked.execute_command("SENTINEL FAILOVER", SERVICE)
            return state["port"] != before.port

        until(replaced, "the Sentinel has replaced the primary")
        return self.primary_other_than(before)

    def primary_other_than(self, before: Server) -> Server:
        """The primary, as soon as all Sentinels name another one than `before`."""
        until(lambda: before.port not in self._named(), "another primary is named")
        return self.primary()

    def is_whole(self) -> bool:
        """Whether one server is the primary, and the Sentinels could replace it at once."""
        roles = [server.admin.role()[0] for server in self.servers]
        states = [each.admin.sentinel_master(SERVICE) for each in self.sentinels]
        return roles.count(b"master") == 1 and all(
            state["flags"] == "master" and state["num-slaves"] == 2 for state in states
        )

    def end(self) -> None:
        """End all servers."""
        for server in (*self.sentinels, *self.servers):
            server.end()


@contextmanager
def redis_cluster(*, replicas: bool = True) -> Generator[RedisCluster]:
    """A cluster in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = RedisCluster(Path(folder), replicas=replicas)
        try:
            yield cluster
        finally:
            cluster.end()


@contextmanager
def sentinel_set() -> Generator[SentinelSet]:
    """A Sentinel set in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        watched = SentinelSet(Path(folder))
        try:
            yield watched
        finally:
            watched.end()


def _follows(server: Server) -> bool:
    return bool(server.admin.info("replication")["master_link_status"] == "up")


def one_server(url: str, tag: str) -> str:
    """The URL of the one server that has the keys with this hash tag now."""
    address = parse_address(url)
    return url if address.topology == "single" else locate(address, f"{{{tag}}}").label


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw
