"""The wire format of Redis: commands as bytes, replies, and what its errors mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import hiredis

from tenure.core.errors import ServerError, StoreError, StoreUnreachable, UsageError
from tenure.store.redis.address import Arg

MORE: Final = object()
"""What a parser from `reply_reader` returns when it needs more bytes."""

# A server that answers with one of these has executed nothing, so it counts as unreachable.
_NOT_READY = {
    "LOADING": "it is still loading its data",
    "MASTERDOWN": "it is a replica that lost its primary",
    "CLUSTERDOWN": "its cluster is down",
    "READONLY": "it is a read-only replica, and only the primary takes writes",
    "UNBLOCKED": "it became a replica while a command waited",
}
# Servers before Redis 7 put a prefix before the error of a command in a script.
_IN_SCRIPT = re.compile(r"^ERR Error .*-(READONLY|MASTERDOWN|CLUSTERDOWN) ")
_REMEDIES = {
    "WRONGTYPE": "another program wrote a value of another type under a key of this queue",
    "MISCONF": "the server cannot save to its disk and refuses writes: see its log",
    "OOM": "the server is at its maxmemory: raise it or remove data; nothing was written",
    "NOAUTH": "the server wants a password: put it into the URL, redis://user:password@host",
    "WRONGPASS": "the user or the password in the URL is wrong",
    "NOPERM": "the user in the URL lacks the right to do this: see ACL SETUSER",
    "MOVED": "this server is a node of a Redis Cluster: write redis+cluster://host",
    "ASK": "this server is a node of a Redis Cluster: write redis+cluster://host",
    "CROSSSLOT": "on a Redis Cluster all keys of a queue share a hash tag: namespace={jobs}: "
    "for streams, prefix={bull} for bullmq",
    "BUSY": "a script has been running for too long: SCRIPT KILL on the server ends it",
}


def encode(args: Sequence[Arg]) -> bytes:
    """One command as bytes; None, bool and nested values raise UsageError."""
    if not args:
        # Redis does not answer an empty command, so all later replies would be shifted by one.
        raise UsageError("an empty Redis command; expected its name and arguments")
    try:
        packed: bytes = hiredis.pack_command(tuple(args))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{command_name(args)}: not a Redis command ({error}); "
            f"arguments are str, bytes, int or float"
        ) from None
    return packed


def command_name(args: Sequence[Arg]) -> str:
    """The command's name for messages, without its arguments, which may be secret."""
    name = args[0] if args else ""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def reply_reader() -> hiredis.Reader:
    """A parser whose `gets()` returns `MORE` or a reply; an error reply is a StoreError."""
    return hiredis.Reader(replyError=error_from_reply, notEnoughData=MORE)


def error_from_reply(text: str) -> StoreError:
    """The error for an error reply; its message says what an operator can do about it."""
    word = text.partition(" ")[0]
    if word == "ERR" and (inner := _IN_SCRIPT.match(text)):
        word = inner[1]
    if word in _NOT_READY:
        return StoreUnreachable(f"Redis is not ready: {_NOT_READY[word]}", reply=text)
    if text.startswith("ERR max number of clients"):
        return StoreUnreachable("Redis takes no more clients: raise its maxclients", reply=text)
    remedy = _REMEDIES.get(word)
    return ServerError(f"Redis answered: {text}" + (f" ({remedy})" if remedy else ""), reply=text)


def is_no_script(error: ServerError) -> bool:
    """Whether the server does not have the script. Then nothing was executed."""
    return isinstance(error.reply, str) and error.reply.startswith("NOSCRIPT")


def is_wrong_type(error: ServerError) -> bool:
    """Whether a key holds a value of another type than the command or script works on."""
    return isinstance(error.reply, str) and "WRONGTYPE" in error.reply


UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)
"""What reading an answer raises that has another form than it should have."""


def place_in(host: Any, port: Any) -> tuple[str, int]:
    """Host and port in an answer; raises one of `UNREADABLE`.

    >>> place_in(b"127.0.0.1", b"6379")
    ('127.0.0.1', 6379)
    """
    found = host.decode(), int(port)
    if not 0 < found[1] < 2**16:
        raise ValueError(f"port {found[1]}")
    return found


def check_reply(reply: Any, operation: str) -> Any:
    """The reply; raises it if it is an error."""
    if isinstance(reply, ServerError):
        reply.operation = reply.operation or operation
    if isinstance(reply, StoreError):
        raise reply
    return reply
