-- Replaces an object. ARGV: prefix, key, "1" for only when new, "1" for only when there, bytes, locks held….
local only_new, only_existing, data = ARGV[3] == '1', ARGV[4] == '1', ARGV[5]
if lost_lock(6) then
  return { 'taken' }
end
local stamp = stamp_of(key)
if stamp and only_new or not stamp and only_existing then
  return { 'unwanted' }
end
if stamp and stamp.kind == 'log' then
  return { 'log' }
end
local version = next_version()
redis.call('SET', at('object', key), data)
note(key, version, { kind = 'object', size = #data, life = 0, last = 0 })
return { 'ok', version }
