"""Where Spark runs, as every command of the pipeline is told, and its session for one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure.cli.output import note

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Function = TypeVar("Function", bound=Callable[..., Any])


def spark_options(function: Function) -> Function:
    """Where Spark runs; the same for every command."""
    for option in (
        click.option("--master", default="local[*]", show_default=True, help="Spark's master."),
        click.option("--remote", default="", metavar="sc://HOST", help="A Spark Connect server."),
        click.option("--driver-memory", default="2g", show_default=True),
        click.option("--conf", multiple=True, metavar="NAME=VALUE", help="Goes to Spark as it is."),
        click.option("--ship", is_flag=True, help="Send this package to the executors."),
    ):
        function = option(function)
    return function


@contextmanager
def session(spark: dict[str, Any], *, quick: bool = True) -> Iterator[SparkSession]:
    """Open Spark for one command. `quick` suits what takes seconds, not hours."""
    from tenure.pipeline.session import SparkSettings, open_session

    conf = dict(_pair(each) for each in spark["conf"])
    is_seen = sys.stderr.isatty()
    note("starting Spark")
    opened = open_session(
        SparkSettings(
            master=spark["master"],
            remote=spark["remote"],
            driver_memory=spark["driver_memory"],
            conf=conf,
            quick=quick and spark["master"].startswith("local"),
            progress=is_seen,
            ship=spark["ship"],
        ),
        environment=os.environ,
    )
    from tenure.pipeline.plainly import one_line

    try:
        with one_line():
            yield opened
    finally:
        opened.stop()


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise click.BadParameter(f"--conf is NAME=VALUE, not {text!r}")
    return name, value
