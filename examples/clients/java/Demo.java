import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import org.postgresql.ds.PGSimpleDataSource;

/**
 * Shows NamedLocks at work, on the server of DATABASE_URL (jdbc:postgresql:...). Answers are lines of JSON.
 *
 * <pre>
 *   java Demo count LOCK TASKS ROUNDS       tasks count in the table counter, each round under the lock
 *   java Demo count-xact LOCK TASKS ROUNDS  the same under a lock to the end of a transaction
 *   java Demo hold LOCK [TIMEOUT_MS]        takes the lock and holds it; a line of input ends the holding or the waiting
 *   java Demo lease NAME TTL_MS             holds a lease and writes to the table written at each line of input
 * </pre>
 *
 * Ends with its input. Exit code: 0 done, 3 lock or lease not to be had, 4 lost, 5 waiting cancelled.
 */
public final class Demo {
    // Lines of input; empty: its end.
    private final BlockingQueue<Optional<String>> input = new LinkedBlockingQueue<>();
    private final NamedLocks locks;

    private Demo() {
        // In a program of weight a pool, such as HikariCP.
        PGSimpleDataSource dataSource = new PGSimpleDataSource();
        dataSource.setUrl(System.getenv("DATABASE_URL"));
        dataSource.setTcpKeepAlive(true);
        locks = new NamedLocks(dataSource);
    }

    // Not atomic: two at once would lose a step.
    private static Void count(Connection connection) throws Exception {
        try (Statement read = connection.createStatement();
                PreparedStatement write = connection.prepareStatement("UPDATE counter SET value = ?")) {
            int value;
            try (ResultSet row = read.executeQuery("SELECT value FROM counter")) {
                row.next();
                value = row.getInt(1);
            }
            Thread.sleep(2);
            write.setInt(1, value + 1);
            write.execute();
        }
        return null;
    }

    private Void countInTransaction(String name) throws Exception {
        return locks.transaction(connection -> {
            if (!NamedLocks.xactLock(connection, name, Duration.ofMinutes(1))) {
                throw new IllegalStateException("no lock within a minute");
            }
            return count(connection);
        });
    }

    private static void countInTasks(int tasks, int rounds, Callable<Void> step) throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(tasks);
        List<Future<?>> running = new ArrayList<>();
        for (int task = 0; task < tasks; task++) {
            running.add(threads.submit(() -> {
                for (int round = 0; round < rounds; round++) step.call();
                return null;
            }));
        }
        threads.shutdown();
        for (Future<?> task : running) task.get();
        tell("counted");
    }

    private void hold(String name, Duration timeout) throws Exception {
        // While this thread waits for the lock, another looks for the line that cancels.
        Thread waiting = Thread.currentThread();
        Thread canceller = new Thread(() -> {
            try {
                input.take();
                waiting.interrupt();
            } catch (InterruptedException locked) {
                // too late to cancel
            }
        });
        canceller.start();
        try {
            locks.withLock(name, timeout, connection -> {
                canceller.interrupt();
                canceller.join();
                tell("held");
                input.take();
                return null;
            });
        } finally {
            canceller.interrupt();
        }
        tell("released");
    }

    private void workUnderLease(String name, Duration ttl) throws Exception {
        locks.withLease(name, ttl, Duration.ZERO, lease -> {
            tell("acquired", "token", quoted(Long.toString(lease.token)));
            while (input.take().isPresent()) {
                lease.transaction(connection -> insert(connection, lease.token));
                tell("written");
            }
            return null;
        });
        tell("released");
    }

    private static Void insert(Connection connection, long token) throws SQLException {
        try (PreparedStatement insert = connection.prepareStatement("INSERT INTO written VALUES (?)")) {
            insert.setLong(1, token);
            insert.execute();
        }
        return null;
    }

    private void readInput() {
        try (BufferedReader lines = new BufferedReader(new InputStreamReader(System.in))) {
            for (String line; (line = lines.readLine()) != null; ) input.add(Optional.of(line));
        } catch (IOException ended) {
            // as good as its end
        }
        input.add(Optional.empty());
    }

    private int run(String[] args) throws Exception {
        Thread reader = new Thread(this::readInput);
        reader.start();
        int code = 0;
        try {
            String name = args[1];
            Integer number = args.length > 2 ? Integer.valueOf(args[2]) : null;
            switch (args[0]) {
                case "count" -> countInTasks(
                        number, Integer.parseInt(args[3]), () -> locks.withLock(name, Duration.ofMinutes(1), Demo::count));
                case "count-xact" -> countInTasks(number, Integer.parseInt(args[3]), () -> countInTransaction(name));
                case "hold" -> hold(name, number != null ? Duration.ofMillis(number) : null);
                case "lease" -> workUnderLease(name, Duration.ofMillis(number));
                default -> throw new IllegalArgumentException("unknown command: " + args[0]);
            }
        } catch (NamedLocks.LockTimeout error) {
            tell("timeout", "detail", quoted(error.detail));
            code = 3;
        } catch (NamedLocks.LeaseTaken error) {
            String retry = Long.toString(error.retryAfter.toMillis());
            tell("taken", "holder", quoted(error.holder), "retry_after_ms", retry);
            code = 3;
        } catch (NamedLocks.LockLost error) {
            tell("lost");
            code = 4;
        } catch (NamedLocks.LeaseLost error) {
            tell("lost", "sqlstate", quoted(error.sqlState));
            code = 4;
        } catch (InterruptedException error) {
            tell("cancelled");
            code = 5;
        }
        reader.join();
        return code;
    }

    private static synchronized void tell(String event, String... more) {
        StringBuilder json = new StringBuilder("{\"event\": " + quoted(event));
        for (int at = 0; at < more.length; at += 2) {
            json.append(", ").append(quoted(more[at])).append(": ").append(more[at + 1]);
        }
        System.out.println(json.append("}"));
    }

    private static String quoted(String text) {
        return text == null ? "null" : '"' + text.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", "\\n") + '"';
    }

    public static void main(String[] args) throws Exception {
        System.exit(new Demo().run(args));
    }
}
