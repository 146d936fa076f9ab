"""The Redis client on a cluster: each answer of a node that does not execute has a defined effect.

redis-py is the judge: it says which slot a key has, and what lies there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from tenure.core.errors import ReplyLost, ServerError, StoreUnreachable
from tenure.store.redis import BulkRedis, Redis, Script, load_script
from tenure.store.redis.cluster import key_of, slot_of
from tests.redis_topologies import RedisCluster
from tests.waiting import until

pytestmark = pytest.mark.few


@pytest.fixture
async def client(cluster: RedisCluster) -> AsyncGenerator[Redis]:
    client = Redis(cluster.url)
    yield client
    await client.close()


@pytest.fixture
def judge(cluster: RedisCluster) -> Generator[Any]:
    judge = redis_py.RedisCluster(host="127.0.0.1", port=cluster.servers[0].port)
    yield judge
    judge.close()


@pytest.fixture
def key() -> str:
    return f"{{{secrets.token_hex(4)}}}:k"


@pytest.fixture
def moves_two(tmp_path: Path) -> Script:
    """A script that declares one key and reaches a second one by name, as omniq's do."""
    path = tmp_path / "moves_two-1.lua"
    path.write_text(
        "redis.call('INCR', KEYS[1])\n"
        "redis.call('INCR', KEYS[1] .. ARGV[1])\n"
        "return redis.call('GET', KEYS[1])\n"
    )
    return load_script(path, files("tenure.store") / "lua" / "include")


async def test_keys_lie_where_redis_py_finds_them(client: Redis, judge: Any) -> None:
    keys = [f"{secrets.token_hex(3)}{{{n % 7}}}" if n % 2 else f"plain-{n}" for n in range(60)]
    keys += ["{}empty", "a{b", "{x}{y}", "}x{", "ä{ö}"]
    for key in keys:
        assert slot_of(key) == judge.keyslot(key)
        await client.call("SET", key, key)
    assert [judge.get(key) for key in keys] == [key.encode() for key in keys]


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "k"),
        ("EVALSHA", "0" * 40, 2, "k", "l", "arg"),
        ("XREAD", "COUNT", 1, "BLOCK", 5, "STREAMS", "k", "l", "0", "0"),
        ("XREADGROUP", "GROUP", "streams", "c", "COUNT", 1, "STREAMS", "k", ">"),
        ("XINFO", "STREAM", "k"),
        ("XGROUP", "CREATE", "k", "g", "$"),
        ("OBJECT", "ENCODING", "k"),
        ("MEMORY", "USAGE", "k"),
        ("BZPOPMIN", "k", "l", 1),
        ("xadd", b"k", "*", "f", "v"),
    ],
    ids=lambda command: command[0],
)
def test_the_first_key_of_a_command_is_the_one_that_the_server_names(
    cluster: RedisCluster, command: tuple[Any, ...]
) -> None:
    keys = cluster.servers[0].admin.execute_command("COMMAND GETKEYS", *command)
    found = key_of(command)
    assert (found.decode() if isinstance(found, bytes) else found) == keys[0]


@pytest.mark.parametrize("command", ["TIME", "PING", "INFO", "MULTI", "EXEC", "DBSIZE", "FLUSHALL"])
def test_a_command_that_has_no_key_has_none_here(cluster: RedisCluster, command: str) -> None:
    with pytest.raises(redis_py.ResponseError, match="no key arguments"):
        cluster.servers[0].admin.execute_command("COMMAND GETKEYS", command)
    assert key_of([command]) is None


async def test_a_pipeline_over_all_nodes_is_answered_in_order(client: Redis, judge: Any) -> None:
    keys = [secrets.token_hex(6) for _ in range(100)]
    assert {judge.get_node_from_key(key).port for key in keys} == {
        judge.get_node_from_key(key).port for key in ("a", "b", "c")
    }
    await client.pipeline([("SET", key, n) for n, key in enumerate(keys)])
    replies = await client.pipeline([("GET", key) for key in keys])
    assert replies == [str(n).encode() for n in range(100)]


