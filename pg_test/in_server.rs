//! What each function does in the plainest case, from inside one backend, and what the catalogue says of it.

/// In-server tests.
#[cfg(feature = "pg_test")]
#[pgrx::pg_schema]
mod tests {
    use pgrx::datum::DatumWithOid;
    use pgrx::pg_sys;
    use pgrx::prelude::*;

    const MODES: [&str; 5] = ["exclusive", "share", "intent share", "intent exclusive", "share intent exclusive"];

    /// What all names here begin with.
    const STEM: &str = "in server";

    /// These tests run side by side: each session has names of its own.
    fn own(sql: &str) -> String {
        sql.replace(STEM, &format!("{STEM} {}", std::process::id()))
    }

    fn flag(sql: &str) -> bool {
        Spi::get_one(&own(sql)).expect("a result").expect("not null")
    }

    fn int(sql: &str) -> i64 {
        Spi::get_one(&own(&format!("select ({sql})::bigint"))).expect("a result").expect("not null")
    }

    fn text(sql: &str) -> Option<String> {
        Spi::get_one(&own(&format!("select ({sql})::text"))).expect("a result")
    }

    /// The SQLSTATE of a statement, caught as PL/pgSQL catches it.
    fn code(sql: &str) -> String {
        Spi::run(
            "create or replace function pg_temp.code(sql text) returns text language plpgsql as \
             $$ begin execute sql; return '00000'; exception when others then return sqlstate; end $$",
        )
        .expect("a function");
        Spi::get_one_with_args("select pg_temp.code($1)", &[DatumWithOid::from(own(sql))])
            .expect("a result")
            .expect("not null")
    }

    /// What this session shows: kind, name, mode and count of each row.
    fn shown() -> Vec<String> {
        let rows: Vec<String> = Spi::get_one(
            "select coalesce(array_agg(concat_ws(' ', kind, name, mode, holds) order by kind, name, mode), '{}') \
               from lock_holders where pid = pg_backend_pid()",
        )
        .expect("a result")
        .expect("not null");
        rows.into_iter().map(|row| row.replace(&own(STEM), STEM)).collect()
    }

    #[pg_test]
    fn named_lock_and_unlock() {
        assert!(flag("select named_lock('in server')"));
        assert_eq!(shown(), ["session in server exclusive 1"]);
        assert_eq!(int("named_lock_held('in server')"), 1);
        assert!(flag("select named_lock('in server', '0')"));
        assert!(flag("select named_lock('in server', '1 s')"));
        assert_eq!(int("named_lock_held('in server')"), 3);
        assert_eq!(int("named_unlock('in server')"), 2);
        assert_eq!(int("named_unlock('in server', all_holds => true)"), 0);
        assert_eq!(int("named_lock_held('in server')"), 0);
        assert_eq!(code("select named_unlock('in server')"), "55000");
        assert_eq!(shown(), [""; 0]);
    }

    #[pg_test]
    fn named_lock_strict_returns_nothing() {
        assert_eq!(text("named_lock_strict('in server')").as_deref(), Some(""));
        assert_eq!(text("named_xact_lock_strict('in server x')").as_deref(), Some(""));
        assert_eq!(shown(), ["session in server exclusive 1", "transaction in server x exclusive 1"]);
        assert_eq!(int("named_unlock_all()"), 1);
    }

    #[pg_test]
    fn named_xact_lock_is_not_given_back_by_hand() {
        assert!(flag("select named_xact_lock('in server')"));
        assert_eq!(shown(), ["transaction in server exclusive 1"]);
        assert_eq!(int("named_lock_held('in server')"), 1);
        assert_eq!(code("select named_unlock('in server')"), "55000");
        assert_eq!(int("named_unlock_all()"), 0);
        assert_eq!(shown(), ["transaction in server exclusive 1"]);
    }

    #[pg_test]
    fn every_mode_is_reentrant_by_itself_and_with_every_other() {
        for one in MODES {
            for other in MODES {
                for function in ["named_lock", "named_xact_lock"] {
                    assert!(flag(&format!("select named_lock('in server', '0', '{one}')")));
                    assert!(flag(&format!("select {function}('in server {one}', '0', '{one}')")));
                    assert!(flag(&format!("select {function}('in server', '0', '{other}')")), "{one}, {other}");
                    let held = int(&format!("named_lock_held('in server', '{one}')"));
                    assert!(held >= if one == other { 2 } else { 1 }, "{one}, {other}");
                    int("named_unlock_all()");
                }
            }
        }
    }

