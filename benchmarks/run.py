#!/usr/bin/env python3
"""Run a benchmark scenario: every contender in the same run, interleaved, against a private Redis.

    python benchmarks/run.py noop                       # all contenders, full size
    python benchmarks/run.py latency --peers tenure,taskiq --repeats 5
    python benchmarks/run.py all --quick                # does everything still work?
    python benchmarks/run.py --page                     # the pages, from results/

Results go to benchmarks/results/<scenario>.json and .md, from which the figures of
docs/concepts/comparison.md and docs/operating/scaling.md are taken. Exit code 0: everything ran and
every goal that could be told was met; 1: a contender failed; 8: a goal was missed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import scenarios
from harness import comparison, environments, machine, report, scaling
from harness.rounds import Results, play
from harness.scenario import Scenario
from harness.server import PrivateRedis

HERE = Path(__file__).resolve().parent
FAILED = 1
GOAL_MISSED = 8


def main() -> int:
    chosen = _arguments()
    if chosen.page:
        comparison.write_page()
        scaling.write_page()
        return 0
    # A plain SIGTERM must also stop the private server and the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = scenarios.NAMES if chosen.scenario == "all" else (chosen.scenario,)
    codes = [_run(scenarios.load(name), chosen) for name in names]
    return FAILED if FAILED in codes else max(codes)


def _run(scenario: Scenario, chosen: argparse.Namespace) -> int:
    contenders = _contenders(scenario, chosen.peers)
    jobs = chosen.jobs or (scenario.quick_jobs if chosen.quick else scenario.jobs)
    repeats = chosen.repeats or (1 if chosen.quick else 3)
    for name in contenders:
        environments.binaries(name)
    print(f"{scenario.title}: {', '.join(contenders)}", file=sys.stderr, flush=True)
    with PrivateRedis(aof=chosen.aof, clients=scenario.clients) as server:
        facts = machine.facts(server)
        settings = {"size": jobs, "rounds": repeats}

        def keep(results: Results) -> None:
            report.write(results, chosen.out, facts, settings)
            if chosen.out.resolve() == comparison.RESULTS:
                comparison.write_page()
                if scenario.name in scaling.SCENARIOS:
                    scaling.write_page()

        results = play(
            scenario,
            contenders,
            server,
            repeats=repeats,
            jobs=jobs,
            patience_s=chosen.patience,
            after_round=keep,
        )
    print(report.as_markdown(results, facts, settings))
    return _exit_code(results)


def _exit_code(results: Results) -> int:
    if any(contender.errors for contender in results.contenders.values()):
        return FAILED
    return GOAL_MISSED if any(goal["met"] is False for goal in report.goals(results)) else 0


def _contenders(scenario: Scenario, asked: str | None) -> list[str]:
    if asked is None:
        return list(scenario.contenders)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    unknown = [name for name in names if name not in scenario.contenders]
    if unknown or not names:
        sys.exit(
            f"{scenario.name} has no contender {', '.join(unknown) or '(none named)'}; "
            f"it has {', '.join(scenario.contenders)}"
        )
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "scenario",
        nargs="?",
        choices=[*scenarios.NAMES, *scenarios.PIPELINE, "all"],
        metavar="SCENARIO",
        help=f"one of {', '.join((*scenarios.NAMES, *scenarios.PIPELINE))}, or all",
    )
    parser.add_argument("--peers", metavar="A,B", help="only these contenders, in this order")
    parser.add_argument("--repeats", type=_positive, help="rounds (default 3; 1 with --quick)")
    parser.add_argument("--jobs", type=_positive, help="size: jobs, or clients for sse")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="DIR")
    parser.add_argument(
        "--aof",
        choices=["off", "everysec", "always"],
        default="off",
        help="persistence of the private server",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        metavar="SECONDS",
        help="kill: how long to wait for the jobs of the killed worker",
    )
    parser.add_argument("--quick", action="store_true", help="one small round; figures mean little")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the page anew")
    chosen = parser.parse_args()
    if chosen.scenario is None and not chosen.page:
        parser.error("name a scenario, or all")
    return chosen


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
