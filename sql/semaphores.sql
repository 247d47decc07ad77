-- Semaphores: at most so many slots of a name taken at once.

CREATE FUNCTION named_semaphore(
    name text,
    permits integer,
    timeout interval DEFAULT NULL,
    hold_limit interval DEFAULT NULL
)
RETURNS integer
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_semaphore_wrapper';
COMMENT ON FUNCTION named_semaphore(text, integer, interval, interval) IS
    'takes a slot for the session if fewer than permits are taken; NULL when the timeout passed';

CREATE FUNCTION named_semaphore_release(name text, slot integer)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'named_semaphore_release_wrapper';
COMMENT ON FUNCTION named_semaphore_release(text, integer) IS
    'gives back a slot; 55000 when not held by this session';
