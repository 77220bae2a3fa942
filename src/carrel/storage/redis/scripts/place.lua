-- Makes what was gathered piece by piece an object. ARGV[5]: the expected stamp, ARGV[6]: the name of what was gathered,
-- ARGV[7]: its size.
local gathered = at('coming', ARGV[6])
if not is_expected(key, ARGV[5]) then
  return { 'unexpected' }
end
local note = note_of(key)
if note and note.kind == 'log' then
  return { 'log' }
end
if redis.call('STRLEN', gathered) ~= tonumber(ARGV[7]) then
  return { 'expired' }
end
local version = next_version()
redis.call('RENAME', gathered, at('object', key))
redis.call('PERSIST', at('object', key))
return { 'ok', save_note(key, version, { kind = 'object', size = tonumber(ARGV[7]), life = 0, last = 0 }) }
