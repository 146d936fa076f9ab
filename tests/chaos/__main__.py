"""Full-size chaos runs: `python -m tests.chaos SCENARIO --contract streams --jobs 100000`.

Prints the report and keeps all logs in a folder; exits with 1 when anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.cuts import cuts
from tests.chaos.failover import WAYS, failover
from tests.chaos.garbage import garbage
from tests.chaos.planted import EVERY
from tests.chaos.scenario import SCENARIOS
from tests.chaos.sql_subjects import SQL_SUBJECTS
from tests.chaos.stage import Setup
from tests.chaos.subject import ON_REDIS, SUBJECTS

# Those that only contracts with a gateway before their workers know.
BEHIND_A_GATEWAY = {
    "cuts": cuts,
    "long-cuts": partial(cuts, each=4, shortest_ms=10_000, longest_ms=90_000),
}
# Those that only contracts whose whole store is a Redis can have, and why.
ONLY_REDIS = {
    "lost-replies": "goes through a proxy that speaks the protocol of Redis",
    "emptied": "takes all data from a Redis",
    "failover": "is about clusters and Sentinels of Redis",
}
EVERYTHING: dict[str, Any] = {
    **SCENARIOS,
    **BEHIND_A_GATEWAY,
    "garbage": garbage,
    "failover": failover,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("scenario", choices=sorted(EVERYTHING))
    parser.add_argument(
        "--contract", choices=sorted({**SUBJECTS, **SQL_SUBJECTS}), default="streams"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2_000, help="of the hostile writer (garbage)")
    parser.add_argument("--seconds", type=float, default=0, help="instead of --rounds (garbage)")
    parser.add_argument("--topology", choices=sorted(WAYS), default="", help="(failover)")
    parser.add_argument("--replicas", type=int, default=1, help="that submits wait for (failover)")
    parser.add_argument("--each", type=int, default=1, help="times each of the ways (failover)")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--lease-ms", type=int, default=1_500)
    parser.add_argument("--fsync", choices=("everysec", "always"), default="everysec")
    parser.add_argument("--patience-s", type=float, default=600.0)
    parser.add_argument("--planted", choices=sorted({fault for _, fault in EVERY}), default="")
    parser.add_argument("--out", type=Path, help="where the logs go (a new temporary folder)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    asked = parser.parse_args()
    if asked.scenario in ONLY_REDIS and asked.contract not in ON_REDIS:
        why, others = ONLY_REDIS[asked.scenario], ", ".join(sorted(ON_REDIS))
        parser.error(
            f"{asked.scenario} {why}; {asked.contract} is not in one: give one of {others}"
        )
    if (asked.scenario == "failover") != bool(asked.topology):
        parser.error("failover takes place on a topology, and nothing else does: give --topology")
    return asked


def main() -> int:
    """Run one scenario."""
    asked = _arguments()
    setup = Setup(
        folder=asked.out or Path(tempfile.mkdtemp(prefix="tenure-chaos-")),
        contract=asked.contract,
        seed=asked.seed,
        jobs=asked.jobs,
        workers=asked.workers,
        concurrency=asked.concurrency,
        lease_ms=asked.lease_ms,
        fsync=asked.fsync,
        patience_s=asked.patience_s,
        planted=asked.planted,
        topology=asked.topology,
        replicas=asked.replicas,
    )
    sizes = {
        "garbage": {"rounds": asked.rounds, "seconds": asked.seconds},
        "failover": {"each": asked.each},
    }.get(asked.scenario, {})
    report = asyncio.run(EVERYTHING[asked.scenario](setup, **sizes))
    print(report.as_json().decode() if asked.json else f"{report}\n  logs       {setup.folder}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