async def test_a_command_without_a_key_goes_where_its_neighbours_go(
    client: Redis, cluster: RedisCluster, key: str
) -> None:
    owner = cluster.owner(slot_of(key))
    info, _ = await client.pipeline([("INFO", "server"), ("GET", key)])
    assert f"tcp_port:{owner.port}\r\n".encode() in info
    assert f"tcp_port:{owner.port}\r\n".encode() in await client.call("INFO", "server")


async def test_a_scan_sees_the_keys_of_all_nodes(client: Redis) -> None:
    mark = secrets.token_hex(4)
    keys = {f"{mark}-{n}".encode() for n in range(50)}
    await client.pipeline([("SET", key, 1) for key in keys])
    assert {key async for page in client.scan(f"{mark}-*") for key in page} == keys


async def test_a_moved_slot_is_followed_and_nothing_runs_twice(
    client: Redis, cluster: RedisCluster, judge: Any, key: str
) -> None:
    slot = slot_of(key)
    assert await client.call("INCR", key) == 1
    source, target = cluster.begin_move(slot)
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_move(slot, source, target)
    assert await client.call("INCR", key) == 2
    assert await client.pipeline([("INCR", key), ("INCR", key)]) == [3, 4]
    assert judge.get(key) == b"4"


async def test_a_key_that_has_moved_ahead_is_asked_for_at_the_target(
    client: Redis, cluster: RedisCluster, judge: Any, key: str
) -> None:
    """ASK is for one command: the next one of another key still goes to the source."""
    slot = slot_of(key)
    assert await client.call("INCR", key) == 1
    source, target = cluster.begin_move(slot)
    cluster.move_keys(slot, source, target)
    assert await client.call("INCR", key) == 2
    assert await client.pipeline([("INCR", key), ("PING",), ("INCR", key)]) == [3, b"PONG", 4]
    cluster.end_move(slot, source, target)
    assert await client.call("INCR", key) == 5
    assert judge.get(key) == b"5"


async def test_a_script_waits_until_its_slot_has_one_owner(
    client: Redis, cluster: RedisCluster, moves_two: Script, key: str
) -> None:
    """Whatever has moved: no key, the declared one, all. The script runs whole or not at all."""
    slot = slot_of(key)
    for number, moved in enumerate((0, 1, 10), start=1):
        source, target = cluster.begin_move(slot)
        if moved:
            cluster.move_keys(slot, source, target, moved)
        running = asyncio.create_task(client.run(moves_two, [key], [":other"]))
        await asyncio.wait([running], timeout=0.2)
        assert not running.done()
        while cluster.move_keys(slot, source, target):
            pass
        cluster.end_move(slot, source, target)
        assert await running == str(number).encode()
    assert await client.call("GET", f"{key}:other") == b"3"


