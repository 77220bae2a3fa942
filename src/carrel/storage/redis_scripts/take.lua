-- Takes a lock that nobody holds. ARGV: prefix, key, token, milliseconds, milliseconds that it is remembered who took it
-- last: one who stood still and wakes must not take it for his own. Answers 0 when somebody has it.
-- Also when memory has run out: who wants to delete something takes one first.
even_when_full()
if not redis.call('SET', at('lock', key), ARGV[3], 'NX', 'PX', ARGV[4]) then
  return 0
end
redis.call('SET', at('taken', key), ARGV[3], 'PX', ARGV[5])
return 1
