-- Several named locks in one call.

CREATE FUNCTION named_lock_all(
    names text[],
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_all_wrapper';
COMMENT ON FUNCTION named_lock_all(text[], interval, @extschema@.named_lock_mode) IS
    'session locks on all of the names or none; true when held, false when the timeout passed';

CREATE FUNCTION named_xact_lock_all(
    names text[],
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_xact_lock_all_wrapper';
COMMENT ON FUNCTION named_xact_lock_all(text[], interval, @extschema@.named_lock_mode) IS
    'named_lock_all() to the end of the transaction';

CREATE FUNCTION named_lock_any(
    names text[],
    max_locks integer DEFAULT 1,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS SETOF text
VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_any_wrapper';
COMMENT ON FUNCTION named_lock_any(text[], integer, @extschema@.named_lock_mode) IS
    'session locks on up to max_locks of the names that are free, without waiting; the names locked';

CREATE FUNCTION named_xact_lock_any(
    names text[],
    max_locks integer DEFAULT 1,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS SETOF text
VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1
LANGUAGE c AS 'MODULE_PATHNAME', 'named_xact_lock_any_wrapper';
COMMENT ON FUNCTION named_xact_lock_any(text[], integer, @extschema@.named_lock_mode) IS
    'named_lock_any() to the end of the transaction';
