-- Takes jobs out of the queue for good, with what hangs on them: deduplication, parents, retention.

local function forget_dedup(id, deid, prefix)
  prefix = prefix or PREFIX
  local de = prefix .. 'de:' .. deid
  if redis.pcall('GET', de) == id then
    call('DEL', de, prefix .. 'dn:' .. deid)
  end
end

-- The deduplication id is free again, unless it has a time to live of its own. A job that was turned
-- away while this one ran, and asked to be kept, follows now.
local function end_dedup(id, deid)
  local de, dn = PREFIX .. 'de:' .. deid, PREFIX .. 'dn:' .. deid
  if call('PTTL', de) == -1 and redis.pcall('GET', de) == id then
    call('DEL', de)
  end
  if call('TYPE', dn).ok ~= 'hash' then
    return
  end
  local v = call('HMGET', dn, 'name', 'data', 'opts', 'pk', 'pd', 'rjk', 'jid')
  if not v[1] or not v[3] then -- no job can be made of it
    return call('DEL', dn)
  end
  local number = redis.pcall('INCR', ID)
  local next_id = v[7] or text[type(number) == 'number' and number or NOW]
  call('SET', de, next_id) -- held as long as its job lives, so that another can follow that one
  store_from_opts(next_id, v[1], v[2], v[3],
    { deid = deid, parent_key = v[4] or nil, parent = v[5] or nil, rjk = v[6] or nil })
  call('DEL', dn)
end

-- `sweeping` says that the whole line is swept: a parent that waits for nothing else goes with its child.
local function drop_finished(ids, sweeping)
  for _, id in ipairs(ids) do
    local key = PREFIX .. id
    local v = redis.pcall('HMGET', key, 'parentKey', 'deid', 'parent', 'tn', 'name', 'ats')
    if v[1] then
      child_removed(key, v[1], v[3], sweeping)
    end
    if v[2] then
      forget_dedup(id, v[2])
    end
    local ver, state = read_tn(v[4])
    if ver > 0 then
      local fence = whole(v[6]) and v[6] or '0'
      note(id, 'remove', text[ver + 1], NOW_S, plain(v[5]), state, '', '0', fence, fence, '0', '0', '')
    end
    delete_job(key)
  end
end

-- What the job's options keep of finished jobs: no older than an age, no more than a count. `limit` bounds
-- how many old ones go at once.
local function retain(set, count, age_s, limit)
  flush_kept()
  if age_s then
    local old = call('ZREVRANGEBYSCORE', set, text[NOW - age_s * 1000], '-inf', 'LIMIT', '0', text[limit or 1000])
    if #old > 0 then
      drop_finished(old)
      each_many('ZREM', set, old)
    end
  end
  if count then
    local old = call('ZREVRANGE', set, text[count], '-1')
    if #old > 0 then
      drop_finished(old)
      call('ZREMRANGEBYRANK', set, '0', text[-(count + 1)])
    end
  end
end

-- What the options say of finished jobs, for scripts that end a job without its worker's help.
local function keep_of(opts_json, name)
  local function bound(value)
    value = tonumber(value)
    return value and value >= 0 and value < NEVER and value or nil -- not NaN either
  end
  local ok, opts = pcall(cjson.decode, opts_json or '')
  local keep = ok and type(opts) == 'table' and opts[name]
  if keep == true then
    return 0, nil
  elseif type(keep) == 'number' then
    return bound(keep), nil
  elseif type(keep) == 'table' then
    return bound(keep.count), bound(keep.age), bound(keep.limit)
  end
  return nil, nil
end
