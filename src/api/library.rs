//! What the extension's scripts ask the library. No object of the extension is left of it.

use super::arguments::required;
use crate::server::arguments::Arguments;
use crate::server::report::answer;
use crate::server::version;
use pgrx::prelude::*;

/// `(version)`: the script's. An error where the library is older.
#[pg_extern(sql = false)]
fn check_library(fcinfo: pg_sys::FunctionCallInfo) {
    let version = required("version", Arguments::of(fcinfo).text(0));
    answer(version.and_then(version::check_script));
}
