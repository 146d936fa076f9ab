"""Commands as a user types them, one after the other, in one process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.spark.working import SMALL

ROOT = Path(__file__).resolve().parents[2]
HERE = [
    "--master", "local[2]", "--driver-memory", "1g",
    *(f"--conf={name}={value}" for name, value in SMALL.items()),
]  # fmt: skip
# A list of words is a command; a text is a program in Python. After each comes its exit code.
# Spark is stopped at the end of each command; here one serves them all.
RUNNER = """
import json, os, sys
from pyspark.sql import SparkSession
from tenure.cli.console import run
SparkSession.stop = lambda self: None
scope, umask = {}, os.umask(0)
for step in json.load(sys.stdin):
    os.umask(umask)
    code = 0
    if isinstance(step, str):
        exec(step, scope)
    else:
        sys.argv[1:] = step
        code = run()
    print(f"EXIT {code}", flush=True)
"""
Step = list[str] | str


def _command(words: list[str], where: Sequence[str]) -> list[str]:
    """The command with where Spark runs, if it needs one."""
    return ["pipeline", *words, *(() if words[0] in ("check", "forget") else where)]


def typed(
    folder: Path,
    *steps: Step,
    where: Sequence[str] = HERE,
    environment: Mapping[str, str] | None = None,
    umask: int = -1,
) -> list[tuple[int, str]]:
    """Exit code and stdout of each step; commands are told `where` Spark runs."""
    given = [step if isinstance(step, str) else _command(step, where) for step in steps]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TENURE_")}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(given),
        cwd=folder,
        env=clean
        | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        | dict(environment or {}),
        umask=umask,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("EXIT ")
    outputs = [parts[0], *(part.partition("\n")[2] for part in parts[1:])]
    codes = [int(part.partition("\n")[0]) for part in parts[1:]]
    assert len(codes) == len(steps), done.stderr
    failed = [step for step, code in zip(steps, codes, strict=True) if code == 1]
    assert not failed, f"{failed}\n{done.stderr}"
    return list(zip(codes, outputs, strict=False))
