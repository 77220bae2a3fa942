-- Takes a free lock. ARGV[5]: token, ARGV[6]: milliseconds. Answers 0 if it is held.
-- Also when memory is used up: a caller that wants to delete something takes a lock first.
even_when_full()
return redis.call('SET', at('lock', key), ARGV[5], 'NX', 'PX', ARGV[6]) and 1 or 0
