"""The oldest versions that pyproject.toml declares are installed and really work.

The environment is made once for a pyproject.toml and kept in `.tools`; making it takes the network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# What runs the tests is not what is tested: it has the versions of the lock file.
TOOLS = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "redis",
    "rich",
    "sentry-sdk",
    "watchfiles",
)
SMOKE = (
    "tests/unit/core",
    "tests/unit/store",
    "tests/unit/worker",
    "tests/unit/cli",
    "tests/contract/memory",
    "tests/contract/cli/test_worker.py",
    "tests/contract/gateway/test_jobs.py",
)
pytestmark = pytest.mark.timeout(900)


def uv() -> str:
    beside = ROOT / ".tools" / "bin" / "uv"
    found = os.environ.get("TENURE_UV") or shutil.which("uv") or str(beside)
    assert Path(found).exists(), "no uv found: run bin/test, which brings one"
    return found


def run(*command: str | Path) -> str:
    certificates = {"UV_SYSTEM_CERTS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TENURE_TEST"))}
    done = subprocess.run(
        command, cwd=ROOT, env=certificates | clean, capture_output=True, text=True, check=False
    )
    said = (done.stdout + done.stderr)[-8_000:]
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{said}"
    return done.stdout


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of an environment with the lowest versions."""
    text = (ROOT / "pyproject.toml").read_bytes() + f"{sys.version} {TOOLS}".encode()
    folder = ROOT / ".tools" / f"lowest-{hashlib.sha256(text).hexdigest()[:12]}"
    made = folder / "bin" / "python"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(uv(), "venv", "--quiet", "--clear", "--python", sys.executable, folder)
        install = (uv(), "pip", "install", "--quiet", "--python", made)
        run(*install, "--resolution", "lowest-direct", "--editable", ".[all]")
        run(*install, *(f"{name}=={version(name)}" for name in TOOLS))
        (folder / "made").touch()
    return made


def declared(extras: tuple[str, ...] = ("gateway", "inbox")) -> dict[str, str]:
    """The lowest version of each package that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    found = (re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", each) for each in wanted)
    return {match[1].lower(): match[2] for match in found if match}


def test_the_lowest_declared_versions_are_what_is_installed(python: Path) -> None:
    names = list(declared())
    code = f"from importlib.metadata import version\nfor n in {names!r}: print(n, version(n))"
    got = dict(line.split() for line in run(python, "-c", code).splitlines())
    wrong = {
        name: (low, got[name])
        for name, low in declared().items()
        if got[name].split(".")[: len(low.split("."))] != low.split(".")
    }
    assert not wrong, wrong


def test_commands_worker_and_gateway_work_with_the_lowest_versions(python: Path) -> None:
    assert "submit" in run(python, "-m", "tenure.cli", "--help")
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *SMOKE)
