"""The Redis client when the network or the server fails: what is certain, what is in doubt."""

import asyncio
import time

import pytest
import uvloop

from tenure.core.errors import ReplyLost, ServerError, StoreUnreachable
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis
from tests.chaos.proxy import LossyProxy
from tests.waiting import until


async def test_a_lost_reply_is_told_from_a_command_that_never_left(
    redis: Redis, proxy: LossyProxy
) -> None:
    """The command was executed once; the client does not send it again."""
    client = Redis(proxy.url)
    await redis.call("DEL", "once")
    await client.call("PING")
    proxy.drop_reply(when=lambda command: command[0] == b"INCR")
    with pytest.raises(ReplyLost, match="may have been executed"):
        await client.call("INCR", "once")
    assert await redis.call("GET", "once") == b"1"
    assert await client.call("INCR", "once") == 2
    assert (proxy.replies_lost, proxy.accepted) == (1, 2)
    await client.close()


async def test_what_was_answered_before_the_loss_is_not_in_doubt(
    redis: Redis, proxy: LossyProxy
) -> None:
    client = Redis(proxy.url)
    await redis.call("DEL", "flight")
    await client.call("PING")
    proxy.drop_reply(when=lambda command: command[-1] == b"5")
    results = await asyncio.gather(
        *(client.call("RPUSH", "flight", i) for i in range(10)), return_exceptions=True
    )
    assert results[:5] == [1, 2, 3, 4, 5]
    assert all(isinstance(result, ReplyLost) for result in results[5:])
    assert await redis.call("LLEN", "flight") == 10
    await client.close()


async def test_a_pipeline_that_lost_one_reply_lost_its_answer(
    redis: Redis, proxy: LossyProxy
) -> None:
    client = Redis(proxy.url)
    await client.call("PING")
    proxy.drop_reply(when=lambda command: command[-1] == b"3")
    with pytest.raises(ReplyLost):
        await client.pipeline([("ECHO", i) for i in range(5)])
    await client.close()


async def test_a_call_without_a_server_is_unreachable_not_in_doubt(server: EmbeddedRedis) -> None:
    async with LossyProxy(server.url) as proxy:
        url = proxy.url
    client = Redis(url)
    with pytest.raises(StoreUnreachable, match=r"redis://127\.0\.0\.1:\d+/0: cannot connect"):
        await client.call("PING")
    await client.close()


async def test_what_was_still_queued_when_the_connection_broke_never_left(
    proxy: LossyProxy,
) -> None:
    client = Redis(proxy.url)
    await client.call("PING")
    connection = client._node.main
    assert connection is not None
    connection.pause_writing()
    queued = asyncio.create_task(client.call("INCR", "never"))
    await asyncio.sleep(0)
    proxy.reset()
    with pytest.raises(StoreUnreachable, match="was not sent"):
        await queued
    assert await client.call("GET", "never") is None
    await client.close()


async def test_a_reply_that_is_overdue_fails_everybody_on_the_connection(
    proxy: LossyProxy,
) -> None:
    client = Redis(proxy.url, timeout_ms=150, connect_timeout_ms=2000)
    await client.call("PING")
    proxy.blackhole()
    started = time.monotonic()
    results = await asyncio.gather(
        *(client.call("ECHO", i) for i in range(10)), return_exceptions=True
    )
    assert all(isinstance(result, ReplyLost) for result in results)
    assert "no answer within 150 ms" in str(results[0])
    assert 0.15 <= time.monotonic() - started < 8  # without its own timeout it would be 10
    proxy.pass_through()
    assert await client.call("ECHO", "again") == b"again"
    await client.close()


async def test_a_silent_loss_is_found_by_the_clock(redis: Redis, proxy: LossyProxy) -> None:
    client = Redis(proxy.url, timeout_ms=150)
    await redis.call("DEL", "silent")
    await client.call("PING")
    proxy.drop_reply(silently=True)
    with pytest.raises(ReplyLost):
        await client.call("INCR", "silent")
    assert await redis.call("GET", "silent") == b"1"
    await client.close()


