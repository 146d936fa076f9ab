"""Tenure's inbox on SQLite."""

from __future__ import annotations

import os

from tenure_kit import QueueProducer, main

FILE = os.environ["BENCH_SQLITE_FILE"]
SYNCHRONOUS = "normal" if os.environ.get("BENCH_SYNCHRONOUS_COMMIT") == "off" else "full"
URL = f"inbox+sqlite:///{FILE}?synchronous={SYNCHRONOUS}"
RECEIVER = os.environ.get("BENCH_RECEIVER", "http://receiver.example/")
EVENTS = {"status_webhook_url": RECEIVER} if "BENCH_EVENTS" in os.environ else {}
"""With an address each step of a job leaves an event in the outbox, in the same transaction."""


def make() -> QueueProducer:
    return QueueProducer(
        URL,
        notes="journal, attempt and fence for every job" + ("; two events too" if EVENTS else ""),
        chunk=100_000,
        ended=("succeeded", "dead_letter"),
        options=EVENTS,
    )


if __name__ == "__main__":
    main(URL, make, slots=1_000)
