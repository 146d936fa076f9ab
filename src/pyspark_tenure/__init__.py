"""Lets Spark find the data source by itself: it looks into packages named `pyspark_*`."""

from tenure.pipeline.source.journal import TenureSource as DefaultSource

__all__ = ["DefaultSource"]
