-- Who holds and who waits. The lock manager is the truth, and for leases the newest committed rows: each row was granted
-- (or queued) when the view was read.
-- No table is joined: its relation lock could not be had when the server's lock table is full, which is when one looks.

CREATE FUNCTION _lock_holders(
    OUT kind text,
    OUT domain text,
    OUT name text,
    OUT mode text,
    OUT holds integer,
    OUT pid integer,
    OUT usesysid oid,
    OUT application_name text,
    OUT client_addr inet,
    OUT state text,
    OUT acquired_at timestamp with time zone,
    OUT hold_limit interval,
    OUT expires_at timestamp with time zone,
    OUT remaining interval,
    OUT token bigint,
    OUT owner text,
    OUT payload jsonb,
    OUT waiters integer,
    OUT database name,
    OUT prepared xid,
    OUT classid oid,
    OUT objid oid,
    OUT objsubid smallint
)
RETURNS SETOF record
VOLATILE PARALLEL UNSAFE COST 1000 ROWS 100
LANGUAGE c AS 'MODULE_PATHNAME', 'lock_holders_wrapper';
COMMENT ON FUNCTION _lock_holders() IS 'the rows of the view lock_holders';

CREATE VIEW lock_holders AS
SELECT
    h.kind,
    h.domain,
    h.name,
    h.mode::@extschema@.named_lock_mode AS mode,
    h.holds,
    h.pid,
    pg_catalog.pg_get_userbyid(h.usesysid) AS usename,
    h.application_name,
    h.client_addr,
    h.state,
    h.acquired_at,
    pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) h.acquired_at AS held_for,
    h.hold_limit,
    h.expires_at,
    h.remaining,
    h.token,
    h.owner,
    h.payload,
    h.waiters,
    h.database,
    p.gid,
    h.classid,
    h.objid,
    h.objsubid
FROM @extschema@._lock_holders() AS h
LEFT JOIN pg_catalog.pg_prepared_xact() AS p ON p.transaction OPERATOR(pg_catalog.=) h.prepared;
COMMENT ON VIEW lock_holders IS 'who holds locks: named and native advisory ones, slots of semaphores, leases of this database';
COMMENT ON COLUMN lock_holders.kind IS 'session, transaction, semaphore, lease, or advisory (a native advisory lock)';
COMMENT ON COLUMN lock_holders.domain IS 'what stands before the first colon of the name';
COMMENT ON COLUMN lock_holders.name IS 'the name; NULL if hidden, and for a prepared transaction after a restart';
COMMENT ON COLUMN lock_holders.mode IS 'the mode in which it is held; NULL for leases';
COMMENT ON COLUMN lock_holders.holds IS 'how often it was taken and not given back; NULL for native advisory locks and leases';
COMMENT ON COLUMN lock_holders.pid IS 'the session''s process; NULL for a prepared transaction and a lease that is not bound';
COMMENT ON COLUMN lock_holders.usename IS 'the session''s role; of a lease, the role that acquired it';
COMMENT ON COLUMN lock_holders.application_name IS 'the session''s application_name';
COMMENT ON COLUMN lock_holders.client_addr IS 'where its client connects from; NULL for a Unix socket, or without the right to see it';
COMMENT ON COLUMN lock_holders.state IS 'as in pg_stat_activity; prepared for a prepared transaction; held or kept for a lease';
COMMENT ON COLUMN lock_holders.acquired_at IS 'since when it is held; NULL where only the server knows of the lock';
COMMENT ON COLUMN lock_holders.held_for IS 'for how long it has been held';
COMMENT ON COLUMN lock_holders.hold_limit IS 'the limit that ends the session when overrun';
COMMENT ON COLUMN lock_holders.expires_at IS 'when that limit is reached, or the lease ends by the wall clock of its last renewal';
COMMENT ON COLUMN lock_holders.remaining IS 'how long is left until then';
COMMENT ON COLUMN lock_holders.token IS 'the fencing token of a lease; NULL but for members of the role that acquired it';
COMMENT ON COLUMN lock_holders.owner IS 'the owner of a lease';
COMMENT ON COLUMN lock_holders.payload IS 'the payload of a lease';
COMMENT ON COLUMN lock_holders.waiters IS 'how many sessions wait for this lock, or for any slot of the semaphore';
COMMENT ON COLUMN lock_holders.database IS 'the database the lock is in; NULL when it is cluster-wide';
COMMENT ON COLUMN lock_holders.gid IS 'the identifier of the prepared transaction that holds it';
COMMENT ON COLUMN lock_holders.classid IS 'as in pg_locks';
COMMENT ON COLUMN lock_holders.objid IS 'as in pg_locks';
COMMENT ON COLUMN lock_holders.objsubid IS 'as in pg_locks; of a slot, (objsubid & 2047) + 1 is its number';

CREATE FUNCTION _lock_waiters(
    OUT kind text,
    OUT domain text,
    OUT name text,
    OUT mode text,
    OUT pid integer,
    OUT usesysid oid,
    OUT application_name text,
    OUT wait_started timestamp with time zone,
    OUT deadline timestamp with time zone,
    OUT queue_position integer,
    OUT blocked_by integer[]
)
RETURNS SETOF record
VOLATILE PARALLEL UNSAFE COST 1000 ROWS 10
LANGUAGE c AS 'MODULE_PATHNAME', 'lock_waiters_wrapper';
COMMENT ON FUNCTION _lock_waiters() IS 'the rows of the view lock_waiters';

CREATE VIEW lock_waiters AS
SELECT
    w.kind,
    w.domain,
    w.name,
    w.mode::@extschema@.named_lock_mode AS mode,
    w.pid,
    pg_catalog.pg_get_userbyid(w.usesysid) AS usename,
    w.application_name,
    w.wait_started,
    pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) w.wait_started AS waited,
    w.deadline,
    w.queue_position,
    w.blocked_by
FROM @extschema@._lock_waiters() AS w;
COMMENT ON VIEW lock_waiters IS 'who waits: for named and native advisory locks, semaphores and leases';
COMMENT ON COLUMN lock_waiters.kind IS 'session, transaction, semaphore, lease, or advisory (a native advisory lock)';
COMMENT ON COLUMN lock_waiters.domain IS 'what stands before the first colon of the name';
COMMENT ON COLUMN lock_waiters.name IS 'the name; NULL if hidden';
COMMENT ON COLUMN lock_waiters.mode IS 'the mode asked for; NULL for leases';
COMMENT ON COLUMN lock_waiters.pid IS 'the waiting session''s process';
COMMENT ON COLUMN lock_waiters.usename IS 'its role';
COMMENT ON COLUMN lock_waiters.application_name IS 'its application_name';
COMMENT ON COLUMN lock_waiters.wait_started IS 'since when it waits';
COMMENT ON COLUMN lock_waiters.waited IS 'for how long it has waited';
COMMENT ON COLUMN lock_waiters.deadline IS 'when its timeout ends the wait; NULL without one';
COMMENT ON COLUMN lock_waiters.queue_position IS 'its place in the queue for that lock, from 1';
COMMENT ON COLUMN lock_waiters.blocked_by IS 'the processes it waits for, as pg_blocking_pids() tells';

CREATE FUNCTION lock_graph()
RETURNS text
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lock_graph_wrapper';
COMMENT ON FUNCTION lock_graph() IS 'who waits for whom, as the text of a Mermaid flowchart';

GRANT SELECT ON lock_holders, lock_waiters TO PUBLIC;
