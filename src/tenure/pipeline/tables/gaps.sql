-- gaps: what was missing in a journal when it was read, and how much.
-- update: view of events
--
-- `lost` is -1 if the number is not known, and the most there can be if it is not exact.
select told.*, ts_ms as found_ms
from (
  select ts_ms, from_json(data, 'journal string, url string, reason string, after string,
    until string, lost bigint, is_exact boolean') as told
  from tenure.events where journal = 'gaps'
)
