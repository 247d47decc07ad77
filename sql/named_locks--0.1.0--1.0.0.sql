-- The library comes first. A session may have loaded one that is older than this script, and goes on with it until its
-- end: then nothing is changed. Libraries before 1.0.0 have no function to ask.
DO LANGUAGE plpgsql $do$
DECLARE
    version CONSTANT pg_catalog.text := '1.0.0';
BEGIN
    BEGIN
        CREATE FUNCTION @extschema@._check_library(version pg_catalog.text)
        RETURNS pg_catalog.void
        VOLATILE PARALLEL UNSAFE
        LANGUAGE c AS 'MODULE_PATHNAME', 'check_library_wrapper';
    EXCEPTION WHEN undefined_function THEN
        RAISE EXCEPTION 'library of named_locks is too old for version % of the extension', version USING
            ERRCODE = 'object_not_in_prerequisite_state',
            DETAIL = 'The library that this session works with is of a version before 1.0.0.',
            HINT = E'Install the library of that version, then connect again; where a setting such as shared_preload_libraries loads it, restart the server.\nDocumentation: reference/errors.md#library-too-old';
    END;
    PERFORM @extschema@._check_library(version);
    DROP FUNCTION @extschema@._check_library(pg_catalog.text);
END
$do$;

-- What is not for users has names of its own. Whoever uses a lease or the rules for domains at the moment is waited for.
ALTER TABLE lease RENAME TO _lease;
ALTER INDEX lease_pkey RENAME TO _lease_pkey;
ALTER SEQUENCE lease_token RENAME TO _lease_token;
ALTER SEQUENCE lease_timeline RENAME TO _lease_timeline;
ALTER TABLE lock_domain RENAME TO _lock_domain;
ALTER INDEX lock_domain_pkey RENAME TO _lock_domain_pkey;
ALTER TABLE _lock_domain RENAME CONSTRAINT lock_domain_domain_check TO _lock_domain_domain_check;
ALTER TABLE _lock_domain RENAME CONSTRAINT lock_domain_role_check TO _lock_domain_role_check;
ALTER TABLE _lock_domain RENAME CONSTRAINT lock_domain_max_wait_check TO _lock_domain_max_wait_check;
ALTER TABLE _lock_domain RENAME CONSTRAINT lock_domain_max_hold_check TO _lock_domain_max_hold_check;
-- From PostgreSQL 18 on, what is NOT NULL is a constraint with a name.
DO LANGUAGE plpgsql $do$
DECLARE
    found pg_catalog.record;
BEGIN
    FOR found IN
        SELECT conrelid::pg_catalog.regclass AS of_table, conname AS name
        FROM pg_catalog.pg_constraint
        WHERE contype OPERATOR(pg_catalog.=) 'n' AND conrelid OPERATOR(pg_catalog.=) ANY (
            ARRAY['@extschema@._lease'::pg_catalog.regclass, '@extschema@._lock_domain'::pg_catalog.regclass]::pg_catalog.oid[]
        )
    LOOP
        EXECUTE pg_catalog.format('ALTER TABLE %s RENAME CONSTRAINT %I TO %I', found.of_table, found.name, '_' OPERATOR(pg_catalog.||) found.name::pg_catalog.text);
    END LOOP;
END
$do$;
ALTER FUNCTION lock_domain_changed() RENAME TO _lock_domain_changed;
ALTER FUNCTION lock_holders() RENAME TO _lock_holders;
ALTER FUNCTION lock_waiters() RENAME TO _lock_waiters;
ALTER FUNCTION lock_stats() RENAME TO _lock_stats;

-- Comments that fit into psql's tables.
COMMENT ON FUNCTION named_lock(text, interval, @extschema@.named_lock_mode, interval, boolean) IS
    'session lock on a name; true when held, false when the timeout passed';
COMMENT ON PROCEDURE named_lock_wait(text, interval, @extschema@.named_lock_mode, interval, boolean, INOUT boolean) IS
    'session lock on a name, holding no snapshot during the wait; not in a transaction block';
COMMENT ON FUNCTION named_unlock(text, @extschema@.named_lock_mode, boolean, boolean) IS
    'gives back one session hold of a name, or all; how many remain; 55000 when there was none';
COMMENT ON FUNCTION named_lock_all(text[], interval, @extschema@.named_lock_mode) IS
    'session locks on all of the names or none; true when held, false when the timeout passed';
COMMENT ON FUNCTION named_lock_any(text[], integer, @extschema@.named_lock_mode) IS
    'session locks on up to max_locks of the names that are free, without waiting; the names locked';
COMMENT ON FUNCTION named_lock_tree(text, interval, @extschema@.named_lock_mode) IS
    'session lock on a path and all below it; true when held, false when the timeout passed';
COMMENT ON FUNCTION named_unlock_tree(text) IS
    'gives back what the last named_lock_tree() of a path took; how many of that path remain';
