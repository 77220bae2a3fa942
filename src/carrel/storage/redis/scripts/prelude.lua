-- Stands before every script. ARGV: prefix, key, the key that guards the write ('' none), its stamp, then the script's own.
-- What is noted of a key is "kind size microseconds version life last": `life` is the version at which a log was made,
-- `last` its newest sequence number; both are 0 for an object. Its stamp is "size microseconds version".
local prefix, key = ARGV[1], ARGV[2]
local STATE, INDEX, STAMPS = prefix .. ':state', prefix .. ':index', prefix .. ':stamps'

local function at(kind, name)
  return prefix .. ':' .. kind .. ':' .. name
end

-- tostring() would give 1e+15.
local function digits(number)
  return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local micros = clock[1] * 1000000 + clock[2]

-- A server without free memory refuses a script at its first write and never later, so this comes first: all or nothing.
local function next_version()
  return redis.call('HINCRBY', STATE, 'version', 1)
end

-- For scripts that must work when memory is used up: after a write that takes none, the others are accepted.
local function even_when_full()
  redis.call('DEL', at('none', key))
end

local function note_of(name)
  local line = redis.call('HGET', STAMPS, name)
  if not line then
    return nil
  end
  local kind, size, life, last = string.match(line, '^(%a+) (%d+) %d+ %d+ (%d+) (%d+)$')
  return { kind = kind, size = tonumber(size), life = tonumber(life), last = tonumber(last) }
end

-- Whether a key has the expected stamp: '*' is any or none, '-' is none.
local function is_expected(name, expected)
  if expected == '*' then
    return true
  end
  local line = redis.call('HGET', STAMPS, name)
  return (line and string.match(line, '^%a+ (%d+ %d+ %d+) ') or '-') == expected
end

-- Notes what was written; returns the new stamp.
local function save_note(name, version, note)
  local stamp = digits(note.size) .. ' ' .. digits(micros) .. ' ' .. digits(version)
  redis.call('ZADD', INDEX, 0, name)
  redis.call('HSET', STAMPS, name, table.concat({ note.kind, stamp, digits(note.life), digits(note.last) }, ' '))
  return stamp
end

if ARGV[3] ~= '' and not is_expected(ARGV[3], ARGV[4]) then
  return { 'guard' }
end
