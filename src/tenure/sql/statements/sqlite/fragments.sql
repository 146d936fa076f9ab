-- Text that several statements share, or that differs between the job tables. `-- name: x [table]` is the
-- variant for one table. A fragment with neither a variant for a table nor a default is empty there.

-- name: running
('claimed', 'fetching', 'processing', 'uploading')

-- name: response
''

-- name: response [inbox_jobs]
-- The response that is stored with an idempotency key.
'{"job_id":"' || job_id || '","status":"queued"}'

-- name: held_back
false

-- name: held_back [job_outbox_events]
EXISTS (SELECT 1 FROM job_outbox_events WHERE queue = :queue
 AND status = 'queued' AND NOT ready AND due_ms = 0)

-- name: known_attempt
-- The plane inserts the row of an attempt at its claim. Also, a row that another program inserted must
-- not fail the other jobs of the batch.
WHERE true ON CONFLICT (job_id, claim_version, queue) DO UPDATE SET
    (attempt, worker_id, claimed_ms, ended_ms, verdict, outcome_h, error_code, error, due_ms)
    = (excluded.attempt, excluded.worker_id, excluded.claimed_ms, excluded.ended_ms,
      excluded.verdict, excluded.outcome_h, excluded.error_code, excluded.error, excluded.due_ms)

-- name: fitting
-- The jobs of `weighed` that claims get: of each claim `n` those up to the one with which the payloads reach
-- `bytes` bytes. It stops there, because SQLite reads a payload to learn its length.
WITH RECURSIVE fitting(turn, job_id, n, bytes) AS (
  SELECT 0, '', 0, 0
  UNION ALL
  SELECT w.turn, w.job_id, w.n, CASE w.n WHEN f.n THEN f.bytes ELSE 0 END
    + (SELECT length(CAST(j.payload AS BLOB)) FROM {jobs} j WHERE j.job_id = w.job_id)
  FROM fitting f JOIN temp.weighed w ON w.turn = CASE WHEN f.bytes < :bytes THEN f.turn + 1
    ELSE (SELECT min(later.turn) FROM temp.weighed later WHERE later.turn > f.turn AND later.n > f.n) END
)

-- name: in_turn
true

-- name: in_turn [job_outbox_events]
-- An event waits for the earlier events of its job, even if `ready` is set.
(SELECT earlier.seq FROM job_outbox_events earlier WHERE earlier.gid = j.gid
 AND earlier.seq < j.seq AND earlier.status NOT IN ('succeeded', 'dead_letter')
 LIMIT 1) IS NULL

-- name: share
-- A requester runs at most its quota of jobs, and at most its share of one worker's slots.
-- A quota that cannot be read counts as none, as in `gateway.limits.read_quota`.
(j.requester_id = '' OR j.requester_id NOT IN (
    SELECT r.requester_id FROM inbox_jobs r LEFT JOIN api_keys k ON k.key_id = r.requester_id
    WHERE r.queue = :queue AND r.lease_expires_at > 0 AND r.status IN {running}
    GROUP BY r.requester_id
    HAVING sum(r.worker_id = :worker_id) >= :share OR count(*) >= coalesce(
      nullif(coalesce(CASE WHEN json_valid(k.quota) THEN (SELECT value FROM json_each(k.quota)
        WHERE key = 'transcodes' AND type = 'integer' AND value >= 0) END, :requester_max), 0), 1 << 31)))

-- name: history
job_journal

-- name: history [job_outbox_events]
-- The rows of one event: its own, and that of the step it tells of, which is its submit.
-- `queue || ''` keeps the planner from using an index on the queue: a job has few rows, a queue many.
-- Clauses: I-31
(
  SELECT seq, queue || '' AS queue, job_id, ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code
  FROM job_journal WHERE job_id = :job_id
  UNION ALL
  SELECT seq, queue || '/' || 'outbox', job_id || '.' || event_number, 1, 'submit', ts_ms, 'queued', 0, NULL, NULL,
    NULL, ''
  FROM job_journal
  WHERE job_id = substr(rtrim(:job_id, '0123456789'), 1, length(rtrim(:job_id, '0123456789')) - 1)
    AND event_number > 0
) AS history

-- name: release_next
-- The end of an event makes the next event of its job ready in the same step.
UPDATE job_outbox_events SET ready = 1 WHERE seq IN (
  SELECT min(x.seq) FROM temp.{moved} h
  JOIN job_outbox_events d ON d.{key} = h.{key} AND d.status IN ('succeeded', 'dead_letter')
  JOIN job_outbox_events x ON x.gid = d.gid AND x.status NOT IN ('succeeded', 'dead_letter')
  GROUP BY d.gid
) AND status = 'queued' AND due_ms = 0;

-- name: after_settle [job_outbox_events]
{release_next: moved=ending; key=seq}

-- name: after_decide [job_outbox_events]
{release_next: moved=chosen; key=job_id}

-- name: write_events
-- Writes the events of the jobs that were just moved: the rows of `{moved}`. They wait for earlier events.
-- Clauses: I-36 I-37
INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
  created_ms, updated_ms, status_webhook_url, trace, payload)
SELECT j.job_id || '.' || j.event_count, :queue || '/outbox', 'webhook', j.job_id, j.requester_id, 10,
  j.event_count = 1 OR NOT EXISTS (SELECT 1 FROM job_outbox_events e
    WHERE e.gid = j.job_id AND e.status NOT IN ('succeeded', 'dead_letter')),
  j.updated_ms, j.updated_ms, j.status_webhook_url, j.trace,
  '{"event_id":' || json_quote(j.job_id || '.' || j.event_count) || ',"job_id":'
  || json_quote(j.job_id) || ',"seq":' || j.event_count || ',"status":"' || j.status
  || '","previous_status":"' || h.was || '","task":' || json_quote(j.task)
  || ',"attempt":' || j.attempt_count || ',"max_attempts":' || j.max_attempts
  || ',"occurred_ms":' || j.updated_ms
  || CASE WHEN j.status = 'succeeded'
      THEN ',"outputs":' || coalesce(nullif(j.result, ''), 'null')
    WHEN j.status IN ('failed', 'dead_letter')
      THEN ',"error":' || coalesce(nullif(j.error, ''), 'null')
    WHEN j.progress <> '' THEN ',"progress":' || j.progress ELSE '' END || '}'
FROM {moved} h JOIN inbox_jobs j ON j.{key} = h.{key}
WHERE j.status_webhook_url IS NOT NULL ORDER BY h.{order}
ON CONFLICT (job_id) DO NOTHING;

-- name: events_of_taken [inbox_jobs]
{write_events: moved=temp.taking; key=seq; order=turn}

-- name: events_of_ended [inbox_jobs]
{write_events: moved=temp.ending; key=seq; order=n}

-- name: events_of_decided [inbox_jobs]
{write_events: moved=temp.chosen; key=job_id; order=n}

-- name: count_event [inbox_jobs]
-- Used only by statements that also write the event.
, event_count = j.event_count + (j.status_webhook_url IS NOT NULL)

-- name: event_number
0

-- name: event_number [inbox_jobs]
CASE WHEN j.status_webhook_url IS NULL THEN 0 ELSE j.event_count END
