"""Redis' wire format: commands become bytes, replies become values or errors.

hiredis does the bytes. What is ours is the judgement on error replies: a server that is not ready
or not the primary (`-LOADING`, `-READONLY`) has executed nothing and counts as unreachable; every
other error is an answer, and the ones that an operator can cure say how.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import hiredis

from tenure.core.errors import ServerError, StoreError, StoreUnreachable, UsageError

Arg = bytes | str | int | float

MORE: Final = object()
"""What a reader from `reply_reader` answers when it needs more bytes."""

_NOT_READY = {
    "LOADING": "it is still loading its data",
    "MASTERDOWN": "it is a replica that lost its primary",
    "CLUSTERDOWN": "its cluster is down",
    "READONLY": "it is a read-only replica, and the URL must name the primary",
    "UNBLOCKED": "it became a replica while a command waited",
}
# Servers before Redis 7 put the error of a script's command behind words of their own.
_IN_SCRIPT = re.compile(r"^ERR Error .*-(READONLY|MASTERDOWN|CLUSTERDOWN) ")
_REMEDIES = {
    "WRONGTYPE": "another program wrote a value of another type under a key of this queue",
    "MISCONF": "the server cannot save to its disk and refuses writes: see its log",
    "OOM": "the server is at its maxmemory: raise it or remove data; nothing was written",
    "NOAUTH": "the server wants a password: put it into the URL, redis://user:password@host",
    "WRONGPASS": "the user or the password in the URL is wrong",
    "NOPERM": "the user in the URL lacks the right to do this: see ACL SETUSER",
    "MOVED": "this is a Redis Cluster: Tenure needs one primary that holds all keys",
    "CROSSSLOT": "this is a Redis Cluster: Tenure needs one primary that holds all keys",
    "BUSY": "a script has been running for too long: SCRIPT KILL on the server ends it",
}


def encode(args: Sequence[Arg]) -> bytes:
    """One command as bytes; None, bool and nested values raise UsageError."""
    if not args:
        # Redis does not answer an empty command, so it would shift every later reply by one.
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
    """The command's own name, for messages; never its arguments, which may be secret."""
    name = args[0] if args else ""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def reply_reader() -> hiredis.Reader:
    """A parser whose `gets()` answers `MORE` when starved and a StoreError for an error reply."""
    return hiredis.Reader(replyError=error_from_reply, notEnoughData=MORE)


def error_from_reply(text: str) -> StoreError:
    """The error that stands for this error reply."""
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
    """Whether the server says that it does not hold the script, so that nothing was executed."""
    return isinstance(error.reply, str) and error.reply.startswith("NOSCRIPT")


def is_wrong_type(error: ServerError) -> bool:
    """Whether a key holds a value of another type than the command or script works on."""
    return isinstance(error.reply, str) and "WRONGTYPE" in error.reply
