-- What has happened, by domain: in shared memory since the server's start, or the last reset.

CREATE FUNCTION _lock_stats(
    OUT domain text,
    OUT database name,
    OUT grants bigint,
    OUT waits bigint,
    OUT timeouts bigint,
    OUT deadlocks bigint,
    OUT wait_time interval,
    OUT max_wait interval,
    OUT leases_granted bigint,
    OUT leases_taken_over bigint,
    OUT leases_expired bigint,
    OUT stats_reset timestamp with time zone
)
RETURNS SETOF record
VOLATILE PARALLEL UNSAFE COST 1000 ROWS 100
LANGUAGE c AS 'MODULE_PATHNAME', 'lock_stats_wrapper';
COMMENT ON FUNCTION _lock_stats() IS 'the rows of the view lock_stats';

CREATE VIEW lock_stats AS
SELECT
    s.domain,
    s.database,
    s.grants,
    s.waits,
    s.timeouts,
    s.deadlocks,
    s.wait_time,
    s.max_wait,
    s.leases_granted,
    s.leases_taken_over,
    s.leases_expired,
    s.stats_reset
FROM @extschema@._lock_stats() AS s;
COMMENT ON VIEW lock_stats IS 'what has happened to named locks and leases, by domain of names and database';
COMMENT ON COLUMN lock_stats.domain IS 'what stands before the first colon; NULL if hidden; (other): all that came after the first 1,024';
COMMENT ON COLUMN lock_stats.database IS 'the database in which the calls were made';
COMMENT ON COLUMN lock_stats.grants IS 'locks granted: holds, names of sets and trees, semaphore slots';
COMMENT ON COLUMN lock_stats.waits IS 'waits that have ended, for locks and leases that were not free at the first try';
COMMENT ON COLUMN lock_stats.timeouts IS 'those that their time limit ended: timeout, lock_timeout or the domain''s max_wait';
COMMENT ON COLUMN lock_stats.deadlocks IS 'those that a deadlock ended, with error 40P01 in this session';
COMMENT ON COLUMN lock_stats.wait_time IS 'how long all these waits were together, however they ended';
COMMENT ON COLUMN lock_stats.max_wait IS 'how long the longest of them was';
COMMENT ON COLUMN lock_stats.leases_granted IS 'grants of leases that were committed';
COMMENT ON COLUMN lock_stats.leases_taken_over IS 'those among them where the grant before had expired and nobody had released it';
COMMENT ON COLUMN lock_stats.leases_expired IS 'grants that had expired, with nobody to release them, and were cleared away';
COMMENT ON COLUMN lock_stats.stats_reset IS 'since when all this is counted';
GRANT SELECT ON lock_stats TO PUBLIC;

CREATE FUNCTION lock_stats_reset()
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lock_stats_reset_wrapper';
COMMENT ON FUNCTION lock_stats_reset() IS 'sets all of lock_stats to zero, in the whole server, and forgets the domains';
REVOKE EXECUTE ON FUNCTION lock_stats_reset() FROM PUBLIC;
