//! All that the extension shows to SQL, as one table: tests go over it, so that nothing new can be forgotten.
//! `rights.rs` compares it with the catalogue.

use super::{Scope, Session};

/// Whom something is for, if nobody is given or denied anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum For {
    Everyone,
    /// The extension's owner and superusers.
    Owner,
}

/// What a function does, as far as rights and limits are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Does {
    /// Takes named locks.
    Lock(Scope),
    /// Takes a native lock.
    Native(Scope),
    /// Changes the mode of a named lock that the session holds.
    Convert,
    /// Gives a named lock that the session holds a new limit.
    Extend,
    /// Takes a lease.
    Lease,
    /// Asks for a lease, or breaks it.
    Order,
    /// Changes or guards a lease by its token.
    Token,
    /// Gives back what this session holds, or counts it.
    Own,
    /// Only looks.
    Look,
    /// Changes what holds for all.
    Administer,
    /// Is called by a trigger only.
    Trigger,
}

impl Does {
    /// Whether the rule for a name's domain says who may call it about that name.
    pub fn is_under_rules(self) -> bool {
        matches!(self, Does::Lock(_) | Does::Convert | Does::Extend | Does::Lease | Does::Order)
    }

    /// Whether it acquires anything.
    pub fn acquires(self) -> bool {
        matches!(self, Does::Lock(_) | Does::Native(_) | Does::Lease)
    }

    /// Whether `named_locks.session_locks` is about it. (A lease that is bound is one too.)
    pub fn is_session_form(self) -> bool {
        matches!(self, Does::Lock(Scope::Session) | Does::Native(Scope::Session) | Does::Convert)
    }

    /// Whether a standby refuses it unless `named_locks.allow_on_standby` is on.
    pub fn is_lock_on_standby(self) -> bool {
        matches!(self, Does::Lock(_) | Does::Native(_) | Does::Convert)
    }

    /// Whether a standby refuses it always.
    pub fn writes(self) -> bool {
        matches!(self, Does::Lease | Does::Order | Does::Token)
    }
}

/// A function or procedure.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// As `regprocedure` shows it.
    pub signature: &'static str,
    pub is_for: For,
    pub does: Does,
    /// What has to come before in the same session, if anything: a query of one value.
    pub before: &'static str,
    /// A call that waits for nobody and succeeds where NAME is free. VALUE is what `before` gave.
    pub call: &'static str,
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.signature.split('(').next().unwrap_or_default()
    }

    /// Whether it has to be called by CALL, on its own.
    pub fn is_procedure(&self) -> bool {
        self.call.starts_with("call ")
    }

    /// Does what has to come before, and gives the call.
    #[track_caller]
    pub fn prepared(&self, session: &mut Session, name: &str) -> String {
        self.prepared_in(session, name, str::to_owned)
    }

    /// The same, with a change made to each statement.
    #[track_caller]
    pub fn prepared_in(&self, session: &mut Session, name: &str, change: impl Fn(&str) -> String) -> String {
        let value = if self.before.is_empty() {
            String::new()
        } else {
            session.text(&change(self.before).replace("NAME", name))
        };
        change(self.call).replace("NAME", name).replace("VALUE", &value)
    }
}

/// A statement with the extension's functions qualified by a schema, as that stands in SQL.
pub fn qualified(statement: &str, schema: &str) -> String {
    let mut names: Vec<&str> = FUNCTIONS.iter().map(Function::name).collect();
    names.sort_unstable();
    names.dedup();
    names.iter().fold(statement.to_owned(), |statement, name| {
        statement.replace(&format!("{name}("), &format!("{schema}.{name}("))
    })
}

const fn function(signature: &'static str, does: Does, before: &'static str, call: &'static str) -> Function {
    Function { signature, is_for: For::Everyone, does, before, call }
}

const fn for_owner(signature: &'static str, does: Does, call: &'static str) -> Function {
    Function { signature, is_for: For::Owner, does, before: "", call }
}

const SESSION: Does = Does::Lock(Scope::Session);
const TRANSACTION: Does = Does::Lock(Scope::Transaction);
const NATIVE_SESSION: Does = Does::Native(Scope::Session);
const NATIVE_TRANSACTION: Does = Does::Native(Scope::Transaction);

