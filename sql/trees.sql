-- Trees of named locks: paths of names with / between their parts.

CREATE FUNCTION named_lock_tree(
    path text,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_lock_tree_wrapper';
COMMENT ON FUNCTION named_lock_tree(text, interval, @extschema@.named_lock_mode) IS
    'session lock on a path and all below it; true when held, false when the timeout passed';

CREATE FUNCTION named_xact_lock_tree(
    path text,
    timeout interval DEFAULT NULL,
    mode @extschema@.named_lock_mode DEFAULT 'exclusive'
)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_xact_lock_tree_wrapper';
COMMENT ON FUNCTION named_xact_lock_tree(text, interval, @extschema@.named_lock_mode) IS
    'named_lock_tree() to the end of the transaction';

CREATE FUNCTION named_unlock_tree(path text)
RETURNS integer
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_unlock_tree_wrapper';
COMMENT ON FUNCTION named_unlock_tree(text) IS
    'gives back what the last named_lock_tree() of a path took; how many of that path remain';
