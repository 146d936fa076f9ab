-- Room in the keys. A step writes its row anew, and with it an entry of the key beside the one before:
-- a full page would be searched for entries that nobody needs any more, and then split, at every step.
-- What is stored from now on leaves room for them; older pages are as they were.

-- @for box in inbox_jobs job_outbox_events plane_jobs
ALTER INDEX {box}_pkey SET (fillfactor = 50);
-- @end
