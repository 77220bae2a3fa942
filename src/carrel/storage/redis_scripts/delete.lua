-- Removes a key and all below it. ARGV: prefix, key, milliseconds that a deleted log is remembered by name,
-- how many deleted keys `changed` remembers, a log ('' where it does not matter) and the version it must have ('': none),
-- locks held….
if lost_lock(7) then
  return { 'taken' }
end
if ARGV[5] ~= '' then
  local stamp = redis.call('HGET', STAMPS, ARGV[5])
  if (stamp and string.match(stamp, '^%a+ %d+ %d+ (%d+) ') or '') ~= ARGV[6] then
    return { 'none' }
  end
end
local keys = redis.call('ZRANGEBYLEX', INDEX, '[' .. key .. '/', '(' .. key .. '0')
if redis.call('HEXISTS', STAMPS, key) == 1 then
  table.insert(keys, key)
end
if #keys == 0 then
  return { 'none' }
end

-- The removals come before the notes: a server out of memory refuses a script only at its first write, and only
-- when that one takes memory. So what fills it up can still be deleted.
local logs = {}
for _, name in ipairs(keys) do
  local stamp = stamp_of(name)
  if stamp.kind == 'log' then
    redis.call('UNLINK', at('log', name), at('big', name))
    table.insert(logs, name)
  else
    redis.call('UNLINK', at('object', name))
  end
  redis.call('ZREM', INDEX, name)
  redis.call('HDEL', STAMPS, name)
end

local version = next_version()
for _, name in ipairs(keys) do
  redis.call('ZADD', CHANGES, version, name)
end
-- Wakes those who watch the log, and tells an append that began before.
for _, name in ipairs(logs) do
  redis.call('XADD', at('gone', name), digits(version) .. '-1', 'at', digits(micros))
  redis.call('PEXPIRE', at('gone', name), ARGV[3])
end

if redis.call('ZCARD', CHANGES) - redis.call('ZCARD', INDEX) > tonumber(ARGV[4]) then
  for _, name in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
    if redis.call('HEXISTS', STAMPS, name) == 0 then
      redis.call('ZREM', CHANGES, name)
    end
  end
  redis.call('HSET', STATE, 'floor', version)
end
return { 'ok', version }
