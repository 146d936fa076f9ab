"""What the buttons do. Each handler acts, leaves a notice, and says which page comes next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from tenure.core.encoding import check_json
from tenure.core.errors import NotFound, UsageError
from tenure.core.job import NewJob
from tenure.core.redaction import MASK, Redaction
from tenure.dashboard.acting import VERBS, Actor, Verb
from tenure.dashboard.finding import Finder
from tenure.dashboard.house import Street
from tenure.dashboard.job_facts import job_path
from tenure.dashboard.reading import decoded
from tenure.dashboard.search import parse
from tenure.dashboard.visit import Notices, Visit, local_path

_SELECTED_MAX = 500
_DONE = {
    "retry": "sent back",
    "cancel": "cancelled",
    "remove": "removed",
    "redeliver": "to be sent again",
}


class Forms:
    """All forms of a dashboard."""

    def __init__(
        self, street: Street, finder: Finder, actor: Actor, notices: Notices, redaction: Redaction
    ) -> None:
        self._street = street
        self._finder = finder
        self._actor = actor
        self._notices = notices
        self._redaction = redaction

    def handlers(self) -> dict[str, Callable[[Visit], Awaitable[str]]]:
        """By path."""
        return {
            "/ui/act": self.act,
            "/ui/bulk": self.bulk,
            "/ui/bulk/stop": self.bulk_stop,
            "/ui/queue": self.queue,
            "/ui/redeliver": self.redeliver,
            "/ui/submit": self.submit,
            "/ui/replay": self.replay,
        }

    async def act(self, visit: Visit) -> str:
        """Retry, cancel or remove the jobs that were ticked; `job` is `queue|id`."""
        verb = _verb(visit.field("verb"))
        by_queue: dict[str, list[str]] = {}
        chosen = visit.fields("job")[:_SELECTED_MAX]
        for each in chosen:
            queue, _, job_id = each.partition("|")
            by_queue.setdefault(queue, []).append(job_id)
        if not by_queue:
            raise UsageError("no job is selected: tick some first")
        answers: Counter[str] = Counter()
        for queue, job_ids in by_queue.items():
            answers.update(await self._actor.act(visit.who, verb, queue, job_ids))
        removed_itself = verb == "remove" and visit.field("gone") and answers["ok"]
        back = visit.field("gone") if removed_itself else visit.field("next")
        return self._back(back, "/jobs", _told(verb, answers))

    async def bulk(self, visit: Visit) -> str:
        """Begin an action on a whole search."""
        search = parse(visit.field("q"), now_ms=time.time_ns() // 1_000_000)
        bulk = await self._actor.begin(visit.who, _verb(visit.field("verb")), search)
        return f"/bulk/{bulk.id}"

    async def bulk_stop(self, visit: Visit) -> str:
        """Stop one."""
        bulk = await self._actor.stop(visit.who, visit.field("bulk"))
        return f"/bulk/{bulk.id}"

    async def queue(self, visit: Visit) -> str:
        """Pause or resume."""
        verb, name = visit.field("verb"), visit.field("queue")
        if verb not in ("pause", "resume"):
            raise UsageError(f"{verb!r} is nothing to do to a queue; there are pause and resume")
        await self._actor.steer(visit.who, "pause" if verb == "pause" else "resume", name)
        return self._back(visit.field("next"), "/queues", f"{name} is {verb}d.")

    async def redeliver(self, visit: Visit) -> str:
        """Send the events that were ticked again."""
        chosen = visit.fields("job")[:_SELECTED_MAX]
        if not chosen:
            raise UsageError("no event is selected: tick some first")
        answers = await self._actor.redeliver(visit.who, visit.field("queue"), chosen)
        return self._back(visit.field("next"), "/outbox", _told("redeliver", Counter(answers)))

    async def submit(self, visit: Visit) -> str:
        """A new job from the page."""
        queue, text = visit.field("queue"), visit.field("payload")
        job = NewJob(
            task=_task(visit),
            payload=await self._redaction.apart(len(text), lambda: _json_of(text)),
            requester=visit.caller.requester,
        )
        made = await self._actor.submit(visit.who, queue, job)
        return f"{job_path(queue, made.job_id)}?n={self._notices.leave('Submitted.')}"

    async def replay(self, visit: Visit) -> str:
        """The same job again as a new one, with its payload as it was edited."""
        queue, job_id = visit.field("queue"), visit.field("job_id")
        old = await self._street[queue].ledger.get(job_id)
        if old is None:
            raise NotFound("there is no such job (any more)")
        text, before = visit.field("payload"), old.payload

        def restored() -> bytes:
            edited = decoded(_json_of(text))
            if edited == MASK:  # a large payload was masked whole
                return before
            return msgspec.json.encode(self._redaction.restored(edited, decoded(before)))

        payload = await self._redaction.apart(len(text) + len(before), restored)
        job = NewJob(
            task=_task(visit) or old.task,
            payload=payload,
            priority=old.priority,
            max_attempts=old.max_attempts or None,
            gid=old.gid,
            requester=old.requester,
        )
        made = await self._actor.submit(visit.who, queue, job, why=f"replay {job_id}")
        return f"{job_path(queue, made.job_id)}?n={self._notices.leave(f'Replay of {job_id}.')}"

    def _back(self, text: str, default: str, notice: str) -> str:
        path = local_path(text, default)
        return f"{path}{'&' if '?' in path else '?'}n={self._notices.leave(notice)}"


def _verb(text: str) -> Verb:
    for verb in VERBS:
        if verb == text:
            return verb
    raise UsageError(f"{text!r} is no action; there are {', '.join(VERBS)}")


def _task(visit: Visit) -> str:
    task = visit.field("task").strip()
    if not task:
        raise UsageError("a job needs a task")
    return task


def _json_of(text: str) -> bytes:
    """The text as it stands if it is JSON: numbers are not to lose digits on the way."""
    try:
        check_json(text)
    except ValueError as error:
        raise UsageError(f"the payload {error}") from None
    return text.encode()


def _told(verb: str, answers: Counter[str]) -> str:
    done = answers.pop("ok", 0)
    parts = [f"{done} {_DONE[verb]}"] if done else []
    requested = answers.pop("requested", 0)
    if requested:
        parts.append(f"{requested} told to their workers")
    parts += [f"{count} not possible ({why})" for why, count in answers.items()]
    return ", ".join(parts) + "."
