-- Puts right what clients without counters (OmniQ 1.x) or a deleted job have left wrong in the tables that
-- monitors read and in the counts of groups; a bounded piece at a time.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] idx | lane | groups  ARGV[3] the state, for idx and lane
-- ARGV[4..] idx: ids that the mirror table of the state has; lane: ids that stand in its lane; groups: all gids
-- Returns how many entries were wrong
-- Clauses O-34 O-38 O-51
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include groups
local STATE = ARGV[3]
local wrong = 0

local mend = {}

-- A job that says it is elsewhere has left; one that is gone, too.
function mend.idx()
  for at = 4, #ARGV do
    if call('HGET', JOB .. ARGV[at], 'state') ~= STATE then
      wrong = wrong + call('ZREM', IDX .. STATE, ARGV[at])
    end
  end
end

-- When the job entered the state, as far as its hash tells.
local ENTERED = { wait = 'queued_ms', active = 'last_started_ms', delayed = 'updated_ms', failed = 'failed_ms',
  completed = 'completed_ms' }

function mend.lane()
  for at = 4, #ARGV do
    local id = ARGV[at]
    if not call('ZSCORE', IDX .. STATE, id) then
      local v = call('HMGET', JOB .. id, 'state', ENTERED[STATE], 'updated_ms')
      if v[1] == STATE then
        local at_ms = tonumber(v[2]) or tonumber(v[3]) or NOW
        call('ZADD', IDX .. STATE, text[at_ms], id)
        wrong = wrong + 1
      end
    end
  end
end

-- How many jobs of each group are leased, and how many wait in all.
function mend.groups()
  local running, waiting, seen = {}, 0, {}
  for _, id in ipairs(call('ZRANGE', ACTIVE, '0', '-1')) do
    local gid = call('HGET', JOB .. id, 'gid')
    if gid and gid ~= '' then
      running[gid] = (running[gid] or 0) + 1
    end
  end
  local function look(gid)
    if seen[gid] then
      return
    end
    seen[gid] = true
    local key, n = GROUP .. gid .. ':inflight', running[gid] or 0
    if (tonumber(call('GET', key)) or 0) ~= n then
      wrong = wrong + 1
      if n > 0 then
        call('SET', key, text[n])
      else
        call('DEL', key)
      end
    end
    waiting = waiting + call('LLEN', lane_of(gid))
    looked_at[gid] = true
  end
  for at = 4, #ARGV do
    look(ARGV[at])
  end
  for gid in pairs(running) do
    look(gid)
  end
  for _, gid in ipairs(call('ZRANGE', READY, '0', '-1')) do -- made since the gids were collected
    look(gid)
  end
  call('HSET', STATS, 'group_waiting', text[waiting])
  flush_groups()
end

mend[ARGV[2]]()
for _, name in ipairs({ 'wait', 'active', 'delayed', 'failed', 'completed', 'groups' }) do
  dirty[name] = true
end
flush()
return wrong
