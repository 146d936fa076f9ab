-- Trims the journal by length and age. Once somebody captures it, `captured` says how far they have come, and
-- nothing is dropped that they have not read, until it is older than `unread_ms`. The including script has
-- JOURNAL, NOW, call, match and text.
local function trim_journal(length_max, age_ms, unread_ms, captured)
  local oldest = math.max(0, NOW - tonumber(age_ms))
  if not captured then
    return call('XTRIM', JOURNAL, 'MAXLEN', '~', length_max)
      + call('XTRIM', JOURNAL, 'MINID', '~', text[oldest])
  end
  -- No position lies ahead of the clock: what else the field holds was not written by a reader.
  local read_until = math.min(NOW, tonumber(match(captured, '^%d+')) or 0)
  read_until = math.max(read_until, NOW - tonumber(unread_ms))
  local trimmed = call('XTRIM', JOURNAL, 'MINID', '~', text[math.min(read_until, oldest)])
  local extra = call('XLEN', JOURNAL) - tonumber(length_max)
  if extra > 0 then
    trimmed = trimmed + call('XTRIM', JOURNAL, 'MINID', '~', text[read_until], 'LIMIT', text[extra])
  end
  return trimmed
end
