from typing import Any
from zoneinfo import ZoneInfo

from arq import cron


async def report(ctx: dict[str, Any]) -> str:
    return "the report of the night"


class WorkerSettings:
    timezone = ZoneInfo("Europe/Berlin")
    cron_jobs = (cron(report, hour=3, minute=0),)
