"""In what the statements of one box differ from those of another, on PostgreSQL."""

from __future__ import annotations

from leasehold.ledger.engine import INBOX, OUTBOX, part, words_of

NOW = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"

# An event that ended lets the next one of its job into the line in the same step. That one is found
# by its job and not among all that wait: IS TRUE keeps the planner from the index of those.
_RELEASE_NEXT = """,
released AS (
  UPDATE {table} e SET ready = true
  FROM (
    SELECT (SELECT x.job_id FROM {table} x WHERE x.gid = d.gid AND x.job_id <> d.job_id
      AND x.status NOT IN ('succeeded', 'dead_letter') ORDER BY x.seq LIMIT 1) AS job_id
    FROM ended d WHERE d.status IN ('succeeded', 'dead_letter')
  ) n
  WHERE e.job_id = n.job_id AND (e.status = 'queued') IS TRUE AND e.due_ms = 0 AND NOT e.ready
  RETURNING e.job_id
)"""
_SILENT = dict.fromkeys(("count_event", "event_columns", "tell_taken", "tell_ended", "tells"), "")


def postgres_words(table: str) -> dict[str, str]:
    """The fragments that make the statements of one box."""
    after_settle = _RELEASE_NEXT.format(table=table) if table == OUTBOX else ""
    words = words_of(table, "postgres", NOW, after_settle)
    if table == INBOX:
        return words | _telling()
    tells = ", EXISTS (SELECT FROM released) AS told" if table == OUTBOX else ""
    return words | {**_SILENT, "told": "0", "tells": tells}


def _telling() -> dict[str, str]:
    """Of the inbox: who counts the event of a step writes it too, in the same statement."""
    text = part("postgres", "tell")
    return {
        "count_event": ",\n    event_count = j.event_count"
        " + (j.status_webhook_url IS NOT NULL)::integer",
        "event_columns": ", j.event_count, j.result, j.error, j.progress",
        "told": "CASE WHEN status_webhook_url IS NULL THEN 0 ELSE event_count END",
        "tell_taken": text.replace("{moved}", "taken"),
        "tell_ended": text.replace("{moved}", "ended"),
        "tells": ", status_webhook_url IS NOT NULL AS told",
    }
