-- Trims the journal by age and size. Once somebody captures it, `captured` says how far they have come, and
-- nothing is dropped that they have not read, until it is older than `unread_ms`. The including script has
-- JOURNAL, NOW, call, match and text.
local function trim_journal(bytes_max, age_ms, unread_ms, captured)
  local oldest = math.max(0, NOW - tonumber(age_ms))
  local read_until = NOW
  if captured then
    -- No position lies ahead of the clock: what else the field holds was not written by a reader.
    read_until = math.min(NOW, tonumber(match(captured, '^%d+')) or 0)
    read_until = math.max(read_until, NOW - tonumber(unread_ms))
  end
  local trimmed = call('XTRIM', JOURNAL, 'MINID', '~', text[math.min(read_until, oldest)])
  local length = call('XLEN', JOURNAL)
  -- An entry holds one event or a hundred: the bytes are asked for. Some servers refuse to tell them.
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
