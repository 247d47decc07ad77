//! The forms in which one lock can be asked for, so that a rule can be tested for all of them in one loop.

use super::{Rows, SqlError};

/// What is locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A name, in this database or `cluster_wide`.
    Name { name: String, cluster_wide: bool },
    /// A native key.
    Bigint(i64),
    /// A native pair of keys.
    Pair(i32, i32),
}

impl Target {
    pub fn name(name: &str) -> Target {
        Target::Name { name: name.into(), cluster_wide: false }
    }

    /// A condition on `pg_locks` for this lock, for a session in the same database.
    pub fn in_pg_locks(&self) -> String {
        match self {
            Target::Name { name, cluster_wide } => format!(
                "(database, classid, objid, objsubid) = \
                 (select k.database, k.classid, k.objid, k.objsubid \
                    from named_lock_key({}, cluster_wide => {cluster_wide}) as k)",
                literal(name)
            ),
            Target::Bigint(key) => format!(
                "database = (select oid from pg_database where datname = current_database()) \
                 and classid = {} and objid = {} and objsubid = 1",
                (key >> 32) as u32,
                *key as u32
            ),
            Target::Pair(key1, key2) => format!(
                "database = (select oid from pg_database where datname = current_database()) \
                 and classid = {} and objid = {} and objsubid = 2",
                *key1 as u32, *key2 as u32
            ),
        }
    }

    /// A condition on `lock_holders` for this lock, for a session that may see the name.
    pub fn in_lock_holders(&self) -> String {
        match self {
            Target::Name { name, .. } => format!("name = {}", literal(name)),
            Target::Bigint(key) => {
                let (high, low) = ((key >> 32) as u32, *key as u32);
                format!("name is null and classid = {high} and objid = {low} and objsubid = 1")
            }
            Target::Pair(key1, key2) => {
                let (key1, key2) = (*key1 as u32, *key2 as u32);
                format!("name is null and classid = {key1} and objid = {key2} and objsubid = 2")
            }
        }
    }

    /// The same for `lock_waiters`.
    pub fn in_lock_waiters(&self) -> String {
        match self {
            Target::Name { name, .. } => format!("name = {}", literal(name)),
            _ => format!(
                "name is null and pid in (select pid from pg_locks where not granted and {})",
                self.in_pg_locks()
            ),
        }
    }

    /// A call that gives back one session hold of it.
    pub fn unlock(&self) -> String {
        match self {
            Target::Name { name, cluster_wide } => {
                format!("select named_unlock({}, cluster_wide => {cluster_wide})", literal(name))
            }
            Target::Bigint(key) => format!("select pg_advisory_unlock({key})"),
            Target::Pair(key1, key2) => format!("select pg_advisory_unlock({key1}, {key2})"),
        }
    }

    fn arguments(&self) -> String {
        match self {
            Target::Name { name, .. } => literal(name),
            Target::Bigint(key) => format!("{key}::bigint"),
            Target::Pair(key1, key2) => format!("{key1}, {key2}"),
        }
    }
}

/// A text as an SQL literal.
pub fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// For how long a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Session,
    Transaction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Name,
    ClusterWide,
    Bigint,
    Pair,
}

/// One way to lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    kind: Kind,
    pub scope: Scope,
    /// Raises 55P03 where the others return false.
    pub strict: bool,
    /// By `CALL named_lock_wait`.
    pub call: bool,
}

impl Form {
    /// Every form.
    pub fn all() -> Vec<Form> {
        let mut forms = Vec::new();
        for kind in [Kind::Name, Kind::ClusterWide, Kind::Bigint, Kind::Pair] {
            for scope in [Scope::Session, Scope::Transaction] {
                for strict in [false, true] {
                    forms.push(Form { kind, scope, strict, call: false });
                }
            }
        }
        for kind in [Kind::Name, Kind::ClusterWide] {
            forms.push(Form { kind, scope: Scope::Session, strict: false, call: true });
        }
        forms
    }

    /// The forms that take a name.
    pub fn named() -> Vec<Form> {
        Form::all().into_iter().filter(Form::is_named).collect()
    }

    /// `advisory_lock(bigint)`, for a twin of the server's own function.
    pub fn bigint() -> Form {
        Form { kind: Kind::Bigint, scope: Scope::Session, strict: false, call: false }
    }

    pub fn is_named(&self) -> bool {
        matches!(self.kind, Kind::Name | Kind::ClusterWide)
    }

