//! What `lease_holder`, `lock_holders`, `lock_waiters` and `lock_graph()` show of leases.

use super::{acquire, acquire_sql, guard, owners, release, renew, shown, take, until_queued, waiters};
use crate::pg_test::support::{Running, Server, literal, unique, until};

#[test]
fn a_lease_in_every_column() {
    let server = Server::shared();
    let role = server.new_role("lease_views");
    let mut watch = server.session("watch");
    let mut a = server.session_as(&role, "views a");
    for bound in [false, true] {
        let k = unique("views:lease");
        let before = watch.text("select clock_timestamp()");
        let token =
            take(&mut a, &k, "1 hour", &format!(", owner => 'me', payload => '{{\"a\": 1}}', bound => {bound}"));
        let rows = watch.run(&format!(
            "select *, current_database() as here, host(client_addr) as addr, \
                    acquired_at between '{before}' and clock_timestamp() as in_time, \
                    held_for between '0' and '1 minute' as for_long, \
                    expires_at - acquired_at = '1 hour' as to_come, \
                    remaining between '59 minutes' and '1 hour' as for_more, \
                    (select host(client_addr) from pg_stat_activity where pid = {}) as address \
               from lock_holders where name = '{k}'",
            a.pid
        ));
        assert_eq!(rows.len(), 1);
        let get = |column: &str| rows[0].get(column);
        let pid = a.pid.to_string();
        for (column, value) in [
            ("kind", Some("lease")),
            ("domain", Some("views")),
            ("name", Some(k.as_str())),
            ("mode", None),
            ("holds", None),
            ("pid", bound.then_some(pid.as_str())),
            ("usename", Some(role.as_str())),
            ("application_name", bound.then_some("views a")),
            ("addr", if bound { get("address") } else { None }),
            ("state", Some("held")),
            ("in_time", Some("t")),
            ("for_long", Some("t")),
            ("hold_limit", None),
            ("to_come", Some("t")),
            ("for_more", Some("t")),
            ("token", Some(token.to_string().as_str())),
            ("owner", Some("me")),
            ("payload", Some("{\"a\": 1}")),
            ("waiters", Some("0")),
            ("database", get("here")),
            ("gid", None),
        ] {
            assert_eq!(get(column), value, "{column}, bound: {bound}");
        }
        for column in ["classid", "objid", "objsubid"] {
            assert!(get(column).is_some(), "{column}");
        }
        let rows = watch.run(&format!(
            "select concat_ws(' ', h.owner, h.payload, permits), h.acquired_at = l.acquired_at, h.expires_at = l.expires_at, \
                    h.remaining between '59 minutes' and '1 hour' \
               from lease_holder('{k}') as h, lock_holders as l where l.name = '{k}'"
        ));
        let row: Vec<_> = (0..4).map(|column| rows[0].get(column)).collect();
        assert_eq!(row, [Some("me {\"a\": 1} 1"), Some("t"), Some("t"), Some("t")]);
    }
}

#[test]
fn columns_of_lease_holder_are_the_contracts() {
    let server = Server::shared();
    let mut a = server.session("views a");
    let k = unique("views");
    take(&mut a, &k, "1 hour", "");
    let row = a.client.query_one(&format!("select * from lease_holder('{k}')"), &[]).expect("a row");
    let columns: Vec<String> =
        row.columns().iter().map(|column| format!("{} {}", column.name(), column.type_())).collect();
    assert_eq!(
        columns,
        [
            "owner text",
            "payload jsonb",
            "acquired_at timestamptz",
            "remaining interval",
            "expires_at timestamptz",
            "permits int4"
        ]
    );
    assert_eq!(a.run(&format!("select * from lease_holder('{}')", unique("views"))).len(), 0, "no row if free");
    // A set: it joins, it counts, it stops.
    for permits in [1, 3] {
        let k = unique("views");
        for _ in 0..permits {
            take(&mut a, &k, "1 hour", &format!(", permits => {permits}"));
        }
        assert_eq!(a.int(&format!("select count(*) from lease_holder('{k}')")), permits);
        assert_eq!(a.run(&format!("select * from lease_holder('{k}') limit 1")).len(), 1);
        assert_eq!(a.run(&format!("select (lease_holder('{k}')).owner")).len(), permits as usize);
        assert_eq!(
            a.int(&format!("select count(h.owner) from (values ('{k}'), ('{k} free')) as n(n) left join lateral lease_holder(n) as h on true")),
            permits
        );
    }
}

