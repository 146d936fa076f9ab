-- What each claimer took last, packed in a field of the hash `claims`.
local CLAIMS = BASE .. ':claims'

-- { number, at, seed, ids } of a packed claim; nil when there is none, or it was not written by a claim.
local function claim_of(packed)
  if not packed then
    return nil
  end
  local is_packed, claim = pcall(cmsgpack.unpack, packed)
  if not is_packed or type(claim) ~= 'table' or type(claim.number) ~= 'number' or type(claim.at) ~= 'number'
    or type(claim.seed) ~= 'string' or type(claim.ids) ~= 'table' then
    return nil
  end
  for _, id in ipairs(claim.ids) do
    if type(id) ~= 'string' then
      return nil
    end
  end
  return claim
end
