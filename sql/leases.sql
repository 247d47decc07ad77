-- Leases: rows that outlive a connection, with a time to live and a fencing token.
--
-- The library reads and writes the table itself, not by SQL, so nobody needs rights on it. So much of each page is left free
-- that a renewal stays in its page, and so little that the server tidies the page when it comes by. Rows come and go
-- quickly: they are vacuumed by their number alone.
CREATE TABLE _lease (
    key bigint NOT NULL,
    token bigint NOT NULL,
    slot integer NOT NULL,
    permits integer NOT NULL,
    role oid NOT NULL,
    bound_pid integer NOT NULL,
    bound_session integer NOT NULL,
    kept boolean NOT NULL,
    ttl bigint NOT NULL,
    acquired_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    boot bigint NOT NULL,
    acquired_boot bigint NOT NULL,
    expires_boot bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    owner text NOT NULL,
    requested text,
    payload jsonb,
    for_token bigint,
    PRIMARY KEY (key, token)
) USING heap WITH (
    fillfactor = 95,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_cost_delay = 0
);
COMMENT ON TABLE _lease IS 'one row for each grant of a lease or order to its holder; read it through lock_holders';
COMMENT ON COLUMN _lease.key IS 'XXH3-64 of the name';
COMMENT ON COLUMN _lease.token IS 'the fencing token, higher than any before it; below zero, that of an order to a holder';
COMMENT ON COLUMN _lease.slot IS 'which of the permits it is, from 0';
COMMENT ON COLUMN _lease.permits IS 'how many grants the lease may have at once';
COMMENT ON COLUMN _lease.role IS 'the role that acquired it, or gave the order';
COMMENT ON COLUMN _lease.bound_pid IS 'the process whose session it ends with; 0 if with none';
COMMENT ON COLUMN _lease.bound_session IS 'tells that session from others of the same process number';
COMMENT ON COLUMN _lease.kept IS 'released, and kept from others until it expires; of an order, that it ends the grant';
COMMENT ON COLUMN _lease.ttl IS 'time to live, in microseconds';
COMMENT ON COLUMN _lease.acquired_at IS 'when it was granted, by the wall clock';
COMMENT ON COLUMN _lease.expires_at IS 'when it expires, by the wall clock of its grant or last renewal';
COMMENT ON COLUMN _lease.boot IS 'the boot of the machine that the next two are counted from; 0 if not known';
COMMENT ON COLUMN _lease.acquired_boot IS 'when it was granted, in microseconds since that boot';
COMMENT ON COLUMN _lease.expires_boot IS 'when it expires, in microseconds since that boot';
COMMENT ON COLUMN _lease.name IS 'the name';
COMMENT ON COLUMN _lease.owner IS 'who holds it, as the holder calls itself';
COMMENT ON COLUMN _lease.requested IS 'of an order, the reason for which somebody asks the holder to hand over';
COMMENT ON COLUMN _lease.payload IS 'what the holder wants others to know';
COMMENT ON COLUMN _lease.for_token IS 'of an order, the token of the grant that it is about';

-- epoch << 42 | counter. A sequence is not transactional: a token is used up even if its grant is rolled back. Each draw
-- is for as many tokens as the increment says, which is the library's.
CREATE SEQUENCE _lease_token INCREMENT 64 CACHE 1;
COMMENT ON SEQUENCE _lease_token IS 'the first of the fencing tokens drawn last';
-- Where the server's timeline is another one, tokens were handed out that this server does not know of.
CREATE SEQUENCE _lease_timeline MINVALUE 0 START 0 CACHE 1;
COMMENT ON SEQUENCE _lease_timeline IS 'the timeline on which the last fencing token was drawn';
-- A dump carries the token's floor, and no lease.
SELECT pg_catalog.pg_extension_config_dump('@extschema@._lease_token', '');

CREATE FUNCTION lease_acquire(
    name text,
    ttl interval,
    timeout interval DEFAULT '0',
    owner text DEFAULT NULL,
    payload jsonb DEFAULT NULL,
    permits integer DEFAULT 1,
    bound boolean DEFAULT false,
    OUT acquired boolean,
    OUT token bigint,
    OUT remaining interval,
    OUT expires_at timestamp with time zone,
    OUT holder text,
    OUT retry_after interval
)
RETURNS record
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_acquire_wrapper';
COMMENT ON FUNCTION lease_acquire(text, interval, interval, text, jsonb, integer, boolean) IS
    'takes a lease and returns its fencing token, or says who has it and when to try again';

CREATE PROCEDURE lease_acquire_wait(
    name text,
    ttl interval,
    timeout interval DEFAULT NULL,
    owner text DEFAULT NULL,
    payload jsonb DEFAULT NULL,
    permits integer DEFAULT 1,
    bound boolean DEFAULT false,
    INOUT token bigint DEFAULT NULL
)
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_acquire_wait_wrapper';
COMMENT ON PROCEDURE lease_acquire_wait(text, interval, interval, text, jsonb, integer, boolean, INOUT bigint) IS
    'takes a lease, holding no snapshot during the wait; token NULL when the timeout passed';

CREATE FUNCTION lease_renew(
    name text,
    token bigint,
    ttl interval DEFAULT NULL,
    payload jsonb DEFAULT NULL,
    OUT remaining interval,
    OUT expires_at timestamp with time zone,
    OUT release_requested text,
    OUT waiters integer
)
RETURNS record
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_renew_wrapper';
COMMENT ON FUNCTION lease_renew(text, bigint, interval, jsonb) IS
    'prolongs a lease from now on; 55006 when another holds it, 55000 when it has ended';

CREATE FUNCTION lease_release(name text, token bigint, keep_for interval DEFAULT NULL)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_release_wrapper';
COMMENT ON FUNCTION lease_release(text, bigint, interval) IS
    'ends a lease, or keeps it from others until keep_for after the grant; false if it had ended';

CREATE FUNCTION lease_check(name text, token bigint)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_check_wrapper';
COMMENT ON FUNCTION lease_check(text, bigint) IS 'whether a lease is held with that token now';

CREATE FUNCTION lease_guard(name text, token bigint)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_guard_wrapper';
COMMENT ON FUNCTION lease_guard(text, bigint) IS
    'fences writes: fails unless held, and nobody else is granted it before this transaction ends';

CREATE FUNCTION lease_request(name text, reason text DEFAULT NULL)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_request_wrapper';
COMMENT ON FUNCTION lease_request(text, text) IS
    'asks the holder to hand over: its next lease_renew() returns the reason; false if nobody holds it';

CREATE FUNCTION lease_break(name text)
RETURNS integer
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_break_wrapper';
COMMENT ON FUNCTION lease_break(text) IS
    'ends all grants of a lease, whoever has them; how many';

CREATE FUNCTION lease_holder(
    name text,
    OUT owner text,
    OUT payload jsonb,
    OUT acquired_at timestamp with time zone,
    OUT remaining interval,
    OUT expires_at timestamp with time zone,
    OUT permits integer
)
RETURNS SETOF record
VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1
LANGUAGE c AS 'MODULE_PATHNAME', 'lease_holder_wrapper';
COMMENT ON FUNCTION lease_holder(text) IS 'who holds a lease, a row for each permit taken; no row if it is free';
