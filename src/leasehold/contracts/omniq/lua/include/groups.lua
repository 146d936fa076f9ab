-- Lanes. An ungrouped job waits in one list; a group has a list, a count of leased jobs and a limit of
-- its own, and stands in the zset of ready groups while it has work and a free slot.
local freed, looked_at = {}, {}
local GROUP_IDLE_MS = '604800000' -- how long an idle group's limit is remembered

local function lane_of(gid)
  return gid and gid ~= '' and GROUP .. gid .. ':wait' or WAIT
end

local function slots_of(gid)
  local v = call('MGET', GROUP .. gid .. ':limit', GROUP .. gid .. ':inflight')
  local limit = tonumber(v[1]) or 1
  return limit > 0 and limit or 1, math.max(0, tonumber(v[2]) or 0)
end

-- A job joins its lane: at the end, or in front when it comes back through no fault of its own.
local function join_lane(id, gid, in_front)
  call(in_front and 'LPUSH' or 'RPUSH', lane_of(gid), id)
  if gid and gid ~= '' then
    group_waiting = group_waiting + 1
    looked_at[gid] = true
  end
  wake_wanted = true
end

local function free_slot(gid)
  if gid and gid ~= '' then
    freed[gid] = (freed[gid] or 0) + 1
  end
end

-- A group that nobody waits for and nobody runs leaves nothing behind but its limit, and that not for ever.
local function give_slots(gid, n)
  local key = GROUP .. gid .. ':inflight'
  local left = call('DECRBY', key, text[n])
  looked_at[gid] = true
  if left > 0 then
    return
  end
  if call('EXISTS', lane_of(gid)) == 1 then
    call('SET', key, '0')
  else
    call('DEL', key)
    call('PEXPIRE', GROUP .. gid .. ':limit', GROUP_IDLE_MS)
    looked_at[gid] = nil
  end
end

-- Groups that got work or a slot become ready, unless they are.
local function flush_groups()
  for gid, n in pairs(freed) do
    give_slots(gid, n)
  end
  freed = {}
  local ready, n = {}, 0
  for gid in pairs(looked_at) do
    local limit, inflight = slots_of(gid)
    if inflight < limit and call('EXISTS', lane_of(gid)) == 1 then
      ready[n + 1], ready[n + 2] = NOW_S, gid
      n = n + 2
    end
  end
  looked_at = {}
  if n > 0 then
    dirty.groups = true
    wake_wanted = true
    for from = 1, n, MANY do
      call('ZADD', READY, 'NX', unpack(ready, from, math.min(from + MANY - 1, n)))
    end
  end
end
