"""Whether Spark itself can read and write a lake.

Files of a lake in a bucket are read and written by Arrow, which knows S3. Spark needs Hadoop's
connector for it, a jar that PySpark does not bring.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tenure.core.errors import UsageError
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.spark_errors import lacks_connector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HADOOP_OLDEST = "3.4.1"


def is_reached(spark: SparkSession, lake: LakeFiles) -> bool:
    """Whether Spark has a connector for this lake; reads no file."""
    if lake.is_disk:
        return True
    try:
        spark.read.schema("line string").text(lake.uri("lake.json")).schema  # noqa: B018
    except Exception as error:
        if lacks_connector(str(error)):
            return False
        # There is a connector, and it reports an error; the real read will raise it.
    return True


def require_reach(spark: SparkSession, lake: LakeFiles) -> None:
    """Refuse a lake that Spark cannot read, with the remedy."""
    if not is_reached(spark, lake):
        raise UsageError(remedy(lake.lake))


def remedy(lake: str) -> str:
    """What to do where Spark has no connector for S3."""
    version = hadoop_version()
    return (
        f"{lake}: Spark has no connector for S3 here (capture needs none); add it with --conf "
        f"spark.jars.packages=org.apache.hadoop:hadoop-aws:{version} (from Maven) or --conf "
        "spark.jars=FILE,FILE, or copy the lake to a disk and name the copy"
    )


def hadoop_version() -> str:
    """The connector must be of the same version as the Hadoop that PySpark brings."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    found = sorted(jars.glob("hadoop-client-api-*.jar"))
    return found[-1].stem.rpartition("-")[2] if found else _HADOOP_OLDEST
