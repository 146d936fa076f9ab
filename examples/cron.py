"""A report every morning at three in Berlin, once, whatever the number of workers. Run it:

tenure worker cron.py
tenure schedules
"""

from tenure import task


@task("report", cron="0 3 * * *", tz="Europe/Berlin")
async def report() -> str:
    return "the report of the night"
