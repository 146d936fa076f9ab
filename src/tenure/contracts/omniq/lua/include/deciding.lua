-- What each outcome makes of a job whose lease is the caller's to end. CHANCE is for jitter.
local CANCELLED = { error = 'cancelled', error_json = '{"code":"cancelled","message":"cancelled"}',
  error_code = 'cancelled' }

local function again(job, o, kind, attempt, due, in_front)
  if job.cancel then -- it would only start again to be stopped
    fail(job, CANCELLED, 'cancel')
    return { 'cancel', 0 }
  end
  back(job, o, kind, attempt, due, in_front)
  return { kind == 'snooze' and 'retry' or kind, due }
end


function decide.complete(job, o)
  complete(job, o)
  return 1
end

function decide.bury(job, o)
  fail(job, o, 'bury')
  return { 'bury', 0 }
end

function decide.cancel(job, o)
  fail(job, o.error ~= '' and o or CANCELLED, 'cancel')
  return { 'cancel', 0 }
end

function decide.fail(job, o)
  if job.attempt >= job.max_attempts then
    return decide.bury(job, o)
  end
  return again(job, o, 'retry', job.attempt, backoff_due(job, CHANCE), false)
end

function decide.retry(job, o)
  if job.attempt >= job.max_attempts then
    return decide.bury(job, o)
  end
  return again(job, o, 'retry', job.attempt, o.delay_ms > 0 and NOW + o.delay_ms or 0, false)
end

function decide.snooze(job, o)
  return again(job, o, 'snooze', job.attempt - 1, o.delay_ms > 0 and NOW + o.delay_ms or 0, true)
end

function decide.release(job, o)
  return again(job, o, 'release', job.attempt - 1, 0, true)
end
