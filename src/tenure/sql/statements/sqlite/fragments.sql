-- Text that several statements share, or that differs between the job tables: `-- name: x [table]` is the
-- variant of one table. A fragment without a variant for a table and without a default is empty there.

-- name: running
('claimed', 'fetching', 'processing', 'uploading')

-- name: response
''

-- name: response [inbox_jobs]
-- The answer that is kept with an idempotency key.
'{"job_id":"' || job_id || '","status":"queued"}'

-- name: held_back
false

-- name: held_back [job_outbox_events]
EXISTS (SELECT 1 FROM job_outbox_events WHERE queue = :queue
 AND status = 'queued' AND NOT ready AND due_ms = 0)

-- name: known_attempt
-- Some contracts write the row of an attempt with its claim; and a row that another program put there must
-- not stop the other jobs of the batch.
WHERE true ON CONFLICT (job_id, claim_version, queue) DO UPDATE SET
    (attempt, worker_id, claimed_ms, ended_ms, verdict, outcome_h, error_code, error, due_ms)
    = (excluded.attempt, excluded.worker_id, excluded.claimed_ms, excluded.ended_ms,
      excluded.verdict, excluded.outcome_h, excluded.error_code, excluded.error, excluded.due_ms)

-- name: in_turn
true

-- name: in_turn [job_outbox_events]
-- An event waits for the earlier events of its job, whatever its flag says.
(SELECT earlier.seq FROM job_outbox_events earlier WHERE earlier.gid = j.gid
 AND earlier.seq < j.seq AND earlier.status NOT IN ('succeeded', 'dead_letter')
 LIMIT 1) IS NULL

-- name: share
-- A requester has no more jobs at once than its quota, nor all the slots of a worker.
(j.requester_id = '' OR j.requester_id NOT IN (
    SELECT r.requester_id FROM inbox_jobs r LEFT JOIN api_keys k ON k.key_id = r.requester_id
    WHERE r.queue = :queue AND r.lease_expires_at > 0 AND r.status IN {running}
    GROUP BY r.requester_id
    HAVING sum(r.worker_id = :worker_id) >= :share OR count(*) >= coalesce(
      nullif(coalesce(json_extract(k.quota, '$.transcodes'), :requester_max), 0), 1 << 31)))

-- name: history
job_journal

-- name: history [job_outbox_events]
-- The rows of one event: its own, and that of the step it tells of, which is its submit.
-- The queue is compared as a text that no index has: the rows of a job are few, those of a queue many.
-- Clauses: I-31
(
  SELECT seq, queue || '' AS queue, job_id, ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code
  FROM job_journal WHERE job_id = :job_id
  UNION ALL
  SELECT seq, queue || '/' || 'outbox', job_id || '.' || told, 1, 'submit', ts_ms, 'queued', 0, NULL, NULL,
    NULL, ''
  FROM job_journal
  WHERE job_id = substr(rtrim(:job_id, '0123456789'), 1, length(rtrim(:job_id, '0123456789')) - 1)
    AND told > 0
) AS history

-- name: release_next
-- The end of an event makes the next event of its job ready, in the same step.
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

-- name: tell
-- The events of the jobs that were just moved: rows of `{moved}`. They wait behind earlier ones.
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

-- name: tell_taken [inbox_jobs]
{tell: moved=temp.taking; key=seq; order=turn}

-- name: tell_ended [inbox_jobs]
{tell: moved=temp.ending; key=seq; order=n}

-- name: tell_decided [inbox_jobs]
{tell: moved=temp.chosen; key=job_id; order=n}

-- name: count_event [inbox_jobs]
-- A statement that counts the event of a step writes the event too.
, event_count = j.event_count + (j.status_webhook_url IS NOT NULL)

-- name: told
0

-- name: told [inbox_jobs]
CASE WHEN j.status_webhook_url IS NULL THEN 0 ELSE j.event_count END
