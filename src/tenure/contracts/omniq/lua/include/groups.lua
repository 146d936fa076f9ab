-- Lanes. An ungrouped job waits in one list; a group has a list, a count of leased jobs and a limit of
-- its own, and stands in the zset of ready groups while it has work and a free slot.
local freed, looked_at = {}, {}
local GROUP_IDLE_MS = '604800000' -- how long an idle group's limit is remembered

local function lane_of(gid)
  return gid and gid ~= '' and GROUP .. gid .. ':wait' or WAIT
end

local function slots_of(gid)
  local v = call('MGET', GROUP .. gid .. ':limit', GROUP .. gid .. ':inflight')
  local limit = figure(v[1], 1) or 1
  return limit > 0 and limit or 1, math.max(0, figure(v[2], 0) or 0)
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

local ready, ready_n = {}, 0

local function make_ready(gid)
  ready[ready_n + 1], ready[ready_n + 2] = NOW_S, gid
  ready_n = ready_n + 2
end

-- A group that nobody waits for and nobody runs leaves nothing behind but its limit, and that not for ever.
local function forget_group(gid)
  call('DEL', GROUP .. gid .. ':inflight')
  call('PEXPIRE', GROUP .. gid .. ':limit', GROUP_IDLE_MS)
end

-- Slots that leases gave back: all counts are read at once and written at once.
local function flush_freed()
  local gids, keys = {}, {}
  for gid in pairs(freed) do
    gids[#gids + 1] = gid
    keys[#keys + 1] = GROUP .. gid .. ':inflight'
  end
  if #gids == 0 then
    return
  end
  local counts, set, n = call('MGET', unpack(keys)), {}, 0
  for i, gid in ipairs(gids) do
    local left = (figure(counts[i], 0) or 0) - freed[gid]
    if left > 0 then
      set[n + 1], set[n + 2], n = keys[i], text[left], n + 2
      looked_at[gid] = true
    elseif call('EXISTS', lane_of(gid)) == 0 then
      forget_group(gid)
      looked_at[gid] = nil
    else
      set[n + 1], set[n + 2], n = keys[i], '0', n + 2
      make_ready(gid) -- nobody runs it, and no limit is below one
      looked_at[gid] = nil
    end
  end
  if n > 0 then
    call('MSET', unpack(set))
  end
  freed = {}
end

-- Groups that got work or a slot become ready, unless they are.
local function flush_groups()
  flush_freed()
  for gid in pairs(looked_at) do
    local limit, inflight = slots_of(gid)
    if inflight < limit and call('EXISTS', lane_of(gid)) == 1 then
      make_ready(gid)
    end
  end
  looked_at = {}
  if ready_n > 0 then
    dirty.groups = true
    wake_wanted = true
    for from = 1, ready_n, MANY do
      call('ZADD', READY, 'NX', unpack(ready, from, math.min(from + MANY - 1, ready_n)))
    end
    ready, ready_n = {}, 0
  end
end
