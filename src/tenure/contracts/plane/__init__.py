"""The `plane` contract: a control plane over HTTP, whose workers need no inbound port.

`plane+http://host:8470?streams=jobs:high,jobs:low` is for workers and clients.
`plane+sqlite:///plane.db` and `plane+postgresql://user@host/database` are the plane itself, for a
gateway or for a producer with access to the database. Here is the descriptor; what it opens is
imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tenure.core.errors import UsageError
from tenure.core.registry import Contract, QueueUrl
from tenure.core.state import Machine

if TYPE_CHECKING:
    from tenure.contracts.plane.ledger import PlaneJournal, PlaneLedger
    from tenure.contracts.plane.model import PlaneOptions, WorkerOptions
    from tenure.contracts.plane.queue import PlaneQueue
    from tenure.contracts.plane.remote.ledger import RemoteLedger, RemoteNews
    from tenure.core.endpoint import Endpoint, Submits
    from tenure.core.journal import SqlFormat
    from tenure.sql.engine import Engine

# A failed job rests in FAILED until the plane decides. A job that is cancelled or expires while it
# waits goes there through RUNNING.
MACHINE = Machine(
    contract="plane",
    initial=("QUEUED",),
    running=("RUNNING",),
    final=("SUCCEEDED", "DLQ"),
    steps={
        "QUEUED": ("RUNNING", "DLQ"),
        "RUNNING": ("SUCCEEDED", "FAILED", "DLQ", "QUEUED"),
        "FAILED": ("QUEUED", "DLQ"),
    },
    reopen={"SUCCEEDED": ("QUEUED",), "DLQ": ("QUEUED",)},
    combined_steps=(("QUEUED", "RUNNING", "FAILED"),),
    order_slack_ms=30_000,  # a message that Redis lost goes out again only after `resend_ms`
)


def _open_queue(url: QueueUrl, worker_id: str) -> PlaneQueue:
    if url.store.startswith("http"):
        from tenure.contracts.plane.remote.queue import open_remote  # imports ssl

        return open_remote(url, worker_id=worker_id)
    from tenure.contracts.plane.plane import LocalQueue, Plane
    from tenure.store.redis import Redis

    engine, options = _open_parts(url)
    redis = Redis(options.redis, name="tenure-plane") if options.redis else None
    if redis is not None and redis.replicas:
        raise UsageError(
            "the jobs of a plane are in its database, and its Redis has messages only: leave "
            "replicas out of redis=, and let the database replicate",
            contract="plane",
        )
    return LocalQueue(Plane(engine, options, redis=redis), worker_id=worker_id)


def _open_ledger(url: QueueUrl) -> PlaneLedger | RemoteLedger:
    if url.store.startswith("http"):
        from tenure.contracts.plane.remote.ledger import open_remote_ledger

        return open_remote_ledger(url)
    from tenure.contracts.plane.ledger import PlaneLedger

    return PlaneLedger(*_open_parts(url, pinned=False))


def _open_journal(url: QueueUrl) -> PlaneJournal:
    from tenure.contracts.plane.ledger import PlaneJournal

    _require_database(url)
    return PlaneJournal(*_open_parts(url))


def _open_news(url: QueueUrl) -> PlaneJournal | RemoteNews:
    """What names the jobs that move: the journal, or over HTTP a long poll."""
    if not url.store.startswith("http"):
        return _open_journal(url)
    from tenure.contracts.plane.remote.ledger import open_remote_news

    return open_remote_news(url)


def _open_database(url: QueueUrl) -> Engine:
    """The database of a plane, for data beside its jobs."""
    _require_database(url)
    return _open_parts(url, pinned=False)[0]


def _read_options(url: QueueUrl) -> tuple[PlaneOptions | WorkerOptions, str]:
    from tenure.contracts.plane.model import WorkerOptions

    return url.read(WorkerOptions) if url.store.startswith("http") else _read_plane(url)


def _read_plane(url: QueueUrl) -> tuple[PlaneOptions, str]:
    from tenure.contracts.plane.model import PlaneOptions
    from tenure.store.credentials import LOGIN_OPTIONS

    return url.read(PlaneOptions, of_store=LOGIN_OPTIONS)


def _journal_format(url: QueueUrl) -> SqlFormat:
    from tenure.contracts.plane.ledger import journal_table

    _require_database(url)
    options, store = _read_plane(url)
    return journal_table(store, options)


def _open_parts(url: QueueUrl, *, pinned: bool = True) -> tuple[Engine, PlaneOptions]:
    """The database and the options that a URL names."""
    from tenure.sql import open_engine

    if not url.store:
        raise UsageError(
            f"{url.safe} names neither a plane nor a database; write plane+http://host:8470, "
            "plane+sqlite:///plane.db or plane+postgresql://user@host/database",
            contract="plane",
        )
    options, store = _read_plane(url)
    return open_engine(store, options.engine(store, pinned=pinned)), options


def _require_database(url: QueueUrl) -> None:
    if url.store.startswith("http"):
        raise UsageError(
            f"{url.safe} has no journal and no database to open; name the plane at its database, "
            "with plane+sqlite:// or plane+postgresql://",
            contract="plane",
        )


def _routes(submits: Submits, ledger: Any, queue: Any, **given: Any) -> list[Endpoint]:
    """The endpoints of the producers and of the workers."""
    from tenure.contracts.plane.routes import open_routes, open_worker_routes

    return open_routes(submits, ledger, **given) + open_worker_routes(queue)


def _samples() -> Sequence[Any]:
    from tenure.contracts.plane.samples import FLOWS

    return FLOWS


CONTRACT = Contract(
    machine=MACHINE,
    open_queue=_open_queue,
    open_ledger=_open_ledger,
    open_journal=_open_journal,
    read_options=_read_options,
    example_url="plane+sqlite:///jobs.db",
    journal_format=_journal_format,
    parts={"database": _open_database, "news": _open_news},
    routes=_routes,
    samples=_samples,
    submit_example=(
        "curl, the contract's own endpoint",
        """\
curl -s {base}/v1/plane/jobs -H 'content-type: application/json' \\
  -d {body}""",
    ),
    lost_max_option="lost_max",
    submit_options=frozenset({"priority", "ttl_s"}),
)
