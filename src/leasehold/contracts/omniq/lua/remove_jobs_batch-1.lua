-- Removes jobs that nobody runs from the lane where they must stand.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] lane  ARGV[2] how many ids, at most 100  ARGV[3..] the ids, and after them now_ms if given
-- Returns per id, flat: id, 'OK' or id, 'ERR', why; or { 'ERR', 'BATCH_TOO_LARGE', '100' } or { 'ERR', 'BAD_LANE' }
-- Clauses O-26 O-43
local GIVEN_NOW = ARGV[3 + (tonumber(ARGV[2]) or 0)] or '0'
-- @include head
-- @include groups
-- @include job
-- @include ending
-- @include removal
-- @include steering
local VERB, LANE, ids = 'remove', ARGV[1], {}
if not LANES[LANE] then
  return { 'ERR', 'BAD_LANE' }
end
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
