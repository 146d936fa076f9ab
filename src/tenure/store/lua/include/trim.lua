-- Trims the journal by age and size. If a pipeline captures it, `captured` is its cursor, and entries after the cursor
-- are kept until they are older than `unread_ms`. The including script has JOURNAL, NOW, call, match and text.
local function trim_journal(bytes_max, age_ms, unread_ms, captured)
  local oldest = math.max(0, NOW - tonumber(age_ms))
  local read_until = NOW
  if captured then
    -- A cursor cannot be in the future. Anything else in the field was not written by a reader.
    read_until = math.min(NOW, tonumber(match(captured, '^%d+')) or 0)
    read_until = math.max(read_until, NOW - tonumber(unread_ms))
  end
  local trimmed = call('XTRIM', JOURNAL, 'MINID', '~', text[math.min(read_until, oldest)])
  local length = call('XLEN', JOURNAL)
  -- Entries hold one to a hundred events, so their number says little. Some servers do not allow MEMORY USAGE.
  local bytes = redis.pcall('MEMORY', 'USAGE', JOURNAL, 'SAMPLES', '1000')
  bytes = type(bytes) == 'number' and bytes or length * 1000
  local extra = length - math.floor(length * tonumber(bytes_max) / math.max(bytes, 1))
  if extra > 0 and captured then
    trimmed = trimmed + call('XTRIM', JOURNAL, 'MINID', '~', text[read_until], 'LIMIT', text[extra])
  elseif extra > 0 then
    trimmed = trimmed + call('XTRIM', JOURNAL, 'MAXLEN', '~', text[length - extra])
  end
  return trimmed
end
