-- Some bytes of an object. ARGV: prefix, key, offset of the first, offset of the last, "" or the version wanted.
-- Answers the version and the bytes; no bytes when there is no such object, or another one meanwhile.
local line = redis.call('HGET', STAMPS, key)
if not line then
  return { '' }
end
local kind, version = string.match(line, '^(%a+) %d+ %d+ (%d+) ')
if kind ~= 'object' or (ARGV[5] ~= '' and ARGV[5] ~= version) then
  return { kind == 'object' and version or '' }
end
return { version, redis.call('GETRANGE', at('object', key), ARGV[3], ARGV[4]) }
