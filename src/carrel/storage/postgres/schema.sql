-- Tables and functions of version 1. Every write is one call of a function, so it happens whole or not at all.
-- A stamp is written as "size microseconds version"; as a condition, NULL stands for none and '-' for a missing key.

CREATE TABLE keys (
  key text COLLATE "C" PRIMARY KEY,
  is_log boolean NOT NULL,
  size bigint NOT NULL,
  modified bigint NOT NULL,
  version bigint NOT NULL,
  content bigint NOT NULL,  -- where its pieces or records are; a log that is made anew gets another number
  last bigint NOT NULL      -- the number of a log's last record
);
CREATE TABLE pieces (content bigint, number integer, data bytea NOT NULL, PRIMARY KEY (content, number));
CREATE TABLE records (content bigint, seq bigint, data bytea NOT NULL, PRIMARY KEY (content, seq));
CREATE TABLE uploads (content bigint PRIMARY KEY, touched timestamptz NOT NULL);
CREATE TABLE locks (key text COLLATE "C" PRIMARY KEY, token text NOT NULL, expires timestamptz NOT NULL);
CREATE SEQUENCE numbers;

CREATE TYPE answer AS (outcome text, size bigint, modified bigint, version bigint);

-- Keeps other writes of this key away until the transaction ends, also if there is no such key yet.
CREATE FUNCTION hold(k text) RETURNS void LANGUAGE sql AS $$
  SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' ' || k, 0))
$$;

CREATE FUNCTION is_expected(k text, condition text) RETURNS boolean LANGUAGE sql AS $$
  SELECT condition IS NULL
    OR condition = coalesce((SELECT concat_ws(' ', size, modified, version) FROM keys WHERE key = k), '-')
$$;

-- Whether the guard is unchanged; it stays so until the transaction ends.
CREATE FUNCTION is_guarded(guard text, guard_stamp text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  IF guard IS NULL THEN
    RETURN true;
  END IF;
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(current_schema() || ' ' || guard, 0));
  RETURN is_expected(guard, guard_stamp);
END $$;

CREATE FUNCTION now_micros() RETURNS bigint LANGUAGE sql AS $$
  SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
$$;

-- Makes what has been gathered under `new_content` the object `k`.
CREATE FUNCTION place(k text, new_content bigint, new_size bigint, condition text, guard text, guard_stamp text)
RETURNS answer LANGUAGE plpgsql AS $$
DECLARE old keys; a answer;
BEGIN
  PERFORM hold(k);
  IF NOT is_guarded(guard, guard_stamp) THEN
    a.outcome := 'guard'; RETURN a;
  END IF;
  SELECT * INTO old FROM keys WHERE key = k FOR UPDATE;
  IF NOT is_expected(k, condition) THEN
    a.outcome := 'unexpected'; RETURN a;
  ELSIF old.is_log THEN
    a.outcome := 'log'; RETURN a;
  END IF;
  DELETE FROM uploads WHERE content = new_content;
  IF NOT FOUND THEN
    a.outcome := 'expired'; RETURN a;
  END IF;
  DELETE FROM pieces WHERE content = old.content;
  a := ('ok', new_size, now_micros(), nextval('numbers'));
  INSERT INTO keys VALUES (k, false, a.size, a.modified, a.version, new_content, 0)
    ON CONFLICT (key) DO UPDATE
    SET size = a.size, modified = a.modified, version = a.version, content = new_content;
  RETURN a;
END $$;

CREATE FUNCTION put(k text, bytes bytea, piece integer, condition text, guard text, guard_stamp text)
RETURNS answer LANGUAGE plpgsql AS $$
DECLARE c bigint := nextval('numbers'); a answer;
BEGIN
  INSERT INTO uploads VALUES (c, clock_timestamp());
  INSERT INTO pieces SELECT c, n, substring(bytes FROM n * piece + 1 FOR piece)
    FROM generate_series(0, greatest(length(bytes) - 1, 0) / piece) n;
  a := place(k, c, length(bytes), condition, guard, guard_stamp);
  IF a.outcome <> 'ok' THEN
    DELETE FROM pieces WHERE content = c;
    DELETE FROM uploads WHERE content = c;
  END IF;
  RETURN a;
END $$;

CREATE FUNCTION copy_object(source text, target text, guard text, guard_stamp text)
RETURNS answer LANGUAGE plpgsql AS $$
DECLARE found keys; c bigint := nextval('numbers'); a answer;
BEGIN
  SELECT * INTO found FROM keys WHERE key = source AND NOT is_log FOR SHARE;
  IF found.key IS NULL THEN
    a.outcome := 'missing'; RETURN a;
  END IF;
  INSERT INTO uploads VALUES (c, clock_timestamp());
  INSERT INTO pieces SELECT c, number, data FROM pieces WHERE content = found.content;
  a := place(target, c, found.size, NULL, guard, guard_stamp);
  IF a.outcome <> 'ok' THEN
    DELETE FROM pieces WHERE content = c;
    DELETE FROM uploads WHERE content = c;
  END IF;
  RETURN a;
