"""Errors of Spark in one line: the cause, without the many lines around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tenure.core import errors
from tenure.core.errors import StoreError, TenureError

_ERROR = re.compile(r"([A-Za-z_][\w.]*): (.*)")
_END = ("=== Streaming Query", "JVM stacktrace")
_NO_CONNECTOR = ("S3AFileSystem not found", 'No FileSystem for scheme "s3')


class SparkFailed(TenureError):
    """Spark could not do it; the message is the cause."""

    code = "spark"


@contextmanager
def one_line() -> Iterator[None]:
    """Turn errors that Spark raises inside into `TenureError`s with the cause as their message."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        raise plain(str(error)) from error


def lacks_connector(text: str) -> bool:
    """Whether Spark says that it has no connector for a bucket."""
    return any(words in text for words in _NO_CONNECTOR)


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
