//! Every error of the contract for bad input to the lease functions: its code, a text that helps, and nothing changed.

use super::{check, guard_sql, is_free, owners, renew, stored, take, waiters};
use crate::pg_test::support::{Server, unique};

/// Arguments that no call takes, by their SQLSTATE.
const NAMES: [(&str, &str); 6] = [
    ("null", "22004"),
    ("''", "22023"),
    ("repeat('x', 1025)", "22001"),
    ("repeat('x', 10000000)", "22001"),
    ("repeat('é', 513)", "22001"),
    ("null::text", "22004"),
];
const TTLS: [(&str, &str); 11] = [
    ("null", "22004"),
    ("'0'", "22023"),
    ("'-1 ms'", "22023"),
    ("'-1 hour'", "22023"),
    ("'99 ms'", "22023"),
    ("'99.999 ms'", "22023"),
    ("'1 day -24 hours'", "22023"),
    ("'11 years'", "22023"),
    ("'3660 days'", "22023"),
    ("'178000000 years'", "22023"),
    ("'-178000000 years'", "22023"),
];
const TIMEOUTS: [(&str, &str); 4] =
    [("'-1 ms'", "22023"), ("'25 days'", "22023"), ("'178000000 years'", "22023"), ("'-178000000 years'", "22023")];
const PERMITS: [(&str, &str); 6] = [
    ("null", "22004"),
    ("0", "22023"),
    ("-1", "22023"),
    ("2049", "22023"),
    ("2147483647", "22023"),
    ("-2147483648", "22023"),
];

/// Every call with one argument that is bad, with its code. `$k` is a name.
fn bad_calls(infinity: bool) -> Vec<(String, &'static str)> {
    let mut calls = Vec::new();
    let mut add = |call: &str, arguments: &[(&str, &'static str)]| {
        for (argument, code) in arguments {
            calls.push((call.replace("$_", argument), *code));
        }
    };
    for form in ["select lease_acquire", "call lease_acquire_wait"] {
        add(&format!("{form}($_, '1 hour')"), &NAMES);
        add(&format!("{form}('$k', $_)"), &TTLS);
        add(&format!("{form}('$k', '1 hour', $_)"), &TIMEOUTS);
        add(&format!("{form}('$k', '1 hour', '0', permits => $_)"), &PERMITS);
        add(&format!("{form}('$k', '1 hour', '0', bound => $_)"), &[("null", "22004")]);
        add(&format!("{form}('$k', $_, null, 'x', '{{}}', 2, true)"), &[("'99 ms'", "22023"), ("'soon'", "22007")]);
        if infinity {
            add(&format!("{form}('$k', $_)"), &[("'infinity'", "22023"), ("'-infinity'", "22023")]);
            add(&format!("{form}('$k', '1 hour', $_)"), &[("'-infinity'", "22023")]);
        }
    }
    for function in ["lease_renew($_, 1)", "lease_release($_, 1)", "lease_check($_, 1)", "lease_guard($_, 1)"] {
        add(&format!("select {function}"), &NAMES);
    }
    for function in ["lease_request($_)", "lease_request($_, 'why')", "lease_break($_)", "lease_holder($_)"] {
        add(&format!("select {function}"), &NAMES);
    }
    for function in
        ["lease_renew('$k', $_)", "lease_release('$k', $_)", "lease_check('$k', $_)", "lease_guard('$k', $_)"]
    {
        add(&format!("select {function}"), &[("null", "22004"), ("'x'", "22P02")]);
    }
    add("select lease_release('$k', $_, '1 s')", &[("null", "22004")]);
    // Here NULL is the TTL of before.
    add("select lease_renew('$k', 1, $_)", &TTLS[1..]);
    add("select lease_release('$k', 1, $_)", &[("'-1 us'", "22023"), ("'-1 day'", "22023"), ("'11 years'", "22023")]);
    add("select lease_release('$k', 1, $_)", &[("'178000000 years'", "22023"), ("'-178000000 years'", "22023")]);
    if infinity {
        add("select lease_renew('$k', 1, $_)", &[("'infinity'", "22023"), ("'-infinity'", "22023")]);
        add("select lease_release('$k', 1, $_)", &[("'infinity'", "22023"), ("'-infinity'", "22023")]);
    }
    calls
}

#[test]
fn each_argument_of_each_function() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let mut watch = server.session("watch");
    let infinity = a.int("show server_version_num") >= 170_000;
    let calls = bad_calls(infinity);
    assert!(calls.len() > 100);
    for (call, code) in calls {
        let k = unique("bad");
        for held in [false, true] {
            if held {
                take(&mut watch, &k, "1 hour", ", payload => '1'");
            }
            let before = stored(&mut watch, &k);
            for begin in ["", "begin"] {
                a.run(begin);
                let error = a.fails(&call.replace("$k", &k));
                a.run("rollback");
                // In a block, the call form has another reason, and either will do.
                if !(call.starts_with("call") && begin == "begin" && error.code == "25001") {
                    error.is(code);
                }
                assert!(error.message.len() > 10, "a text that helps: {error:#?}");
                assert_eq!(error.severity, "ERROR");
                assert_eq!(watch.locks_of(a.pid), 0, "{call}: something is held");
                assert_eq!(stored(&mut watch, &k), before, "{call}: something is changed");
            }
        }
        assert_eq!(waiters(&mut watch, &k), 0);
    }
}

