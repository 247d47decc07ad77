-- Leases: they outlive the session that took them.
\set VERBOSITY sqlstate

SELECT acquired, token, remaining > '29 min' AS remains, holder
  FROM lease_acquire('import:orders', ttl => '30 min', owner => 'first', payload => '{"host": "a"}') \gset first_
SELECT :'first_acquired' AS acquired, :'first_remains' AS remains, :'first_holder' AS holder;
\connect -
\set VERBOSITY sqlstate
SELECT acquired, token, holder, retry_after > '29 min' AS later
  FROM lease_acquire('import:orders', ttl => '30 min', owner => 'second');
SELECT owner, payload, permits FROM lease_holder('import:orders');
SELECT kind, domain, name, state, owner, payload FROM lock_holders WHERE kind = 'lease';

-- Who has the token renews, is asked to hand over, guards its writes and releases.
SELECT lease_check('import:orders', :first_token), lease_check('import:orders', :first_token - 1);
SELECT lease_request('import:orders', 'upgrade');
SELECT remaining > '59 min' AS remains, release_requested, waiters
  FROM lease_renew('import:orders', :first_token, ttl => '1 hour');
BEGIN;
SELECT lease_guard('import:orders', :first_token);
COMMIT;
SELECT lease_release('import:orders', :first_token);
SELECT lease_release('import:orders', :first_token);
SELECT lease_guard('import:orders', :first_token);
SELECT lease_renew('import:orders', :first_token);

-- The next token is a higher one, and a rolled back grant is none.
BEGIN;
SELECT acquired FROM lease_acquire('import:orders', '1 hour');
ROLLBACK;
SELECT count(*) FROM lease_holder('import:orders');
CALL lease_acquire_wait('import:orders', '1 hour') \gset second_
SELECT :second_token > :first_token AS higher;
SELECT lease_guard('import:orders', :first_token);
SELECT lease_break('import:orders');

-- Kept from others for a while.
SELECT token FROM lease_acquire('cron', '10 min') \gset
SELECT lease_release('cron', :token, keep_for => '1 hour');
SELECT acquired, retry_after > '59 min' AS later FROM lease_acquire('cron', '10 min');
SELECT lease_break('cron');

-- Permits: each with a token of its own, and one number of them for all.
SELECT acquired FROM lease_acquire('api', '1 hour', permits => 2);
SELECT acquired FROM lease_acquire('api', '1 hour', permits => 2);
SELECT acquired FROM lease_acquire('api', '1 hour', permits => 2);
SELECT acquired FROM lease_acquire('api', '1 hour', permits => 3);
SELECT count(DISTINCT token) FROM lock_holders WHERE name = 'api';
SELECT lease_break('api');

SELECT count(*) FROM lock_holders WHERE kind = 'lease';