#[test]
fn the_lock_managers_row_of_a_guard_is_found_by_the_last_columns() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("views a");
    let k = unique("views");
    let tokens: Vec<i64> = (0..3).map(|_| take(&mut a, &k, "1 hour", ", permits => 3")).collect();
    let found = format!(
        "select h.token || ' ' || l.mode from lock_holders as h join pg_locks as l using (classid, objid, objsubid) \
          where h.kind = 'lease' and h.name = '{k}' and l.pid = {} and l.locktype = 'advisory' and l.granted \
            and l.database = (select oid from pg_database where datname = current_database())",
        a.pid
    );
    assert_eq!(watch.column(&found), [""; 0]);
    a.run("begin");
    guard(&mut a, &k, tokens[1]);
    assert_eq!(watch.column(&found), [format!("{} ShareLock", tokens[1])]);
    // It's an internal lock: it isn't shown as one.
    assert_eq!(watch.column(&format!("select kind from lock_holders where name = '{k}'")), ["lease"; 3]);
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid = {}", a.pid)), 0);
    a.run("commit");
    assert_eq!(watch.column(&found), [""; 0]);
    // The three have places of their own.
    assert_eq!(
        watch.int(&format!("select count(distinct (classid, objid, objsubid)) from lock_holders where name = '{k}'")),
        3
    );
}

#[test]
fn internal_locks_are_not_shown() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("views a");
    let k = unique("views");
    let token = take(&mut a, &k, "1 hour", ", bound => true");
    let of_a = format!("select kind from lock_holders where pid = {}", a.pid);
    assert_eq!(watch.column(&of_a), ["lease"], "the sentinel of the session isn't shown");
    a.run("begin");
    guard(&mut a, &k, token);
    take(&mut a, &format!("{k} 2"), "1 hour", "");
    assert!(watch.locks_of(a.pid) > 1);
    assert_eq!(watch.column(&of_a), ["lease"], "nor the tags of guards and grants");
    a.run("commit");
    // The queue's, neither.
    let waiting: Vec<_> = (1..=2)
        .map(|count| {
            let waiting = server.session("views waiter").background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
            until_queued(&mut watch, &k, count);
            waiting
        })
        .collect();
    for waiting in &waiting {
        assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid = {}", waiting.pid)), 0);
        assert_eq!(
            watch.column(&format!("select kind || ' ' || name from lock_waiters where pid = {}", waiting.pid)),
            [format!("lease {k}")],
            "one row for each"
        );
    }
    a.run(&format!("select lease_break('{k}')"));
    for waiting in waiting {
        let (mut session, rows) = waiting.end();
        let token = super::Said::from_rows(&rows.expect("no error")).granted();
        assert!(release(&mut session, &k, token));
        assert_eq!(watch.locks_of(session.pid), 0, "nothing is left of the queue");
    }
}

