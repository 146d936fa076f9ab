"""In what the statements of one box differ from those of another, on SQLite."""

from __future__ import annotations

from tenure.ledger.engine import INBOX, OUTBOX, RUNNING, part, words_of

# An event that ended lets the next one of its job into the line in the same step.
_RELEASE_NEXT = """
UPDATE {table} SET ready = 1 WHERE seq IN (
  SELECT min(x.seq) FROM temp.{moved} h
  JOIN {table} d ON d.{key} = h.{key} AND d.status IN ('succeeded', 'dead_letter')
  JOIN {table} x ON x.gid = d.gid AND x.status NOT IN ('succeeded', 'dead_letter')
  GROUP BY d.gid
) AND status = 'queued' AND due_ms = 0;"""
# An event waits for the earlier events of its job, whatever its flag says.
_IN_TURN = (
    f"(SELECT earlier.seq FROM {OUTBOX} earlier WHERE earlier.gid = j.gid"  # nosec B608 # a constant
    " AND earlier.seq < j.seq AND earlier.status NOT IN ('succeeded', 'dead_letter')"
    " LIMIT 1) IS NULL"
)
_SILENT = dict.fromkeys(
    ("count_event", "tell_taken", "tell_ended", "tell_decided", "tell_succeeded"), ""
)


# A requester has no more jobs at once than its quota, nor all the slots of a worker.
_WITHIN_SHARE = f"""(j.requester_id = '' OR j.requester_id NOT IN (
    SELECT r.requester_id FROM {INBOX} r LEFT JOIN api_keys k ON k.key_id = r.requester_id
    WHERE r.queue = :queue AND r.lease_expires_at > 0 AND r.status IN {RUNNING}
    GROUP BY r.requester_id
    HAVING sum(r.worker_id = :worker_id) >= :share OR count(*) >= coalesce(
      nullif(coalesce(json_extract(k.quota, '$.transcodes'), :requester_max), 0), 1 << 31)))"""  # nosec B608 # names of ours


def sqlite_words(table: str) -> dict[str, str]:
    """The fragments that make the statements of one box."""
    words = words_of(table, ":now_ms") | {
        **dict.fromkeys(("after_complete", "after_decide"), ""),
        "history": "job_journal",
    }
    if table == OUTBOX:
        words |= {"in_turn": _IN_TURN, "history": part("sqlite", "event_history")}
        words["after_settle"] = _RELEASE_NEXT.format(table=table, moved="ending", key="job_id")
        words["after_complete"] = _RELEASE_NEXT.format(table=table, moved="succeeding", key="seq")
        words["after_decide"] = _RELEASE_NEXT.format(table=table, moved="chosen", key="job_id")
    if table == INBOX:
        return words | _telling() | {"share": _WITHIN_SHARE}
    return words | {**_SILENT, "told": "0"}


def _telling() -> dict[str, str]:
    """Of the inbox: who counts the event of a step writes it too, in the same transaction."""
    return {
        "count_event": ", event_count = j.event_count + (j.status_webhook_url IS NOT NULL)",
        "told": "CASE WHEN j.status_webhook_url IS NULL THEN 0 ELSE j.event_count END",
        "tell_taken": _tell("taking", "seq", "turn"),
        "tell_ended": _tell("ending", "job_id", "n"),
        "tell_decided": _tell("chosen", "job_id", "n"),
        "tell_succeeded": _tell("succeeding", "seq", "n"),
    }


def _tell(moved: str, key: str, order: str) -> str:
    text = part("sqlite", "tell").replace("{moved}", f"temp.{moved}")
    return text.replace("{key}", key).replace("{order}", order)
