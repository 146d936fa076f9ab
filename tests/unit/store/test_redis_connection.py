"""Redis URLs and the wire format: what is read and packed, what is refused, what errors say."""

import re
from typing import Any

import pytest

from tenure.core.errors import ServerError, StoreError, StoreUnreachable, UsageError
from tenure.store.redis import Redis
from tenure.store.redis.address import RedisAddress, parse_address
from tenure.store.redis.wire import (
    MORE,
    command_name,
    encode,
    error_from_reply,
    reply_reader,
)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", RedisAddress(host="localhost")),
        ("redis://box", RedisAddress(host="box", port=6379, db=0)),
        ("redis://box:7000/3", RedisAddress(host="box", port=7000, db=3)),
        ("redis://box/?db=4", RedisAddress(host="box", db=4)),
        ("redis://[::1]:7000/1", RedisAddress(host="::1", port=7000, db=1)),
        ("redis://:s%40cret@box", RedisAddress(host="box", password="s@cret")),
        ("redis://ann:pw@box", RedisAddress(host="box", user="ann", password="pw")),
        ("unix:///run/r.sock", RedisAddress(path="/run/r.sock")),
        ("redis+unix:///run/r.sock?db=2", RedisAddress(path="/run/r.sock", db=2)),
        ("redis+unix://:pw@/run/r%20s", RedisAddress(path="/run/r s", password="pw")),
        (
            "rediss://box?cafile=ca.pem&certfile=c.pem&keyfile=k.pem",
            RedisAddress(host="box", tls=True, cafile="ca.pem", certfile="c.pem", keyfile="k.pem"),
        ),
        ("valkey://box:7000/3", RedisAddress(host="box", port=7000, db=3)),
        ("valkeys://box", RedisAddress(host="box", tls=True)),
        (
            "rediss://box?ssl_cert_reqs=none&ssl_check_hostname=false&ssl_ca_certs=ca.pem",
            RedisAddress(
                host="box", tls=True, ssl_cert_reqs="none", check_hostname=False, cafile="ca.pem"
            ),
        ),
        (
            "redis://ann@box?password_file=secret",
            RedisAddress(host="box", user="ann", password_file="secret"),
        ),
        (
            "redis+sentinel://ann:pw@a,b:7001,[::1]:7002/orders/2?sentinel_password=s",
            RedisAddress(
                topology="sentinel",
                hosts=(("a", 26379), ("b", 7001), ("::1", 7002)),
                service="orders",
                db=2,
                user="ann",
                password="pw",
                sentinel_password="s",
            ),
        ),
        ("redis://box?replicas=2", RedisAddress(host="box", replicas=2)),
        ("unix:///r.sock?replicas=1", RedisAddress(path="/r.sock", replicas=1)),
        (
            "redis+cluster://a?replicas=1&replicas_ms=250",
            RedisAddress(topology="cluster", hosts=(("a", 6379),), replicas=1, replicas_ms=250),
        ),
        (
            "rediss+cluster://a,b:7001",
            RedisAddress(topology="cluster", hosts=(("a", 6379), ("b", 7001)), tls=True),
        ),
    ],
)
def test_every_form_of_url_is_read(url: str, expected: RedisAddress) -> None:
    assert parse_address(url) == expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://box", "http: not a Redis URL"),
        ("box:6379", "not a Redis URL"),
        ("redis://box/one", "'one' is not a Redis database number"),
        ("redis://box/-1", "'-1' is not a Redis database number"),
        ("redis://box/" + "9" * 5_000, "is not a Redis database number"),
        ("redis://box/1?db=1", "names its database once"),
        ("redis://box?queue=x", "unknown option 'queue'"),
        ("redis://box?cafile=ca.pem", "unknown option 'cafile'"),
        ("rediss://box?keyfile=k.pem", "needs certfile"),
        ("unix://", "needs the socket's path"),
        ("redis://box:port", "cannot be read"),
        ("redis://[::1", "cannot be read"),
        ("redis://a,b/0", "several are redis+sentinel"),
        ("redis+sentinel://a,b", "names the service"),
        ("redis+sentinel://a,b/0", "names the service"),
        ("redis+cluster://a,b/1", "database 0 only"),
        ("redis+tower://a", "redis+tower: not a Redis URL"),
        ("rediss://box?ssl_cert_reqs=maybe", "required, optional or none"),
        ("rediss://box?check_hostname=maybe", "true or false"),
        ("redis://box?credentials=no_such_module:f", "there is no such function"),
        ("redis://box?credentials=os:sep", "is not a function"),
        ("redis://box?password_file=f&password_command=c", "one of password_file"),
        ("redis://box?sentinel_password=s", "unknown option 'sentinel_password'"),
        ("redis://box?replicas=all", "replicas in the Redis URL is a whole number from 1 to 100"),
        ("redis://box?replicas=0", "replicas in the Redis URL is a whole number from 1 to 100"),
        ("redis://box?replicas=1&replicas_ms=0", "replicas_ms in the Redis URL is a whole number"),
        ("redis://box?replicas_ms=100", "replicas_ms needs replicas as well"),
    ],
)
def test_a_wrong_url_is_told_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        parse_address(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://ann:hush@box:port",
        "redis://ann:hush@box/one",
        "redis://ann:hush@box?nothing=1",
        "http://ann:hush@box",
        "redis://ann:hu/sh@box",
    ],
)
def test_no_error_about_a_url_repeats_its_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(url)
    assert "hush" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_neither_client_nor_address_shows_the_password() -> None:
    url = "redis://ann:hush@box:7000/2"
    client, address = Redis(url), parse_address(url)
    assert "hush" not in f"{client!r} {address!r} {address.label}"
    assert repr(client) == "Redis('redis://box:7000/2')"


