-- Makes what was gathered piece by piece an object. ARGV: prefix, key, name of what was gathered, its size,
-- locks held….
local gathered = at('coming', ARGV[3])
if lost_lock(5) then
  return { 'taken' }
end
local stamp = stamp_of(key)
if stamp and stamp.kind == 'log' then
  return { 'log' }
end
if redis.call('STRLEN', gathered) ~= tonumber(ARGV[4]) then
  return { 'lost' }
end
local version = next_version()
redis.call('RENAME', gathered, at('object', key))
redis.call('PERSIST', at('object', key))
note(key, version, { kind = 'object', size = tonumber(ARGV[4]), life = 0, last = 0 })
return { 'ok', version }
