-- The batches of an OmniQ SDK: ARGV[2] ids, at most 100, from ARGV[3] on. The answer is flat, per id:
-- id, 'OK' or id, 'ERR', why.
-- @include steering
local function steer_batch(verb, lane)
  local n = math.min(tonumber(ARGV[2]) or 0, #ARGV - 2)
  if n > 100 then
    return { 'ERR', 'BATCH_TOO_LARGE', '100' }
  end
  slow_left = n
  local flat = {}
  for at = 3, 2 + n do
    local id = ARGV[at]
    local word = steer(verb, id, lane)
    flat[#flat + 1] = id
    if word == 'OK' then
      flat[#flat + 1] = 'OK'
    else
      flat[#flat + 1], flat[#flat + 2] = 'ERR', word
    end
  end
  flush_steering()
  return flat
end
