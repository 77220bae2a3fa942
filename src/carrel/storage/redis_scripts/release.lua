-- Gives a lock back, if it is still this token's, and wakes one who waits. ARGV: prefix, key, token.
local lock, freed = at('lock', key), at('freed', key)
if redis.call('GET', lock) ~= ARGV[3] then
  return 0
end
redis.call('DEL', lock)
redis.call('LPUSH', freed, 1)
redis.call('LTRIM', freed, 0, 0)
redis.call('PEXPIRE', freed, 10000)
return 1
