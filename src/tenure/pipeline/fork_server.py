"""Starts Python processes for Spark in milliseconds: forks of a process that has done all imports.

Spark starts a Python process for each kind of planning step and another for each stream, and each
would spend two seconds on the same imports. Instead Spark starts a small launcher. It sends its
files, arguments and environment to this server and waits; the server forks, and the child runs what
Spark asked for. A launcher that finds no server runs Python itself.

`launcher` starts the server beside a driver, while Java starts; it ends with the driver.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import msgspec

from tenure.core.config import why_untrusted

PRELOADED = (
    *("numpy", "pandas", "pyarrow.compute", "pyarrow.csv", "pyarrow.parquet", "pyspark.worker"),
    *("pyspark.sql.conversion", "pyspark.sql.pandas.serializers", "pyspark.sql.pandas.types"),
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    *("tenure.pipeline.audit.explain", "tenure.pipeline.audit.parts"),
    *("tenure.pipeline.lake.feed", "tenure.pipeline.lake.sink"),
    *("tenure.pipeline.source.journal", "tenure.pipeline.source.stream_reader"),
    *("tenure.pipeline.source.submitting", "tenure.pipeline.source.writing"),
)
_SOCKET, _CLIENT, _LAUNCHER = "server.sock", "client.py", "python"
_PATH_MAX = 100  # of a socket's address
_LENGTH = 4
_SCRIPT = """\
#!/bin/sh
exec "{python}" -IS "{client}" "$@"
"""
_CLIENT_TEXT = """\
import array, json, os, socket, sys

def ask():
    server = socket.socket(socket.AF_UNIX)
    server.connect({address!r})
    words = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}
    text = json.dumps(words).encode("utf-8", "surrogateescape")
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([len(text).to_bytes({length}, "big")], files)
    server.sendall(text)
    return server

try:
    server = ask()
except OSError:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
answer = server.recv(1)
os._exit(answer[0] if answer else 1)
"""


class Request(msgspec.Struct):
    """What a launcher was started with."""

    argv: list[str]
    env: dict[str, str]
    cwd: str


class _Running:
    """The one server of this process and its launcher."""

    server: subprocess.Popen[bytes] | None = None
    launcher: str = ""


def launcher() -> str:
    """The Python that Spark should start; the plain one where there can be no server."""
    if _Running.server is not None and _Running.server.poll() is None:
        return _Running.launcher
    folder = Path(tempfile.mkdtemp(prefix="tenure-fork-"))
    address = str(folder / _SOCKET)
    if sys.platform != "linux" or len(address) > _PATH_MAX:
        shutil.rmtree(folder)
        return sys.executable
    _Running.launcher = _write(folder, address)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)  # launchers that connect before the imports are done wait
        _Running.server = subprocess.Popen(  # nosec B603 # this module
            [sys.executable, "-P", "-m", __name__, str(listening.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )
    atexit.register(_stop, _Running.server, folder)
    return _Running.launcher


def _write(folder: Path, address: str) -> str:
    client, script = folder / _CLIENT, folder / _LAUNCHER
    text = _CLIENT_TEXT.format(address=address, python=sys.executable, length=_LENGTH)
    client.write_text(text)
    script.write_text(_SCRIPT.format(python=sys.executable, client=client))
    script.chmod(0o700)
    return str(script)


def _stop(server: subprocess.Popen[bytes], folder: Path) -> None:
    if server.stdin is not None:
        server.stdin.close()
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def serve(listening: socket.socket) -> None:
    """Import everything, then fork for each launcher until the driver ends."""
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    # The other threads are idle pools of numpy and Arrow, which hold no lock that a child needs.
    warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
    watching = selectors.DefaultSelector()
    watching.register(sys.stdin.fileno(), selectors.EVENT_READ)
    watching.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in watching.select():
            if key.fileobj is listening:
                _fork(listening, watching)
            elif key.data is None:
                return  # the driver closed our input, or died
            else:
                _ended(key, watching)


def _fork(listening: socket.socket, watching: selectors.BaseSelector) -> None:
    asking, _ = listening.accept()
    try:
        request, files = _receive(asking)
    except (OSError, EOFError):
        asking.close()
        return
    child = os.fork()
    if child == 0:
        listening.close()
        watching.close()
        asking.close()
        _become(request, files)
    for file in files:
        os.close(file)
    pidfd = os.pidfd_open(child)
    watching.register(pidfd, selectors.EVENT_READ, (child, asking, pidfd))
    watching.register(asking, selectors.EVENT_READ, (child, asking, pidfd))


def _receive(asking: socket.socket) -> tuple[Request, list[int]]:
    head, files, _, _ = socket.recv_fds(asking, _LENGTH, 3)
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        part = asking.recv(length - len(text))
        if not part:
            raise EOFError("the launcher ended before it had said what it wants")
        text += part
    return msgspec.json.decode(text, type=Request), files


def _ended(key: selectors.SelectorKey, watching: selectors.BaseSelector) -> None:
    """A child has ended: send its launcher the exit code. Or a launcher ended: stop its child."""
    child, asking, pidfd = key.data
    if asking.fileno() < 0:
        return  # both ended at once, and the child was handled first
    if key.fileobj is asking:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        watching.unregister(asking)
        return
    _, status = os.waitpid(child, 0)
    watching.unregister(pidfd)
    os.close(pidfd)
    if asking in watching.get_map():
        watching.unregister(asking)
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError):  # it has just ended too
            asking.send(bytes([code if code >= 0 else 128 - code]))
    asking.close()


def _become(request: Request, files: list[int]) -> None:
    """In the child: run the module that Spark named, as Python's own `-m` would.

    But modules of the current folder come last, and only where no other user can have put them.
    """
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request.env)
        os.chdir(request.cwd)
        named = [path for path in request.env.get("PYTHONPATH", "").split(os.pathsep) if path]
        own = [] if why_untrusted(Path(request.cwd).stat()) else [request.cwd]
        sys.path[:] = list(dict.fromkeys([*named, *sys.path, *own]))
        _run(*request.argv)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # Spark has closed it
                stream.flush()
        os._exit(code & 0xFF)


def _run(option: str, what: str, *words: str) -> None:
    """`-m MODULE WORDS`, or `-c CODE`, by which Spark asks for the version."""
    if option == "-c":
        sys.argv = ["-c", *words]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # nosec B102 # Spark, our parent, gives the code
        return
    sys.argv = [what, *words]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that it is imported already
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    entrance = socket.socket(fileno=int(sys.argv[1]))
    serve(entrance)
    # A driver that was killed cannot do it.
    shutil.rmtree(Path(entrance.getsockname()).parent, ignore_errors=True)
