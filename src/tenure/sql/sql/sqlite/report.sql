-- Publishes news of running attempts; a report that names a stage moves the job there.
-- Batch: job_id text, fence bigint, token_h text, type text, step text, data text, progress text
-- Batch: stage text
-- Takes: queue text
-- Returns: for each report whose lease is held its number, the state it found and the state it left
-- Clauses: I-5 I-11 I-15
DELETE FROM temp.news;
INSERT INTO temp.news
SELECT a.n, a.job_id, a.type, a.step, a.data, a.progress, j.status, j.ver,
  CASE WHEN a.stage = '' OR a.stage = j.status THEN j.status
    WHEN j.status || '>' || a.stage IN ('claimed>fetching', 'claimed>processing',
      'claimed>uploading', 'fetching>processing', 'fetching>uploading', 'processing>uploading')
    THEN a.stage END,
  row_number() OVER (PARTITION BY a.job_id ORDER BY a.n)
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0;
UPDATE {jobs} AS j
SET status = s.becomes, ver = j.ver + s.steps, updated_ms = :now_ms,
  progress = coalesce((SELECT m.progress FROM temp.news m WHERE m.job_id = s.job_id
    AND m.progress <> '' ORDER BY m.n DESC LIMIT 1), j.progress),
  passed = CASE WHEN s.was || '>' || s.becomes = 'claimed>processing' THEN 'fetching>'
    WHEN s.was || '>' || s.becomes = 'claimed>uploading' THEN 'fetching>processing>'
    WHEN s.was || '>' || s.becomes = 'fetching>uploading' THEN 'processing>' ELSE '' END
FROM (SELECT job_id, max(nth) AS steps, max(becomes) AS becomes, max(was) AS was FROM temp.news
  GROUP BY job_id HAVING count(becomes) = count(*)) s
WHERE j.job_id = s.job_id;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority, max_attempts,
  data, news_type, news_step, news)
SELECT :queue, m.job_id, m.ver_was + m.nth, 'report', :now_ms, j.task, m.was, m.becomes,
  j.attempt_count, j.claim_version, j.claim_version, j.lease_token_h, j.worker_id,
  j.lease_expires_at, j.lease_expires_at, j.gid, j.priority, j.max_attempts, m.type, m.type, m.step,
  m.data
FROM temp.news m JOIN {jobs} j ON j.job_id = m.job_id
WHERE m.becomes IS NOT NULL ORDER BY m.n;
SELECT n, was, coalesce(becomes, '') AS becomes FROM temp.news;
