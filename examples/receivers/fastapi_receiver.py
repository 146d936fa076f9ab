"""A webhook receiver with FastAPI.

    WEBHOOK_SECRETS=whsec_... uvicorn fastapi_receiver:app --port 9000

Two secrets, separated by a comma, while one replaces the other. The effect of an event and the note
that it has been done are one transaction, so a delivery that comes twice has its effect once.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response

from tenure.webhooks import InvalidWebhook, SqliteNonces, verify

SCHEMA = """
create table if not exists done (event_id text primary key);
create table if not exists jobs (job_id text primary key, seq integer, status text);
"""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the database, and the memory of nonces beside it."""
    path = os.environ.get("RECEIVER_DB", "receiver.db")
    app.state.secrets = [text for text in os.environ["WEBHOOK_SECRETS"].split(",") if text]
    app.state.nonces = SqliteNonces(path)
    app.state.db = sqlite3.connect(path, isolation_level=None)
    app.state.db.executescript(SCHEMA)
    yield
    app.state.db.close()
    app.state.nonces.close()


app = FastAPI(lifespan=lifespan)


@app.post("/hooks")
async def receive(request: Request) -> Response:
    """Verify, do the effect once, and answer."""
    state = request.app.state
    body = await request.body()  # as it came: what is signed are these bytes
    try:
        verified = await verify(body, request.headers, state.secrets, nonces=state.nonces)
    except InvalidWebhook as refused:
        return Response(refused.reason, status_code=401)  # it is tried again, signed anew
    note(state.db, verified.event)
    return Response(status_code=204)  # also for a repetition: it has been dealt with


@app.get("/jobs/{job_id}")
async def job(job_id: str, request: Request) -> dict[str, Any]:
    """What is known of a job."""
    row = request.app.state.db.execute(
        "select seq, status from jobs where job_id = ?", (job_id,)
    ).fetchone()
    return {"job_id": job_id, "seq": row[0], "status": row[1]} if row else {"job_id": job_id}


def note(db: sqlite3.Connection, event: dict[str, Any]) -> None:
    """The effect: the newest status of the job. A repeated or an older event changes nothing."""
    db.execute("begin immediate")
    new = db.execute("insert or ignore into done values (?)", (event["event_id"],)).rowcount
    if new:
        db.execute(
            "insert into jobs values (:job_id, :seq, :status) on conflict (job_id) do update"
            " set seq = excluded.seq, status = excluded.status where excluded.seq > jobs.seq",
            event,
        )
    db.execute("commit")
