-- Some bytes of an object. ARGV[5], ARGV[6]: offsets of the first and the last, ARGV[7]: '' or the version wanted.
-- Answers the version and the bytes; no bytes if there is no such object, or another one by now.
local line = redis.call('HGET', STAMPS, key)
if not line then
  return { '' }
end
local kind, version = string.match(line, '^(%a+) %d+ %d+ (%d+) ')
if kind ~= 'object' or (ARGV[7] ~= '' and ARGV[7] ~= version) then
  return { kind == 'object' and version or '' }
end
return { version, redis.call('GETRANGE', at('object', key), ARGV[5], ARGV[6]) }
