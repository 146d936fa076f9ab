"""The proof of the audit in DuckDB: `python audit.py EVENTS STEPS`; answers one line of JSON.

The aggregates of tenure.pipeline.audit.proof over the same files, in a wider row, and no
carried rows, no places in line, no evidence.
"""

from __future__ import annotations

import json
import sys
import time

import duckdb

PROOF = """
WITH known AS (
  SELECT e.*, s.bits, s.kind, s.was, s.becomes, hash(e.worker_id, e.token_h) AS who
  FROM read_parquet(?) e
  LEFT JOIN read_parquet(?) s USING (contract, type, from_state, to_state)
), marked AS (
  SELECT hash(journal, contract, queue) AS line_h, hash(job_id) AS job_h, hash(1, job_id) AS job_h2,
    ver, pos, coalesce(kind, 0) AS kind,
    hash(ver, becomes, fence, lease_until_ms, if(bits & 8 <> 0, -1, attempt),
      if(bits & 2 <> 0, who, 0)) AS "left",
    if(ver = 1 AND type = 'submit', 0, hash(ver - 1, was, prev_fence, prev_lease_until_ms,
      if(bits & 4 <> 0, -1, attempt - (type = 'claim')::int + (type IN ('release', 'snooze'))::int),
      if(bits & 1 <> 0, who, 0))) AS saw,
    bits IS NULL
      OR ((lease_until_ms > 0) <> (bits & 2 <> 0) AND type <> 'remove')
      OR fence <> prev_fence + (type = 'claim')::int
      OR (type = 'reap' AND ts_ms < prev_lease_until_ms)
      OR (type = 'extend' AND lease_until_ms < prev_lease_until_ms)
      OR (max_attempts > 0 AND attempt > max_attempts) AS bad,
    contract IN ('streams', 'bullmq', 'omniq') AND type <> 'submit'
      AND (pos >> 22) - ts_ms > 1000 AS late,
    if(type = 'submit' AND due_ms = 0, pos, NULL) AS submit_at,
    if(type = 'claim', pos, NULL) AS claim_at, type = 'expire' AS expires, priority
  FROM known
), jobs AS (
  SELECT count(*) AS n, min(ver) AS min_ver, max(ver) AS max_ver, bit_xor(xor("left", saw)) AS x,
    arg_max("left", ver) AS last, arg_min(saw, ver) AS first, bool_or(bad) AS bad,
    bool_or(late) AS late, arg_max(kind, ver) AS kind, bool_or(expires) AS expired,
    arg_max(pos, ver) AS last_pos, max(pos) AS max_pos, min(submit_at) AS submit_pos,
    min(claim_at) AS claim_pos, max(priority) AS priority
  FROM marked GROUP BY line_h, job_h, job_h2
)
SELECT count(*), sum(n), count(*) FILTER (
  bad OR late OR n <> max_ver - min_ver + 1 OR x <> xor(last, first) OR last_pos <> max_pos
  OR min_ver > 1), max(submit_pos), max(claim_pos), max(priority), max(kind), bool_or(expired)
FROM jobs
"""


def main(events: str, steps: str) -> None:
    """Prove once and say how long it took."""
    base = duckdb.connect()
    began = time.perf_counter()
    jobs, total, unproven, *_ = base.execute(PROOF, [events, steps]).fetchall()[0]
    took_s = time.perf_counter() - began
    print(json.dumps({"took_s": took_s, "jobs": jobs, "events": int(total), "unproven": unproven}))


if __name__ == "__main__":
    main(*sys.argv[1:])
