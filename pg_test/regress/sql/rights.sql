-- Rules for domains, and what other roles may do.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
DROP ROLE IF EXISTS regress_named_locks_operator, regress_named_locks_app;
RESET client_min_messages;
CREATE ROLE regress_named_locks_operator;
CREATE ROLE regress_named_locks_app;

SELECT lock_domain_set('deploy', role => 'regress_named_locks_operator', max_wait => '10 s', max_hold => '5 min');
SELECT * FROM lock_domains;

SET ROLE regress_named_locks_app;
SELECT named_lock('deploy:site');
SELECT lease_acquire('deploy:site', '1 min');
SELECT named_lock('report:daily');
SELECT lock_domain_drop('deploy');
SELECT lock_stats_reset();
SELECT named_unlock('report:daily');

SET ROLE regress_named_locks_operator;
SELECT named_lock('deploy:site');
SELECT hold_limit FROM lock_holders WHERE pid = pg_backend_pid();
SELECT named_lock('deploy:site', hold_limit => '1 hour');
SELECT lease_acquire('deploy:site', '1 hour');
SELECT named_unlock('deploy:site');
SELECT token FROM lease_acquire('deploy:site', '1 min') \gset

-- The token alone is not enough: a lease belongs to the role that acquired it.
RESET ROLE;
SELECT lock_domain_drop('deploy');
SET ROLE regress_named_locks_app;
SELECT lease_release('deploy:site', :token);
SELECT lease_break('deploy:site');
RESET ROLE;
SELECT lease_break('deploy:site');

DROP ROLE regress_named_locks_operator, regress_named_locks_app;
