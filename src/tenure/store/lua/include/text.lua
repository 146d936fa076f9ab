-- Numbers as text: `text[12]` is '12'. Each number is converted once, because a Lua number as an argument of a command
-- costs Redis ten times as much as a text, and from 1e14 on it has another format.
local text = setmetatable({}, {
  __index = function(cache, number)
    local made = string.format('%.0f', number)
    cache[number] = made
    return made
  end,
})
