//! What `docs/moving-over.md` says of other ways to lock: its tables are true. Its SQL runs with that of all pages.

use crate::pg_test::support::{Server, unique, until};

/// Old code on a native key and new code with a timeout are in each other's way; a name is in nobody's.
#[test]
fn old_and_new_code_side_by_side() {
    let server = Server::shared();
    let (mut old, mut new, mut watch) = (server.session("old"), server.session("new"), server.session("watch"));
    let k = unique("moving");
    let forms = [
        (format!("pg_advisory_lock(hashtext('{k}'))"), format!("advisory_lock(hashtext('{k}'), timeout => $)")),
        ("pg_advisory_lock(712345, 1)".to_owned(), "advisory_lock(712345, 1, timeout => $)".to_owned()),
    ];
    for (by_old, by_new) in forms {
        let with_timeout = |timeout: &str| format!("select {}", by_new.replace('$', timeout));
        old.run(&format!("select {by_old}"));
        assert!(!new.flag(&with_timeout("'0'")), "{by_new}");
        assert!(new.flag(&format!("select named_lock('{k}', '0')")), "a name is another lock");
        let waiting = new.background(&with_timeout("'1 min'"));
        watch.until_waiting(waiting.pid);
        old.run("select pg_advisory_unlock_all()");
        let (session, answer) = waiting.end();
        assert_eq!(answer.expect("no error")[0].get(0), Some("t"));
        new = session;
        // And the other way round.
        let waiting = old.background(&format!("select {by_old}"));
        watch.until_waiting(waiting.pid);
        new.run("select pg_advisory_unlock_all()");
        let (session, answer) = waiting.end();
        answer.expect("no error");
        old = session;
        old.run("select pg_advisory_unlock_all()");
    }
}

/// `GET_LOCK`, `sp_getapplock` and `DBMS_LOCK` answer by numbers: what stands for each.
#[test]
fn what_stands_for_the_results_of_others() {
    let server = Server::shared();
    let (mut a, mut b, mut watch) = (server.session("a"), server.session("b"), server.session("watch"));
    let k = unique("moving");
    // Free, taken, held again.
    assert!(a.flag(&format!("select named_lock('{k}', '5 s')")));
    assert!(!b.flag(&format!("select named_lock('{k}', '20 ms')")));
    assert!(a.flag(&format!("select named_lock('{k}', '5 s')")));
    assert_eq!(watch.int(&format!("select pid from lock_holders where name = '{k}'")), i64::from(a.pid));
    assert!(!watch.flag(&format!("select not exists (select from lock_holders where name = '{k}')")));
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 1);
    // Not the caller's, and nobody's.
    b.fails(&format!("select named_unlock('{k}')")).is("55000").detail_has(&a.pid.to_string());
    assert_eq!(a.int("select named_unlock_all()"), 1);
    b.fails(&format!("select named_unlock('{k}')")).is("55000").detail_has("Nobody holds it");
    // Cancelled, and the victim of a deadlock.
    a.run(&format!("select named_lock('{k} 1')"));
    b.run(&format!("select named_lock('{k} 2')"));
    let waiting = b.background(&format!("select named_lock('{k} 1')"));
    watch.until_waiting(waiting.pid);
    watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
    let (b, answer) = waiting.end();
    answer.expect_err("cancelled").is("57014");
    let waiting = b.background(&format!("select named_lock('{k} 1')"));
    watch.until_waiting(waiting.pid);
    let other = a.background(&format!("select named_lock('{k} 2')"));
    until("one of them is the victim", || waiting.finished() || other.finished());
    let (first, second) = if waiting.finished() { (waiting, other) } else { (other, waiting) };
    let (mut victim, answer) = first.end();
    answer.expect_err("a deadlock").is("40P01");
    victim.run("select named_unlock_all()");
    second.end().1.expect("the other one goes on");
    // Oracle's modes, by their conflicts.
    for (one, other, together) in [
        ("share", "share", true),
        ("intent share", "share intent exclusive", true),
        ("intent exclusive", "intent exclusive", true),
        ("intent exclusive", "share", false),
        ("share intent exclusive", "share intent exclusive", false),
        ("exclusive", "intent share", false),
    ] {
        let (mut a, mut b) = (server.session("a"), server.session("b"));
        assert!(a.flag(&format!("select named_lock('{k} modes', mode => '{one}')")));
        assert_eq!(b.flag(&format!("select named_lock('{k} modes', '0', '{other}')")), together, "{one}, {other}");
        a.run("select named_unlock_all()");
        b.run("select named_unlock_all()");
    }
}

/// ShedLock's two durations: others are kept out until the second has passed since the grant.
#[test]
fn shedlock_lock_at_least_for() {
    let server = Server::shared();
    let (mut a, mut b) = (server.session("a"), server.session("b"));
    let k = unique("moving");
    let token = a.int(&format!("select token from lease_acquire('{k}', ttl => '10 min')"));
    assert!(a.flag(&format!("select lease_release('{k}', {token}, keep_for => '1 min')")));
    let refused =
        &b.run(&format!("select acquired, holder, retry_after > '50 s' from lease_acquire('{k}', '10 min')"))[0];
    assert_eq!((refused.get(0), refused.get(1), refused.get(2)), (Some("f"), None, Some("t")));
}
