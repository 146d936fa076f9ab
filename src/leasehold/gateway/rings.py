"""Where the key ring of a queue lies: beside its jobs, in the same store."""

from __future__ import annotations

from urllib.parse import urlencode

from leasehold.core.opening import parse_url
from leasehold.gateway.keys import KeyRing, MemoryKeyRing, RedisKeyRing
from leasehold.store.redis import Redis

_STORE_OPTIONS = ("db", "cafile", "certfile", "keyfile")


def open_keyring(queue_url: str) -> KeyRing:
    """The ring that belongs to a queue: in its Redis or database, in memory where it has none."""
    url = parse_url(queue_url)
    if url.store.startswith(("sqlite", "postgres", "libsql")):
        from leasehold.gateway.sql_keys import open_sql_keyring

        return open_sql_keyring(url)
    if not url.store.startswith(("redis", "unix")):
        return MemoryKeyRing()
    namespace = url.options.get("namespace", "")
    kept = {name: value for name, value in url.options.items() if name in _STORE_OPTIONS}
    store = url.store + (f"?{urlencode(kept)}" if kept else "")
    return RedisKeyRing(Redis(store, name="leasehold-keys"), prefix=namespace)