COMMENT ON FUNCTION advisory_lock(bigint, interval, @extschema@.named_lock_mode, interval) IS
    'pg_advisory_lock() on a bigint key, with a timeout; true when held, false when it passed';
COMMENT ON FUNCTION advisory_xact_lock(bigint, interval, @extschema@.named_lock_mode) IS
    'pg_advisory_xact_lock() on a bigint key, with a timeout; true when held, false when it passed';
COMMENT ON FUNCTION advisory_lock(integer, integer, interval, @extschema@.named_lock_mode, interval) IS
    'pg_advisory_lock() on two integer keys, with a timeout; true when held, false when it passed';
COMMENT ON FUNCTION advisory_lock_strict(integer, integer, interval, @extschema@.named_lock_mode, interval) IS
    'advisory_lock() on two integer keys that raises 55P03 where the other returns false';
COMMENT ON FUNCTION advisory_xact_lock(integer, integer, interval, @extschema@.named_lock_mode) IS
    'pg_advisory_xact_lock() on two integer keys, with a timeout; true when held, false when it passed';
COMMENT ON FUNCTION advisory_xact_lock_strict(integer, integer, interval, @extschema@.named_lock_mode) IS
    'advisory_xact_lock() on two integer keys that raises 55P03 where the other returns false';
COMMENT ON FUNCTION named_semaphore(text, integer, interval, interval) IS
    'takes a slot for the session if fewer than permits are taken; NULL when the timeout passed';
COMMENT ON FUNCTION lock_domain_set(text, regrole, interval, interval) IS
    'makes the rules for a domain: whose members may use it, the longest wait, the longest hold and TTL';
COMMENT ON FUNCTION lock_domain_drop(text) IS 'drops the rules for a domain, which is open to all then; false if there were none';
COMMENT ON TABLE _lease IS 'one row for each grant of a lease or order to its holder; read it through lock_holders';
COMMENT ON COLUMN _lease.token IS 'the fencing token, higher than any before it; below zero, that of an order to a holder';
COMMENT ON FUNCTION lease_acquire(text, interval, interval, text, jsonb, integer, boolean) IS
    'takes a lease and returns its fencing token, or says who has it and when to try again';
COMMENT ON PROCEDURE lease_acquire_wait(text, interval, interval, text, jsonb, integer, boolean, INOUT bigint) IS
    'takes a lease, holding no snapshot during the wait; token NULL when the timeout passed';
COMMENT ON FUNCTION lease_renew(text, bigint, interval, jsonb) IS
    'prolongs a lease from now on; 55006 when another holds it, 55000 when it has ended';
COMMENT ON FUNCTION lease_release(text, bigint, interval) IS
    'ends a lease, or keeps it from others until keep_for after the grant; false if it had ended';
COMMENT ON FUNCTION lease_guard(text, bigint) IS
    'fences writes: fails unless held, and nobody else is granted it before this transaction ends';
COMMENT ON FUNCTION lease_request(text, text) IS
    'asks the holder to hand over: its next lease_renew() returns the reason; false if nobody holds it';
COMMENT ON FUNCTION lease_break(text) IS 'ends all grants of a lease, whoever has them; how many';
COMMENT ON FUNCTION lease_holder(text) IS 'who holds a lease, a row for each permit taken; no row if it is free';
COMMENT ON VIEW lock_holders IS 'who holds locks: named and native advisory ones, slots of semaphores, leases of this database';
COMMENT ON COLUMN lock_holders.name IS 'the name; NULL if hidden, and for a prepared transaction after a restart';
COMMENT ON COLUMN lock_holders.pid IS 'the session''s process; NULL for a prepared transaction and a lease that is not bound';
COMMENT ON COLUMN lock_holders.state IS 'as in pg_stat_activity; prepared for a prepared transaction; held or kept for a lease';
COMMENT ON COLUMN lock_holders.objsubid IS 'as in pg_locks; of a slot, (objsubid & 2047) + 1 is its number';
COMMENT ON VIEW lock_waiters IS 'who waits: for named and native advisory locks, semaphores and leases';
COMMENT ON COLUMN lock_waiters.name IS 'the name; NULL if hidden';
COMMENT ON COLUMN lock_waiters.blocked_by IS 'the processes it waits for, as pg_blocking_pids() tells';
COMMENT ON VIEW lock_stats IS 'what has happened to named locks and leases, by domain of names and database';
COMMENT ON COLUMN lock_stats.domain IS
    'what stands before the first colon; NULL if hidden; (other): all that came after the first 1,024';
COMMENT ON COLUMN lock_stats.leases_taken_over IS 'those among them where the grant before had expired and nobody had released it';
COMMENT ON COLUMN lock_stats.leases_expired IS 'grants that had expired, with nobody to release them, and were cleared away';
COMMENT ON FUNCTION lock_stats_reset() IS 'sets all of lock_stats to zero, in the whole server, and forgets the domains';
