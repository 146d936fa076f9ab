-- A row trigger before an insert makes COPY put its rows in one by one. After it, the rule is the
-- same: what it refuses is undone with the statement.

-- @for box in inbox_jobs job_outbox_events plane_jobs
DROP TRIGGER {box}_begin ON {box};
CREATE TRIGGER {box}_begin AFTER INSERT ON {box} FOR EACH ROW
  WHEN (NEW.status <> 'queued') EXECUTE FUNCTION {box}_refuse();
-- @end
