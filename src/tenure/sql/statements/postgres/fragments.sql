-- Text that several statements share, or that differs between the job tables: `-- name: x [table]` is the
-- variant of one table. A fragment without a variant for a table and without a default is empty there.

-- name: now
(extract(epoch FROM clock_timestamp()) * 1000)::bigint

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
({earlier: gid=j.gid; number=event_number(j.job_id, j.gid)})

-- name: earlier
-- Whether no event of the job `{gid}` before number `{number}` is unfinished. The one right before it is
-- asked first, and is the only one there is of most. Of the others the last thousand are asked: each of
-- those waited for the ones before it, and a number that another program wrote may be any.
-- Clauses: I-22
({number} < 2 OR (SELECT before.seq FROM job_outbox_events before
    WHERE before.job_id = {gid} || '.' || ({number} - 1)
      AND (before.status NOT IN ('succeeded', 'dead_letter')) IS TRUE LIMIT 1) IS NULL)
  AND ({number} < 3 OR (SELECT earlier.seq
    FROM generate_series(greatest(1, {number} - 1000), {number} - 2) nth, job_outbox_events earlier
    WHERE earlier.job_id = {gid} || '.' || nth
      AND (earlier.status NOT IN ('succeeded', 'dead_letter')) IS TRUE LIMIT 1) IS NULL)

-- name: share
-- A requester has no more jobs at once than its quota, nor all the slots of a worker.
(j.requester_id = '' OR j.requester_id NOT IN (
    SELECT r.requester_id FROM inbox_jobs r LEFT JOIN api_keys k ON k.key_id = r.requester_id
    WHERE r.queue = :queue AND r.status IN {running} AND r.lease_expires_at > 0
    GROUP BY r.requester_id, k.quota
    HAVING count(*) FILTER (WHERE r.worker_id = :worker_id) >= :share OR count(*) >= coalesce(
      nullif(coalesce((k.quota::json ->> 'transcodes')::bigint, :requester_max), 0), 1e9)))

-- name: told_by
NULL

-- name: told_by [job_outbox_events]
-- The queue whose steps are the submits of these events.
left(:queue, -7)

-- name: span
4611686018427387904

-- name: span [job_outbox_events]
-- The history of an outbox is between the steps of its jobs, most of which have no event.
2000

-- name: after_settle [job_outbox_events]
-- The end of an event makes the next event of its job ready, in the same step. One whose number does not
-- follow, because an event between them was removed, is found by `unblock`.
,
released AS (
  UPDATE job_outbox_events e SET ready = true FROM ended d
  WHERE d.status IN ('succeeded', 'dead_letter') AND event_number(d.job_id, d.gid) > 0
    AND e.job_id = d.gid || '.' || (event_number(d.job_id, d.gid) + 1)
    AND (e.status = 'queued') IS TRUE AND e.due_ms = 0 AND NOT e.ready
    AND ({earlier: gid=d.gid; number=event_number(d.job_id, d.gid)})
  RETURNING e.job_id
)

-- name: tell
-- The events of the jobs that a statement moved: rows of `{moved}`. They wait behind earlier ones.
-- Clauses: I-36 I-37
,
told AS (
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
    created_ms, updated_ms, status_webhook_url, trace, payload)
  SELECT m.job_id || '.' || m.event_count, :queue || '/outbox', 'webhook', m.job_id, m.requester_id,
    10, ({earlier: gid=m.job_id; number=m.event_count}),
    m.updated_ms, m.updated_ms, m.status_webhook_url, m.trace,
    event_body(m.job_id, m.event_count, m.status, m.was, m.task, m.attempt_count, m.max_attempts,
      m.updated_ms, m.result, m.error, m.progress)
  FROM {moved} m
  WHERE m.status_webhook_url IS NOT NULL AND m.status <> m.was
  ON CONFLICT (job_id) DO NOTHING
)

-- name: tell_taken [inbox_jobs]
{tell: moved=taken}

-- name: tell_ended [inbox_jobs]
{tell: moved=ended}

-- name: count_event [inbox_jobs]
-- A statement that counts the event of a step writes the event too.
,
    event_count = j.event_count + (j.status_webhook_url IS NOT NULL)::integer

-- name: event_columns [inbox_jobs]
, j.event_count, j.result, j.error, j.progress

-- name: told
0

-- name: told [inbox_jobs]
CASE WHEN status_webhook_url IS NULL THEN 0 ELSE event_count END

-- name: tells [inbox_jobs]
-- Whether an event was written or became ready: then the engine notifies those who wait for it.
, status_webhook_url IS NOT NULL AS told

-- name: tells [job_outbox_events]
, EXISTS (SELECT FROM released) AS told
