-- Replaces an object. ARGV[5]: the expected stamp, ARGV[6]: the bytes.
if not is_expected(key, ARGV[5]) then
  return { 'unexpected' }
end
local note = note_of(key)
if note and note.kind == 'log' then
  return { 'log' }
end
local version = next_version()
redis.call('SET', at('object', key), ARGV[6])
return { 'ok', save_note(key, version, { kind = 'object', size = #ARGV[6], life = 0, last = 0 }) }