async def test_a_slot_that_keeps_moving_counts_as_unreachable(
    client: Redis,
    cluster: RedisCluster,
    moves_two: Script,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tenure.store.redis.cluster._PATIENCE_S", 0.3)
    slot = slot_of(key)
    await client.run(moves_two, [key], [":other"])
    source, target = cluster.begin_move(slot)
    with pytest.raises(StoreUnreachable, match="the slot is moving"):
        await client.run(moves_two, [key], [":other"])
    with pytest.raises(StoreUnreachable, match="the slot is moving"):
        await client.call("MGET", key, f"{key}:missing")
    with pytest.raises(ReplyLost, match="an earlier part of the call was executed"):
        await client.pipeline([("GET", key), ("MGET", key, f"{key}:missing")])
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_move(slot, source, target)
    assert await client.call("GET", key) == b"1"


async def test_a_transaction_is_sent_again_as_a_whole(
    client: Redis, cluster: RedisCluster, key: str
) -> None:
    slot = slot_of(key)
    assert await client.call("INCR", key) == 1
    source, target = cluster.begin_move(slot)
    commands = [("MULTI",), ("INCR", key), ("INCR", f"{key}:new"), ("EXEC",)]
    running = asyncio.create_task(client.pipeline(commands))
    await asyncio.wait([running], timeout=0.2)
    assert not running.done()
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_move(slot, source, target)
    assert (await running)[-1] == [2, 1]


async def test_a_blocked_command_whose_slot_moves_ends_and_the_next_one_is_woken(
    client: Redis, cluster: RedisCluster, key: str
) -> None:
    slot = slot_of(key)
    await client.call("SET", f"{key}:x", 1)
    blocked = asyncio.create_task(client.block("BLPOP", key, 20, wait_ms=20_000))
    source, target = cluster.begin_move(slot)
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_move(slot, source, target)
    assert await asyncio.wait_for(blocked, 10) is None
    blocked = asyncio.create_task(client.block("BLPOP", key, 20, wait_ms=20_000))
    await until(lambda: target.admin.info("clients")["blocked_clients"] > 0)
    await client.call("RPUSH", key, "v")
    assert await blocked == [key.encode(), b"v"]


async def test_a_slot_without_an_owner_counts_as_unreachable(
    client: Redis, cluster: RedisCluster, key: str
) -> None:
    slot = slot_of(key)
    await client.call("SET", key, 1)
    owner = cluster.owner(slot)
    owner.admin.execute_command("CLUSTER DELSLOTS", slot)
    with pytest.raises(StoreUnreachable, match="cluster is down") as caught:
        await client.call("GET", key)
    assert str(caught.value.reply).startswith("CLUSTERDOWN")
    owner.admin.execute_command("CLUSTER ADDSLOTS", slot)

    async def answers() -> bool:
        try:
            return bool(await client.call("GET", key))
        except StoreUnreachable:
            return False

    await until(answers)


async def test_a_call_whose_answer_was_lost_is_not_sent_again(
    client: Redis, cluster: RedisCluster, key: str
) -> None:
    owner = cluster.owner(slot_of(key))
    call = asyncio.create_task(client.call("BLPOP", key, 30))
    await until(lambda: owner.admin.info("clients")["blocked_clients"] > 0)
    owner.admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with pytest.raises(ReplyLost, match="may have been executed"):
        await call
    assert await client.call("RPUSH", key, "v") == 1
    assert await client.call("LLEN", key) == 1


async def test_keys_of_several_slots_in_one_script_say_what_would_be_right(
    client: Redis, tmp_path: Path
) -> None:
    path = tmp_path / "two-2.lua"
    path.write_text("return { KEYS[1], KEYS[2] }\n")
    script = load_script(path, files("tenure.store") / "lua" / "include")
    with pytest.raises(ServerError, match=r"share a hash tag.*namespace=\{jobs\}:"):
        await client.run(script, ["a", "b"], [])


async def test_a_plain_url_to_a_node_says_that_it_is_a_cluster(
    cluster: RedisCluster, key: str
) -> None:
    owner = cluster.owner(slot_of(key))
    other = cluster.another_primary(owner)
    client = Redis(f"redis://127.0.0.1:{other.port}/0")
    with pytest.raises(ServerError, match=r"write redis\+cluster://"):
        await client.call("GET", key)
    await client.close()


def test_a_bulk_reader_speaks_to_the_owner_of_its_key(
    cluster: RedisCluster, judge: Any, key: str
) -> None:
    judge.xadd(key, {"a": "1"})
    with BulkRedis(cluster.url, key=key) as bulk:
        assert len(list(bulk.pages(key, "", "+", 10))) == 1


def test_a_bulk_reader_whose_slot_moves_says_that_it_can_read_again(
    cluster: RedisCluster, judge: Any, key: str
) -> None:
    judge.xadd(key, {"a": "1"})
    slot = slot_of(key)
    with BulkRedis(cluster.url, key=key) as bulk:
        source, target = cluster.begin_move(slot)
        while cluster.move_keys(slot, source, target):
            pass
        with pytest.raises(StoreUnreachable, match=r"moving to another node \(ASK .*read again"):
            bulk.call("XLEN", key)
        cluster.end_move(slot, source, target)
        with pytest.raises(StoreUnreachable, match=r"moving to another node \(MOVED .*read again"):
            bulk.call("XLEN", key)
    with BulkRedis(cluster.url, key=key) as again:
        assert again.call("XLEN", key) == 1


async def test_no_node_that_answers_is_told_with_all_that_were_asked() -> None:
    client = Redis("redis+cluster://127.0.0.1:1,127.0.0.1:2", connect_timeout_ms=2_000)
    with pytest.raises(StoreUnreachable, match=r"no node answers: .*:[12]/0.*:[12]/0"):
        await client.call("PING")
    await client.close()