    #[pg_test]
    fn convert_between_all_modes() {
        for one in MODES {
            for other in MODES {
                assert!(flag(&format!("select named_lock('in server', mode => '{one}')")));
                assert!(flag(&format!("select named_lock_convert('in server', '{other}', '0')")));
                assert_eq!(shown(), [format!("session in server {other} 1")]);
                assert_eq!(int("named_unlock('in server')"), 0);
            }
        }
    }

    #[pg_test]
    fn extend_says_until_when() {
        assert!(flag("select named_lock('in server', hold_limit => '1 hour')"));
        assert!(flag(
            "select named_lock_extend('in server', '2 hours') between clock_timestamp() + '119 minutes' \
                 and clock_timestamp() + '2 hours'"
        ));
        assert!(flag(
            "select remaining between '119 minutes' and '2 hours' from lock_holders where name = 'in server'"
        ));
        assert_eq!(text("named_lock_extend('in server', null)"), None);
        assert!(flag(
            "select num_nulls(hold_limit, expires_at, remaining) = 3 from lock_holders where name = 'in server'"
        ));
        assert_eq!(int("named_unlock('in server')"), 0);
    }

    #[pg_test]
    fn cluster_wide_is_another_lock() {
        assert!(flag("select named_lock('in server', cluster_wide => true)"));
        assert_eq!(int("named_lock_held('in server')"), 0);
        assert_eq!(int("named_lock_held('in server', cluster_wide => true)"), 1);
        assert_eq!(code("select named_unlock('in server')"), "55000");
        assert_eq!(int("named_unlock('in server', cluster_wide => true)"), 0);
    }

    #[pg_test]
    fn keys_are_found_in_pg_locks() {
        assert!(flag("select named_lock('in server'), named_lock('in server', cluster_wide => true)"));
        for (cluster_wide, database) in
            [("false", "(select oid from pg_database where datname = current_database())"), ("true", "0")]
        {
            assert!(flag(&format!("select database = {database} from named_lock_key('in server', {cluster_wide})")));
            assert_eq!(
                int(&format!(
                    "select count(*) from pg_locks as l \
                       join named_lock_key('in server', {cluster_wide}) as k using (database, classid, objid, objsubid) \
                      where l.locktype = 'advisory' and l.pid = pg_backend_pid()"
                )),
                1
            );
        }
        assert_eq!(int("named_unlock_all()"), 2);
    }

    #[pg_test]
    fn native_twins_are_native_locks() {
        for (lock, key, unlock) in [
            ("advisory_lock(77001)", "77001", "pg_advisory_unlock(77001)"),
            ("advisory_lock(77, 1)", "77, 1", "pg_advisory_unlock(77, 1)"),
            ("advisory_lock(-77001, mode => 'share')", "-77001", "pg_advisory_unlock_shared(-77001)"),
            ("advisory_lock(77, -1, '1 s', 'share')", "77, -1", "pg_advisory_unlock_shared(77, -1)"),
        ] {
            assert!(flag(&format!("select {lock}")));
            assert!(flag(&format!("select {unlock}")), "{key}");
            assert!(!flag(&format!("select {unlock}")), "{key}");
        }
        assert!(flag("select advisory_xact_lock(77002)"));
        assert!(flag("select advisory_xact_lock(77, 2)"));
        assert_eq!(text("advisory_lock_strict(77003)").as_deref(), Some(""));
        assert_eq!(text("advisory_xact_lock_strict(77, 4)").as_deref(), Some(""));
        assert_eq!(int("select count(*) from lock_holders where pid = pg_backend_pid() and kind = 'advisory'"), 4);
        Spi::run("select pg_advisory_unlock_all()").expect("unlock");
    }

    #[pg_test]
    fn a_call_inside_a_function_is_refused() {
        assert_eq!(code("call named_lock_wait('in server')"), "25001");
        assert_eq!(int("named_lock_held('in server')"), 0);
    }

