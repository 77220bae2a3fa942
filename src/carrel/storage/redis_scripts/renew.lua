-- Keeps a lock. ARGV: prefix, key, token, milliseconds. A lock that vanished and that nobody took since (the server
-- was restarted) is taken again. Answers 0 when somebody else has it.
local lock = at('lock', key)
local held = redis.call('GET', lock)
if held == ARGV[3] then
  return redis.call('PEXPIRE', lock, ARGV[4])
end
if held then
  return 0
end
redis.call('SET', lock, ARGV[3], 'PX', ARGV[4])
return 1
