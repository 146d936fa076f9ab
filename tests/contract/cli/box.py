"""A box for the page about systemd: its commands run for real, in a root folder of the test's.

What would change the machine has a stand-in. `sudo` runs what it is given; `apt-get` leaves the
Redis configuration that Debian's package would; `python3.11 -m venv` makes a folder whose `pip`
leaves this very program; `systemctl` starts what a unit says, as it says it, with the environment
of its files, and waits for READY=1 as systemd does. Ports are those of the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tenure.store.embedded.programs import redis_program

READY_WITHIN_S = 40.0

STAND_INS = {
    "sudo": 'exec "$@"',
    "apt-get": """
        [ "$*" = "install redis-server" ] || exit 1
        mkdir -p "$BOX/etc/redis"
        cd "$BOX/etc/redis"
        printf 'port %s\\ndir %s\\ndaemonize no\\n' "$REDIS_PORT" "$BOX" >redis.conf
    """,
    "python3.11": """
        [ "$1 $2" = "-m venv" ] || exit 1
        mkdir -p "$3/bin"
        cp "$BOX/stand-ins/pip" "$3/bin/pip"
    """,
    "pip": """
        [ "$1" = install ] || exit 1
        echo "$2" >>"$BOX/installed"
        cd "$(dirname "$0")"
        printf '#!/bin/sh\\nexec "%s" -m tenure.cli "$@"\\n' "$PYTHON" >tenure
        chmod +x tenure
    """,
    "systemctl": 'exec "$PYTHON" -m tests.contract.cli.box "$@"',
    "journalctl": '[ "$1 $3" = "-u -f" ] && head -5 "$BOX/$2.log"',
}


class Box:
    """The root folder, its stand-ins, and what was started in it."""

    def __init__(self, root: Path, project: Path, *, redis_port: int, gateway_port: int) -> None:
        self.root = root
        self._ports = {"6379": str(redis_port), "8470": str(gateway_port)}
        programs = root / "stand-ins"
        programs.mkdir(parents=True)
        (root / "etc" / "systemd" / "system").mkdir(parents=True)
        for name, text in STAND_INS.items():
            (programs / name).write_text(f"#!/bin/sh\n{textwrap.dedent(text)}\n")
            (programs / name).chmod(0o755)
        self.environment = {
            "BOX": str(root),
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{project}:{os.environ.get('PYTHONPATH', '')}",
            "REDIS_PORT": str(redis_port),
            "TENURE_QUEUE_URL": f"streams+redis://127.0.0.1:{redis_port}/0",
            "BOX_PORTS": json.dumps(self._ports),
        }

    def here(self, commands: str) -> str:
        """Commands, with the folders of the machine below the box."""
        return commands.replace("/etc/", f"{self.root}/etc/").replace("/opt/", f"{self.root}/opt/")

    def installed(self) -> list[str]:
        """What pip was asked for."""
        return (self.root / "installed").read_text().split()

    def stop(self) -> None:
        """End what was started, the newest first, and wait for it."""
        for path in sorted(self.root.glob("*.pid"), key=lambda p: -p.stat().st_mtime_ns):
            with contextlib.suppress(ProcessLookupError):
                pid = int(path.read_text())
                os.kill(pid, signal.SIGTERM)
                _wait(partial(_gone, pid))


def _runs(pid: int) -> bool:
    """Whether it is there and no zombie; our children's children belong to the first process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _gone(pid: int) -> bool:
    return not _runs(pid)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("it did not happen in time")
        time.sleep(0.02)  # looks again until the deadline


# --- systemctl -----------------------------------------------------------------------------------


def main(root: Path, verb: str, *words: str) -> None:
    """`daemon-reload`, `restart redis-server`, `enable --now UNIT`, `status UNIT`."""
    match verb, *words:
        case ["daemon-reload"]:
            return
        case ["restart", "redis-server"]:
            _start_redis(root)
        case ["enable", "--now", unit]:
            _start_unit(root, unit)
        case ["status", unit]:
            pid = int((root / f"{unit}.pid").read_text())
            print("active (running)" if _runs(pid) else "failed")
        case _:
            raise SystemExit(f"systemctl {verb} {shlex.join(words)}: not in this box")


def _start_redis(root: Path) -> None:
    command = [str(redis_program()), str(root / "etc" / "redis" / "redis.conf")]
    _spawn(root, "redis-server", command, dict(os.environ))

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(os.environ["REDIS_PORT"]))) == 0

    _wait(answers)


def _start_unit(root: Path, unit: str) -> None:
    name, _, instance = unit.partition("@")
    file = (
        root
        / "etc"
        / "systemd"
        / "system"
        / (f"{name}@.service" if instance else f"{name}.service")
    )
    text = file.read_text().replace("%i", instance).replace("%S", str(root / "state"))
    lines = [line.partition("=") for line in text.splitlines() if not line.startswith("#")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TENURE_")}
    for key, _, value in lines:
        if key == "Environment":
            environment.update([value.split("=", 1)])
        elif key == "EnvironmentFile":
            environment |= _read(root, value)
    said = {key: value for key, _, value in lines}
    command = said["ExecStart"].replace("/opt/", f"{root}/opt/")
    for key, value in environment.items():
        command = command.replace(f"${{{key}}}", value)
    (root / "state" / said["StateDirectory"]).mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.settimeout(READY_WITHIN_S)
        notify.bind(f"\0tenure-box-{os.getpid()}")
        environment["NOTIFY_SOCKET"] = f"@tenure-box-{os.getpid()}"
        _spawn(root, unit, shlex.split(command), environment, folder=Path(said["WorkingDirectory"]))
        while b"READY=1" not in notify.recv(4096):
            pass


def _read(root: Path, words: str) -> dict[str, str]:
    """An EnvironmentFile; `-` before its name means that it may be missing."""
    path = root / words.removeprefix("-").lstrip("/")
    if not path.exists() and words.startswith("-"):
        return {}
    text = path.read_text()
    for documented, ours in json.loads(os.environ["BOX_PORTS"]).items():
        text = text.replace(documented, ours)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] != "#")


def _spawn(
    root: Path,
    name: str,
    command: list[str],
    environment: dict[str, str],
    folder: Path | None = None,
) -> None:
    with (root / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    (root / f"{name}.pid").write_text(str(process.pid))


if __name__ == "__main__":
    main(Path(os.environ["BOX"]), *sys.argv[1:])