    #[pg_test]
    fn errors_leave_the_servers_globals_as_they_were() {
        // SAFETY: plain globals.
        #[allow(unsafe_code, reason = "looks at what the server has no function for")]
        let globals = || unsafe {
            (
                pg_sys::InterruptHoldoffCount,
                pg_sys::QueryCancelHoldoffCount,
                pg_sys::CritSectionCount,
                pg_sys::LockTimeout,
                pg_sys::CurrentMemoryContext,
                pg_sys::error_context_stack,
                pg_sys::PG_exception_stack,
                pg_sys::CurrentResourceOwner,
            )
        };
        let before = globals();
        for (sql, expected) in [
            ("select named_lock('in server', '0')", "00000"),
            ("select named_lock('', '0')", "22023"),
            ("select named_lock(null)", "22004"),
            ("select named_unlock('in server other')", "55000"),
            // Two names with one key.
            ("select named_lock('order-36325'), named_lock('M0plytOy')", "54000"),
            ("select lock_graph()", "00000"),
        ] {
            assert_eq!(code(sql), expected, "{sql}");
            assert_eq!(globals(), before, "{sql}");
        }
        Spi::run("select named_unlock_all()").expect("unlock");
        assert_eq!(globals(), before);
    }

    #[pg_test]
    fn the_graph_is_a_flowchart() {
        assert!(text("lock_graph()").expect("a text").starts_with("flowchart"));
    }

    #[pg_test]
    fn arguments_have_the_contracts_names_and_defaults() {
        for (function, arguments) in [
            ("named_lock", "name timeout mode hold_limit cluster_wide"),
            ("named_lock_strict", "name timeout mode hold_limit cluster_wide"),
            ("named_xact_lock", "name timeout mode cluster_wide"),
            ("named_xact_lock_strict", "name timeout mode cluster_wide"),
            ("named_lock_wait", "name timeout mode hold_limit cluster_wide acquired"),
            ("named_unlock", "name mode all_holds cluster_wide"),
            ("named_unlock_all", ""),
            ("named_lock_held", "name mode cluster_wide"),
            ("named_lock_convert", "name mode timeout cluster_wide"),
            ("named_lock_extend", "name hold_limit cluster_wide"),
            ("named_lock_key", "name cluster_wide database classid objid objsubid"),
            ("named_semaphore", "name permits timeout hold_limit"),
            ("named_semaphore_release", "name slot"),
            (
                "_lock_stats",
                "domain database grants waits timeouts deadlocks wait_time max_wait \
                 leases_granted leases_taken_over leases_expired stats_reset",
            ),
            ("lock_stats_reset", ""),
            (
                "lease_acquire",
                "name ttl timeout owner payload permits bound acquired token remaining expires_at holder retry_after",
            ),
            ("lease_acquire_wait", "name ttl timeout owner payload permits bound token"),
            ("lease_renew", "name token ttl payload remaining expires_at release_requested waiters"),
            ("lease_release", "name token keep_for"),
            ("lease_check", "name token"),
            ("lease_guard", "name token"),
            ("lease_request", "name reason"),
            ("lease_break", "name"),
            ("lease_holder", "name owner payload acquired_at remaining expires_at permits"),
        ] {
            assert_eq!(
                text(&format!("select array_to_string(proargnames, ' ') from pg_proc where proname = '{function}'"))
                    .unwrap_or_default(),
                arguments,
                "{function}"
            );
        }
        assert_eq!(
            text(
                "select string_agg(enumlabel, ', ' order by enumsortorder) from pg_enum \
                  where enumtypid = 'named_lock_mode'::regtype"
            )
            .as_deref(),
            Some("exclusive, share, intent share, intent exclusive, share intent exclusive")
        );
    }

    #[pg_test]
    fn an_empty_search_path_is_no_obstacle() {
        let schema = text(
            "select nspname from pg_namespace as n join pg_extension as e on n.oid = extnamespace \
                            where extname = 'named_locks'",
        )
        .expect("a schema");
        Spi::run("set local search_path = ''").expect("set");
        for call in [
            "named_lock('in server', '1 s', 'share')",
            "named_lock_convert('in server', 'exclusive')",
            "named_xact_lock('in server')",
            "advisory_lock(77005)",
        ] {
            assert!(flag(&format!("select {schema}.{call}")), "{call}");
        }
        assert_eq!(int(&format!("{schema}.named_lock_held('in server', 'exclusive')")), 2);
        assert_eq!(int(&format!("select count(*) from {schema}.lock_holders where name = 'in server'")), 2);
        assert_eq!(int(&format!("select count(*) from {schema}.lock_waiters where name = 'in server'")), 0);
        assert!(text(&format!("{schema}.lock_graph()")).is_some());
        assert_eq!(int(&format!("{schema}.named_unlock('in server')")), 0);
        Spi::run("select pg_advisory_unlock_all()").expect("unlock");
    }
}
