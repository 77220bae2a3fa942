-- Which keys below a folder changed. ARGV: prefix, "" or the folder with a slash after it, the `born` and the
-- version of the caller's cursor. Answers born, version, whether the keys are known, and the keys.
local state = redis.call('HMGET', STATE, 'born', 'version', 'floor')
local born, version, floor = state[1] or '0', tonumber(state[2] or 0), tonumber(state[3] or 0)
local cursor = tonumber(ARGV[4])
-- A cursor from when the store was still empty has no `born` to compare.
if (ARGV[3] ~= born and ARGV[3] ~= '0') or cursor > version or cursor < floor then
  return { born, version, 0, {} }
end
local keys = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', CHANGES, '(' .. digits(cursor), '+inf')) do
  if string.sub(name, 1, #key) == key then
    table.insert(keys, name)
  end
end
return { born, version, 1, keys }
