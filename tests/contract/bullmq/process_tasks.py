"""Handlers that a child process can import."""

from typing import Any

from tenure import Job, task


def gently(attempts_made: int, kind: str, error: BaseException, job: Job) -> int:
    return 20 if kind == "gently" and str(error) == "not yet" else -1


@task("process", process=True, backoff=gently)
def in_a_process(job: Job) -> Any:
    if job.attempt == 1:
        job.update_data({"from": "a process"})
        raise RuntimeError("not yet")
    return [job.payload, job.opts["attempts"]]


@task("options", process=True)
def shows_options(job: Job) -> str:
    return str(job.opts["far"])
