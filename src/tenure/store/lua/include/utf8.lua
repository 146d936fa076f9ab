-- Whether a text is UTF-8: every sequence of several bytes is removed, and no byte of one may be left.
local function is_utf8(value)
  for _, sequence in ipairs({
    '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]',
    '\237[\128-\159][\128-\191]', '\240[\144-\191][\128-\191][\128-\191]',
    '[\241-\243][\128-\191][\128-\191][\128-\191]', '\244[\128-\143][\128-\191][\128-\191]',
  }) do
    value = string.gsub(value, sequence, ' ')
  end
  return not string.find(value, '[\128-\255]')
end