const HELD: &str = "select named_lock('NAME')";
const LEASED: &str = "select token from lease_acquire('NAME', '1 hour')";

/// Every function and procedure.
pub const FUNCTIONS: [Function; 45] = [
    function(
        "named_lock(text,interval,named_lock_mode,interval,boolean)",
        SESSION,
        "",
        "select named_lock('NAME', '0')",
    ),
    function(
        "named_lock_strict(text,interval,named_lock_mode,interval,boolean)",
        SESSION,
        "",
        "select named_lock_strict('NAME', '0')",
    ),
    function(
        "named_xact_lock(text,interval,named_lock_mode,boolean)",
        TRANSACTION,
        "",
        "select named_xact_lock('NAME', '0')",
    ),
    function(
        "named_xact_lock_strict(text,interval,named_lock_mode,boolean)",
        TRANSACTION,
        "",
        "select named_xact_lock_strict('NAME', '0')",
    ),
    function(
        "named_lock_wait(text,interval,named_lock_mode,interval,boolean,boolean)",
        SESSION,
        "",
        "call named_lock_wait('NAME', '0')",
    ),
    function("named_unlock(text,named_lock_mode,boolean,boolean)", Does::Own, HELD, "select named_unlock('NAME')"),
    function("named_unlock_all()", Does::Own, HELD, "select named_unlock_all()"),
    function("named_lock_held(text,named_lock_mode,boolean)", Does::Own, HELD, "select named_lock_held('NAME')"),
    function(
        "named_lock_convert(text,named_lock_mode,interval,boolean)",
        Does::Convert,
        HELD,
        "select named_lock_convert('NAME', 'share', '0')",
    ),
    function(
        "named_lock_extend(text,interval,boolean)",
        Does::Extend,
        HELD,
        "select named_lock_extend('NAME', '1 hour')",
    ),
    function("named_lock_key(text,boolean)", Does::Look, "", "select * from named_lock_key('NAME')"),
    function(
        "named_lock_all(text[],interval,named_lock_mode)",
        SESSION,
        "",
        "select named_lock_all(array['NAME'], '0')",
    ),
    function(
        "named_xact_lock_all(text[],interval,named_lock_mode)",
        TRANSACTION,
        "",
        "select named_xact_lock_all(array['NAME'], '0')",
    ),
    function("named_lock_any(text[],integer,named_lock_mode)", SESSION, "", "select named_lock_any(array['NAME'], 1)"),
    function(
        "named_xact_lock_any(text[],integer,named_lock_mode)",
        TRANSACTION,
        "",
        "select named_xact_lock_any(array['NAME'], 1)",
    ),
    function("named_lock_tree(text,interval,named_lock_mode)", SESSION, "", "select named_lock_tree('NAME', '0')"),
    function(
        "named_xact_lock_tree(text,interval,named_lock_mode)",
        TRANSACTION,
        "",
        "select named_xact_lock_tree('NAME', '0')",
    ),
    function(
        "named_unlock_tree(text)",
        Does::Own,
        "select named_lock_tree('NAME')",
        "select named_unlock_tree('NAME')",
    ),
    function("named_semaphore(text,integer,interval,interval)", SESSION, "", "select named_semaphore('NAME', 2, '0')"),
    function(
        "named_semaphore_release(text,integer)",
        Does::Own,
        "select named_semaphore('NAME', 2)",
        "select named_semaphore_release('NAME', VALUE)",
    ),
    function(
        "advisory_lock(bigint,interval,named_lock_mode,interval)",
        NATIVE_SESSION,
        "",
        "select advisory_lock(hashtextextended('NAME', 0), timeout => '0')",
    ),
    function(
        "advisory_lock_strict(bigint,interval,named_lock_mode,interval)",
        NATIVE_SESSION,
        "",
        "select advisory_lock_strict(hashtextextended('NAME', 0), timeout => '0')",
    ),
    function(
        "advisory_xact_lock(bigint,interval,named_lock_mode)",
        NATIVE_TRANSACTION,
        "",
        "select advisory_xact_lock(hashtextextended('NAME', 0), timeout => '0')",
    ),
    function(
        "advisory_xact_lock_strict(bigint,interval,named_lock_mode)",
        NATIVE_TRANSACTION,
        "",
        "select advisory_xact_lock_strict(hashtextextended('NAME', 0), timeout => '0')",
    ),
    function(
        "advisory_lock(integer,integer,interval,named_lock_mode,interval)",
        NATIVE_SESSION,
        "",
        "select advisory_lock(hashtext('NAME'), 1, timeout => '0')",
    ),
    function(
        "advisory_lock_strict(integer,integer,interval,named_lock_mode,interval)",
        NATIVE_SESSION,
        "",
        "select advisory_lock_strict(hashtext('NAME'), 1, timeout => '0')",
    ),
    function(
        "advisory_xact_lock(integer,integer,interval,named_lock_mode)",
        NATIVE_TRANSACTION,
        "",
        "select advisory_xact_lock(hashtext('NAME'), 1, timeout => '0')",
    ),
    function(
        "advisory_xact_lock_strict(integer,integer,interval,named_lock_mode)",
        NATIVE_TRANSACTION,
        "",
        "select advisory_xact_lock_strict(hashtext('NAME'), 1, timeout => '0')",
    ),
    function(
        "lease_acquire(text,interval,interval,text,jsonb,integer,boolean)",
        Does::Lease,
        "",
        "select acquired from lease_acquire('NAME', '1 hour')",
    ),
    function(
        "lease_acquire_wait(text,interval,interval,text,jsonb,integer,boolean,bigint)",
        Does::Lease,
        "",
        "call lease_acquire_wait('NAME', '1 hour', '0')",
    ),
    function(
        "lease_renew(text,bigint,interval,jsonb)",
        Does::Token,
        LEASED,
        "select * from lease_renew('NAME', VALUE)",
    ),
    function("lease_release(text,bigint,interval)", Does::Token, LEASED, "select lease_release('NAME', VALUE)"),
    function("lease_check(text,bigint)", Does::Look, LEASED, "select lease_check('NAME', VALUE)"),
    function("lease_guard(text,bigint)", Does::Token, LEASED, "select lease_guard('NAME', VALUE)"),
    function("lease_request(text,text)", Does::Order, LEASED, "select lease_request('NAME')"),
    function("lease_break(text)", Does::Order, LEASED, "select lease_break('NAME')"),
    function("lease_holder(text)", Does::Look, LEASED, "select * from lease_holder('NAME')"),
    for_owner(
        "lock_domain_set(text,regrole,interval,interval)",
        Does::Administer,
        "select lock_domain_set('of the table', max_wait => '1 s')",
    ),
    for_owner("lock_domain_drop(text)", Does::Administer, "select lock_domain_drop('of the table')"),
    for_owner("_lock_domain_changed()", Does::Trigger, "select _lock_domain_changed() is null"),
    function("_lock_holders()", Does::Look, "", "select * from _lock_holders()"),
    function("_lock_waiters()", Does::Look, "", "select * from _lock_waiters()"),
    function("lock_graph()", Does::Look, "", "select lock_graph()"),
    function("_lock_stats()", Does::Look, "", "select * from _lock_stats()"),
    for_owner("lock_stats_reset()", Does::Administer, "select lock_stats_reset()"),
];

/// A table, sequence or view.
#[derive(Clone, Copy, Debug)]
pub struct Relation {
    pub name: &'static str,
    /// `pg_class.relkind`.
    pub kind: char,
    /// Who may read it. Nobody but the owner may write.
    pub is_for: For,
}

/// Every table, sequence and view.
pub const RELATIONS: [Relation; 8] = [
    Relation { name: "_lease", kind: 'r', is_for: For::Owner },
    Relation { name: "_lease_timeline", kind: 'S', is_for: For::Owner },
    Relation { name: "_lease_token", kind: 'S', is_for: For::Owner },
    Relation { name: "_lock_domain", kind: 'r', is_for: For::Owner },
    Relation { name: "lock_domains", kind: 'v', is_for: For::Everyone },
    Relation { name: "lock_holders", kind: 'v', is_for: For::Everyone },
    Relation { name: "lock_stats", kind: 'v', is_for: For::Everyone },
    Relation { name: "lock_waiters", kind: 'v', is_for: For::Everyone },
];
