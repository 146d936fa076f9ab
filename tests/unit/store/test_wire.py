"""Commands become bytes or are refused; error replies become errors that help."""

from typing import Any

import pytest

from tenure.core.errors import ServerError, StoreError, StoreUnreachable, UsageError
from tenure.store.redis_connection import MORE, command_name, encode, error_from_reply, reply_reader


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
        ("MOVED 3999 127.0.0.1:6381", "Redis Cluster"),
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