#[test]
fn waiters_are_shown_in_their_order_with_deadline_and_who_is_in_the_way() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("views a");
    for bound in [false, true] {
        let k = unique("views:lease");
        let token = take(&mut a, &k, "1 hour", &format!(", bound => {bound}"));
        let before = watch.text("select clock_timestamp()");
        let forms = [
            acquire_sql(&k, "1 hour", ", '30 minutes'"),
            format!("call lease_acquire_wait('{k}', '1 hour')"),
            acquire_sql(&k, "1 hour", ", null"),
            format!("call lease_acquire_wait('{k}', '1 hour', '30 minutes')"),
        ];
        let mut waiting = Vec::new();
        for (index, form) in forms.iter().enumerate() {
            waiting.push(server.session(&format!("views waiter {index}")).background(form));
            until_queued(&mut watch, &k, index as i64 + 1);
        }
        let rows = watch.run(&format!(
            "select *, wait_started between '{before}' and clock_timestamp() as in_time, \
                    waited between '0' and '1 minute' as for_long, \
                    extract(epoch from deadline - wait_started)::numeric(20, 0) as seconds, \
                    (select wait_event_type from pg_stat_activity as s where s.pid = w.pid) as sleeps \
               from lock_waiters as w where name = '{k}' order by queue_position"
        ));
        assert_eq!(rows.len(), 4);
        for (index, row) in rows.iter().enumerate() {
            let pid = waiting[index].pid.to_string();
            let application = format!("views waiter {index}");
            for (column, value) in [
                ("kind", Some("lease")),
                ("domain", Some("views")),
                ("name", Some(k.as_str())),
                ("mode", None),
                ("pid", Some(pid.as_str())),
                ("usename", Some(server.user.as_str())),
                ("application_name", Some(application.as_str())),
                ("in_time", Some("t")),
                ("for_long", Some("t")),
                ("seconds", [Some("1800"), None, None, Some("1800")][index]),
                ("queue_position", Some(["1", "2", "3", "4"][index])),
                ("sleeps", Some(if index == 0 { "Extension" } else { "Lock" })),
            ] {
                assert_eq!(row.get(column), value, "{column} of {index}, bound: {bound}");
            }
            let blocked_by = row.get("blocked_by").expect("an array");
            match index {
                0 if bound => assert_eq!(blocked_by, format!("{{{}}}", a.pid)),
                0 => assert_eq!(blocked_by, "{}", "no session has it"),
                _ => assert!(
                    blocked_by.contains(&waiting[0].pid.to_string()),
                    "{index} is behind the head: {blocked_by}"
                ),
            }
        }
        assert_eq!(watch.text(&format!("select waiters from lock_holders where name = '{k}'")), "4");
        assert_eq!(renew(&mut a, &k, token, "").waiters, 4);
        let graph = watch.text("select lock_graph()");
        assert!(graph.contains(&k), "{graph}");
        for waiting in &waiting {
            assert!(graph.contains(&waiting.pid.to_string()), "{} is in\n{graph}", waiting.pid);
        }
        // While they wait, a try is refused: they were first.
        acquire(&mut watch, &k, "1 hour", "").refused();
        // They go, one by one, and the places move up.
        for left in (0..4).rev() {
            let first = waiting.remove(0);
            watch.run(&format!("select pg_cancel_backend({})", first.pid));
            first.end().1.expect_err("cancelled").is("57014");
            until_queued(&mut watch, &k, left);
            assert_eq!(
                watch.column(&format!("select queue_position from lock_waiters where name = '{k}' order by 1")),
                (1..=left).map(|place| place.to_string()).collect::<Vec<_>>()
            );
            assert_eq!(renew(&mut a, &k, token, "").waiters, left);
        }
        acquire(&mut watch, &k, "1 hour", "").refused_by("views a", 3600.0);
    }
}

/// Who waits for a guarded transaction's end is blocked by that transaction's session.
#[test]
fn a_waiter_behind_a_guarded_transaction() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("views a");
    let k = unique("views");
    let token = take(&mut a, &k, "1 hour", "");
    a.run("begin");
    guard(&mut a, &k, token);
    assert!(release(&mut watch, &k, token));
    let waiting = server.session("views waiter").background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
    until_queued(&mut watch, &k, 1);
    let blocked_by = format!("select blocked_by from lock_waiters where pid = {}", waiting.pid);
    assert_eq!(watch.text(&blocked_by), format!("{{{}}}", a.pid));
    assert_eq!(shown(&mut watch, &k), [""; 0]);
    a.run("commit");
    waiting.end().1.expect("granted");
    assert_eq!(waiters(&mut watch, &k), 0);
    // The same behind a grant that isn't committed.
    let k = unique("views");
    a.run("begin");
    take(&mut a, &k, "1 hour", "");
    let waiting = server.session("views waiter").background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
    until_queued(&mut watch, &k, 1);
    assert_eq!(
        watch.text(&format!("select blocked_by from lock_waiters where pid = {}", waiting.pid)),
        format!("{{{}}}", a.pid)
    );
    a.run("rollback");
    waiting.end().1.expect("granted");
}

