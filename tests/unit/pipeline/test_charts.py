"""Charts of a report."""

from tenure.pipeline.report.charts import lines


def test_a_time_after_the_last_year_of_the_calendar_is_drawn() -> None:
    assert "31 Dec 23:59 UTC" in lines({"jobs": [(0, 1.0), (10**17, 2.0)]}, unit="")
