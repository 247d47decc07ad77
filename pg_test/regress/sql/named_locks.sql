-- Named locks in one session. What two do to one another is in the isolation specs.
\set VERBOSITY sqlstate

-- Re-entrance: two acquires, two releases; then it is an error.
SELECT named_lock('job', timeout => '0');
SELECT named_lock('job', timeout => '5 s', mode => 'share');
SELECT named_lock_held('job');
SELECT named_lock_held('job', 'share');
SELECT named_unlock('job');
SELECT named_unlock('job');
SELECT named_unlock('job');
SELECT named_lock_strict('job', '0');
SELECT named_unlock('job', all_holds => true);

-- Names are told apart byte for byte.
SELECT named_lock('Job'), named_lock('job '), named_lock('Jöb'), named_lock_held('job');
SELECT named_unlock_all();

-- The key of a name is the same everywhere and for ever: it is XXH3-64 of the name, beside its domain's.
SELECT classid, objid, objsubid FROM named_lock_key('report:daily');
SELECT database FROM named_lock_key('report:daily', cluster_wide => true);

-- What is refused.
SELECT named_lock(NULL);
SELECT named_lock('');
SELECT named_lock(repeat('x', 1025));
SELECT named_lock('job', timeout => '-1 s');
SELECT named_lock('job', mode => 'exclusiv');
SELECT named_lock('job', hold_limit => '1 ms');
SELECT named_lock_held('job');

-- The transaction form ends with the transaction, or with the savepoint around it.
BEGIN;
SELECT named_xact_lock('tx');
SAVEPOINT s;
SELECT named_xact_lock('tx', mode => 'intent share');
SELECT named_lock_held('tx');
ROLLBACK TO s;
SELECT named_lock_held('tx');
COMMIT;
SELECT named_lock_held('tx');

-- Another mode in one step, and a limit on the time it is held.
SELECT named_lock('convert', mode => 'share', hold_limit => '1 hour');
SELECT named_lock_convert('convert', 'exclusive');
SELECT named_lock_held('convert', 'exclusive');
SELECT named_lock_extend('convert', '2 hours') > now() + interval '1 hour' AS extended;
SELECT named_unlock('convert');

-- A wait without a snapshot; not in a transaction block.
CALL named_lock_wait('wait', '1 s');
SELECT named_unlock('wait');
BEGIN;
CALL named_lock_wait('wait');
ROLLBACK;

-- PostgreSQL's own advisory locks, with a timeout.
SELECT advisory_lock(42, timeout => '1 s');
SELECT pg_advisory_unlock(42);
SELECT advisory_lock(1, 2, timeout => '0', mode => 'share');
SELECT pg_advisory_unlock_shared(1, 2);

-- No lock is left.
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
