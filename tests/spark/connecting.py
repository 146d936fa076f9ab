"""A Spark Connect server of our own, started from the wheel on a free port of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tenure.pipeline.session import find_java, runtime_folder
from tests.spark.working import SMALL

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
PATIENCE_S = 240


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """Its address, while the block lasts; the package is installed beside it."""
    port = free_port()
    log = folder / "connect.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            _command(port, folder), env=_environment(), cwd=folder,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(server, port, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def _command(port: int, folder: Path) -> list[str | Path]:
    conf = SMALL | {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.extraJavaOptions": QUICK,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.python.daemon.module": "tenure.pipeline.daemon",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    words = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    service = "org.apache.spark.sql.connect.service.SparkConnectServer"
    return [
        HOME / "bin" / "spark-submit", "--master", "local[2]", "--driver-memory", "1g",
        *words, "--class", service, "spark-internal",
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    return os.environ | {
        "JAVA_HOME": str(find_java(os.environ, runtime_folder(os.environ))),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(HOME),
    }


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)  # another process opens it
    raise TimeoutError(log.read_text())


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
