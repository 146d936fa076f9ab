"""`tenure bridge`: move waiting jobs from one queue to another, each exactly once.

A job is leased in the old queue, submitted to the new one under an id derived from the old id, and
settled in the old one. If a bridge is killed in between, the next one leases the job again, and the
new queue replies that it already has it. This needs a source without workers, so the command
refuses to run while there are any. Delayed jobs cannot be leased: they are submitted with the rest
of their delay and removed from the old queue. The bridge also waits for the leases of a bridge that
was killed, so a run that ends has moved everything.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import click
import msgspec
from click.termui import progressbar

from tenure.cli.config import load_config, with_options
from tenure.cli.console import Exit, Failed, emit, emit_text, json_option, needed_queue_option, note
from tenure.core.errors import UsageError
from tenure.core.job import JobRecord, NewJob, Submitted
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.core.portable import State, own_words, portable_counts
from tenure.core.registry import contract_of, open_ledger, open_queue, parse_url
from tenure.core.seam import Ledger, Query, Queue
from tenure.dashboard.queues import states_of

_BATCH = 100
_CLAIM_WAIT_MS = 200
_FULL_WAIT_S = 1.0
_HELD_MAX = 1_000
_WORKER_ID = "tenure-bridge"


@dataclass
class Moved:
    """How many jobs were moved, how many of these had arrived before, and which were refused."""

    moved: int = 0
    replayed: int = 0
    refused: dict[str, str] = field(default_factory=dict)


@dataclass
class Bridge:
    """Moves the jobs of one queue to another.

    `on_moved` gets the number of jobs of each step. `on_wait` gets the number of jobs that a killed
    bridge still holds, and for how many milliseconds at most. `plain` drops groups and priorities,
    for a target that has none.
    """

    from_url: str
    source: Queue
    source_ledger: Ledger
    target: Queue
    on_moved: Callable[[int], object] = lambda count: None
    keep: bool = False
    on_wait: Callable[[int, int], object] = lambda count, ms: None
    plain: bool = False
    checked: set[str] = field(default_factory=set)

    async def run(self) -> Moved:
        """Move everything that waits; returns when only refused jobs are left."""
        moved = Moved()
        await self._move(moved)
        held = await self._held()
        if held:
            now_ms = time.time_ns() // 1_000_000
            longest_ms = max(job.lease_until_ms for job in held) - now_ms
            self.on_wait(len(held), max(0, longest_ms))
        while held:
            await self.source.upkeep()
            await self._move(moved)
            held = await self._held()
        return moved

    async def _held(self) -> list[JobRecord]:
        """The jobs that another bridge holds; this one holds none between two steps."""
        states = await self._own_states("running")
        page = await self.source_ledger.find(Query(states=states, limit=_HELD_MAX))
        return [job for job in page.jobs if job.worker_id == _WORKER_ID]

    async def _own_states(self, *states: State) -> tuple[str, ...]:
        """The names that the source's contract has for these states."""
        counts, contract = await self.source_ledger.counts(), parse_url(self.from_url).contract
        return own_words(contract, states, states_of(contract, tuple(counts.states)))

    async def _move(self, moved: Moved) -> None:
        while leases := await self.source.claim(_BATCH, wait_ms=_CLAIM_WAIT_MS):
            if all(lease.job_id in moved.refused for lease in leases):
                await self._release(leases)
                break
            await self._move_leased(leases, moved)
        await self._move_delayed(moved)

    async def _move_leased(self, leases: Sequence[Lease], moved: Moved) -> None:
        try:
            answers = await self._store(leases)
        except BaseException:  # an unreachable target must not cost a job an attempt
            await self._release(leases)
            raise
        accepted: list[tuple[Lease, str]] = []
        refused: list[Lease] = []
        for lease, answer in zip(leases, answers, strict=True):
            _count(moved, lease.job_id, answer)
            if answer.accepted:
                accepted.append((lease, answer.job_id))
            else:
                refused.append(lease)
        if accepted:
            await self.source.settle(
                [Outcome(lease, "complete", _result(new)) for lease, new in accepted]
            )
            if not self.keep:
                await self.source_ledger.remove([lease.job_id for lease, _ in accepted])
        if refused:
            await self._release(refused)
        self.on_moved(len(accepted))

    async def _release(self, leases: Sequence[Lease]) -> None:
        await self.source.settle([Outcome(lease, "release") for lease in leases])

    async def _move_delayed(self, moved: Moved) -> None:
        states, after = await self._own_states("waiting", "scheduled"), ""
        while True:
            page = await self.source_ledger.find(Query(states=states, after=after, limit=_BATCH))
            now_ms = time.time_ns() // 1_000_000
            delayed = [
                job for job in page.jobs if job.due_ms > now_ms and job.job_id not in moved.refused
            ]
            answers = await self._store(delayed, now_ms)
            for job, answer in zip(delayed, answers, strict=True):
                _count(moved, job.job_id, answer)
            accepted = [
                job.job_id for job, answer in zip(delayed, answers, strict=True) if answer.accepted
            ]
            if accepted:
                await self.source_ledger.remove(accepted)
                self.on_moved(len(accepted))
            after = page.after
            if not after:
                return

    def _new(self, job: Lease | JobRecord, now_ms: int = 0) -> NewJob:
        """The job as it is submitted to the target."""
        due_ms = job.due_ms if isinstance(job, JobRecord) else 0
        return NewJob(
            task=job.task,
            payload=job.payload,
            job_id=moved_id(self.from_url, job.job_id),
            max_attempts=job.max_attempts or None,
            delay_ms=max(0, due_ms - now_ms),
            priority=0 if self.plain else job.priority,
            gid="" if self.plain else job.gid,
            trace=job.trace,
        )

    async def _store(
        self, old: Sequence[Lease] | Sequence[JobRecord], now_ms: int = 0
    ) -> list[Submitted]:
        """Submit the jobs to the target; waits while the target is full."""
        jobs = [self._new(job, now_ms) for job in old]
        answers: dict[int, Submitted] = {}
        todo = list(range(len(jobs)))
        while todo:
            submitted = await self.target.submit([jobs[at] for at in todo])
            answers |= dict(zip(todo, submitted, strict=True))
            todo = [at for at in todo if answers[at].status == "full"]
            if todo:
                await asyncio.sleep(max(_FULL_WAIT_S, answers[todo[0]].retry_after_ms / 1000))
        stored = [answers[at] for at in range(len(jobs))]
        accepted = [answer.job_id for answer in stored if answer.accepted]
        await self._check_distinct(accepted, {job.queue for job in old})
        return stored

    async def _check_distinct(self, stored: Sequence[str], queues: set[str]) -> None:
        """Raise if both URLs name the same queue: then the source has what the target stored.

        Checked once per queue, with the first stored job, before anything is removed. Two queues of
        one database are distinct: the record tells in which of them a job is.
        """
        if not stored or queues <= self.checked:
            return
        self.checked |= queues
        found = await self.source_ledger.get(stored[0])
        if found is not None and found.queue in self.checked:
            await self.source_ledger.remove(stored)
            raise UsageError("both URLs name the same queue; a bridge needs two")


