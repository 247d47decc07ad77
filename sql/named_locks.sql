-- Named locks: session and transaction forms.
--
-- All are VOLATILE and PARALLEL UNSAFE, with one high COST: otherwise the planner would run a cheap unlock before a dear
-- lock in the same WHERE clause. None is STRICT: a NULL name is an error, never a lock silently not taken.

CREATE FUNCTION named_lock(
    name text,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    hold_limit interval DEFAULT NULL,
    cluster_wide boolean DEFAULT false
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_wrapper';
COMMENT ON FUNCTION named_lock(text, interval, @extschema@.named_lock_mode, interval, boolean) IS
    'session lock on a name; true when held, false when the timeout passed';

CREATE FUNCTION named_lock_strict(
    name text,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    hold_limit interval DEFAULT NULL,
    cluster_wide boolean DEFAULT false
)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_strict_wrapper';
COMMENT ON FUNCTION named_lock_strict(text, interval, @extschema@.named_lock_mode, interval, boolean) IS
    'named_lock() that raises 55P03 where the other returns false';

CREATE FUNCTION named_xact_lock(
    name text,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    cluster_wide boolean DEFAULT false
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_xact_lock_wrapper';
COMMENT ON FUNCTION named_xact_lock(text, interval, @extschema@.named_lock_mode, boolean) IS
    'lock on a name to the end of the transaction; true when held, false when the timeout passed';

CREATE FUNCTION named_xact_lock_strict(
    name text,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    cluster_wide boolean DEFAULT false
)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_xact_lock_strict_wrapper';
COMMENT ON FUNCTION named_xact_lock_strict(text, interval, @extschema@.named_lock_mode, boolean) IS
    'named_xact_lock() that raises 55P03 where the other returns false';

CREATE PROCEDURE named_lock_wait(
    name text,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive',
    hold_limit interval DEFAULT NULL,
    cluster_wide boolean DEFAULT false,
    INOUT acquired boolean DEFAULT NULL
)
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_wait_wrapper';
COMMENT ON PROCEDURE named_lock_wait(text, interval, @extschema@.named_lock_mode, interval, boolean, INOUT boolean) IS
    'session lock on a name, holding no snapshot during the wait; not in a transaction block';

CREATE FUNCTION named_unlock(
    name text,
    mode @extschema@.named_lock_mode DEFAULT NULL,
    all_holds boolean DEFAULT false,
    cluster_wide boolean DEFAULT false
)
RETURNS integer
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_unlock_wrapper';
COMMENT ON FUNCTION named_unlock(text, @extschema@.named_lock_mode, boolean, boolean) IS
    'gives back one session hold of a name, or all; how many remain; 55000 when there was none';

CREATE FUNCTION named_unlock_all()
RETURNS integer
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_unlock_all_wrapper';
COMMENT ON FUNCTION named_unlock_all() IS
    'gives back every session hold of this session, and nothing else; returns how many there were';

CREATE FUNCTION named_lock_held(
    name text,
    mode @extschema@.named_lock_mode DEFAULT NULL,
    cluster_wide boolean DEFAULT false
)
RETURNS integer
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_held_wrapper';
COMMENT ON FUNCTION named_lock_held(text, @extschema@.named_lock_mode, boolean) IS
    'how many holds of a name this session has, session and transaction forms together; 0 if none';

CREATE FUNCTION named_lock_convert(
    name text,
    mode @extschema@.named_lock_mode,
    timeout interval DEFAULT NULL,
    cluster_wide boolean DEFAULT false
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_convert_wrapper';
COMMENT ON FUNCTION named_lock_convert(text, @extschema@.named_lock_mode, interval, boolean) IS
    'changes the mode of the one session hold of a name in one step; on false the old hold stands';

CREATE FUNCTION named_lock_extend(
    name text,
    hold_limit interval,
    cluster_wide boolean DEFAULT false
)
RETURNS timestamp with time zone
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_extend_wrapper';
COMMENT ON FUNCTION named_lock_extend(text, interval, boolean) IS
    'gives a held session lock a new hold_limit from now on (NULL: none); returns when it ends';

CREATE FUNCTION named_lock_key(
    name text,
    cluster_wide boolean DEFAULT false,
    OUT database oid,
    OUT classid oid,
    OUT objid oid,
    OUT objsubid smallint
)
RETURNS record
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_key_wrapper';
COMMENT ON FUNCTION named_lock_key(text, boolean) IS
    'where a name is found in pg_locks; the mapping never changes';
