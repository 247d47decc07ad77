"use strict";

/**
 * Named locks and leases from node-postgres: to be lifted into a project as it is.
 *
 * withLock()   one of many processes at a time, for as long as its connection lives: short work, migrations
 * xactLock()   the same, to the end of a transaction: the check and the writes that hang on it
 * withLease()  work that outlives a connection, or goes through a transaction pooler; its writes by lease.transaction()
 *
 * What a caller should be ready for are the classes of errors below. All else is passed on as pg's DatabaseError with its
 * `code`, of which 40P01 (deadlock) may be tried again; 42501 (not allowed), 22023 (an argument), 0A000 (a session lock
 * behind a transaction pooler) and 25006 (a standby) are for people.
 *
 * Times are milliseconds and reach the server as text that it casts ($2::interval); null stays NULL. A token is a bigint:
 * pg gives it as a string, and a string it stays, as a Number has 53 bits only. Compare tokens as BigInt(token).
 */

/** Somebody else has the lock; `detail` says who. */
class LockTimeout extends Error {
  name = "LockTimeout";

  constructor(lock, cause) {
    super(`lock ${lock} is not to be had`, { cause });
    this.detail = cause?.detail ?? null;
  }
}

/** The connection is gone, and the lock with it, before it was given back. */
class LockLost extends Error {
  name = "LockLost";
}

/** Somebody else has the lease: `holder`, and in how many milliseconds it may be free. */
class LeaseTaken extends Error {
  name = "LeaseTaken";

  constructor(lease, holder, retryAfter) {
    super(`lease ${lease} is held by ${holder ?? "somebody else"}`);
    this.holder = holder;
    this.retryAfter = retryAfter;
  }
}

/** The lease has expired, was broken or is another's: write nothing more. No `code` if only our clock says so. */
class LeaseLost extends Error {
  name = "LeaseLost";

  constructor(lease, cause) {
    super(`lease ${lease} is lost`, { cause });
    this.code = cause?.code ?? null;
  }
}

const LOCK_NOT_AVAILABLE = "55P03";
const LEASE_IS_LOST = ["55000", "55006"];

/**
 * Runs `work(client, lost)` while holding a lock, and returns what it returns.
 *
 * `timeout` is in milliseconds: 0 is one try, null waits as the server would. `signal` ends the waiting.
 *
 * The lock is the connection's: `client` is taken from the pool for the whole time, and work should use it rather than ask
 * the pool for a second one, for which all those who wait here might have to end first. If the connection is lost, so is
 * the lock: `lost`, a signal too, is aborted then. A connection that may still hold the lock is not given back to the pool
 * but closed: then the server lets go of it.
 */
async function withLock(pool, name, timeout, work, { signal } = {}) {
  signal?.throwIfAborted();
  const client = await pool.connect();
  const lost = new AbortController();
  // Without a listener, a connection that is lost while nothing is asked of it would end the process.
  const onError = (error) => lost.abort(new LockLost(`lock ${name} is lost`, { cause: error }));
  client.on("error", onError);
  let reusable = false;
  try {
    try {
      const lock = "SELECT named_lock_strict($1, $2::interval)";
      await cancellable(pool, client, signal, lock, [name, interval(timeout)]);
    } catch (error) {
      throw error.code === LOCK_NOT_AVAILABLE ? new LockTimeout(name, error) : error;
    }
    const unlock = () => client.query("SELECT named_unlock($1)", [name]);
    let result;
    try {
      result = await work(client, lost.signal);
    } catch (error) {
      reusable = await unlock().then(() => true, () => false);
      throw error;
    }
    await unlock().catch((error) => {
      throw new LockLost(`lock ${name} is lost`, { cause: error });
    });
    reusable = true;
    return result;
  } catch (error) {
    reusable ||= error instanceof LockTimeout;
    throw error;
  } finally {
    client.removeListener("error", onError);
    client.release(!reusable);
  }
}

/**
 * Takes a lock to the end of the transaction that `client` is in; false if the timeout passed.
 *
 * After false the transaction is alive and may do something else. Only true is to be trusted: check it.
 */
async function xactLock(client, name, timeout) {
  const { rows } = await client.query("SELECT named_xact_lock($1, $2::interval) AS locked", [name, interval(timeout)]);
  return rows[0].locked;
}

/** Runs `work(client)` in a transaction on a connection of its own. */
async function transaction(pool, work) {
  const client = await pool.connect();
  const ignore = () => {}; // a lost connection: the next statement says so
  client.on("error", ignore);
  let broken = true;
  try {
    await client.query("BEGIN");
    try {
      const result = await work(client);
      await client.query("COMMIT");
      broken = false;
      return result;
    } catch (error) {
      await client.query("ROLLBACK").then(() => (broken = false), () => {});
      throw error;
    }
  } finally {
    client.removeListener("error", ignore);
    client.release(broken);
  }
}

