"""Lets Spark find the data source by itself: it looks into packages named `pyspark_*`."""

from leasehold.pipeline.source.journal import LeaseholdSource as DefaultSource

__all__ = ["DefaultSource"]