#[test]
fn a_refusal_says_which_argument_it_means() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let k = unique("bad");
    for (call, word) in [
        ("lease_acquire(null, '1 hour')", "name"),
        ("lease_acquire('$k', null)", "ttl"),
        ("lease_acquire('$k', '1 ms')", "ttl"),
        ("lease_acquire('$k', '1 hour', '-1 s')", "timeout"),
        ("lease_acquire('$k', '1 hour', permits => null)", "permits"),
        ("lease_acquire('$k', '1 hour', permits => 0)", "permits"),
        ("lease_acquire('$k', '1 hour', bound => null)", "bound"),
        ("lease_renew('$k', null)", "token"),
        ("lease_renew('$k', 1, '1 ms')", "ttl"),
        ("lease_release('$k', null)", "token"),
        ("lease_release('$k', 1, '-1 s')", "keep_for"),
        ("lease_check('$k', null)", "token"),
        ("lease_guard('$k', null)", "token"),
    ] {
        let error = a.fails(&format!("select {}", call.replace("$k", &k)));
        let text = format!("{} {} {}", error.message, error.detail, error.hint).to_lowercase();
        assert!(text.contains(word) || (word == "ttl" && text.contains("time to live")), "{call}: {error:#?}");
    }
}

#[test]
fn the_limits_themselves_are_allowed() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    for ttl in ["100 ms", "0.1 s", "3650 days", "10 years", "1 day -23:59:59.9"] {
        for call in ["select token from lease_acquire('$k', '$t')", "call lease_acquire_wait('$k', '$t')"] {
            let k = unique("bad");
            assert!(a.int(&call.replace("$k", &k).replace("$t", ttl)) > 0, "{ttl}");
        }
        let k = unique("bad");
        let token = take(&mut a, &k, "1 hour", "");
        renew(&mut a, &k, token, &format!(", '{ttl}'"));
    }
    for timeout in ["0", "1 us", "24 days"] {
        take(&mut a, &unique("bad"), "1 hour", &format!(", '{timeout}'"));
    }
    if a.int("show server_version_num") >= 170_000 {
        take(&mut a, &unique("bad"), "1 hour", ", 'infinity'");
        assert!(a.int(&format!("call lease_acquire_wait('{}', '1 hour', 'infinity')", unique("bad"))) > 0);
    }
    for permits in ["1", "2048"] {
        take(&mut a, &unique("bad"), "1 hour", &format!(", permits => {permits}"));
    }
    for keep_for in ["0", "1 us", "3650 days", "10 years"] {
        let k = unique("bad");
        let token = take(&mut a, &k, "1 hour", "");
        assert!(a.flag(&format!("select lease_release('{k}', {token}, '{keep_for}')")), "{keep_for}");
    }
    // NULL where there is a meaning to it.
    let k = unique("bad");
    let token = take(&mut a, &k, "1 hour", ", null, null, null");
    renew(&mut a, &k, token, ", null, null");
    assert!(a.flag(&format!("select lease_request('{k}', null)")));
    assert!(a.flag(&format!("select lease_release('{k}', {token}, null)")));
}

/// A refused call leaves the lease that it was about as it was.
#[test]
fn a_refused_call_changes_nothing_of_a_held_lease() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let mut watch = server.session("watch");
    let k = unique("bad");
    let token = take(&mut a, &k, "1 hour", ", owner => 'me', payload => '{\"a\": 1}'");
    let before = stored(&mut watch, &k);
    for (call, code) in [
        ("lease_renew('$k', $t, '99 ms')", "22023"),
        ("lease_renew('$k', $t, '11 years', '{}')", "22023"),
        ("lease_release('$k', $t, '-1 s')", "22023"),
        ("lease_release('$k', $t, '11 years')", "22023"),
        ("lease_acquire('$k', '1 hour', permits => 2)", "22023"),
        ("lease_acquire('$k', '1 ms')", "22023"),
        ("lease_renew('$k', $t, '1 hour', '{')", "22P02"),
    ] {
        a.fails(&format!("select {}", call.replace("$k", &k).replace("$t", &token.to_string()))).is(code);
        assert_eq!(stored(&mut watch, &k), before, "{call}");
        assert!(check(&mut a, &k, token), "{call}");
    }
    assert_eq!(owners(&mut a, &k), ["me"]);
}

