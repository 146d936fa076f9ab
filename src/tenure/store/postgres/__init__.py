"""The PostgreSQL client of queues."""

from tenure.store.postgres.client import CALL_TIMEOUT_S, CONNECTIONS_MAX, Copied, Postgres
from tenure.store.postgres.session import Connection

__all__ = ["CALL_TIMEOUT_S", "CONNECTIONS_MAX", "Connection", "Copied", "Postgres"]
