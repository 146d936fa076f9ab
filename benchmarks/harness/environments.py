"""One environment a peer, in `.bench/<peer>`, made on first use from its pinned requirements.txt.

A peer without a requirements.txt belongs to the project and runs in the environment of the harness.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PEERS = PROJECT / "benchmarks" / "peers"
KIT = PROJECT / "benchmarks" / "kit"
ENVIRONMENTS = PROJECT / ".bench"


def known_peers() -> list[str]:
    """Every folder of peers/ that has an adapter."""
    return sorted(path.parent.name for path in PEERS.glob("*/adapter.py"))


def binaries(peer: str) -> Path:
    """The folder of the peer's interpreter and commands; makes the environment if needed."""
    requirements = PEERS / peer / "requirements.txt"
    if not requirements.exists():
        return Path(sys.executable).parent
    oldest = PEERS / peer / "python.txt"
    return made_from(requirements, peer, oldest.read_text() if oldest.exists() else "")


def made_from(requirements: Path, name: str, oldest: str = "") -> Path:
    """The commands of an environment that holds what a pinned file lists; made when it changed.

    By one process at a time: tests that run side by side ask for the same peer. `oldest` is the
    oldest Python that its packages run on, if that is not the project's own.
    """
    environment = ENVIRONMENTS / name
    stamp = environment / "requirements.sha256"
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != digest:
            _make(environment, requirements, _python(name, oldest))
            stamp.write_text(digest)
    return environment / "bin"


def _python(name: str, oldest: str) -> str:
    """Our own Python, or another one of this machine where the peer needs a newer one."""
    wanted = tuple(int(part) for part in oldest.split(".")) if oldest else ()
    if sys.version_info >= wanted:
        return sys.executable
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    beside = sorted(home.glob("*/bin/python3"), reverse=True)
    check = f"import sys; sys.exit(sys.version_info < {wanted})"
    # A name on the PATH may be a shim without a Python behind it: only running it tells.
    for candidate in (*(f"python3.{minor}" for minor in (14, 13, 12)), *map(str, beside)):
        found = shutil.which(candidate)
        if found and not subprocess.run([found, "-c", check], capture_output=True).returncode:
            return found
    raise RuntimeError(f"{name} needs Python {oldest.strip()} or newer, and this machine has none")


def _make(environment: Path, requirements: Path, interpreter: str) -> None:
    _say(f"making the environment of {environment.name} (first use, or its pins changed)")
    (ENVIRONMENTS / ".gitignore").write_text("*\n")
    shutil.rmtree(environment, ignore_errors=True)
    python = environment / "bin" / "python"
    uv = _uv()
    if uv is None:
        _run([interpreter, "-m", "venv", str(environment)])
        _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)])
        return
    _run([uv, "venv", "--quiet", "--python", interpreter, str(environment)])
    _run([uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(requirements)])


def _uv() -> str | None:
    beside = [Path(sys.executable).parent / "uv", *(PROJECT / ".tools").glob("**/bin/uv")]
    found = os.environ.get("UV") or shutil.which("uv")
    return found or next((str(path) for path in beside if path.exists()), None)


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed:\n{done.stderr.strip()}")


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
