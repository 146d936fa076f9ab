-- Text that several statements share, or that differs between the job tables. `-- name: x [table]` is the
-- variant for one table. A fragment with neither a variant for a table nor a default is empty there.

-- name: now
(extract(epoch FROM clock_timestamp()) * 1000)::bigint

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

-- name: unknown_attempt
-- For a claim, which writes the row first. A row that another program inserted is overwritten by the settle.
WHERE (SELECT known.attempt FROM job_attempts known WHERE known.job_id = taken.job_id
    AND known.claim_version = taken.claim_version AND known.queue = :queue LIMIT 1) IS NULL

-- name: in_turn
true

-- name: in_turn [job_outbox_events]
-- An event waits for the earlier events of its job, even if `ready` is set.
({earlier: gid=j.gid; number=event_number(j.job_id, j.gid)})

-- name: earlier
-- Whether no event of the job `{gid}` before number `{number}` is unfinished. The event right before it is
-- checked first: most jobs have no other. Of the rest, the last thousand are checked. Each of those waited
-- for the ones before it, and a number that another program wrote may be arbitrarily large.
-- Clauses: I-22
({number} < 2 OR (SELECT before.seq FROM job_outbox_events before
    WHERE before.job_id = {gid} || '.' || ({number} - 1)
      AND (before.status NOT IN ('succeeded', 'dead_letter')) IS TRUE LIMIT 1) IS NULL)
  AND ({number} < 3 OR (SELECT earlier.seq
    FROM generate_series(greatest(1, {number} - 1000), {number} - 2) nth, job_outbox_events earlier
    WHERE earlier.job_id = {gid} || '.' || nth
      AND (earlier.status NOT IN ('succeeded', 'dead_letter')) IS TRUE LIMIT 1) IS NULL)

-- name: share
-- A requester runs at most its quota of jobs, and at most its share of one worker's slots.
-- A quota that cannot be read counts as none, as in `gateway.limits.read_quota`. A quota is a flat object of
-- numbers. The pattern cannot fail; a cast to json can, and PostgreSQL 13 has no `IS JSON`.
(j.requester_id = '' OR j.requester_id NOT IN (
    SELECT r.requester_id FROM inbox_jobs r LEFT JOIN api_keys k ON k.key_id = r.requester_id
    WHERE r.queue = :queue AND r.status IN {running} AND r.lease_expires_at > 0
    GROUP BY r.requester_id, k.quota
    HAVING count(*) FILTER (WHERE r.worker_id = :worker_id) >= :share OR count(*) >= coalesce(
      nullif(coalesce(substring(k.quota FROM '^\s*\{\s*(?:"\w+"\s*:\s*[-+.\w]+\s*,\s*)*'
        '"transcodes"\s*:\s*(\d{1,19})\s*(?:,\s*"\w+"\s*:\s*[-+.\w]+\s*)*\}\s*$')::numeric,
        :requester_max), 0), 1e9)))

-- name: inbox_queue
NULL

-- name: inbox_queue [job_outbox_events]
-- The inbox of an outbox: the submits of events are recorded in the steps of its jobs.
left(:queue, -7)

-- name: span
4611686018427387904

-- name: span [job_outbox_events]
-- The history of an outbox is among the steps of its jobs, most of which have no event.
2000

-- name: after_settle [job_outbox_events]
-- The end of an event makes the next event of its job ready in the same step. If the event between them was
-- removed, `unblock` finds the next one.
,
released AS (
  UPDATE job_outbox_events e SET ready = true FROM ended d
  WHERE d.status IN ('succeeded', 'dead_letter') AND event_number(d.job_id, d.gid) > 0
    AND e.job_id = d.gid || '.' || (event_number(d.job_id, d.gid) + 1)
    AND (e.status = 'queued') IS TRUE AND e.due_ms = 0 AND NOT e.ready
    AND ({earlier: gid=d.gid; number=event_number(d.job_id, d.gid)})
  RETURNING e.job_id
)

-- name: write_events
-- Writes the events of the jobs that a statement moved: the rows of `{moved}`. They wait for earlier events.
-- An event that another program wrote already is left. ON CONFLICT would cost another WAL record per event.
-- Clauses: I-36 I-37
,
events AS (
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
    created_ms, updated_ms, status_webhook_url, trace, payload)
  SELECT m.job_id || '.' || m.event_count, :queue || '/outbox', 'webhook', m.job_id, m.requester_id,
    10, ({earlier: gid=m.job_id; number=m.event_count}),
    m.updated_ms, m.updated_ms, m.status_webhook_url, m.trace,
    event_body(m.job_id, m.event_count, m.status, m.was, m.task, m.attempt_count, m.max_attempts,
      m.updated_ms, m.result, m.error, m.progress)
  FROM {moved} m
  WHERE m.status_webhook_url IS NOT NULL AND m.status <> m.was
    AND (SELECT known.seq FROM job_outbox_events known
      WHERE known.job_id = m.job_id || '.' || m.event_count LIMIT 1) IS NULL
)

-- name: events_of_taken [inbox_jobs]
{write_events: moved=taken}

-- name: events_of_ended [inbox_jobs]
{write_events: moved=ended}

-- name: count_event [inbox_jobs]
-- Used only by statements that also write the event.
,
    event_count = j.event_count + (j.status_webhook_url IS NOT NULL)::integer

-- name: event_columns [inbox_jobs]
, j.event_count, j.result, j.error, j.progress

-- name: event_number
0

-- name: event_number [inbox_jobs]
CASE WHEN status_webhook_url IS NULL THEN 0 ELSE event_count END

-- name: has_event [inbox_jobs]
-- Whether an event was written or became ready. The engine then notifies the claimers of the outbox.
, status_webhook_url IS NOT NULL AS has_event

-- name: has_event [job_outbox_events]
, EXISTS (SELECT FROM released) AS has_event

-- name: any_event [inbox_jobs]
, count(status_webhook_url) > 0 AS has_event

-- name: any_event [job_outbox_events]
, EXISTS (SELECT FROM released) AS has_event