/**
 * Runs `work(lease)` while holding a lease, and returns what it returns.
 *
 * `ttl` is how long others are kept out after this process was last heard of, `timeout` how long to wait for the lease
 * (0: one try, null: for as long as it takes).
 *
 * It is renewed in the background at a third of the TTL, so that one renewal may fail. When it is lost, `lease.signal`
 * is aborted with a LeaseLost: work should stop then. What a late one still writes by `lease.transaction()` is refused.
 * Nothing here stays with one connection; the pool should have one to spare for the renewals.
 */
async function withLease(pool, name, ttl, work, { timeout = 0 } = {}) {
  const sent = performance.now(); // the server counts from a little later on
  const { rows } = await pool.query(
    `SELECT acquired, token, holder, extract(epoch FROM retry_after)::float8 * 1000 AS retry_after
       FROM lease_acquire($1, $2::interval, $3::interval)`,
    [name, interval(ttl), interval(timeout)],
  );
  const [{ acquired, token, holder, retry_after: retryAfter }] = rows;
  if (!acquired) throw new LeaseTaken(name, holder, retryAfter);

  const lost = new AbortController();
  const lose = (cause) => lost.abort(new LeaseLost(name, cause));
  let deadline = setTimeout(lose, ttl);
  let renewal;
  let renewing;
  const plan = (delay) => {
    if (!lost.signal.aborted) renewal = setTimeout(() => (renewing = renew()), delay);
  };
  const heldSince = (at) => {
    clearTimeout(deadline);
    deadline = setTimeout(lose, at + ttl - performance.now());
    plan(at + ttl / 3 - performance.now());
  };
  const renew = async () => {
    const at = performance.now();
    try {
      await pool.query("SELECT lease_renew($1, $2)", [name, token]);
      heldSince(at);
    } catch (error) {
      if (LEASE_IS_LOST.includes(error.code)) lose(error);
      else plan(ttl / 10); // a connection lost, a server starting: the TTL is not over yet
    }
  };
  const lease = {
    name,
    token,
    signal: lost.signal,
    /** Runs `work(client)` in a transaction that commits only while the lease is held. */
    transaction: (inside) =>
      transaction(pool, async (client) => {
        try {
          await client.query("SELECT lease_guard($1, $2)", [name, token]);
        } catch (error) {
          if (!LEASE_IS_LOST.includes(error.code)) throw error;
          lose(error);
          throw lost.signal.reason;
        }
        return inside(client);
      }),
  };
  try {
    // Had it to wait, then part of the TTL, as we count it, is over: count anew.
    if (performance.now() - sent < ttl / 3) heldSince(sent);
    else await renew();
    lost.signal.throwIfAborted();
    const result = await work(lease);
    lost.signal.throwIfAborted();
    return result;
  } finally {
    clearTimeout(renewal);
    await renewing; // it may have planned another
    clearTimeout(renewal);
    clearTimeout(deadline);
    // If this fails it expires by itself.
    if (!lost.signal.aborted) await pool.query("SELECT lease_release($1, $2)", [name, token]).catch(() => {});
  }
}

/**
 * Runs a statement that waits, on `client`; the signal ends it, by a cancel from a connection of its own: those of the pool
 * may all be waiting.
 *
 * Closing the connection would not do: the server looks for its client only when the wait is over. A cancel may come
 * before the statement has begun, or when it is over: so it is sent again, and the caller closes the connection.
 */
async function cancellable(pool, client, signal, text, values) {
  if (!signal) return client.query(text, values);
  const { rows } = await client.query("SELECT pg_backend_pid() AS pid"); // client.processID may be a pooler's
  signal.throwIfAborted();
  let over = false;
  const cancel = async () => {
    const canceller = new pool.Client(pool.options);
    canceller.on("error", () => {});
    await canceller.connect().catch(() => {});
    while (!over) {
      await canceller.query("SELECT pg_cancel_backend($1)", [rows[0].pid]).catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    await canceller.end().catch(() => {});
  };
  signal.addEventListener("abort", cancel, { once: true });
  try {
    const result = await client.query(text, values);
    signal.throwIfAborted();
    return result;
  } catch (error) {
    throw signal.aborted ? signal.reason : error;
  } finally {
    over = true;
    signal.removeEventListener("abort", cancel);
  }
}

function interval(milliseconds) {
  return milliseconds === null ? null : `${milliseconds} milliseconds`;
}

module.exports = { withLock, xactLock, transaction, withLease, LockTimeout, LockLost, LeaseTaken, LeaseLost };
