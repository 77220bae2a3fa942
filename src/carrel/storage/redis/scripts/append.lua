-- Adds records to a log. ARGV[5]: '1' to make a missing log, ARGV[6]: the number that the last record must have (-1: any),
-- ARGV[7] and all others: the records.
local create, after = ARGV[5] == '1', tonumber(ARGV[6])
local FIRST = 7
local note = note_of(key)
if note and note.kind ~= 'log' then
  return { 'object' }
end
if note and note.last > 0 and redis.call('EXISTS', at('log', key)) == 0 then
  return { 'vanished' }
end
if not note and (after > 0 or not create) then
  return { 'missing' }
end
if after >= 0 and after ~= (note and note.last or 0) then
  return { 'ok', 0 }
end
if note and #ARGV < FIRST then
  return { 'ok', note.last }
end
local version = next_version()
note = note or { kind = 'log', size = 0, life = version, last = 0 }
for i = FIRST, #ARGV do
  note.last = note.last + 1
  note.size = note.size + #ARGV[i] + 1
  redis.call('XADD', at('log', key), digits(note.life) .. '-' .. digits(note.last), 'r', ARGV[i])
end
save_note(key, version, note)
return { 'ok', note.last }
