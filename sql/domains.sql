-- Rules for domains: who may lock names in one, how long a call may wait, how long a session may hold.
CREATE TABLE _lock_domain (
    domain text COLLATE "C" PRIMARY KEY CHECK (strpos(domain, ':') = 0 AND octet_length(domain) <= 1024),
    role regrole CHECK (role::oid <> 0),
    max_wait interval CHECK (max_wait >= '0' AND max_wait <= '24 days'),
    max_hold interval CHECK (max_hold >= '100 ms' AND max_hold <= '3650 days')
) USING heap;
COMMENT ON TABLE _lock_domain IS 'rules for the domains of names; changed by lock_domain_set() and lock_domain_drop()';
COMMENT ON COLUMN _lock_domain.domain IS 'what stands before the first colon of a name; empty for names without one';
COMMENT ON COLUMN _lock_domain.role IS 'only its members may lock names in the domain; NULL: anyone';
COMMENT ON COLUMN _lock_domain.max_wait IS 'no call waits longer for a name in the domain; NULL: no limit';
COMMENT ON COLUMN _lock_domain.max_hold IS 'the hold_limit of session locks that give none, and the longest hold_limit and TTL; NULL: no limit';
SELECT pg_catalog.pg_extension_config_dump('@extschema@._lock_domain', '');

CREATE FUNCTION _lock_domain_changed()
RETURNS trigger
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lock_domain_changed_wrapper';
COMMENT ON FUNCTION _lock_domain_changed() IS 'tells all sessions that the rules for domains have changed';
-- Nobody else is to make all sessions read the rules anew, by a trigger on a table of their own.
REVOKE EXECUTE ON FUNCTION _lock_domain_changed() FROM PUBLIC;

CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON _lock_domain
    FOR EACH STATEMENT EXECUTE FUNCTION @extschema@._lock_domain_changed();
COMMENT ON TRIGGER changed ON _lock_domain IS 'tells all sessions that the rules have changed';

CREATE FUNCTION lock_domain_set(
    domain text,
    role regrole DEFAULT NULL,
    max_wait interval DEFAULT NULL,
    max_hold interval DEFAULT NULL
)
RETURNS void
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lock_domain_set_wrapper';
COMMENT ON FUNCTION lock_domain_set(text, regrole, interval, interval) IS
    'makes the rules for a domain: whose members may use it, the longest wait, the longest hold and TTL';

CREATE FUNCTION lock_domain_drop(domain text)
RETURNS boolean
VOLATILE PARALLEL UNSAFE COST 1000
LANGUAGE c AS 'MODULE_PATHNAME', 'lock_domain_drop_wrapper';
COMMENT ON FUNCTION lock_domain_drop(text) IS
    'drops the rules for a domain, which is open to all then; false if there were none';

CREATE VIEW lock_domains AS
SELECT
    d.domain,
    d.role,
    d.max_wait,
    d.max_hold
FROM @extschema@._lock_domain AS d;
COMMENT ON VIEW lock_domains IS 'the rules for domains of names; a domain that is not listed is open to all';
COMMENT ON COLUMN lock_domains.domain IS 'what stands before the first colon of a name; empty for names without one';
COMMENT ON COLUMN lock_domains.role IS 'only its members may lock names in the domain; NULL: anyone';
COMMENT ON COLUMN lock_domains.max_wait IS 'no call waits longer for a name in the domain; NULL: no limit';
COMMENT ON COLUMN lock_domains.max_hold IS 'the hold_limit of session locks that give none, and the longest hold_limit and TTL; NULL: no limit';
GRANT SELECT ON lock_domains TO PUBLIC;
