//! named_locks: locks with names and timeouts, leases with fencing tokens, and a view of who holds them, for PostgreSQL.
//!
//! Three kinds of room: `api` is what SQL calls, one call each; `rules` is what names, keys, modes, holds and leases mean,
//! without a server; `server` is the server's side, one wrapper for each of its facilities.

mod api;
mod rules;
mod server;

#[cfg(any(test, feature = "pg_test"))]
#[path = "../pg_test/mod.rs"]
pub mod pg_test;

pgrx::pg_module_magic!(name, version);

pgrx::extension_sql_file!("../sql/library.sql", name = "library", bootstrap);
pgrx::extension_sql_file!("../sql/types.sql", name = "types", requires = ["library"]);
pgrx::extension_sql_file!("../sql/named_locks.sql", name = "named_locks", requires = ["types"]);
pgrx::extension_sql_file!("../sql/sets.sql", name = "sets", requires = ["types"]);
pgrx::extension_sql_file!("../sql/trees.sql", name = "trees", requires = ["types"]);
pgrx::extension_sql_file!("../sql/native_locks.sql", name = "native_locks", requires = ["types"]);
pgrx::extension_sql_file!("../sql/semaphores.sql", name = "semaphores", requires = ["types"]);
pgrx::extension_sql_file!("../sql/domains.sql", name = "domains", requires = ["types"]);
pgrx::extension_sql_file!("../sql/leases.sql", name = "leases", requires = ["types"]);
pgrx::extension_sql_file!("../sql/views.sql", name = "views", requires = ["leases"]);
pgrx::extension_sql_file!("../sql/statistics.sql", name = "statistics", requires = ["views"]);

#[cfg(not(panic = "unwind"))]
compile_error!("errors cross from Rust to the server by unwinding: set panic = \"unwind\"");

/// When the server loads the library.
#[allow(non_snake_case)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    server::settings::define();
}
