-- Makes ARGV[5] a new log with the records of the key up to number ARGV[6] and then ARGV[7] and all others.
local target, through = ARGV[5], tonumber(ARGV[6])
local FIRST, PAGE = 7, 200
local source = note_of(key)
if not source or source.kind ~= 'log' or source.last < through then
  return { 'missing' }
end
if redis.call('HEXISTS', STAMPS, target) == 1 then
  return { 'exists' }
end
local version = next_version()
local note = { kind = 'log', size = 0, life = version, last = 0 }
local function add(record)
  note.last = note.last + 1
  note.size = note.size + #record + 1
  redis.call('XADD', at('log', target), digits(note.life) .. '-' .. digits(note.last), 'r', record)
end
while note.last < through do
  local from = digits(source.life) .. '-' .. digits(note.last + 1)
  local page = redis.call('XRANGE', at('log', key), from, digits(source.life) .. '-' .. digits(through), 'COUNT', PAGE)
  if #page == 0 then
    redis.call('UNLINK', at('log', target))
    return { 'missing' }
  end
  for _, entry in ipairs(page) do
    -- Earlier versions kept long records in a hash beside the stream.
    add(entry[2][1] == 'b' and redis.call('HGET', at('big', key), entry[1]) or entry[2][2])
  end
end
for i = FIRST, #ARGV do
  add(ARGV[i])
end
save_note(target, version, note)
return { 'ok', note.last }
