//! Payloads come back as they were given, whatever they are, and wherever they are shown.

use super::{owners, release, renew, stored, take};
use crate::pg_test::support::{Server, Session, literal, unique};

/// Payloads that something could break, as SQL expressions.
fn payloads() -> Vec<String> {
    let digits = "1234567890".repeat(4);
    [
        "'{}'",
        "'null'",
        "'0'",
        "'true'",
        "'\"\"'",
        "'[]'",
        "'{\"a\": 1, \"b\": [true, null, {\"c\": \"d\"}]}'",
        &format!("'{digits}'"),
        &format!("'{{\"n\": -{digits}.{digits}}}'"),
        "'[1.10, 1.1000, 0.00, 1e300, -0.0000001, 18446744073709551616]'",
        "to_jsonb(repeat('9', 5000)::numeric)",
        "(repeat('[', 500) || '\"deep\"' || repeat(']', 500))::jsonb",
        "(repeat('{\"a\": ', 500) || '1' || repeat('}', 500))::jsonb",
        "'{\"ü\": \"日本 🔒 e\u{301} \u{200b}\", \"\": \"empty key\"}'",
        "'\"\\u0001 \\t \\n \\\\ \\\" / \\u00e9\"'",
        "'{\"a\": 1, \"a\": 2}'",
        "to_jsonb(repeat('x', 3000))",
        "to_jsonb(repeat('compresses well ', 20000))",
        "(select to_jsonb(string_agg(md5(i::text), '')) from generate_series(1, 300) as i)",
        "(select jsonb_agg(md5(i::text)) from generate_series(1, 20000) as i)",
        "(select jsonb_object_agg(i, repeat('é', i)) from generate_series(1, 300) as i)",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// That what is shown everywhere is that payload.
#[track_caller]
fn is_shown(session: &mut Session, name: &str, payload: &str) {
    for of in [
        format!("select payload from lease_holder('{name}')"),
        format!("select payload from lock_holders where kind = 'lease' and name = '{name}'"),
    ] {
        assert!(
            session.flag(&format!("select p.payload::text = ({payload})::jsonb::text from ({of}) as p")),
            "{payload}: {:.200?}",
            session.maybe(&of)
        );
    }
}

#[test]
fn unchanged_by_whatever_it_goes_through() {
    let server = Server::shared();
    let mut a = server.session("payload a");
    let mut b = server.session("payload b");
    for payload in payloads() {
        let k = unique("payload");
        let token = take(&mut a, &k, "1 hour", &format!(", payload => {payload}"));
        is_shown(&mut b, &k, &payload);
        // A renewal without one leaves it, also when it comes from elsewhere, and with a request in between.
        renew(&mut b, &k, token, "");
        assert!(b.flag(&format!("select lease_request('{k}', 'please')")));
        renew(&mut a, &k, token, ", '2 hours'");
        is_shown(&mut b, &k, &payload);
        // One that is given replaces it.
        renew(&mut a, &k, token, ", payload => '{\"other\": []}'");
        is_shown(&mut b, &k, "'{\"other\": []}'");
        renew(&mut a, &k, token, &format!(", payload => {payload}"));
        is_shown(&mut b, &k, &payload);
        // Undone, it is the one of before.
        a.run("begin");
        renew(&mut a, &k, token, ", payload => '1'");
        is_shown(&mut a, &k, "'1'");
        is_shown(&mut b, &k, &payload);
        a.run("rollback");
        is_shown(&mut a, &k, &payload);
        // A kept one goes on to be shown in the view.
        assert!(a.flag(&format!("select lease_release('{k}', {token}, '1 hour')")));
        a.run(&format!("select * from lock_holders where name = '{k}'"));
        a.run(&format!("select lease_break('{k}')"));
        // By the procedure.
        let text = literal(&a.text(&format!("select {payload}::jsonb::text")));
        a.run(&format!("call lease_acquire_wait('{k}', '1 hour', payload => {text})"));
        is_shown(&mut b, &k, &payload);
    }
}

#[test]
fn null_is_none() {
    let server = Server::shared();
    let mut a = server.session("payload a");
    let k = unique("payload");
    let token = take(&mut a, &k, "1 hour", "");
    let looks = [
        format!("select payload from lease_holder('{k}')"),
        format!("select payload from lock_holders where name = '{k}'"),
    ];
    for look in &looks {
        assert_eq!(a.maybe(look), None);
    }
    renew(&mut a, &k, token, "");
    for look in &looks {
        assert_eq!(a.maybe(look), None);
    }
    renew(&mut a, &k, token, ", payload => 'null'");
    for look in &looks {
        assert_eq!(a.maybe(look).as_deref(), Some("null"), "JSON's null is a value");
    }
}

#[test]
fn in_a_latin1_database() {
    let latin1 = Server::shared().new_database("payload_latin1", "LATIN1");
    let mut a = latin1.session("payload a");
    for payload in payloads().into_iter().filter(|payload| !payload.contains('日')) {
        let k = unique("payload");
        let token = take(&mut a, &k, "1 hour", &format!(", payload => {payload}, owner => 'größer'"));
        is_shown(&mut a, &k, &payload);
        renew(&mut a, &k, token, "");
        is_shown(&mut a, &k, &payload);
        renew(&mut a, &k, token, &format!(", payload => {payload}"));
        is_shown(&mut a, &k, &payload);
        assert_eq!(owners(&mut a, &k), ["größer"]);
        assert!(a.flag(&format!("select lease_request('{k}', 'Übergabe')")));
        assert_eq!(renew(&mut a, &k, token, "").requested.as_deref(), Some("Übergabe"));
        assert!(release(&mut a, &k, token));
    }
    let e = literal("{\"ß\": \"é\"}");
    take(&mut a, "é", "1 hour", &format!(", payload => {e}"));
    is_shown(&mut a, "é", &e);
    // A database without an encoding.
    let ascii = Server::shared().new_database("payload_ascii", "SQL_ASCII");
    let mut a = ascii.session("payload a");
    take(&mut a, "é", "1 hour", &format!(", payload => {e}, owner => 'größer'"));
    is_shown(&mut a, "é", &e);
    assert_eq!(owners(&mut a, "é"), ["größer"]);
}

/// An error about a held lease says who holds it, whatever the payload is; and what the payload says plainly.
#[test]
fn in_errors() {
    let server = Server::shared();
    let latin1 = server.new_database("payload_errors", "LATIN1");
    let ascii = server.new_database("payload_errors", "SQL_ASCII");
    for database in [server, &latin1, &ascii] {
        let mut a = database.session("payload a");
        a.run("set lock_timeout = '1 ms'");
        let fails = |session: &mut Session, k: &str| {
            [
                session.fails(&format!("select lease_renew('{k}', 1)")),
                session.fails(&format!("select lease_guard('{k}', 1)")),
                session.fails(&format!("select lease_acquire('{k}', '1 hour', null)")),
            ]
        };
        for payload in payloads() {
            // What the server itself doesn't take there.
            let is_utf8 = database.dbname == server.dbname;
            if !is_utf8 && (payload.contains('日') || payload.contains("\\u00e9")) {
                continue;
            }
            let k = unique("payload");
            take(&mut a, &k, "1 hour", &format!(", payload => {payload}, owner => 'who'"));
            for (error, code) in fails(&mut a, &k).iter().zip(["55006", "55006", "55P03"]) {
                error.is(code).message_has(&k).detail_has("who");
                assert!(error.detail.len() < 4000, "in brief: {payload}: {error:#?}");
            }
        }
        let k = unique("payload");
        take(
            &mut a,
            &k,
            "1 hour",
            ", payload => '{\"host\": \"größer-7\", \"pid\": 4711, \"up\": true, \"more\": {\"deep\": \"hidden\"}}'",
        );
        for error in fails(&mut a, &k) {
            error.detail_has("größer-7").detail_has("4711");
            assert!(!error.detail.contains("hidden"), "{error:#?}");
        }
    }
}

#[test]
fn a_large_one_costs_a_renewal_nothing() {
    let database = Server::shared().new_database("payload_size", "UTF8");
    let mut a = database.session("payload a");
    let payload = "(select jsonb_agg(md5(i::text)) from generate_series(1, 3000) as i)";
    let token = take(&mut a, "k", "1 hour", &format!(", payload => {payload}"));
    renew(&mut a, "k", token, "");
    let before = a.int("select pg_total_relation_size('_lease')");
    for _ in 0..300 {
        renew(&mut a, "k", token, "");
    }
    let after = a.int("select pg_total_relation_size('_lease')");
    assert!(after <= before + 8 * 8192, "{before} and now {after}");
    is_shown(&mut a, "k", payload);
    // What is stored is in one row, and the payload beside it.
    assert_eq!(stored(&mut a, "k").len(), 1);
}

/// Payloads that are stored beside the row come and go while others read: one is read whole, or the other.
#[test]
fn read_while_it_is_replaced_and_vacuumed_away() {
    let database = Server::shared().new_database("payload_race", "UTF8");
    let mut a = database.session("payload a");
    let payload = |n: i32| {
        format!(
            "(select jsonb_build_object('n', {n}, 'of', jsonb_agg(md5((i * {n})::text))) from generate_series(1, 400) as i)"
        )
    };
    let token = take(&mut a, "k", "1 hour", &format!(", payload => {}", payload(0)));
    let readers: Vec<_> = ["lease_holder('k')", "lock_holders where kind = 'lease'"]
        .into_iter()
        .zip(["read committed", "repeatable read"])
        .map(|(of, isolation)| {
            let sql = format!(
                "begin isolation level {isolation}; select 1; \
                 select (payload->'of') = (select jsonb_agg(md5((i * (payload->>'n')::int)::text)) \
                                             from generate_series(1, 400) as i) from {of}; commit"
            );
            database.session("payload reader").spawn(move |session| {
                for _ in 0..150 {
                    let rows = session.run(&sql);
                    assert_eq!(rows.last().and_then(|row| row.get(0)), Some("t"));
                }
            })
        })
        .collect();
    let mut vacuum = database.session("payload vacuum");
    let mut n = 0;
    while readers.iter().any(|reader| !reader.finished()) {
        n += 1;
        renew(&mut a, "k", token, &format!(", payload => {}", payload(n)));
        if n % 3 == 0 {
            vacuum.run("vacuum _lease");
        }
    }
    for reader in readers {
        reader.end();
    }
    is_shown(&mut a, "k", &payload(n));
}