def test_labels_read_back_as_the_same_place() -> None:
    for url in (
        "redis://[::1]:7000/1",
        "rediss://box:6379/0",
        "redis+unix:///run/r.sock?db=2",
        "redis+sentinel://a:1,b:2/orders/3",
        "rediss+cluster://a:1,b:2",
    ):
        assert parse_address(parse_address(url).label) == parse_address(url)


def test_a_tls_file_that_is_missing_is_named_before_connecting() -> None:
    with pytest.raises(UsageError, match="TLS files"):
        parse_address("rediss://box?cafile=no-such-file.pem").tls_context()


def test_a_command_is_packed_as_redis_wants_it() -> None:
    expected = b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n17\r\n$3\r\n1.5\r\n"
    assert expected == encode(["SET", b"k", 17, 1.5])


@pytest.mark.parametrize("bad", [None, True, ["nested"], {"a": 1}, object()])
def test_an_argument_that_redis_has_no_form_for_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match="SET: not a Redis command"):
        encode(["SET", "k", bad])


def test_an_empty_command_is_refused_because_redis_would_not_answer_it() -> None:
    with pytest.raises(UsageError, match="empty"):
        encode([])


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(UsageError):
        encode(["SET", "k", "\ud800"])


def test_messages_name_a_command_but_not_its_arguments() -> None:
    assert command_name([b"AUTH", "secret"]) == "AUTH"


@pytest.mark.parametrize(
    "text",
    [
        "LOADING Redis is loading",
        "MASTERDOWN Link down",
        "CLUSTERDOWN The cluster is down",
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write",
        "UNBLOCKED force unblock from blocking operation, instance state changed",
    ],
)
def test_a_server_that_is_not_ready_counts_as_unreachable(text: str) -> None:
    error = error_from_reply(text)
    assert isinstance(error, StoreUnreachable)
    assert error.reply == text


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("MISCONF Redis is configured", "see its log"),
        ("OOM command not allowed", "maxmemory"),
        ("NOAUTH Authentication required.", "put it into the URL"),
        ("WRONGPASS invalid", "is wrong"),
        ("MOVED 3999 127.0.0.1:6381", "redis+cluster://"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "share a hash tag"),
    ],
)
def test_an_error_that_an_operator_can_cure_says_how(text: str, remedy: str) -> None:
    error = error_from_reply(text)
    assert type(error) is ServerError
    assert error.reply == text
    assert remedy in str(error)


def test_errors_inside_a_nested_reply_are_values() -> None:
    reader = reply_reader()
    reader.feed(b"*2\r\n:1\r\n-ERR no\r\n")
    one, error = reader.gets()
    assert one == 1
    assert isinstance(error, StoreError)
    assert reader.gets() is MORE
