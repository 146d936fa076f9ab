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
