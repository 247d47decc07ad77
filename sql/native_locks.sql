-- A timeout on the native advisory locks that other software already uses. pg_advisory_unlock() gives them back.
--
-- Give the timeout by name: SQL takes advisory_lock(42, '0') for the pair of integers 42 and 0.

CREATE FUNCTION advisory_lock(
    key bigint,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    hold_limit interval DEFAULT NULL
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'advisory_lock_wrapper';
COMMENT ON FUNCTION advisory_lock(bigint, interval, @extschema@.named_lock_mode, interval) IS
    'pg_advisory_lock() on a bigint key, with a timeout; true when held, false when it passed';

CREATE FUNCTION advisory_lock_strict(
    key bigint,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    hold_limit interval DEFAULT NULL
)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'advisory_lock_strict_wrapper';
COMMENT ON FUNCTION advisory_lock_strict(bigint, interval, @extschema@.named_lock_mode, interval) IS
    'advisory_lock() on a bigint key that raises 55P03 where the other returns false';

CREATE FUNCTION advisory_xact_lock(
    key bigint,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'advisory_xact_lock_wrapper';
COMMENT ON FUNCTION advisory_xact_lock(bigint, interval, @extschema@.named_lock_mode) IS
    'pg_advisory_xact_lock() on a bigint key, with a timeout; true when held, false when it passed';

CREATE FUNCTION advisory_xact_lock_strict(
    key bigint,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'advisory_xact_lock_strict_wrapper';
COMMENT ON FUNCTION advisory_xact_lock_strict(bigint, interval, @extschema@.named_lock_mode) IS
    'advisory_xact_lock() on a bigint key that raises 55P03 where the other returns false';

CREATE FUNCTION advisory_lock(
    key1 integer,
    key2 integer,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    hold_limit interval DEFAULT NULL
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'advisory_lock2_wrapper';
COMMENT ON FUNCTION advisory_lock(integer, integer, interval, @extschema@.named_lock_mode, interval) IS
    'pg_advisory_lock() on two integer keys, with a timeout; true when held, false when it passed';

CREATE FUNCTION advisory_lock_strict(
    key1 integer,
    key2 integer,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    hold_limit interval DEFAULT NULL
)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'advisory_lock2_strict_wrapper';
COMMENT ON FUNCTION advisory_lock_strict(integer, integer, interval, @extschema@.named_lock_mode, interval) IS
    'advisory_lock() on two integer keys that raises 55P03 where the other returns false';

CREATE FUNCTION advisory_xact_lock(
    key1 integer,
    key2 integer,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'advisory_xact_lock2_wrapper';
COMMENT ON FUNCTION advisory_xact_lock(integer, integer, interval, @extschema@.named_lock_mode) IS
    'pg_advisory_xact_lock() on two integer keys, with a timeout; true when held, false when it passed';

CREATE FUNCTION advisory_xact_lock_strict(
    key1 integer,
    key2 integer,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'advisory_xact_lock2_strict_wrapper';
COMMENT ON FUNCTION advisory_xact_lock_strict(integer, integer, interval, @extschema@.named_lock_mode) IS
    'advisory_xact_lock() on two integer keys that raises 55P03 where the other returns false';
