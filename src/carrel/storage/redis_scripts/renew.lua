-- Keeps a lock. ARGV: prefix, key, token, milliseconds, milliseconds that it is remembered who took it last, "1" if the
-- holder spoke lately. A lock that vanished and that nobody took since (it ran out, or the server was restarted) is taken
-- again. Answers 0 when somebody else has it, or had it meanwhile.
local lock, taken = at('lock', key), at('taken', key)
local held, last = redis.call('GET', lock), redis.call('GET', taken)
if (held and held ~= ARGV[3]) or (last and last ~= ARGV[3]) or (not last and ARGV[6] ~= '1') then
  return 0
end
even_when_full()
redis.call('SET', lock, ARGV[3], 'PX', ARGV[4])
redis.call('SET', taken, ARGV[3], 'PX', ARGV[5])
return 1
