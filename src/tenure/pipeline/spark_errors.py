"""Errors of Spark in one line: the cause, without the many lines around it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tenure.core import errors
from tenure.core.errors import StoreError, TenureError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
