"""python -m tests.chaos.sim --seeds 1000 --from 0: run seeds, name those that fail.

A seed that fails is replayed by running it alone: it does the same again, step by step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.chaos.sim.planted import PLANTED, SOUND
from tests.chaos.sim.world import Run, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first one")
    parser.add_argument("--plant", choices=sorted(PLANTED), help="switch a fault on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--traces", action="store_true", help="print the hash of every run")
    args = parser.parse_args()
    began_s = time.monotonic()
    total: Counter[str] = Counter()
    failed = 0
    for run in runs(range(args.first, args.first + args.seeds), args.plant, args.jobs):
        total.update(figures(run))
        if args.traces:
            print(run.seed, run.trace)
        if not run.ok:
            failed += 1
            show(run, args.plant, alone=args.seeds == 1)
    counted = ", ".join(f"{count} {name}" for name, count in total.items())
    print(f"{args.seeds} seeds in {time.monotonic() - began_s:.1f} s: {failed} failed; {counted}")
    return 1 if failed else 0


def runs(seeds: range, plant: str | None, jobs: int) -> Iterator[Run]:
    rules = PLANTED[plant][0] if plant else SOUND
    play = partial(simulate, rules=rules)
    if jobs == 1 or len(seeds) == 1:
        yield from map(play, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(play, seeds, chunksize=10)


def figures(run: Run) -> dict[str, int]:
    return {
        "virtual s": int(run.virtual_s),
        "jobs": run.verdict.jobs,
        "starts": run.verdict.starts,
        "stale writes refused": run.verdict.rejects,
        "kills": run.kills,
        "pauses": run.pauses,
        "messages lost": run.messages_lost,
    }


def show(run: Run, plant: str | None, *, alone: bool) -> None:
    option = f" --plant {plant}" if plant else ""
    print(f"seed {run.seed} failed: {', '.join(sorted(run.verdict.broken) + run.errors)}")
    if alone:
        print(run.verdict)
    else:
        print(f"  replay: python -m tests.chaos.sim --seeds 1 --from {run.seed}{option}")


if __name__ == "__main__":
    sys.exit(main())