async def test_a_slow_server_within_the_timeout_is_waited_for(proxy: LossyProxy) -> None:
    client = Redis(proxy.url, timeout_ms=2000)
    await client.call("PING")
    proxy.latency(60)
    assert await client.call("ECHO", "slow") == b"slow"
    await client.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_loop_that_was_blocked_does_not_take_its_replies_for_lost(
    server: EmbeddedRedis, run: object
) -> None:
    async def main() -> None:
        client = Redis(server.url, timeout_ms=100)
        await client.call("PING")
        call = asyncio.create_task(client.call("ECHO", "patience"))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)
        assert await call == b"patience"
        await client.close()

    assert callable(run)
    run(main())


async def test_a_long_reply_that_is_still_arriving_is_not_overdue() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(b"+OK\r\n")  # to the client's introduction
        await reader.read(4096)
        writer.write(b"$40\r\n")
        for _ in range(40):
            await asyncio.sleep(0.01)  # slowness is what is being tested
            writer.write(b"x")
        writer.write(b"\r\n")
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(trickle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = Redis(f"redis://127.0.0.1:{port}", timeout_ms=100)
    assert await client.call("GET", "long") == b"x" * 40
    await client.close()
    listener.close()


async def test_an_idle_connection_is_never_overdue(server: EmbeddedRedis) -> None:
    client = Redis(server.url, timeout_ms=50)
    await client.call("PING")
    connection = client._node.main
    assert connection is not None
    await asyncio.sleep(0.25)  # five timeouts of idleness are what is being tested
    assert not connection.lost
    await client.close()


async def test_a_blocked_command_may_wait_longer_than_the_timeout(server: EmbeddedRedis) -> None:
    client = Redis(server.url, timeout_ms=100)
    assert await client.block("BLPOP", "patient", 0.4, wait_ms=400) is None
    await client.close()


async def test_a_blocked_command_is_given_up_after_its_wait_and_the_timeout(
    proxy: LossyProxy,
) -> None:
    client = Redis(proxy.url, timeout_ms=100)
    assert await client.block("BLPOP", "gone", 0.01, wait_ms=10) is None
    proxy.blackhole()
    started = time.monotonic()
    with pytest.raises(ReplyLost):
        await client.block("BLPOP", "gone", 0.1, wait_ms=100)
    assert 0.2 <= time.monotonic() - started < 8  # without its own timeout it would be 10
    await client.close()


async def test_many_callers_share_one_attempt_to_connect(proxy: LossyProxy) -> None:
    client = Redis(proxy.url)
    await asyncio.gather(*(client.call("PING") for _ in range(50)))
    assert proxy.accepted == 1
    proxy.reset()
    replies = await asyncio.gather(
        *(client.call("PING") for _ in range(50)), return_exceptions=True
    )
    assert await client.call("PING") == b"PONG"
    assert proxy.accepted == 2, replies
    await client.close()


async def test_one_caller_that_gives_up_connecting_takes_nobody_with_it(proxy: LossyProxy) -> None:
    client = Redis(proxy.url)
    proxy.latency(50)
    first = asyncio.create_task(client.call("PING"))
    second = asyncio.create_task(client.call("PING"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == b"PONG"
    assert proxy.accepted == 1
    await client.close()


async def test_a_server_that_accepts_and_says_nothing_is_unreachable(proxy: LossyProxy) -> None:
    client = Redis(proxy.url, connect_timeout_ms=150)
    proxy.blackhole()
    with pytest.raises(StoreUnreachable, match="no connection within 150 ms"):
        await client.call("PING")
    await client.close()


async def test_a_dead_server_is_not_hammered(proxy: LossyProxy) -> None:
    """Callers that never stop trying make a handful of attempts a second, and recover soon."""
    client = Redis(proxy.url)
    proxy.refuse()

    async def insist() -> bytes:
        while True:
            try:
                return bytes(await client.call("PING"))
            except StoreUnreachable:
                pass

    callers = [asyncio.create_task(insist()) for _ in range(20)]
    began = time.monotonic()
    await asyncio.sleep(1.0)  # the rate over a second is what is being tested
    attempts, took_s = proxy.accepted, time.monotonic() - began
    proxy.pass_through()
    started = time.monotonic()
    assert await asyncio.gather(*callers) == [b"PONG"] * 20
    assert 3 <= attempts <= 12 * took_s
    assert time.monotonic() - started < 5
    await client.close()


async def test_closing_while_connecting_tells_the_callers(proxy: LossyProxy) -> None:
    client = Redis(proxy.url)
    proxy.blackhole()
    call = asyncio.create_task(client.call("PING"))
    await until(lambda: proxy.connections == 1)
    await client.close()
    with pytest.raises(StoreUnreachable, match="closed"):
        await call


async def test_closing_with_a_call_in_flight_leaves_it_in_doubt(proxy: LossyProxy) -> None:
    client = Redis(proxy.url)
    await client.call("PING")
    proxy.blackhole()
    calls = [asyncio.create_task(client.call("PING")) for _ in range(2)]
    connection = client._node.main
    assert connection is not None
    await until(lambda: connection._written - connection._answered == 2)
    await client.close()
    for call in calls:
        with pytest.raises(ReplyLost, match="closed"):
            await call


async def test_something_that_is_not_redis_is_named(server: EmbeddedRedis) -> None:
    async def web(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(web, "127.0.0.1", 0)
    client = Redis(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    with pytest.raises(StoreUnreachable, match="does not speak the Redis protocol"):
        await client.call("PING")
    await client.close()
    listener.close()


async def test_a_restarted_server_is_found_again_with_its_data() -> None:
    server = EmbeddedRedis(appendfsync="always")
    try:
        await asyncio.to_thread(server.start)
        client = Redis(server.url)
        await client.call("SET", "kept", "yes")
        assert await client.block("BLPOP", "nothing", 0.01, wait_ms=10) is None
        await asyncio.to_thread(server.kill)
        with pytest.raises((ReplyLost, StoreUnreachable)):
            await client.call("GET", "kept")
        await asyncio.to_thread(server.start)
        assert await client.call("GET", "kept") == b"yes"
        assert await client.block("BLPOP", "nothing", 0.01, wait_ms=10) is None
        await client.close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_a_loading_server_is_unreachable(server: EmbeddedRedis) -> None:
    """Answers `-LOADING` as a real one does, which an embedded one is too quick to be caught at."""

    async def loading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()

    listener = await asyncio.start_server(loading, "127.0.0.1", 0)
    client = Redis(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    with pytest.raises(StoreUnreachable, match="still loading"):
        await client.call("PING")
    await client.close()
    listener.close()


async def test_passwords_are_sent_and_never_shown(server: EmbeddedRedis, redis: Redis) -> None:
    await redis.call("ACL", "SETUSER", "ann", "on", ">hush", "~*", "+@all")
    right = Redis(server.url.replace("redis://", "redis://ann:hush@"))
    assert await right.call("ACL", "WHOAMI") == b"ann"
    await right.close()
    wrong = Redis(server.url.replace("redis://", "redis://ann:sesame@"))
    with pytest.raises(ServerError, match="refused the user and password") as caught:
        await wrong.call("PING")
    assert "sesame" not in f"{caught.value!r} {caught.value.reply!r} {wrong!r}"
    await wrong.close()


async def test_a_server_that_wants_a_password_says_where_to_put_it() -> None:
    server = EmbeddedRedis(appendfsync="no")
    try:
        await asyncio.to_thread(server.start)
        admin = Redis(server.url)
        await admin.call("CONFIG", "SET", "requirepass", "hush")
        client = Redis(server.url)
        with pytest.raises(ServerError, match="put it into the URL"):
            await client.call("PING")
        await client.close()
        known = Redis(server.url.replace("redis://", "redis://:hush@"))
        assert await known.call("PING") == b"PONG"
        await known.close()
        await admin.close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_a_database_that_does_not_exist_is_refused(server: EmbeddedRedis) -> None:
    client = Redis(server.url.removesuffix("/0") + "/999")
    with pytest.raises(ServerError, match="out of range"):
        await client.call("PING")
    await client.close()