#[test]
fn leases_of_other_databases_are_not_shown() {
    let server = Server::shared();
    let second = server.new_database("lease_views", "UTF8");
    let mut a = server.session("views a");
    let mut b = second.session("views b");
    let k = unique("views");
    take(&mut a, &k, "1 hour", ", bound => true");
    assert_eq!(b.int(&format!("select count(*) from lock_holders where name = '{k}'")), 0);
    assert_eq!(owners(&mut b, &k), [""; 0]);
    // And they are other leases.
    let token = take(&mut b, &k, "1 hour", "");
    assert_eq!(shown(&mut a, &k), ["held views a"]);
    assert_eq!(shown(&mut b, &k), ["held views b"]);
    assert_eq!(b.text(&format!("select database from lock_holders where name = '{k}'")), second.dbname);
    assert!(!a.flag(&format!("select lease_check('{k}', {token})")));
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 1);
    assert_eq!(shown(&mut a, &k), ["held views a"]);
}

/// A database without the extension has no leases, and that of one which was there is no obstacle.
#[test]
fn looking_from_where_no_lease_ever_was() {
    let server = Server::shared();
    let database = server.new_database("lease_views", "UTF8");
    let mut a = database.session("views a");
    assert_eq!(a.int("select count(*) from lock_holders where kind = 'lease'"), 0);
    // Those who wait in other databases may be shown.
    a.run("select * from lock_waiters");
    assert_eq!(owners(&mut a, "k"), [""; 0]);
    assert!(!a.flag("select lease_check('k', 1)"));
    assert!(a.text("select lock_graph()").starts_with("flowchart"));
    let token = take(&mut a, "k", "1 hour", "");
    assert!(release(&mut a, "k", token));
    assert_eq!(a.int("select count(*) from lock_holders where kind = 'lease'"), 0);
}

#[test]
fn the_graph_is_text_whatever_leases_and_owners_are_called() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let stem = unique("graph");
    for odd in ["\"];", "]\nevil-->x", "<b>", "`", "%% comment", "end", "\\", "#quot;"] {
        let name = format!("{stem}{odd}");
        let mut a = server.session("views a");
        let owner = literal(odd);
        take(&mut a, &name, "1 hour", &format!(", owner => {owner}, bound => true"));
        let waiting = server.session("waiter").background(&acquire_sql(&name, "1 hour", ", '1 minute'"));
        until_queued(&mut watch, &name, 1);
        let graph = watch.text("select lock_graph()");
        assert!(graph.contains(&waiting.pid.to_string()));
        assert!(!graph.contains("evil-->x"), "{graph}");
        assert!(!graph.contains("\"];\""), "{graph}");
        assert!(!graph.contains("<b>"), "{graph}");
        for line in graph.lines() {
            assert_eq!(line.matches('"').count() % 2, 0, "{line}");
        }
        watch.run(&format!("select lease_break({})", literal(&name)));
        waiting.end().1.expect("granted");
    }
}

/// Leases come and go while others look: the views never fail, and what they show is of one row.
#[test]
fn looking_while_others_acquire_and_release() {
    let server = Server::shared();
    let stem = unique("views");
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let stem = stem.clone();
            server.session(&format!("{stem} {worker}")).spawn(move |session| {
                for round in 0..120 {
                    let name = format!("{stem} {worker} {}", round % 3);
                    let more = format!(", payload => '{{\"n\": \"{name}\"}}', bound => {}", round % 2 == 0);
                    let token = take(session, &name, "1 hour", &more);
                    renew(session, &name, token, &format!(", payload => '{{\"n\": \"{name}\", \"renewed\": true}}'"));
                    assert!(release(session, &name, token));
                }
            })
        })
        .collect();
    let mut watch = server.session("watch");
    let mut looks = 0;
    while !workers.iter().all(Running::finished) {
        for row in watch.run(&format!(
            "select name, owner, payload->>'n' as n, token, state, expires_at - acquired_at between '1 hour' and '61 minutes' \
               from lock_holders where kind = 'lease' and name like '{stem} %'"
        )) {
            let name = row.get(0).expect("a name");
            assert!(name.starts_with(row.get(1).expect("an owner")), "{row:?}");
            assert_eq!(row.get(2), Some(name), "{row:?}");
            assert!(row.get(3).is_some() && row.get(4) == Some("held") && row.get(5) == Some("t"), "{row:?}");
        }
        watch.run(&format!("select * from lease_holder('{stem} 0 0')"));
        looks += 1;
    }
    assert!(looks > 1);
    for worker in workers {
        worker.end();
    }
    until("they are gone", || {
        watch.int(&format!("select count(*) from lock_holders where kind = 'lease' and name like '{stem} %'")) == 0
    });
}
