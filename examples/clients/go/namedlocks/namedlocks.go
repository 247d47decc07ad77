// Package namedlocks has named locks and leases by database/sql and lib/pq: to be lifted into a project as it is.
//
//   - [WithLock]: one of many processes at a time, for as long as its connection lives: short work, migrations
//   - [XactLock]: the same, to the end of a transaction: the check and the writes that hang on it
//   - [WithLease]: work that outlives a connection, or goes through a transaction pooler; its writes by [Lease.Transaction]
//
// What a caller should be ready for are the errors below, by errors.As. All else is passed on as a *pq.Error with its Code, of
// which 40P01 (deadlock) may be tried again; 42501 (not allowed), 22023 (an argument), 0A000 (a session lock behind
// a transaction pooler) and 25006 (a standby) are for people.
//
// Durations reach the server as text that it casts ($2::interval), [Forever] as NULL. A token is a bigint, and an int64.
package namedlocks

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/lib/pq"
)

// Forever is the timeout of those who wait as the server would, or until their context ends.
const Forever time.Duration = -1

// LockTimeout says that somebody else has the lock; the Detail says who.
type LockTimeout struct {
	Name, Detail string
}

func (e *LockTimeout) Error() string {
	return fmt.Sprintf("lock %s is not to be had: %s", e.Name, e.Detail)
}

// LockLost says that the connection is gone, and the lock with it, before it was given back.
type LockLost struct {
	Name  string
	Cause error
}

func (e *LockLost) Error() string { return fmt.Sprintf("lock %s is lost: %v", e.Name, e.Cause) }
func (e *LockLost) Unwrap() error { return e.Cause }

// LeaseTaken says that somebody else has the lease, and when it may be free.
type LeaseTaken struct {
	Name       string
	Holder     sql.NullString
	RetryAfter time.Duration
}

func (e *LeaseTaken) Error() string {
	return fmt.Sprintf("lease %s is held by %s", e.Name, e.Holder.String)
}

// LeaseLost says that the lease has expired, was broken or is another's: write nothing more. There is no SQLState if only our
// clock says so.
type LeaseLost struct {
	Name, SQLState string
}

func (e *LeaseLost) Error() string { return fmt.Sprintf("lease %s is lost (%s)", e.Name, e.SQLState) }

// WithLock runs work while holding a lock.
//
// A timeout of 0 is one try. The end of ctx ends the waiting.
//
// The lock is the connection's, taken from the pool for the whole time. Work should use it rather than ask the pool for a second
// one, for which all those who wait here might have to end first. If the connection is lost, so is the lock: work gets an
// error at its next statement, or WithLock returns a LockLost. A connection that may still hold the lock is
// not given back to the pool but closed: then the server lets go of it.
func WithLock(
	ctx context.Context, db *sql.DB, name string, timeout time.Duration,
	work func(ctx context.Context, conn *sql.Conn) error,
) (err error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	reusable := false
	defer func() {
		if !reusable {
			// What database/sql takes as: throw it away.
			_ = conn.Raw(func(any) error { return driver.ErrBadConn })
		}
		_ = conn.Close()
	}()
	// At the end of ctx lib/pq sends a cancel, waits for the answer, and takes the connection for bad.
	_, err = conn.ExecContext(ctx, "SELECT named_lock_strict($1, $2::interval)", name, interval(timeout))
	var refused *pq.Error
	switch {
	case ctx.Err() != nil: // also when it was granted at that moment
		return ctx.Err()
	case errors.As(err, &refused) && refused.Code == "55P03":
		reusable = true
		return &LockTimeout{name, refused.Detail}
	case err != nil:
		return err
	}
	// In a defer of its own, for the sake of a work that panics. Given back also when ctx has ended.
	defer func() {
		_, unlockErr := conn.ExecContext(context.Background(), "SELECT named_unlock($1)", name)
		reusable = unlockErr == nil
		if unlockErr != nil && err == nil {
			err = &LockLost{name, unlockErr}
		}
	}()
	return work(ctx, conn)
}

// XactLock takes a lock to the end of the transaction; false if the timeout passed.
//
// After false the transaction is alive and may do something else. Only true is to be trusted: check it.
func XactLock(ctx context.Context, tx *sql.Tx, name string, timeout time.Duration) (locked bool, err error) {
	query := "SELECT named_xact_lock($1, $2::interval)"
	err = tx.QueryRowContext(ctx, query, name, interval(timeout)).Scan(&locked)
	return locked, err
}

