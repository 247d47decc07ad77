// Shows package namedlocks at work, on the server of DATABASE_URL. Answers are lines of JSON.
//
//	demo count LOCK TASKS ROUNDS       tasks count in the table counter, each round under the lock
//	demo count-xact LOCK TASKS ROUNDS  the same under a lock to the end of a transaction
//	demo hold LOCK [TIMEOUT_MS]        takes the lock and holds it; a line of input ends the holding or the waiting
//	demo lease NAME TTL_MS             holds a lease and writes to the table written at each line of input
//
// Where there is no go.sum yet: go mod tidy.
//
// Ends with its input. Exit code: 0 done, 3 lock or lease not to be had, 4 lost, 5 waiting cancelled.
package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"named-locks-example/namedlocks"
)

type fields map[string]any

func tell(event string, more fields) {
	answer := fields{"event": event}
	for key, value := range more {
		answer[key] = value
	}
	line, _ := json.Marshal(answer)
	fmt.Println(string(line))
}

// Either a connection or a transaction.
type session interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// Not atomic: two at once would lose a step.
func count(ctx context.Context, db session) error {
	var value int
	if err := db.QueryRowContext(ctx, "SELECT value FROM counter").Scan(&value); err != nil {
		return err
	}
	time.Sleep(2 * time.Millisecond)
	_, err := db.ExecContext(ctx, "UPDATE counter SET value = $1", value+1)
	return err
}

func countInTasks(tasks, rounds int, step func() error) error {
	results := make(chan error)
	for task := 0; task < tasks; task++ {
		go func() {
			var err error
			for round := 0; round < rounds && err == nil; round++ {
				err = step()
			}
			results <- err
		}()
	}
	var failed error
	for task := 0; task < tasks; task++ {
		if err := <-results; err != nil {
			failed = err
		}
	}
	if failed == nil {
		tell("counted", nil)
	}
	return failed
}

func countInTransaction(ctx context.Context, db *sql.DB, name string) error {
	return namedlocks.Transaction(ctx, db, func(tx *sql.Tx) error {
		locked, err := namedlocks.XactLock(ctx, tx, name, time.Minute)
		if err != nil {
			return err
		}
		if !locked {
			return errors.New("no lock within a minute")
		}
		return count(ctx, tx)
	})
}

func hold(ctx context.Context, db *sql.DB, input <-chan string, name string, timeout time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		<-input
		cancel()
	}()
	err := namedlocks.WithLock(ctx, db, name, timeout, func(ctx context.Context, _ *sql.Conn) error {
		tell("held", nil)
		<-ctx.Done()
		return nil
	})
	if err == nil {
		tell("released", nil)
	}
	return err
}

func workUnderLease(ctx context.Context, db *sql.DB, input <-chan string, name string, ttl time.Duration) error {
	err := namedlocks.WithLease(ctx, db, name, ttl, 0, func(ctx context.Context, lease *namedlocks.Lease) error {
		// As text: many readers of JSON have 53 bits for a number.
		tell("acquired", fields{"token": strconv.FormatInt(lease.Token, 10)})
		for {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case _, more := <-input:
				if !more {
					return nil
				}
				err := lease.Transaction(ctx, func(tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, "INSERT INTO written VALUES ($1)", lease.Token)
					return err
				})
				if err != nil {
					return err
				}
				tell("written", nil)
			}
		}
	})
	if err == nil {
		tell("released", nil)
	}
	return err
}

// answerTo tells of an error that a caller should be ready for, and returns the exit code; others end the program.
func answerTo(err error) int {
	var timeout *namedlocks.LockTimeout
	var lockLost *namedlocks.LockLost
	var taken *namedlocks.LeaseTaken
	var leaseLost *namedlocks.LeaseLost
	switch {
	case err == nil:
		return 0
	case errors.As(err, &timeout):
		tell("timeout", fields{"detail": timeout.Detail})
		return 3
	case errors.As(err, &taken):
		tell("taken", fields{"holder": taken.Holder.String, "retry_after_ms": taken.RetryAfter.Milliseconds()})
		return 3
	case errors.As(err, &lockLost):
		tell("lost", nil)
		return 4
	case errors.As(err, &leaseLost):
		var state any // null where there is none
		if leaseLost.SQLState != "" {
			state = leaseLost.SQLState
		}
		tell("lost", fields{"sqlstate": state})
		return 4
	case errors.Is(err, context.Canceled):
		tell("cancelled", nil)
		return 5
	}
	log.Fatal(err)
	return 1
}

func run(ctx context.Context, db *sql.DB, input <-chan string, args []string) error {
	if len(args) < 2 {
		return errors.New("a command and a name are needed")
	}
	command, name := args[0], args[1]
	numbers := make([]int, len(args)-2)
	for at, text := range args[2:] {
		var err error
		if numbers[at], err = strconv.Atoi(text); err != nil {
			return err
		}
	}
	milliseconds := func() time.Duration { return time.Duration(numbers[0]) * time.Millisecond }
	switch {
	case command == "count" && len(numbers) == 2:
		return countInTasks(numbers[0], numbers[1], func() error {
			work := func(ctx context.Context, conn *sql.Conn) error { return count(ctx, conn) }
			return namedlocks.WithLock(ctx, db, name, time.Minute, work)
		})
	case command == "count-xact" && len(numbers) == 2:
		return countInTasks(numbers[0], numbers[1], func() error { return countInTransaction(ctx, db, name) })
	case command == "hold" && len(numbers) == 0:
		return hold(ctx, db, input, name, namedlocks.Forever)
	case command == "hold":
		return hold(ctx, db, input, name, milliseconds())
	case command == "lease" && len(numbers) == 1:
		return workUnderLease(ctx, db, input, name, milliseconds())
	}
	return fmt.Errorf("unknown command: %v", args)
}

func main() {
	db, err := sql.Open("postgres", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	input := make(chan string, 1000) // more than anyone types
	ended := make(chan struct{})
	go func() {
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			input <- lines.Text()
		}
		close(input)
		close(ended)
	}()
	code := answerTo(run(context.Background(), db, input, os.Args[1:]))
	<-ended
	os.Exit(code)
}
