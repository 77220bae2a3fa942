-- Stands before every script: where things are, and what each write notes down. ARGV[1] is the store's prefix.
-- A stamp is "kind size microseconds version life last": `life` is the version at which a log was made, `last` its
-- newest sequence number; both are 0 for an object.
local place, key = ARGV[1], ARGV[2]
local STATE, INDEX, STAMPS, CHANGES = place .. ':state', place .. ':index', place .. ':stamps', place .. ':changes'

local function at(kind, name)
  return place .. ':' .. kind .. ':' .. name
end

-- tostring() would give 1e+15.
local function digits(number)
  return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local micros = clock[1] * 1000000 + clock[2]

-- A server out of memory refuses a script at its first write and never later, so this comes first: all or nothing.
local function next_version()
  local version = redis.call('HINCRBY', STATE, 'version', 1)
  if version == 1 then
    redis.call('HSET', STATE, 'born', digits(micros))
  end
  return version
end

-- For scripts that must go through when memory has run out: after a write that takes none, the others are let pass.
local function even_when_full()
  redis.call('DEL', at('none', key))
end

local function stamp_of(name)
  local stamp = redis.call('HGET', STAMPS, name)
  if not stamp then
    return nil
  end
  local kind, size, life, last = string.match(stamp, '^(%a+) (%d+) %d+ %d+ (%d+) (%d+)$')
  return { kind = kind, size = tonumber(size), life = tonumber(life), last = tonumber(last) }
end

-- Whether a lock is no longer its holder's. From ARGV[first] on: key of the lock and token, for each. One that ran out
-- and that nobody took is as good as held; not so where nobody is known to have taken it: the server lost what it knew.
local function lost_lock(first)
  for i = first, #ARGV, 2 do
    local holder = redis.call('GET', at('lock', ARGV[i])) or ARGV[i + 1]
    if holder ~= ARGV[i + 1] or redis.call('GET', at('taken', ARGV[i])) ~= ARGV[i + 1] then
      return true
    end
  end
  return false
end

local function note(name, version, stamp)
  redis.call('ZADD', INDEX, 0, name)
  redis.call('ZADD', CHANGES, version, name)
  local numbers = { stamp.size, micros, version, stamp.life, stamp.last }
  for i, number in ipairs(numbers) do
    numbers[i] = digits(number)
  end
  redis.call('HSET', STAMPS, name, stamp.kind .. ' ' .. table.concat(numbers, ' '))
end
