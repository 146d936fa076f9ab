"""In what the statements of one box differ from those of another, on PostgreSQL."""

from __future__ import annotations

from tenure.ledger.engine import INBOX, OUTBOX, RUNNING, part, words_of

NOW = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"

# An event that ended lets the next one of its job into the line in the same step. One that is not
# next by its number, because an event between them was removed, is found by `unblock`.
_RELEASE_NEXT = """,
released AS (
  UPDATE {table} e SET ready = true FROM ended d
  WHERE d.status IN ('succeeded', 'dead_letter') AND event_number(d.job_id, d.gid) > 0
    AND e.job_id = d.gid || '.' || (event_number(d.job_id, d.gid) + 1)
    AND (e.status = 'queued') IS TRUE AND e.due_ms = 0 AND NOT e.ready AND {in_turn}
  RETURNING e.job_id
)"""
_SPAN = 2_000
_SILENT = dict.fromkeys(
    ("count_event", "event_columns", "tell_taken", "tell_ended", "tells", "tells_any"), ""
)


# A requester has no more jobs at once than its quota, nor all the slots of a worker.
_WITHIN_SHARE = f"""(j.requester_id = '' OR j.requester_id NOT IN (
    SELECT r.requester_id FROM {INBOX} r LEFT JOIN api_keys k ON k.key_id = r.requester_id
    WHERE r.queue = :queue AND r.status IN {RUNNING} AND r.lease_expires_at > 0
    GROUP BY r.requester_id, k.quota
    HAVING count(*) FILTER (WHERE r.worker_id = :worker_id) >= :share OR count(*) >= coalesce(
      nullif(coalesce((k.quota::json ->> 'transcodes')::bigint, :requester_max), 0), 1e9)))"""  # nosec B608 # names of ours


def postgres_words(table: str) -> dict[str, str]:
    """The fragments that make the statements of one box."""
    words = words_of(table, NOW) | {"told_by": "NULL", "span": str(2**62)}
    if table == OUTBOX:  # an event waits for the earlier events of its job, whatever its flag says
        release = _RELEASE_NEXT.format(table=table, in_turn=_in_turn("d.gid", "d.job_id"))
        words |= {"in_turn": _in_turn("j.gid", "j.job_id"), "after_settle": release}
        # Its history lies among the steps of its jobs, of which not all told of an event.
        words |= {"told_by": "left(:queue, -7)", "span": str(_SPAN)}
    if table == INBOX:
        return words | _telling() | {"share": _WITHIN_SHARE}
    tells = ", EXISTS (SELECT FROM released) AS told" if table == OUTBOX else ""
    return words | {**_SILENT, "told": "0", "tells": tells, "tells_any": tells}


def _in_turn(gid: str, event_id: str) -> str:
    return _earlier_ended(gid, f"event_number({event_id}, {gid})")


def _earlier_ended(gid: str, number: str) -> str:
    """That all events of a job before this number have ended."""
    text = part("postgres", "earlier").replace("{gid}", gid).replace("{number}", number)
    return f"({text})"


def _telling() -> dict[str, str]:
    """Of the inbox: who counts the event of a step writes it too, in the same statement."""
    first = _earlier_ended("m.job_id", "m.event_count")
    text = part("postgres", "tell").replace("{first_of_job}", first)
    return {
        "count_event": ",\n    event_count = j.event_count"
        " + (j.status_webhook_url IS NOT NULL)::integer",
        "event_columns": ", j.event_count, j.result, j.error, j.progress",
        "told": "CASE WHEN status_webhook_url IS NULL THEN 0 ELSE event_count END",
        "tell_taken": text.replace("{moved}", "taken"),
        "tell_ended": text.replace("{moved}", "ended"),
        "tells": ", status_webhook_url IS NOT NULL AS told",
        "tells_any": ", count(status_webhook_url) > 0 AS told",
    }
