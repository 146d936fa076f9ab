"""The `plane` contract: a control plane over HTTP, whose workers need no inbound port.

`plane+http://host:8470?streams=jobs:high,jobs:low` is a worker's side. `plane+sqlite:///plane.db`
and `plane+postgresql://user@host/database` are the plane itself: what a gateway serves, and what a
producer next to the database uses. Here is the descriptor; what it opens is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tenure.core.errors import UsageError
from tenure.core.registry import Contract, QueueUrl
from tenure.core.state import Machine

if TYPE_CHECKING:
    from tenure.contracts.plane.journal import PlaneJournal
    from tenure.contracts.plane.ledger import PlaneLedger
    from tenure.contracts.plane.model import PlaneOptions, WorkerOptions
    from tenure.contracts.plane.queue import PlaneQueue
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
    walks=(("QUEUED", "RUNNING", "FAILED"),),
    overtake_ms=30_000,  # a message that Redis lost goes out again only after `resend_ms`
)


def _open_queue(url: QueueUrl, worker_id: str) -> PlaneQueue:
    if url.store.startswith("http"):
        from tenure.contracts.plane.remote import open_remote  # imports TLS, which is slow

        return open_remote(url, worker_id=worker_id)
    from tenure.contracts.plane.local import LocalQueue, open_plane

    return LocalQueue(open_plane(url), worker_id=worker_id)


def _open_ledger(url: QueueUrl) -> PlaneLedger:
    from tenure.contracts.plane.ledger import PlaneLedger
    from tenure.contracts.plane.local import parts

    _check_database(url)
    return PlaneLedger(*parts(url, pinned=False))


def _open_journal(url: QueueUrl) -> PlaneJournal:
    from tenure.contracts.plane.journal import PlaneJournal
    from tenure.contracts.plane.local import parts

    _check_database(url)
    return PlaneJournal(*parts(url))


def _open_database(url: QueueUrl) -> Engine:
    """The database of a plane, for what is kept beside its jobs."""
    from tenure.contracts.plane.local import parts

    _check_database(url)
    return parts(url, pinned=False)[0]


def _read_options(url: QueueUrl) -> tuple[PlaneOptions | WorkerOptions, str]:
    from tenure.contracts.plane.model import PlaneOptions, WorkerOptions

    return url.read(WorkerOptions if url.store.startswith("http") else PlaneOptions)


def _journal_format(url: QueueUrl) -> SqlFormat:
    from tenure.contracts.plane.journal import tape
    from tenure.contracts.plane.model import PlaneOptions

    _check_database(url)
    options, store = url.read(PlaneOptions)
    return tape(store, options)


def _check_database(url: QueueUrl) -> None:
    if url.store.startswith("http"):
        raise UsageError(
            f"{url.safe} is a worker's side; read the plane through its gateway, or at its "
            "database with plane+sqlite:// or plane+postgresql://",
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
    parts={"database": _open_database},
    routes=_routes,
    samples=_samples,
    submit_example=(
        "curl, the contract's own endpoint",
        """\
curl -s {base}/v1/plane/jobs -H 'content-type: application/json' \\
  -d {body}""",
    ),
    lost_max_option="lost_max",
)