END $$;

-- Removes a key and all below it.
CREATE FUNCTION remove(k text, expected_key text, condition text, guard text, guard_stamp text)
RETURNS answer LANGUAGE plpgsql AS $$
DECLARE contents bigint[]; a answer;
BEGIN
  IF expected_key IS NOT NULL THEN
    PERFORM hold(expected_key);
    PERFORM FROM keys WHERE key = expected_key FOR UPDATE;
  END IF;
  IF NOT is_guarded(guard, guard_stamp) THEN
    a.outcome := 'guard'; RETURN a;
  ELSIF expected_key IS NOT NULL AND NOT is_expected(expected_key, condition) THEN
    a.outcome := 'none'; RETURN a;
  END IF;
  PERFORM FROM keys WHERE key = k OR (key > k || '/' AND key < k || '0') ORDER BY key FOR UPDATE;
  WITH gone AS (
    DELETE FROM keys WHERE key = k OR (key > k || '/' AND key < k || '0') RETURNING content
  ) SELECT array_agg(content) INTO contents FROM gone;
  DELETE FROM pieces WHERE content = ANY(contents);
  DELETE FROM records WHERE content = ANY(contents);
  a.outcome := CASE WHEN contents IS NULL THEN 'none' ELSE 'ok' END;
  RETURN a;
END $$;

-- Adds records to a log; the answer's version is the number of the last one, 0 if `after` does not hold.
CREATE FUNCTION append(
  k text, added bytea[], sync boolean, make boolean, after bigint, guard text, guard_stamp text
) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE log keys; a answer; bytes bigint;
BEGIN
  IF NOT sync THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
  PERFORM hold(k);
  IF NOT is_guarded(guard, guard_stamp) THEN
    a.outcome := 'guard'; RETURN a;
  END IF;
  SELECT * INTO log FROM keys WHERE key = k FOR UPDATE;
  a.outcome := CASE
    WHEN NOT log.is_log THEN 'object'
    WHEN log.key IS NULL AND (NOT make OR after > 0) THEN 'missing'
    ELSE 'ok' END;
  IF a.outcome <> 'ok' THEN
    RETURN a;
  ELSIF after <> coalesce(log.last, 0) THEN
    a.version := 0; RETURN a;
  END IF;
  IF log.key IS NULL THEN
    INSERT INTO keys VALUES (k, true, 0, now_micros(), nextval('numbers'), nextval('numbers'), 0) RETURNING * INTO log;
  END IF;
  a.version := log.last + cardinality(added);
  IF cardinality(added) > 0 THEN
    INSERT INTO records SELECT log.content, log.last + n, data FROM unnest(added) WITH ORDINALITY AS t (data, n);
    SELECT sum(length(data) + 1) INTO bytes FROM unnest(added) AS t (data);
    UPDATE keys SET size = log.size + bytes, modified = now_micros(), version = nextval('numbers'), last = a.version
      WHERE key = k;
  END IF;
  RETURN a;
END $$;

-- Makes `target` a log with the records of `source` up to `through` and then those that are added.
CREATE FUNCTION copy_log(source text, target text, through bigint, added bytea[], guard text, guard_stamp text)
RETURNS answer LANGUAGE plpgsql AS $$
DECLARE log keys; c bigint := nextval('numbers'); a answer;
BEGIN
  PERFORM hold(target);
  IF NOT is_guarded(guard, guard_stamp) THEN
    a.outcome := 'guard'; RETURN a;
  END IF;
  SELECT * INTO log FROM keys WHERE key = source AND is_log FOR SHARE;
  a.outcome := CASE
    WHEN log.key IS NULL OR log.last < through THEN 'missing'
    WHEN EXISTS (SELECT FROM keys WHERE key = target) THEN 'exists'
    ELSE 'ok' END;
  IF a.outcome <> 'ok' THEN
    RETURN a;
  END IF;
  INSERT INTO records SELECT c, seq, data FROM records WHERE content = log.content AND seq <= through;
  INSERT INTO records SELECT c, through + n, data FROM unnest(added) WITH ORDINALITY AS t (data, n);
  a.version := through + cardinality(added);
  INSERT INTO keys
    SELECT target, true, coalesce(sum(length(data) + 1), 0), now_micros(), nextval('numbers'), c, a.version
    FROM records WHERE content = c;
  RETURN a;
END $$;
