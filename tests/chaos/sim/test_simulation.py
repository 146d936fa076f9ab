"""The real worker over the memory contract, in thousands of worlds that are out to break it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.sim.planted import PLANTED
from tests.chaos.sim.world import simulate

ROOT = Path(__file__).resolve().parents[3]
SEEDS = 1_000
CHUNK = 50
PLANTED_SEEDS_MAX = 200


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_loses_a_job_or_accepts_a_stale_write(first: int) -> None:
    """0 lost, 0 stale accepts, budgets kept, every job ended; and the storm was a real one."""
    storm: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        run = simulate(seed)
        assert run.ok, (
            f"seed {seed}: {run.errors} {run.verdict}\n"
            f"replay: python -m tests.chaos.sim --seeds 1 --from {seed}"
        )
        storm["kills"] += run.kills
        storm["pauses"] += run.pauses
        storm["lost"] += run.messages_lost
        storm["starts"] += run.verdict.starts
        storm["duplicates"] += run.verdict.duplicate_starts
        storm["refused"] += run.verdict.rejects
    assert storm["kills"] > 2 * CHUNK
    assert storm["pauses"] > CHUNK
    assert storm["lost"] > 10 * CHUNK
    assert storm["duplicates"] > CHUNK
    assert storm["refused"] > CHUNK / 4


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_by_the_right_invariant(name: str) -> None:
    rules, invariants = PLANTED[name]
    for seed in range(PLANTED_SEEDS_MAX):
        if invariants <= simulate(seed, rules).verdict.broken:
            return
    pytest.fail(f"{name} was not found by {invariants} in {PLANTED_SEEDS_MAX} seeds")


def test_the_same_seed_gives_the_same_trace() -> None:
    first = [simulate(seed).trace for seed in range(5)]
    assert first == [simulate(seed).trace for seed in range(5)]
    assert len(set(first)) == 5


def test_the_trace_does_not_depend_on_the_process() -> None:
    """Another process with another hash seed goes through exactly the same steps."""

    def traces(hash_seed: str) -> str:
        command = [sys.executable, "-m", "tests.chaos.sim", "--seeds", "5", "--traces", "--jobs=1"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.rpartition("5 seeds in")[0]

    here = "".join(f"{seed} {simulate(seed).trace}\n" for seed in range(5))
    assert traces("1") == traces("4242") == here


def test_a_failing_seed_is_named_with_the_way_to_replay_it() -> None:
    command = [sys.executable, "-m", "tests.chaos.sim", "--seeds", "4", "--plant", "no_reclaim"]
    done = subprocess.run([*command, "--jobs=1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "failed: I1" in done.stdout
    assert "replay: python -m tests.chaos.sim --seeds 1 --from" in done.stdout
