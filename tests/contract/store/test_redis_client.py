"""The Redis client against a real server that behaves."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tenure.core.errors import ServerError, UsageError
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis, Script, load_script
from tests.chaos.proxy import LossyProxy
from tests.waiting import until


@pytest.fixture
def add(tmp_path: Path) -> Script:
    path = tmp_path / "add-1.lua"
    path.write_text("return redis.call('INCRBY', KEYS[1], ARGV[1])")
    return load_script(path, tmp_path)


async def test_replies_are_handed_over_raw(redis: Redis) -> None:
    await redis.call("DEL", "raw", "raws")
    assert await redis.call("SET", "raw", b"\x00\xff") == b"OK"
    assert await redis.call("GET", "raw") == b"\x00\xff"
    assert await redis.call("GET", "no such key") is None
    assert await redis.call("RPUSH", "raws", 1, "two", 3.5) == 3
    assert await redis.call("LRANGE", "raws", 0, -1) == [b"1", b"two", b"3.5"]


async def test_each_of_many_concurrent_callers_gets_its_own_reply(redis: Redis) -> None:
    replies = await asyncio.gather(*(redis.call("ECHO", f"m{i}") for i in range(3000)))
    assert replies == [f"m{i}".encode() for i in range(3000)]


async def test_calls_of_one_turn_of_the_loop_leave_in_one_write_on_one_connection(
    redis: Redis, proxy: LossyProxy
) -> None:
    client = Redis(proxy.url)
    await client.call("PING")
    writes: list[bytes] = []
    connection = client._node.main
    assert connection is not None
    assert connection._transport is not None
    transport = connection._transport

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

        def write(self, data: bytes) -> None:
            writes.append(data)
            transport.write(data)

    connection._transport = Recorder()  # type: ignore[assignment]
    await asyncio.gather(*(client.call("PING") for _ in range(100)))
    await client.close()
    assert [data.count(b"PING") for data in writes] == [100]
    assert proxy.accepted == 1


async def test_commands_run_in_the_order_of_the_calls(redis: Redis) -> None:
    await redis.call("DEL", "order")
    await asyncio.gather(*(redis.call("RPUSH", "order", i) for i in range(500)))
    assert await redis.call("LRANGE", "order", 0, -1) == [str(i).encode() for i in range(500)]


async def test_an_error_reply_raises_and_names_its_command(redis: Redis) -> None:
    await redis.call("SET", "text", "x")
    with pytest.raises(ServerError, match="not an integer") as caught:
        await redis.call("INCR", "text")
    assert caught.value.operation == "INCR"
    assert str(caught.value.reply).startswith("ERR value")
    assert await redis.call("GET", "text") == b"x"


async def test_a_bad_argument_harms_no_neighbour(redis: Redis) -> None:
    bad: Any = None
    results = await asyncio.gather(
        redis.call("ECHO", "a"),
        redis.call("ECHO", bad),
        redis.call("ECHO", "b"),
        return_exceptions=True,
    )
    assert results[0] == b"a"
    assert isinstance(results[1], UsageError)
    assert results[2] == b"b"


async def test_in_a_pipeline_an_error_stands_in_its_place(redis: Redis) -> None:
    await redis.call("DEL", "piped")
    replies = await redis.pipeline(
        [("SET", "piped", "x"), ("INCR", "piped"), ("GET", "piped"), ("NOSUCHCOMMAND",)]
    )
    assert replies[0] == b"OK"
    assert isinstance(replies[1], ServerError)
    assert replies[2] == b"x"
    assert isinstance(replies[3], ServerError)
    assert await redis.pipeline([]) == []


async def test_pipelines_and_calls_mix_without_mixing_replies(redis: Redis) -> None:
    async def piped(i: int) -> bool:
        replies = await redis.pipeline([("ECHO", f"{i}-{j}") for j in range(5)])
        return replies == [f"{i}-{j}".encode() for j in range(5)]

    async def called(i: int) -> bool:
        return bool(await redis.call("ECHO", i) == str(i).encode())

    assert all(await asyncio.gather(*(f(i) for i in range(200) for f in (piped, called))))


async def test_a_transaction_in_a_pipeline_is_one(redis: Redis) -> None:
    replies = await redis.pipeline([("MULTI",), ("INCR", "tx"), ("INCR", "tx"), ("EXEC",)])
    assert replies[3] == [1, 2]


async def test_a_script_runs_before_the_server_has_it_and_after_it_forgot_it(
    redis: Redis, add: Script
) -> None:
    await redis.call("SCRIPT", "FLUSH")
    assert await redis.run(add, ["added"], [1]) == 1
    assert await redis.call("SCRIPT", "EXISTS", add.sha) == [1]
    assert await redis.run(add, ["added"], [1]) == 2
    await redis.call("SCRIPT", "FLUSH")
    results = await asyncio.gather(*(redis.run(add, ["added"], [1]) for _ in range(20)))
    assert sorted(results) == list(range(3, 23))


async def test_a_script_that_fails_is_named(redis: Redis, add: Script) -> None:
    await redis.call("SET", "words", "x")
    with pytest.raises(ServerError) as caught:
        await redis.run(add, ["words"], [1])
    assert caught.value.operation == "add"


async def test_a_script_called_with_the_wrong_number_of_keys_is_not_sent(
    redis: Redis, add: Script
) -> None:
    with pytest.raises(UsageError, match="takes 1 keys, 2 were given"):
        await redis.run(add, ["a", "b"], [1])


async def test_a_blocked_command_delays_nobody_else(redis: Redis) -> None:
    blocked = asyncio.create_task(redis.block("BLPOP", "bell", 20, wait_ms=20_000))
    await until(lambda: blocked_clients(redis, 1))
    assert await redis.call("PING") == b"PONG"
    await redis.call("RPUSH", "bell", "ding")
    assert await blocked == [b"bell", b"ding"]


async def test_a_blocked_command_that_nobody_serves_answers_none(redis: Redis) -> None:
    assert await redis.block("BLPOP", "silence", 0.02, wait_ms=20) is None
    assert await redis.block("BLPOP", "silence", 0.02, wait_ms=20) is None


async def test_blocked_commands_do_not_block_each_other(redis: Redis) -> None:
    tasks = [
        asyncio.create_task(redis.block("BLPOP", f"many{i}", 20, wait_ms=20_000)) for i in range(3)
    ]
    await until(lambda: blocked_clients(redis, 3))
    for i in (2, 0, 1):
        await redis.call("RPUSH", f"many{i}", i)
        assert await tasks[i] == [f"many{i}".encode(), str(i).encode()]


async def test_blocking_connections_are_used_again(
    server: EmbeddedRedis, proxy: LossyProxy
) -> None:
    client = Redis(proxy.url)
    for _ in range(5):
        await client.block("BLPOP", "again", 0.01, wait_ms=10)
    await client.close()
    assert proxy.accepted == 1


async def test_a_late_reply_of_a_cancelled_block_is_never_handed_to_another(redis: Redis) -> None:
    first = asyncio.create_task(redis.block("BLPOP", "late", 20, wait_ms=20_000))
    await until(lambda: blocked_clients(redis, 1))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await until(lambda: blocked_clients(redis, 0))
    await redis.call("RPUSH", "late", "for the next")
    assert await redis.block("BLPOP", "late", 5, wait_ms=5000) == [b"late", b"for the next"]


async def test_a_script_behind_a_blocked_command_runs_in_the_moment_it_is_served(
    redis: Redis, add: Script
) -> None:
    await redis.run(add, ["behind"], [1])  # the server holds the script from now on
    wait = ("BLPOP", "starter", 20)
    blocked = asyncio.create_task(redis.block_then_run(wait, add, ["behind"], [10], wait_ms=20_000))
    await until(lambda: blocked_clients(redis, 1))
    assert await redis.call("GET", "behind") == b"1"
    # One write: what follows the push finds that the script has not waited for anybody's answer.
    await redis.call("RPUSH", "starter", "go")
    assert await redis.call("GET", "behind") == b"11"
    assert await blocked == 11


async def test_a_script_behind_a_block_also_runs_when_nobody_serves_or_knows_it(
    redis: Redis, add: Script
) -> None:
    await redis.call("SCRIPT", "FLUSH")
    for total in (1, 2):
        wait = ("BLPOP", "nobody", 0.02)
        assert await redis.block_then_run(wait, add, ["alone"], [1], wait_ms=20) == total


async def test_an_error_of_the_blocking_command_is_raised_and_the_script_has_run(
    redis: Redis, add: Script
) -> None:
    await redis.run(add, ["ran"], [1])
    with pytest.raises(ServerError, match="WRONGTYPE") as caught:
        await redis.block_then_run(("BLPOP", "ran", 1), add, ["ran"], [1], wait_ms=1000)
    assert caught.value.operation == "BLPOP"
    assert await redis.call("GET", "ran") == b"2"


async def test_replies_of_cancelled_callers_are_swallowed_in_order(redis: Redis) -> None:
    await redis.call("PING")
    tasks = [asyncio.create_task(redis.call("ECHO", i)) for i in range(100)]
    await asyncio.sleep(0)  # they are queued, none is answered
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert results[1::2] == [str(i).encode() for i in range(1, 100, 2)]
    assert await redis.call("ECHO", "after") == b"after"


async def test_a_cancelled_pipeline_takes_no_replies_from_others(redis: Redis) -> None:
    await redis.call("PING")
    doomed = asyncio.create_task(redis.pipeline([("ECHO", i) for i in range(10)]))
    neighbour = asyncio.create_task(redis.call("ECHO", "mine"))
    await asyncio.sleep(0)
    doomed.cancel()
    assert await neighbour == b"mine"


async def test_replies_and_requests_of_many_megabytes_pass(redis: Redis) -> None:
    """More than any socket buffer: writing pauses and resumes, order stays."""
    big = b"x" * (8 << 20)
    calls = [redis.call("ECHO", big), redis.call("ECHO", "small"), redis.call("ECHO", big)]
    replies = await asyncio.gather(*calls)
    assert [len(reply) for reply in replies] == [len(big), 5, len(big)]


async def test_the_server_sees_our_name_and_database(server: EmbeddedRedis) -> None:
    client = Redis(server.url.removesuffix("/0") + "/3", name="box one\n")
    info = await client.call("CLIENT", "INFO")
    await client.close()
    assert b" name=box-one- " in info
    assert b" db=3 " in info


async def test_a_unix_socket_works_as_well(server: EmbeddedRedis) -> None:
    client = Redis(f"redis+unix://{server.socket_path}?db=1")
    assert await client.call("PING") == b"PONG"
    assert b" db=1 " in await client.call("CLIENT", "INFO")
    await client.close()


async def test_the_server_tells_its_time(redis: Redis) -> None:
    first = await redis.server_time_ms()
    assert 0 <= await redis.server_time_ms() - first < 10_000
    assert first > 1_700_000_000_000


def test_a_client_refuses_a_second_event_loop(server: EmbeddedRedis) -> None:
    client = Redis(server.url)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(client.call("PING"))
        except UsageError as error:
            caught.append(error)

    async def main() -> None:
        await client.call("PING")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        await client.close()

    asyncio.run(main())
    assert "another event loop" in str(caught[0])


async def test_a_closed_client_says_so(server: EmbeddedRedis) -> None:
    client = Redis(server.url)
    await client.call("PING")
    await client.close()
    for attempt in (client.call("PING"), client.block("BLPOP", "x", 1, wait_ms=1)):
        with pytest.raises(UsageError, match="closed"):
            await attempt
    await client.close()


def test_it_works_on_uvloop(server: EmbeddedRedis) -> None:
    async def main() -> None:
        for url in (server.url, f"unix://{server.socket_path}"):
            client = Redis(url)
            replies = await asyncio.gather(*(client.call("ECHO", i) for i in range(500)))
            assert replies == [str(i).encode() for i in range(500)]
            assert await client.block("BLPOP", "uv", 0.01, wait_ms=10) is None
            big = b"x" * (8 << 20)
            assert await asyncio.gather(*(client.call("ECHO", big) for _ in range(3))) == [big] * 3
            await client.close()

    uvloop.run(main())


async def blocked_clients(redis: Redis, count: int) -> bool:
    info = await redis.call("INFO", "clients")
    return int(info.partition(b"blocked_clients:")[2].split()[0]) == count
