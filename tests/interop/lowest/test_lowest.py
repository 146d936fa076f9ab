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
# What each package is used for. All other tests would say nothing about a version.
USES = {
    "aiodns": ("tests/contract/egress/test_guard.py",),
    "asyncpg": ("tests/contract/inbox/test_queue.py",),
    "click": ("tests/unit/cli/test_output.py", "tests/unit/cli/test_keys.py"),
    "cronsim": ("tests/unit/plans",),
    "cryptography": ("tests/unit/vault",),
    "fastapi": ("tests/contract/gateway/test_jobs.py", "tests/contract/gateway/test_refusals.py"),
    "hiredis": ("tests/unit/store", "tests/contract/store/test_redis_client.py"),
    "httptools": ("tests/contract/egress/test_guard.py",),
    "jinja2": ("tests/contract/gateway/test_logins.py",),
    "msgspec": ("tests/unit/core/test_registry.py", "tests/contract/memory"),
    "prometheus-client": ("tests/unit/worker/test_telemetry.py",),
    "starlette": ("tests/contract/gateway/test_jobs.py",),
    "structlog": ("tests/unit/worker/test_failure_logs.py",),
    "uvicorn": ("tests/contract/gateway/test_jobs.py",),
    "uvloop": ("tests/contract/cli/test_worker.py",),
}
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


def test_what_uses_a_package_works_with_its_lowest_version(python: Path) -> None:
    assert USES.keys() == declared().keys()
    assert "submit" in run(python, "-m", "tenure.cli", "--help")
    tests = sorted({test for uses in USES.values() for test in uses})
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *tests)
