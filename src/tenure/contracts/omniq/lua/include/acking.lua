-- Ends one lease for an SDK's script. Returns the verdict, and nil; or nil and why not.
local decide = {}

local function ack(id, token, kind, said)
  local job = read_job(id)
  local why = refusal(job, token, '', call('ZSCORE', ACTIVE, id))
  if why then
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
