-- Version 2: appends in groups, and logs that are watched by other processes.

CREATE TABLE watches (key text COLLATE "C" PRIMARY KEY, expires timestamptz NOT NULL);

CREATE FUNCTION is_watched(k text) RETURNS bigint LANGUAGE sql AS $$
  SELECT EXISTS (SELECT FROM watches WHERE key = k AND expires > clock_timestamp())::integer::bigint
$$;

-- Notes that a log is watched for some seconds.
CREATE FUNCTION note_watch(k text, seconds float8) RETURNS void LANGUAGE sql AS $$
  DELETE FROM watches WHERE expires < clock_timestamp();
  INSERT INTO watches VALUES (k, clock_timestamp() + make_interval(secs => seconds))
    ON CONFLICT (key) DO UPDATE SET expires = greatest(watches.expires, excluded.expires)
$$;

-- Does several appends one after the other, `counts[i]` records to `ks[i]`. The size of an answer is 1 if the log is watched.
CREATE FUNCTION append_each(
  ks text[], counts integer[], added bytea[], sync boolean, makes boolean[], afters bigint[], guards text[],
  guard_stamps text[]
) RETURNS SETOF answer LANGUAGE plpgsql AS $$
DECLARE a answer; first integer := 1;
BEGIN
  FOR i IN 1 .. cardinality(ks) LOOP
    a := append(
      ks[i], added[first : first + counts[i] - 1], sync, makes[i], afters[i], guards[i], guard_stamps[i]
    );
    a.size := is_watched(ks[i]);
    first := first + counts[i];
    RETURN NEXT a;
  END LOOP;
END $$;

-- Does the same at once, for different keys without `after`: several times as fast. The record `added[j]` is number
-- `places[j]` of those for `ks[owners[j]]`.
CREATE FUNCTION append_group(
  ks text[], added bytea[], owners integer[], places integer[], sync boolean, makes boolean[], guards text[],
  guard_stamps text[]
) RETURNS SETOF answer LANGUAGE plpgsql AS $$
DECLARE lost text[] := '{}'; g text; s text;
BEGIN
  IF NOT sync THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
  PERFORM hold(k) FROM unnest(ks) k;
  FOR g, s IN SELECT DISTINCT * FROM unnest(guards, guard_stamps) u (g, s) WHERE u.g IS NOT NULL ORDER BY 1 LOOP
    IF NOT is_guarded(g, s) THEN
      lost := lost || (g || ' ' || s);
    END IF;
  END LOOP;
  PERFORM FROM keys WHERE key = ANY(ks) ORDER BY key FOR UPDATE;
  INSERT INTO keys
    SELECT k, true, 0, now_micros(), nextval('numbers'), nextval('numbers'), 0
    FROM unnest(ks, makes, guards, guard_stamps) u (k, make, g, s)
    WHERE make AND (u.g IS NULL OR u.g || ' ' || u.s <> ALL(lost))
    ON CONFLICT DO NOTHING;
  RETURN QUERY
    WITH
      sizes AS (
        SELECT o, count(*) AS n, sum(length(data) + 1) AS bytes FROM unnest(added, owners) u (data, o) GROUP BY o
      ),
      logs AS (
        SELECT i, k, content, last, coalesce(n, 0) AS n, bytes, CASE
            WHEN u.g || ' ' || u.s = ANY(lost) THEN 'guard'
            WHEN key IS NULL THEN 'missing'
            WHEN NOT is_log THEN 'object'
            ELSE 'ok' END AS outcome
        FROM unnest(ks, guards, guard_stamps) WITH ORDINALITY u (k, g, s, i)
          LEFT JOIN keys ON key = k LEFT JOIN sizes ON o = i
      ),
      written AS (
        INSERT INTO records SELECT content, last + place, data
          FROM unnest(added, owners, places) u (data, o, place) JOIN logs ON i = o AND outcome = 'ok'
      ),
      grown AS (
        UPDATE keys SET size = keys.size + bytes, modified = now_micros(), version = nextval('numbers'),
            last = keys.last + n
          FROM logs WHERE keys.key = k AND outcome = 'ok' AND n > 0
      )
    SELECT outcome, is_watched(k), NULL::bigint, last + n FROM logs ORDER BY i;
END $$;
