"""The Redis client. The URL says whether it is one server, Sentinels or a cluster."""

from tenure.store.redis.address import STORE_OPTIONS, Arg
from tenure.store.redis.bulk import BulkRedis
from tenure.store.redis.client import Redis
from tenure.store.redis.scripts import Script, ScriptFolder, load_script, strip_comments
from tenure.store.redis.wire import is_wrong_type

__all__ = [
    "STORE_OPTIONS",
    "Arg",
    "BulkRedis",
    "Redis",
    "Script",
    "ScriptFolder",
    "is_wrong_type",
    "load_script",
    "strip_comments",
]
