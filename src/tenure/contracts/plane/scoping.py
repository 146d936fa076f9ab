"""Which streams a caller's key is good for."""

from __future__ import annotations

from collections.abc import Iterable

from tenure.core.endpoint import Caller, Refused


def allowed(caller: Caller, streams: tuple[str, ...], named: bool) -> tuple[str, ...]:
    """The streams asked for by name must all be allowed; of all streams those that are."""
    names = caller.streams
    if not names:
        return streams
    if named:
        check_allowed(caller, streams)
        return streams
    mine = tuple(stream for stream in streams if stream in names)
    if not mine:
        raise Refused("scope", "this key is good for none of the plane's streams")
    return mine


def check_allowed(caller: Caller, streams: Iterable[str]) -> None:
    """Refuse a stream that the caller's key is not good for."""
    names = caller.streams
    for stream in streams:
        if names and stream not in names:
            raise Refused(
                "scope",
                f"this key is good for {', '.join(sorted(names))}, not for {stream[:120]!r}",
            )
