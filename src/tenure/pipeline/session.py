"""The Spark session of every pipeline command: quiet, quick to start, and the same everywhere.

`local[*]` by default; also a master (`spark://...`) or a Spark Connect server (`sc://...`). The
rest of the pipeline uses only calls that work with all three.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tenure.core.config import why_untrusted
from tenure.core.errors import UsageError
from tenure.pipeline.fork_server import launcher
from tenure.pipeline.java import find_java
from tenure.store.files import private_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOT_INSTALLED = (
    "the pipeline needs PySpark, which is not installed here; "
    "install it with: pip install 'tenure[spark]' (in a clone: bin/up --with-spark)"
)
# In short commands Java's second compiler costs more than it saves.
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_OPEN_JAVA = "-XX:+UseParallelGC"
# Errors are raised as exceptions; Spark would log them as well.
_QUIET = """\
rootLogger.level = off
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = spark: %m%n
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = off
"""


class SparkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where Spark runs and how large. `conf` goes to Spark as it is and wins over all else.

    `quick` trades the speed of long runs for a start in half the time. `ship` sends this package to
    the executors of a cluster whose machines do not have it.
    """

    master: str = "local[*]"
    remote: str = ""
    driver_memory: str = "2g"
    conf: Mapping[str, str] = {}
    quick: bool = False
    progress: bool = False
    ship: bool = False


def open_session(
    settings: SparkSettings, *, environment: Mapping[str, str] | None = None
) -> SparkSession:
    """A session by these settings, with the data source `tenure` known to it."""
    environment = os.environ if environment is None else environment
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise UsageError(NOT_INSTALLED) from None
    opened = (
        _remote(SparkSession, settings)
        if settings.remote
        else _classic(SparkSession, settings, environment)
    )
    return prepare(opened, ship=settings.ship)


def prepare(spark: SparkSession, *, ship: bool = False) -> SparkSession:
    """Register the data sources with a session that was opened elsewhere."""
    from tenure.pipeline.lake.sink import LakeSink
    from tenure.pipeline.source.journal import TenureSource

    spark.dataSource.register(TenureSource)
    spark.dataSource.register(LakeSink)
    # Filters reach a Python source only if asked for.
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    if ship:
        from tenure.pipeline.shipping import ship_package

        ship_package(spark)
    return spark


def _remote(kind: type[SparkSession], settings: SparkSettings) -> SparkSession:
    try:
        import pyspark.sql.connect.session  # noqa: F401 # says what it lacks
    except ImportError as error:
        lacking = str(error).strip().splitlines()[-1]
        raise UsageError(
            f"Spark Connect needs more of PySpark ({lacking}); pip install 'tenure[spark]'"
        ) from None
    # By the general builder: it makes the rest of PySpark use Spark Connect.
    builder = kind.builder.remote(settings.remote)
    for name, value in settings.conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _classic(
    kind: type[SparkSession], settings: SparkSettings, environment: Mapping[str, str]
) -> SparkSession:
    home = runtime_folder(environment)
    is_local = settings.master.startswith("local")
    os.environ["JAVA_HOME"] = str(find_java(environment, home))
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    java = f"{_QUICK_JAVA if settings.quick else _OPEN_JAVA} {_log_option(home)}"
    conf = {
        "spark.driver.memory": settings.driver_memory,
        "spark.driver.extraJavaOptions": java,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(settings.progress).lower(),
        "spark.sql.streaming.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "16",
        "spark.hadoop.fs.permissions.umask-mode": "077",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.streaming.numRecentProgressUpdates": "10",
        # Otherwise each expression makes ten calls into Java, to name its line in errors.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # A speculative copy of a task would do the same work again, for the same jobs and files.
        "spark.speculation": "false",
    }
    if is_local:
        conf["spark.python.daemon.module"] = "tenure.pipeline.daemon"
        conf["spark.driver.host"] = conf["spark.driver.bindAddress"] = "127.0.0.1"
    builder = kind.builder.appName("tenure").master(settings.master)
    for name, value in (conf | dict(settings.conf)).items():
        builder = builder.config(name, value)
    with _python(launcher() if is_local else sys.executable):
        return builder.getOrCreate()


@contextmanager
def _python(program: str) -> Iterator[None]:
    """Let Spark start `program` as Python, not the first on PATH, unless the user named one."""
    names = [name for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON") if name not in os.environ]
    chosen = dict.fromkeys(names, program)
    if "PYTHONSAFEPATH" not in os.environ and why_untrusted(Path.cwd().stat()):
        chosen["PYTHONSAFEPATH"] = "1"  # no modules of other users from the current folder
    os.environ.update(chosen)
    try:
        yield
    finally:
        # For this session only: programs started from here choose for themselves.
        for name in chosen:
            del os.environ[name]


def runtime_folder(environment: Mapping[str, str]) -> Path:
    """The folder of launchers and Java settings: in the user's cache, or a private one."""
    cache = environment.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    home = Path(cache) / "tenure" / "spark"
    try:
        private_folder(home, mark="*")  # its files are executed
    except (OSError, UsageError):
        home = Path(tempfile.mkdtemp(prefix="tenure-spark-"))
    return home


def _log_option(home: Path) -> str:
    path = home / "log4j2.properties"
    if not path.exists() or path.read_text() != _QUIET:
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(_QUIET)
        draft.replace(path)
    return f"-Dlog4j2.configurationFile=file:{path}"
