-- Ends one lease for an SDK's script. Returns the verdict, and nil; or nil and why not.
local decide = {}
local REPEATED = { complete = { complete = true }, fail = { retry = true, bury = true, cancel = true } }

local function ack(id, token, kind, said)
  local job = read_job(id)
  local why = refusal(job, token, '', call('ZSCORE', ACTIVE, id))
  if why then
    if job and token ~= '' and job.settled_token == token and REPEATED[kind][job.settled_kind] then
      return { job.settled_kind, tonumber(job.settled_due) }
    end
    reject(id, job, '', 'sdk', 'settle')
    flush()
    return nil, why
  end
  first_sight(job)
  local verdict = decide[kind](job, { delay_ms = 0, result = '', result_h = '', error = said, error_json = '',
    error_code = said ~= '' and 'error' or '' })
  flush_groups()
  flush_finished()
  flush()
  return verdict
end