// Transaction runs work in a transaction.
func Transaction(ctx context.Context, db *sql.DB, work func(tx *sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing after COMMIT
	if err := work(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// Lease is one that is held, as far as is known here.
type Lease struct {
	Name  string
	Token int64

	db     *sql.DB
	ttl    time.Duration
	cancel context.CancelFunc
	mutex  sync.Mutex
	lost   *LeaseLost
}

// WithLease runs work while holding a lease.
//
// The ttl is how long others are kept out after this process was last heard of; the timeout, how long to wait for the lease (0:
// one try).
//
// It is renewed in the background at a third of the TTL, so that one renewal may fail. When it is lost, the context that work
// gets is cancelled, and LeaseLost returned in place of what work returns. What a late one still writes by
// [Lease.Transaction] is refused. Nothing here stays with one connection; the pool should have one to spare for the
// renewals.
func WithLease(
	ctx context.Context, db *sql.DB, name string, ttl, timeout time.Duration,
	work func(ctx context.Context, lease *Lease) error,
) error {
	sent := time.Now() // the server counts from a little later on
	token, err := acquire(ctx, db, name, ttl, timeout)
	if err != nil {
		return err
	}
	inside, cancel := context.WithCancel(ctx)
	defer cancel()
	lease := &Lease{Name: name, Token: token, db: db, ttl: ttl, cancel: cancel}
	if time.Since(sent) > ttl/3 {
		// It had to wait, and part of the TTL, as we count it, is over: count anew.
		sent = time.Now()
		if err := lease.renew(ctx, sent.Add(ttl)); err != nil {
			return err
		}
	}
	background := make(chan struct{})
	go func() {
		defer close(background)
		lease.keep(inside, sent)
	}()
	defer func() {
		cancel()
		<-background
		if lease.whyLost() == nil {
			// Also when ctx has ended. If this fails it expires by itself.
			release, done := context.WithTimeout(context.Background(), ttl)
			defer done()
			_, _ = db.ExecContext(release, "SELECT lease_release($1, $2)", name, token)
		}
	}()
	err = work(inside, lease)
	if lost := lease.whyLost(); lost != nil {
		return lost
	}
	return err
}

func acquire(ctx context.Context, db *sql.DB, name string, ttl, timeout time.Duration) (int64, error) {
	var acquired bool
	var token sql.NullInt64 // NULL with the next two, in turns
	var holder sql.NullString
	var retryAfter sql.NullFloat64
	query := `SELECT acquired, token, holder, extract(epoch FROM retry_after)
		FROM lease_acquire($1, $2::interval, $3::interval)`
	row := db.QueryRowContext(ctx, query, name, interval(ttl), interval(timeout))
	if err := row.Scan(&acquired, &token, &holder, &retryAfter); err != nil {
		return 0, err
	}
	if !acquired {
		return 0, &LeaseTaken{name, holder, time.Duration(retryAfter.Float64 * float64(time.Second))}
	}
	return token.Int64, nil
}

// Transaction runs work in a transaction that commits only while the lease is held.
func (l *Lease) Transaction(ctx context.Context, work func(tx *sql.Tx) error) error {
	return Transaction(ctx, l.db, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "SELECT lease_guard($1, $2)", l.Name, l.Token); err != nil {
			return l.notice(err)
		}
		return work(tx)
	})
}

// keep renews the lease until ctx ends or the lease is lost.
func (l *Lease) keep(ctx context.Context, sent time.Time) {
	next := sent.Add(l.ttl / 3)
	for {
		deadline := sent.Add(l.ttl)
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(next)):
		}
		now := time.Now()
		err := l.renew(ctx, deadline)
		switch {
		case err == nil:
			sent = now
			next = now.Add(l.ttl / 3)
		case ctx.Err() != nil || l.whyLost() != nil:
			return
		case !time.Now().Before(deadline):
			_ = l.lose(&LeaseLost{Name: l.Name})
			return
		default: // a connection lost, a server starting: the TTL is not over yet
			next = time.Now().Add(l.ttl / 10)
		}
	}
}

// renew sends one renewal; one that hangs ends at the deadline.
func (l *Lease) renew(ctx context.Context, deadline time.Time) error {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	_, err := l.db.ExecContext(ctx, "SELECT lease_renew($1, $2)", l.Name, l.Token)
	return l.notice(err)
}

// notice returns LeaseLost in place of the error that says so, and stops the work.
func (l *Lease) notice(err error) error {
	var answer *pq.Error
	if errors.As(err, &answer) && (answer.Code == "55000" || answer.Code == "55006") {
		return l.lose(&LeaseLost{l.Name, string(answer.Code)})
	}
	return err
}

func (l *Lease) lose(lost *LeaseLost) error {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.lost == nil {
		l.lost = lost
		l.cancel()
	}
	return l.lost
}

func (l *Lease) whyLost() error {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.lost == nil {
		return nil // not l.lost: a nil pointer in an error is not nil
	}
	return l.lost
}

func interval(duration time.Duration) sql.NullString {
	text := fmt.Sprintf("%d milliseconds", duration.Milliseconds())
	return sql.NullString{String: text, Valid: duration >= 0}
}
