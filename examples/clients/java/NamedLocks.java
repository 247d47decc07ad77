import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.FutureTask;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import javax.sql.DataSource;

/**
 * Named locks and leases by JDBC: to be lifted into a project as it is.
 *
 * <ul>
 *   <li>{@link #withLock} one of many processes at a time, for as long as its connection lives: short work, migrations
 *   <li>{@link #xactLock} the same, to the end of a transaction: the check and the writes that hang on it
 *   <li>{@link #withLease} work that outlives a connection, or goes through a transaction pooler; its writes by {@link
 *       Lease#transaction}
 * </ul>
 *
 * What a caller should be ready for are the exceptions below. All else is passed on as an SQLException with its SQLSTATE, of
 * which 40P01 (deadlock) may be tried again; 42501 (not allowed), 22023 (an argument), 0A000 (a session lock behind a
 * transaction pooler) and 25006 (a standby) are for people.
 *
 * Durations reach the server as text that it casts (?::interval); null stays NULL. A token is a bigint, and a long.
 */
public final class NamedLocks {
    /** Somebody else has the lock; the detail says who. */
    public static final class LockTimeout extends Exception {
        private static final long serialVersionUID = 1;
        public final String detail;

        LockTimeout(String name, SQLException cause) {
            super("lock " + name + " is not to be had", cause);
            detail = cause instanceof org.postgresql.util.PSQLException error && error.getServerErrorMessage() != null
                    ? error.getServerErrorMessage().getDetail()
                    : null;
        }
    }

    /** The connection is gone, and the lock with it, before it was given back. */
    public static final class LockLost extends Exception {
        private static final long serialVersionUID = 1;

        LockLost(String name, SQLException cause) {
            super("lock " + name + " is lost", cause);
        }
    }

    /** Somebody else has the lease, and until when at most if it is not renewed. */
    public static final class LeaseTaken extends Exception {
        private static final long serialVersionUID = 1;
        public final String holder;
        public final Duration retryAfter;

        LeaseTaken(String name, String holder, Duration retryAfter) {
            super("lease " + name + " is held by " + (holder != null ? holder : "somebody else"));
            this.holder = holder;
            this.retryAfter = retryAfter;
        }
    }

    /** The lease has expired, was broken or is another's: write nothing more. No SQLSTATE if only our clock says so. */
    public static final class LeaseLost extends Exception {
        private static final long serialVersionUID = 1;
        public final String sqlState;

        LeaseLost(String name, SQLException cause) {
            super("lease " + name + " is lost", cause);
            sqlState = cause != null ? cause.getSQLState() : null;
        }
    }

    /** Work on a connection. */
    public interface Work<T> {
        T run(Connection connection) throws Exception;
    }

    /** Work under a lease. */
    public interface LeaseWork<T> {
        T run(Lease lease) throws Exception;
    }

    private static final String LOCK_NOT_AVAILABLE = "55P03";
    private static final Set<String> LEASE_IS_LOST = Set.of("55000", "55006");

    private final DataSource dataSource;

    public NamedLocks(DataSource dataSource) {
        this.dataSource = dataSource;
    }

    /**
     * Runs work while holding a lock, and returns what it returns.
     *
     * The timeout: zero is one try, null waits as the server would. An interrupt of the thread ends the waiting.
     *
     * The lock is the connection's, taken from the pool for the whole time. Work should use it rather than ask the pool for a
     * second one, for which all those who wait here might have to end first. If the connection is lost, so is the lock: work
     * gets an SQLException at its next statement, or this method throws LockLost. A connection that may still hold
     * the lock is not given back to the pool but closed: then the server lets go of it.
     */
    public <T> T withLock(String name, Duration timeout, Work<T> work) throws Exception {
        try (Connection connection = dataSource.getConnection()) {
            boolean reusable = false;
            try (PreparedStatement lock = connection.prepareStatement("SELECT named_lock_strict(?, ?::interval)");
                    PreparedStatement unlock = connection.prepareStatement("SELECT named_unlock(?)")) {
                lock.setString(1, name);
                lock.setString(2, interval(timeout));
                unlock.setString(1, name);
                try {
                    executeInterruptibly(lock);
                } catch (SQLException error) {
                    if (!LOCK_NOT_AVAILABLE.equals(error.getSQLState())) throw error;
                    reusable = true;
                    throw new LockTimeout(name, error);
                }
                T result;
                try {
                    result = work.run(connection);
                } catch (Throwable thrown) {
                    try {
                        unlock.execute();
                        reusable = true;
                    } catch (SQLException error) {
                        thrown.addSuppressed(error);
                    }
                    throw thrown;
                }
                try {
                    unlock.execute();
                } catch (SQLException error) {
                    throw new LockLost(name, error);
                }
                reusable = true;
                return result;
            } finally {
                if (!reusable) connection.abort(Runnable::run); // a pool throws it away then
            }
        }
    }

