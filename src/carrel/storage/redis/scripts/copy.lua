-- Makes ARGV[5] an object with the bytes of the key.
local target = ARGV[5]
local note, old = note_of(key), note_of(target)
if not note or note.kind == 'log' then
  return { 'missing' }
end
if old and old.kind == 'log' then
  return { 'log' }
end
local version = next_version()
if key ~= target then
  redis.call('COPY', at('object', key), at('object', target), 'REPLACE')
end
return { 'ok', save_note(target, version, note) }