    pub fn is_cluster_wide(&self) -> bool {
        self.kind == Kind::ClusterWide
    }

    pub fn is_session(&self) -> bool {
        self.scope == Scope::Session
    }

    /// A lock to be asked for in this form. Native keys are made of the name.
    pub fn lock(self, name: &str) -> Lock {
        let target = match self.kind {
            Kind::Name => Target::name(name),
            Kind::ClusterWide => Target::Name { name: name.into(), cluster_wide: true },
            Kind::Bigint => Target::Bigint(number(name)),
            Kind::Pair => Target::Pair((number(name) >> 32) as i32, number(name) as i32),
        };
        Lock { form: self, target }
    }
}

/// FNV-1a: any number will do, as long as two names get two.
fn number(name: &str) -> i64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
        .cast_signed()
}

/// A lock to be asked for in a form.
#[derive(Clone, Debug)]
pub struct Lock {
    pub form: Form,
    pub target: Target,
}

impl Lock {
    fn function(&self) -> String {
        let name = match (self.form.is_named(), self.form.scope) {
            (true, Scope::Session) => "named_lock",
            (true, Scope::Transaction) => "named_xact_lock",
            (false, Scope::Session) => "advisory_lock",
            (false, Scope::Transaction) => "advisory_xact_lock",
        };
        match (self.form.call, self.form.strict) {
            (true, _) => "named_lock_wait".into(),
            (false, true) => format!("{name}_strict"),
            (false, false) => name.into(),
        }
    }

    /// The call without `select` or `call`; `more` are further arguments by name.
    pub fn expression(&self, timeout: Option<&str>, more: &str) -> String {
        let mut call = format!("{}({}", self.function(), self.target.arguments());
        if let Some(timeout) = timeout {
            call += &format!(", timeout => '{timeout}'");
        }
        if !more.is_empty() {
            call += &format!(", {more}");
        }
        if self.form.is_cluster_wide() {
            call += ", cluster_wide => true";
        }
        call + ")"
    }

    /// The statement; None: without a timeout.
    pub fn acquire(&self, timeout: Option<&str>) -> String {
        self.acquire_with(timeout, "")
    }

    /// The same with further arguments by name, such as `mode => 'share'`.
    pub fn acquire_with(&self, timeout: Option<&str>, more: &str) -> String {
        let verb = if self.form.call { "call" } else { "select" };
        format!("{verb} {}", self.expression(timeout, more))
    }

    pub fn unlock(&self) -> String {
        self.target.unlock()
    }

    /// The same lock in the plain session form, for the one who holds it against others.
    pub fn for_holder(&self) -> Lock {
        let form = Form { scope: Scope::Session, strict: false, call: false, ..self.form };
        Lock { form, target: self.target.clone() }
    }

    /// What an error's text calls it: the name, or the key.
    pub fn called(&self) -> String {
        match &self.target {
            Target::Name { name, .. } => name.clone(),
            Target::Bigint(key) => key.to_string(),
            Target::Pair(key1, key2) => format!("{key1}, {key2}"),
        }
    }
}

/// What a call said.
#[derive(Debug)]
pub enum Answer {
    /// The lock is held: true, or a normal return of a strict form.
    Held,
    /// The timeout passed: false, or 55P03 of a strict form.
    NotHeld,
    /// Any other error, and 55P03 of a form that isn't strict.
    Failed(SqlError),
}

/// Reads what a call of a form said.
#[track_caller]
pub fn answer(form: Form, result: Result<Rows, SqlError>) -> Answer {
    match result {
        Ok(rows) => match (form.strict, rows.first().and_then(|row| row.get(0))) {
            (true, Some("")) => Answer::Held,
            (false, Some("t")) => Answer::Held,
            (false, Some("f")) => Answer::NotHeld,
            (_, other) => panic!("{form:?} answered {other:?}"),
        },
        Err(error) if form.strict && error.code == "55P03" => Answer::NotHeld,
        Err(error) => Answer::Failed(error),
    }
}

impl Answer {
    pub fn held(&self) -> bool {
        matches!(self, Answer::Held)
    }

    /// The error, where there is one.
    #[track_caller]
    pub fn error(&self) -> &SqlError {
        match self {
            Answer::Failed(error) => error,
            other => panic!("an error was due, not {other:?}"),
        }
    }
}
