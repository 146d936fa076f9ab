"""Where the key ring of a queue lies: beside its jobs, in the same store."""

from __future__ import annotations

from urllib.parse import urlencode

from tenure.core.registry import parse_url
from tenure.gateway.keys import KeyRing, MemoryKeyRing, RedisKeyRing
from tenure.store.redis import Redis

_STORE_OPTIONS = ("db", "cafile", "certfile", "keyfile")


def open_keyring(queue_url: str) -> KeyRing:
    """The ring that belongs to a queue: in its Redis or database, in memory where it has none."""
    url = parse_url(queue_url)
    if url.store.startswith(("sqlite", "postgres", "libsql")):
        from tenure.gateway.sql_keys import open_sql_keyring

        return open_sql_keyring(queue_url)
    found = open_side_store(queue_url, "tenure-keys")
    return MemoryKeyRing() if found is None else RedisKeyRing(found[0], prefix=found[1])


def open_side_store(queue_url: str, name: str) -> tuple[Redis, str] | None:
    """The Redis of a queue and the prefix of its keys, for what gateways keep beside the jobs."""
    url = parse_url(queue_url)
    if not url.store.startswith(("redis", "unix")):
        return None
    kept = {name: value for name, value in url.options.items() if name in _STORE_OPTIONS}
    store = url.store + (f"?{urlencode(kept)}" if kept else "")
    return Redis(store, name=name), url.options.get("namespace", "")
