"""The checkers that a commit must pass, each as one test with the tool's own words on failure."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.reading import ROOT, files, shown, text

BESIDE_PYTHON = Path(sys.executable).parent


def run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        pytest.fail(f"{' '.join(map(str, command))}\n{said}", pytrace=False)


def test_ruff_finds_nothing_to_complain_about() -> None:
    run(BESIDE_PYTHON / "ruff", "check", "--no-fix")


def test_every_file_is_formatted_by_ruff() -> None:
    run(BESIDE_PYTHON / "ruff", "format", "--check")


@pytest.mark.timeout(300)
def test_mypy_accepts_every_type_under_strict() -> None:
    run(BESIDE_PYTHON / "mypy")


def test_imports_keep_to_the_layers_of_the_design() -> None:
    run(BESIDE_PYTHON / "lint-imports", "--no-cache")


def test_bandit_finds_nothing_that_is_not_excepted() -> None:
    run(BESIDE_PYTHON / "bandit", "--quiet", "-c", "pyproject.toml", "-r", "src", "bin", "examples")


def test_every_exception_from_bandit_names_its_check_and_a_reason() -> None:
    lines = [
        f"{shown(path)}: {line.strip()}"
        for folder in ("src", "bin", "examples")
        for path in files(ROOT / folder, "*.py")
        for line in text(path).splitlines()
        if "nosec" in line and not re.search(r"# nosec B\d{3}(, B\d{3})* # \w+", line)
    ]
    assert not lines, "write `# nosec B603 # why this is safe`"


def test_the_lock_file_matches_the_project_file() -> None:
    """Without network: uv only compares the two files."""
    beside = ROOT / ".tools" / "bin" / "uv"
    uv = os.environ.get("TENURE_UV") or shutil.which("uv") or (beside if beside.exists() else None)
    assert uv, "no uv found: run bin/test, which brings one, or name it in TENURE_UV"
    run(uv, "lock", "--check", "--offline")