#[test]
fn the_call_form_where_no_transaction_can_be_ended() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let mut watch = server.session("watch");
    let k = unique("bad");
    let call = format!("call lease_acquire_wait('{k}', '1 hour')");
    for begin in ["begin", "begin isolation level repeatable read", "begin; savepoint s"] {
        a.run(begin);
        a.fails(&call).is("25001").message_has(&k);
        a.run("rollback");
    }
    a.fails(&format!("select 1; {call}")).is("25001");
    let named = format!("call lease_acquire_wait('{k}', '1 hour', token => t)");
    a.fails(&format!("do $$ declare t bigint; begin create temp table written (i int); {named}; end $$")).is("25001");
    a.fails(&format!("do $$ declare t bigint; begin {named}; exception when raise_exception then null; end $$"))
        .is("25001");
    assert!(is_free(&mut watch, &k));
    assert_eq!(watch.locks_of(a.pid), 0);
}

/// A wrapper that says it is parallel safe can bring a call into a worker: an error there.
#[test]
fn in_a_parallel_worker() {
    let server = Server::shared();
    let database = server.new_database("lease_parallel", "UTF8");
    let mut a = database.session("bad input");
    let mut watch = database.session("watch");
    a.run(
        "create table many as select i from generate_series(1, 20000) as i; \
         analyze many; \
         set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0; \
         set parallel_leader_participation = off; set max_parallel_workers_per_gather = 2",
    );
    let token = take(&mut a, "held", "1 hour", "");
    let before = stored(&mut watch, "held");
    for (index, (body, writes)) in [
        ("(lease_acquire('free', '1 hour')).acquired", true),
        ("(lease_acquire('held', '1 hour')).acquired", true),
        ("(lease_acquire('free', '1 hour', bound => true)).acquired", true),
        ("(lease_renew('held', $t)).waiters is null", true),
        ("lease_release('held', $t)", true),
        ("lease_guard('held', $t) is null", true),
        ("lease_request('held')", true),
        ("lease_break('held') > 0", true),
        ("lease_check('held', $t)", false),
        ("exists (select from lease_holder('held'))", false),
        ("exists (select from lock_holders where name = 'held')", false),
    ]
    .into_iter()
    .enumerate()
    {
        a.run(&format!(
            "create function wrapper{index}() returns boolean parallel safe volatile language plpgsql cost 1000 as \
             $$ begin return {}; end $$",
            body.replace("$t", &token.to_string())
        ));
        let count = format!("select count(*) from many where wrapper{index}()");
        let plan = a.column(&format!("explain {count}")).join("\n");
        assert!(plan.contains("Gather"), "the plan has workers:\n{plan}");
        match a.query(&count) {
            // Looking is allowed there, or an error; but never a wrong answer.
            Ok(rows) => {
                assert!(!writes, "{body}");
                assert_eq!(rows[0].get(0), Some("20000"), "{body}");
            }
            Err(error) => {
                assert!(error.message.contains("parallel"), "{body}: {error:#?}");
                error.is("25000");
            }
        }
        assert_eq!(stored(&mut watch, "held"), before, "{body}");
        assert!(is_free(&mut watch, "free"), "{body}");
    }
    a.run(&guard_sql("held", token));
}

/// In a WHERE clause the planner runs what is cheap first: all calls cost the same.
#[test]
fn functions_say_what_they_are() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    assert_eq!(
        a.column(
            "select concat_ws(' ', proname, provolatile, proparallel, procost, proisstrict) \
               from pg_proc as p join pg_depend as d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e' \
              where proname like 'lease%' order by 1"
        ),
        [
            "lease_acquire v u 1000 f",
            "lease_acquire_wait v u 1 f",
            "lease_break v u 1000 f",
            "lease_check v u 1000 f",
            "lease_guard v u 1000 f",
            "lease_holder v u 1000 f",
            "lease_release v u 1000 f",
            "lease_renew v u 1000 f",
            "lease_request v u 1000 f",
        ]
    );
}
