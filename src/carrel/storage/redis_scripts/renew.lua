-- Keeps a lock. ARGV: prefix, key, token, milliseconds, milliseconds that it is remembered who took it last. A lock that
-- vanished and that nobody took since (it ran out, or the server was restarted) is taken again; but a server that no longer
-- knows who took it lost more than that, and what was decided before is not to be written under it. Answers 0 when somebody
-- else has it, or had it meanwhile.
local lock, taken = at('lock', key), at('taken', key)
local held, last = redis.call('GET', lock), redis.call('GET', taken)
if (held and held ~= ARGV[3]) or (last and last ~= ARGV[3]) then
  return 0
end
even_when_full()
redis.call('SET', lock, ARGV[3], 'PX', ARGV[4])
if last then
  redis.call('PEXPIRE', taken, ARGV[5])
end
return 1
