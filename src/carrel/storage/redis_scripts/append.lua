-- Adds records to a log. ARGV: prefix, key, "1" to make a missing log, newest version the caller knows of,
-- bytes above which a record goes beside the stream, the number that the last record must have (-1: any), record…
local create, known, inline, after = ARGV[3] == '1', tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local FIRST = 7

-- A server that lost its newest writes uses their numbers again: what the caller knows of then says nothing.
local again = known > tonumber(redis.call('HGET', STATE, 'version') or 0) and 1 or 0
if again == 1 then
  known = 0
end
-- A delete that the caller may not know of: it decides, by how long ago that was, whether its append came before.
local grave = redis.call('XREVRANGE', at('gone', key), '+', '-', 'COUNT', 1)[1]
if grave then
  local version = tonumber(string.match(grave[1], '^%d+'))
  if version > known then
    return { 'deleted', version, micros - tonumber(grave[2][2]), again }
  end
end

local stamp = stamp_of(key)
if stamp and stamp.kind ~= 'log' then
  return { 'object' }
end
if stamp and stamp.last > 0 and redis.call('EXISTS', at('log', key)) == 0 then
  return { 'lost' }
end
if not stamp and (after > 0 or not create) then
  return { 'missing' }
end
if after >= 0 and after ~= (stamp and stamp.last or 0) then
  return { 'moved' }
end
if stamp and #ARGV < FIRST then
  return { 'ok', 0, stamp.last }
end

local version = next_version()
stamp = stamp or { kind = 'log', size = 0, life = version, last = 0 }
for i = FIRST, #ARGV do
  stamp.last = stamp.last + 1
  stamp.size = stamp.size + #ARGV[i] + 1
  local id = digits(stamp.life) .. '-' .. digits(stamp.last)
  if #ARGV[i] > inline then
    redis.call('HSET', at('big', key), id, ARGV[i])
    redis.call('XADD', at('log', key), id, 'b', #ARGV[i])
  else
    redis.call('XADD', at('log', key), id, 'r', ARGV[i])
  end
end
note(key, version, stamp)
return { 'ok', version, stamp.last }
