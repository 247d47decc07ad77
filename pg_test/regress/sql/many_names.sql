-- Sets, trees and semaphores.
\set VERBOSITY sqlstate

-- All or none; and those that are free, in the array's order.
SELECT named_lock_all(ARRAY['b', 'a', 'b'], '0');
SELECT named_lock_held('a'), named_lock_held('b');
SELECT named_lock_any(ARRAY['c', 'a', 'd', 'e'], max_locks => 2);
SELECT named_unlock_all();
SELECT named_lock_all('{}');
SELECT named_lock_all(ARRAY['a', NULL]);
SELECT named_lock_any(ARRAY['a'], max_locks => 0);
BEGIN;
SELECT named_xact_lock_all(ARRAY['a', 'b']), named_xact_lock_any(ARRAY['c']);
COMMIT;
SELECT named_lock_held('a');

-- A path is locked as asked for, and what is above it in an intent mode.
SELECT named_lock_tree('tenant/42/orders');
SELECT name, mode FROM lock_holders WHERE pid = pg_backend_pid() ORDER BY name COLLATE "C";
SELECT named_unlock_tree('tenant/42/orders');
SELECT named_unlock_tree('tenant/42/orders');
SELECT named_lock_tree('tenant//42');

-- Slots of a semaphore.
SELECT named_semaphore('api', permits => 2), named_semaphore('api', permits => 2);
SELECT named_semaphore('api', permits => 2, timeout => '0');
SELECT named_semaphore_release('api', 1);
SELECT named_semaphore('api', permits => 2, timeout => '0');
SELECT named_semaphore_release('api', 3);
SELECT named_unlock_all();

SELECT count(*) FROM lock_holders WHERE pid = pg_backend_pid();