    /**
     * Takes a lock to the end of the connection's transaction; false if the timeout passed.
     *
     * After false the transaction is alive and may do something else. Only true is to be trusted: check it.
     */
    public static boolean xactLock(Connection connection, String name, Duration timeout) throws SQLException {
        try (PreparedStatement lock = connection.prepareStatement("SELECT named_xact_lock(?, ?::interval)")) {
            lock.setString(1, name);
            lock.setString(2, interval(timeout));
            try (ResultSet row = lock.executeQuery()) {
                row.next();
                return row.getBoolean(1);
            }
        }
    }

    /** Runs work in a transaction on a connection of its own. */
    public <T> T transaction(Work<T> work) throws Exception {
        try (Connection connection = dataSource.getConnection()) {
            connection.setAutoCommit(false);
            try {
                T result = work.run(connection);
                connection.commit();
                connection.setAutoCommit(true);
                return result;
            } catch (Throwable thrown) {
                try {
                    connection.rollback();
                    connection.setAutoCommit(true);
                } catch (SQLException error) {
                    connection.abort(Runnable::run);
                    thrown.addSuppressed(error);
                }
                throw thrown;
            }
        }
    }

    /**
     * Runs work while holding a lease, and returns what it returns.
     *
     * The TTL is how long others are kept out after this process was last heard of; the timeout, how long to wait for the
     * lease (zero: one try, null: as long as it takes).
     *
     * It is renewed in the background at a third of the TTL, so that one renewal may fail. When it is lost, the thread that
     * works is interrupted and LeaseLost is thrown in place of what work throws. What a late one still writes by {@link
     * Lease#transaction} is refused. Nothing here stays with one connection; the pool should have one to spare for
     * the renewals, and a socketTimeout.
     */
    public <T> T withLease(String name, Duration ttl, Duration timeout, LeaseWork<T> work) throws Exception {
        long sent = System.nanoTime(); // the server counts from a little later on
        Lease lease = acquire(name, ttl, timeout, sent);
        ScheduledExecutorService background = Executors.newScheduledThreadPool(2, NamedLocks::daemon);
        try {
            // Had it to wait, then part of the TTL, as we count it, is over: count anew.
            if (System.nanoTime() - sent > ttl.toNanos() / 3) lease.renew();
            // Two threads: that the time is over is noticed while a renewal hangs.
            long third = ttl.toNanos() / 3;
            background.scheduleWithFixedDelay(lease::renewWhenDue, 0, third / 10, TimeUnit.NANOSECONDS);
            background.scheduleWithFixedDelay(lease::watchClock, 0, third / 10, TimeUnit.NANOSECONDS);
            return work.run(lease);
        } finally {
            background.shutdownNow();
            lease.end(); // throws LeaseLost, if it is lost
        }
    }

    private Lease acquire(String name, Duration ttl, Duration timeout, long sent) throws Exception {
        String query = "SELECT acquired, token, holder, extract(epoch FROM retry_after) * 1000 AS retry_after"
                + " FROM lease_acquire(?, ?::interval, ?::interval)";
        try (Connection connection = dataSource.getConnection();
                PreparedStatement acquire = connection.prepareStatement(query)) {
            acquire.setString(1, name);
            acquire.setString(2, interval(ttl));
            acquire.setString(3, interval(timeout));
            try (ResultSet row = acquire.executeQuery()) {
                row.next();
                if (!row.getBoolean("acquired")) {
                    Duration retryAfter = Duration.ofMillis(row.getLong("retry_after"));
                    throw new LeaseTaken(name, row.getString("holder"), retryAfter);
                }
                // getLong makes 0 of NULL, which a token is if it was not acquired.
                return new Lease(name, row.getLong("token"), ttl, sent, Thread.currentThread());
            }
        }
    }

