-- The names directly below a folder that are folders themselves. The key is '' or the folder with a slash after it.
-- Jumps from folder to folder, so its cost is that of the names and not of all keys below them.
local from, stop = '-', '+'
if key ~= '' then
  from, stop = '[' .. key, '(' .. string.sub(key, 1, -2) .. '0'
end
local names, folder = {}, nil
while true do
  local page = redis.call('ZRANGEBYLEX', INDEX, from, stop, 'LIMIT', 0, 50)
  if #page == 0 then
    return names
  end
  for _, name in ipairs(page) do
    local rest = string.sub(name, #key + 1)
    local slash = string.find(rest, '/', 1, true)
    local found = slash and string.sub(rest, 1, slash - 1)
    if found and found ~= folder then
      table.insert(names, found)
    end
    folder = found or nil
    from = folder and '[' .. key .. folder .. '0' or '(' .. name
  end
end
