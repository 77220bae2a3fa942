-- Removes a key and all below it. ARGV[5]: a key that must have the stamp ARGV[6].
if not is_expected(ARGV[5], ARGV[6]) then
  return { 'none' }
end
local keys = redis.call('ZRANGEBYLEX', INDEX, '[' .. key .. '/', '(' .. key .. '0')
if redis.call('HEXISTS', STAMPS, key) == 1 then
  table.insert(keys, key)
end
if #keys == 0 then
  return { 'none' }
end
-- The first write takes no memory, so that what fills the server can be deleted.
for _, name in ipairs(keys) do
  redis.call('UNLINK', at('log', name), at('big', name), at('object', name))
  redis.call('ZREM', INDEX, name)
  redis.call('HDEL', STAMPS, name)
end
return { 'ok', '' }
