"""Redis URLs: every form is read, every mistake is named, no password is shown."""

import pytest

from tenure.core.errors import UsageError
from tenure.store.redis import Redis
from tenure.store.redis_connection import RedisAddress, parse_address


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
    ],
)
def test_a_wrong_url_is_told_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("[", r"\[")):
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
    assert "hush" not in f"{client!r} {client.label} {address!r} {address.label}"
    assert client.label == "redis://box:7000/2"


def test_labels_read_back_as_the_same_place() -> None:
    for url in ("redis://[::1]:7000/1", "rediss://box:6379/0", "redis+unix:///run/r.sock?db=2"):
        assert parse_address(parse_address(url).label) == parse_address(url)


def test_a_tls_file_that_is_missing_is_named_before_connecting() -> None:
    with pytest.raises(UsageError, match="TLS files"):
        parse_address("rediss://box?cafile=no-such-file.pem").tls_context()
