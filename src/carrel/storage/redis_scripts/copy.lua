-- Makes `target` an object with the bytes of another. ARGV: prefix, source, target.
local target = ARGV[3]
local stamp, old = stamp_of(key), stamp_of(target)
if not stamp or stamp.kind == 'log' then
  return { 'missing' }
end
if old and old.kind == 'log' then
  return { 'log' }
end
local version = next_version()
if key ~= target then
  redis.call('COPY', at('object', key), at('object', target), 'REPLACE')
end
note(target, version, stamp)
return { 'ok', version }
