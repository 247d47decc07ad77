"use strict";

/**
 * Shows named_locks.js at work, on the server of DATABASE_URL. Answers are lines of JSON.
 *
 *   node demo.js count LOCK TASKS ROUNDS       tasks count in the table `counter`, each round under the lock
 *   node demo.js count-xact LOCK TASKS ROUNDS  the same under a lock to the end of a transaction
 *   node demo.js hold LOCK [TIMEOUT_MS]        takes the lock and holds it; a line of input ends the holding or the waiting
 *   node demo.js lease NAME TTL_MS             holds a lease and writes to the table `written` at each line of input
 *
 * Ends with its input. Exit code: 0 done, 3 lock or lease not to be had, 4 lost, 5 waiting cancelled.
 */

const { on, once } = require("node:events");
const readline = require("node:readline");
const { setTimeout: sleep } = require("node:timers/promises");
const { Pool } = require("pg");
const { withLock, xactLock, transaction, withLease, LockTimeout, LockLost, LeaseTaken, LeaseLost } = require("./named_locks");

const tell = (event, more = {}) => console.log(JSON.stringify({ event, ...more }));

// Not atomic: two at once would lose a step.
async function count(client) {
  const { rows } = await client.query("SELECT value FROM counter");
  await sleep(2);
  await client.query("UPDATE counter SET value = $1", [rows[0].value + 1]);
}

async function countInTasks(tasks, rounds, step) {
  const task = async () => {
    for (let round = 0; round < rounds; round++) await step();
  };
  await Promise.all(Array.from({ length: tasks }, task));
  tell("counted");
}

async function hold(pool, input, name, timeout) {
  const stop = new AbortController();
  const line = once(input, "line").then(() => stop.abort());
  const work = async (client, lost) => {
    tell("held");
    await Promise.race([line, once(lost, "abort").then(() => lost.throwIfAborted())]);
  };
  await withLock(pool, name, timeout, work, { signal: stop.signal });
  tell("released");
}

async function workUnderLease(pool, input, name, ttl) {
  await withLease(pool, name, ttl, async (lease) => {
    tell("acquired", { token: lease.token });
    for await (const _ of linesOf(input, lease.signal)) {
      await lease.transaction((client) => client.query("INSERT INTO written VALUES ($1)", [lease.token]));
      tell("written");
    }
  });
  tell("released");
}

function linesOf(input, signal) {
  const lines = on(input, "line", { signal });
  input.once("close", () => lines.return());
  return lines;
}

/** What to tell of an error that a caller should be ready for, and the exit code; undefined for others. */
function answerTo(error) {
  if (error.name === "AbortError" && error.cause) error = error.cause; // of an aborted iteration: why
  if (error instanceof LockTimeout) return [3, "timeout", { detail: error.detail }];
  if (error instanceof LeaseTaken) return [3, "taken", { holder: error.holder, retry_after_ms: error.retryAfter }];
  if (error instanceof LockLost) return [4, "lost", {}];
  if (error instanceof LeaseLost) return [4, "lost", { sqlstate: error.code }];
  if (error.name === "AbortError") return [5, "cancelled", {}];
}

async function main([command, name, ...numbers]) {
  const [first = null, second] = numbers.map(Number);
  const pool = new Pool({ connectionString: process.env.DATABASE_URL, max: 10, keepAlive: true });
  pool.on("error", () => {}); // an idle connection that is lost: the pool has thrown it away already
  const input = readline.createInterface({ input: process.stdin });
  const ended = once(input, "close");
  try {
    switch (command) {
      case "count":
        await countInTasks(first, second, () => withLock(pool, name, 60_000, count));
        break;
      case "count-xact":
        await countInTasks(first, second, () =>
          transaction(pool, async (client) => {
            if (!(await xactLock(client, name, 60_000))) throw new LockTimeout(name);
            await count(client);
          }),
        );
        break;
      case "hold":
        await hold(pool, input, name, first);
        break;
      case "lease":
        await workUnderLease(pool, input, name, first);
        break;
      default:
        throw new Error(`unknown command: ${command}`);
    }
  } catch (error) {
    const answer = answerTo(error);
    if (!answer) throw error;
    const [code, event, more] = answer;
    tell(event, more);
    process.exitCode = code;
  }
  await ended;
  await pool.end();
}

main(process.argv.slice(2));