    /** A lease that is held, as far as is known here. */
    public final class Lease {
        public final String name;
        public final long token;
        private final long ttl;
        private final Thread worker;
        private long sent;
        private LeaseLost lost;
        private boolean ended;

        private Lease(String name, long token, Duration ttl, long sent, Thread worker) {
            this.name = name;
            this.token = token;
            this.ttl = ttl.toNanos();
            this.sent = sent;
            this.worker = worker;
        }

        /** Runs work in a transaction that commits only while the lease is held. */
        public <T> T transaction(Work<T> work) throws Exception {
            return NamedLocks.this.transaction(connection -> {
                try (PreparedStatement guard = connection.prepareStatement("SELECT lease_guard(?, ?)")) {
                    guard.setString(1, name);
                    guard.setLong(2, token);
                    guard.execute();
                } catch (SQLException error) {
                    if (LEASE_IS_LOST.contains(error.getSQLState())) throw lose(error);
                    throw error;
                }
                return work.run(connection);
            });
        }

        private void renewWhenDue() {
            if (age() < ttl / 3) return;
            try {
                renew();
            } catch (LeaseLost error) {
                // the worker knows
            } catch (SQLException error) {
                // a connection lost, a server starting: the TTL is not over yet
            }
        }

        private void renew() throws SQLException, LeaseLost {
            long now = System.nanoTime();
            try (Connection connection = dataSource.getConnection();
                    PreparedStatement renew = connection.prepareStatement("SELECT lease_renew(?, ?)")) {
                renew.setString(1, name);
                renew.setLong(2, token);
                renew.execute();
                synchronized (this) {
                    sent = now;
                }
            } catch (SQLException error) {
                if (LEASE_IS_LOST.contains(error.getSQLState())) throw lose(error);
                throw error;
            }
        }

        private void watchClock() {
            if (age() > ttl) lose(null);
        }

        private synchronized long age() {
            return System.nanoTime() - sent;
        }

        private synchronized LeaseLost lose(SQLException cause) {
            if (lost == null && !ended) {
                lost = new LeaseLost(name, cause);
                worker.interrupt();
            }
            return lost != null ? lost : new LeaseLost(name, cause);
        }

        private void end() throws LeaseLost {
            synchronized (this) {
                ended = true;
                if (lost != null) {
                    Thread.interrupted(); // that was ours
                    throw lost;
                }
            }
            try (Connection connection = dataSource.getConnection();
                    PreparedStatement release = connection.prepareStatement("SELECT lease_release(?, ?)")) {
                release.setString(1, name);
                release.setLong(2, token);
                release.execute();
            } catch (SQLException error) {
                // it expires by itself
            }
        }
    }

    /**
     * Executes a statement that waits; an interrupt cancels it.
     *
     * Closing the connection would not do: the server looks for its client only when the wait is over. A cancel may
     * come before the statement has begun: so it is sent again.
     */
    private static void executeInterruptibly(PreparedStatement statement) throws SQLException, InterruptedException {
        FutureTask<Boolean> execution = new FutureTask<>(statement::execute);
        daemon(execution).start();
        try {
            execution.get();
        } catch (ExecutionException error) {
            if (error.getCause() instanceof SQLException cause) throw cause;
            throw new IllegalStateException(error.getCause());
        } catch (InterruptedException interrupted) {
            cancel(statement, execution);
            throw interrupted;
        }
    }

    private static void cancel(Statement statement, FutureTask<?> execution) throws InterruptedException, SQLException {
        while (!execution.isDone()) {
            statement.cancel();
            try {
                execution.get(50, TimeUnit.MILLISECONDS);
            } catch (ExecutionException | TimeoutException again) {
                // looked at above
            }
        }
    }

    private static Thread daemon(Runnable task) {
        Thread thread = new Thread(task, "named locks");
        thread.setDaemon(true);
        return thread;
    }

    private static String interval(Duration duration) {
        return duration == null ? null : duration.toMillis() + " milliseconds";
    }
}
