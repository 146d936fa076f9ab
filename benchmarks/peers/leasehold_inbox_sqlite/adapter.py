"""Leasehold's inbox on SQLite."""

from __future__ import annotations

import os

from leasehold_kit import QueueProducer, main

FILE = os.environ["BENCH_SQLITE_FILE"]
SYNCHRONOUS = "normal" if os.environ.get("BENCH_SYNCHRONOUS_COMMIT") == "off" else "full"
URL = f"inbox+sqlite:///{FILE}?synchronous={SYNCHRONOUS}"


def make() -> QueueProducer:
    return QueueProducer(
        URL,
        notes="journal, attempt and fence for every job; an event where a webhook is named",
        chunk=2_000,
        ended=("succeeded", "dead_letter"),
    )


if __name__ == "__main__":
    main(URL, make, slots=1_000)