def moved_id(from_url: str, job_id: str) -> str:
    """The id of a job in the target: the same each time, and unique to the job."""
    parsed = parse_url(from_url)
    source = f"{parsed.contract}+{parsed.store}?{sorted(parsed.options.items())}"
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"tenure bridge {source} {job_id}"))


def without_lost_limit(url: str) -> str:
    """The source without a limit of lost leases: a bridge that is killed must bury no job."""
    parsed = parse_url(url)
    option = contract_of(parsed).lost_max_option
    if not option or option in parsed.options:
        return url
    return with_options(url, **{option: 1_000_000})


def _count(moved: Moved, job_id: str, answer: Submitted) -> None:
    if answer.accepted:
        moved.moved += 1
        moved.replayed += answer.status == "replayed"
    else:
        moved.refused[job_id] = answer.reason or answer.status


def _result(new_id: str) -> bytes:
    return msgspec.json.encode({"moved_to": new_id})


@click.command("bridge")
@needed_queue_option
@click.option("--to", "to_url", metavar="QUEUE", required=True, help="Where the jobs go.")
@click.option("--keep", is_flag=True, help="Keep the old job as done, instead of removing it.")
@click.option("--plain", is_flag=True, help="Leave out groups and priorities.")
@click.option("--with-workers", is_flag=True, help="Run although workers serve the old queue.")
@json_option
def bridge_command(
    queue_url: str, to_url: str, keep: bool, plain: bool, with_workers: bool, as_json: bool
) -> int:
    """Move the waiting jobs of a queue to another one, of any contract, each exactly once.

    It may be stopped and started again: no job is lost, and none arrives twice. Stop the workers of
    the old queue first. Jobs that the new queue refuses stay in the old one and are listed. --plain
    drops groups and priorities, for a queue without them.

    \b
    tenure bridge --queue 'bullmq+redis://h/0?queue=mail' --to streams+redis://127.0.0.1:6379/0
    """
    config = load_config()
    from_url, to_url = config.text("queue_url", queue_url), config.url_of(to_url)
    if from_url == to_url:
        raise UsageError("both URLs name the same queue; a bridge needs two")
    moved = asyncio.run(_bridge(from_url, to_url, keep, plain, with_workers))
    if as_json:
        emit(moved)
    else:
        emit_text(f"{moved.moved} jobs moved, {moved.replayed} of them had arrived before")
        for job_id, why in moved.refused.items():
            note(f"tenure: {job_id} stays where it is: {why}")
    return Exit.CONFLICT if moved.refused else Exit.OK


async def _bridge(from_url: str, to_url: str, keep: bool, plain: bool, with_workers: bool) -> Moved:
    ledger, target = open_ledger(from_url), open_queue(to_url)
    opened: list[Ledger | Queue] = [ledger, target]
    try:
        workers = await _count_workers(ledger)  # first: a plane over HTTP refuses this at once
        counts = await ledger.counts()
        if workers and not with_workers:
            raise Failed(
                Exit.CONFLICT,
                f"{workers} workers serve the old queue and could run a job that is on its "
                "way: stop them first (or say --with-workers)",
            )
        states = portable_counts(parse_url(from_url).contract, counts.states)
        waiting = states["waiting"] + states["scheduled"]
        source = open_queue(without_lost_limit(from_url), worker_id=_WORKER_ID)
        opened.append(source)
        with progressbar(length=waiting, label="moving", file=sys.stderr) as bar:
            bridge = Bridge(
                from_url,
                source,
                ledger,
                target,
                bar.update,
                keep=keep,
                on_wait=_say_wait,
                plain=plain,
            )
            return await bridge.run()
    finally:
        for each in reversed(opened):
            await each.close()


async def _count_workers(ledger: Ledger) -> int:
    """The number of workers, without a bridge that was killed."""
    return sum(beat.worker_id != _WORKER_ID for beat in await ledger.workers())


def _say_wait(count: int, ms: int) -> None:
    within = f"{ms / 1000:.0f} s at most"
    note(f"tenure: a bridge that was stopped holds {count} jobs; waiting for them, {within}")
