-- Sends failed jobs back, with all their attempts.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] now_ms  ARGV[2] how many ids, at most 100  ARGV[3..] the ids
-- Returns per id, flat: id, 'OK' or id, 'ERR', why; or { 'ERR', 'BATCH_TOO_LARGE', '100' }
-- Clauses O-25 O-43
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include groups
-- @include job
-- @include ending
-- @include removal
-- @include steering
local VERB, LANE, ids = 'retry', '', {}
for at = 3, 2 + (tonumber(ARGV[2]) or 0) do
  ids[#ids + 1] = ARGV[at]
end
if #ids > 100 then
  return { 'ERR', 'BATCH_TOO_LARGE', '100' }
end
slow_left = #ids
local flat = {}
for _, id in ipairs(ids) do
  local word = steer(VERB, id, LANE)
  flat[#flat + 1] = id
  if word == 'OK' then
    flat[#flat + 1] = 'OK'
  else
    flat[#flat + 1], flat[#flat + 2] = 'ERR', word
  end
end
flush_steering()
return flat
