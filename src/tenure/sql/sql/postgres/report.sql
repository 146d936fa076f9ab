-- Publishes news of running attempts; a report that names a stage moves the job there.
-- Batch: job_id text, fence bigint, token_h text, type text, step text, data text, progress text
-- Batch: stage text
-- Takes: queue text
-- Returns: for each report whose lease is held its number, the state it found and the state it left
-- Clauses: I-5 I-11 I-15
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
asked AS MATERIALIZED (SELECT * FROM {batch}),
held AS MATERIALIZED (
  SELECT a.*, j.status AS was, j.ver AS ver_was
  FROM asked a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND (j.status IN {running}) IS TRUE
  ORDER BY j.job_id
  FOR UPDATE OF j
),
moves AS MATERIALIZED (
  SELECT h.*, row_number() OVER (PARTITION BY h.job_id ORDER BY h.n) AS nth,
    CASE WHEN h.stage = '' OR h.stage = h.was THEN h.was
      WHEN h.was || '>' || h.stage IN ('claimed>fetching', 'claimed>processing',
        'claimed>uploading', 'fetching>processing', 'fetching>uploading', 'processing>uploading')
      THEN h.stage END AS becomes
  FROM held h
),
sums AS MATERIALIZED (
  SELECT job_id, max(ver_was) AS ver_was, max(nth) AS steps, max(becomes) AS becomes, max(was) AS was,
    (array_agg(progress ORDER BY n DESC) FILTER (WHERE progress <> ''))[1] AS progress,
    array_agg(type ORDER BY n) AS types, array_agg(step ORDER BY n) AS step_names,
    array_agg(data ORDER BY n) AS data
  FROM moves GROUP BY job_id HAVING bool_and(becomes IS NOT NULL)
),
moved AS (
  UPDATE {jobs} j
  SET status = s.becomes, ver = j.ver + s.steps, progress = coalesce(s.progress, j.progress),
    updated_ms = c.now_ms,
    passed = CASE WHEN s.was || '>' || s.becomes = 'claimed>processing' THEN 'fetching>'
      WHEN s.was || '>' || s.becomes = 'claimed>uploading' THEN 'fetching>processing>'
      WHEN s.was || '>' || s.becomes = 'fetching>uploading' THEN 'processing>' ELSE '' END
  FROM sums s, clock c
  WHERE j.job_id = s.job_id
  RETURNING j.job_id, j.task, j.attempt_count, j.max_attempts, j.claim_version, j.lease_token_h,
    j.worker_id, j.gid, j.priority, j.lease_expires_at, j.updated_ms, s.ver_was, s.was, s.becomes,
    s.types, s.step_names, s.data
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority,
    max_attempts, data, news_type, news_step, news)
  SELECT :queue, d.job_id, d.ver_was + m.nth, 'report', d.updated_ms, d.task, d.was, d.becomes,
    d.attempt_count, d.claim_version, d.claim_version, d.lease_token_h, d.worker_id,
    d.lease_expires_at, d.lease_expires_at, d.gid, d.priority, d.max_attempts, m.type,
    m.type, m.step, m.data
  FROM moved d, unnest(d.types, d.step_names, d.data) WITH ORDINALITY AS m(type, step, data, nth)
)
SELECT m.n, m.was, coalesce(m.becomes, '') AS becomes FROM moves m
