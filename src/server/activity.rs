//! What each session is and does, with the rights of `pg_stat_activity`.

use super::arguments::ServerText;
use super::ffi;
use pgrx::pg_sys;
use std::collections::HashMap;
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// One session.
#[derive(Clone, Debug)]
pub struct Activity {
    /// The role that logged in.
    pub role: pg_sys::Oid,
    /// Its application_name.
    pub application_name: Option<ServerText>,
    /// Whether the caller may see the rest, and names.
    pub is_visible: bool,
    /// Its client's address; None for a Unix socket, or if not visible.
    pub client_addr: Option<IpAddr>,
    /// What it does; None if not visible.
    pub state: Option<&'static str>,
}

/// All sessions, by process.
pub fn read() -> HashMap<i32, Activity> {
    let may_see_all = may_see_all();
    let mut sessions = HashMap::new();
    // SAFETY: the server's copy for this session, made anew; entries are read before it is cleared again.
    unsafe {
        pg_sys::pgstat_clear_backend_activity_snapshot();
        for number in 0..pg_sys::pgstat_fetch_stat_numbackends() {
            let Some(status) = ffi::backend_status(number) else { continue };
            let role = (*status).st_userid;
            let is_visible = may_see_all || may_act_as(role);
            let visible = is_visible.then_some(());
            sessions.insert(
                (*status).st_procpid,
                Activity {
                    role,
                    application_name: ServerText::from_server((*status).st_appname),
                    is_visible,
                    client_addr: visible.and_then(|()| address(&raw const (*status).st_clientaddr.addr)),
                    state: visible.and_then(|()| state((*status).st_state)),
                },
            );
        }
    }
    sessions
}

/// Whether the caller may see everything of all sessions.
pub fn may_see_all() -> bool {
    may_act_as(pg_sys::Oid::from(pg_sys::ROLE_PG_READ_ALL_STATS))
}

/// What the session calls itself, in the database's encoding: its application_name, or else its role.
pub fn application_or_role() -> Vec<u8> {
    // SAFETY: a plain global, null or a C string; and the name of the role that runs this, in memory of this call.
    unsafe {
        let name = pg_sys::application_name.cast_const();
        let name = if name.is_null() || *name == 0 {
            pg_sys::GetUserNameFromId(pg_sys::GetUserId(), false).cast_const()
        } else {
            name
        };
        CStr::from_ptr(name).to_bytes().to_vec()
    }
}

/// Whether the caller is that role, or a member of it.
pub fn may_act_as(role: pg_sys::Oid) -> bool {
    // SAFETY: asks the catalogue, in a transaction as every SQL function is.
    role != pg_sys::InvalidOid && unsafe { pg_sys::has_privs_of_role(pg_sys::GetUserId(), role) }
}

/// Whether there is such a role.
pub fn role_exists(role: pg_sys::Oid) -> bool {
    // SAFETY: asks the catalogue's cache, in a transaction as every SQL function is; for a role that is missing, null.
    unsafe { !pg_sys::GetUserNameFromId(role, true).is_null() }
}

fn state(state: pg_sys::BackendState::Type) -> Option<&'static str> {
    use pg_sys::BackendState as S;
    Some(match state {
        S::STATE_IDLE => "idle",
        S::STATE_RUNNING => "active",
        S::STATE_IDLEINTRANSACTION => "idle in transaction",
        S::STATE_FASTPATH => "fastpath function call",
        S::STATE_IDLEINTRANSACTION_ABORTED => "idle in transaction (aborted)",
        S::STATE_DISABLED => "disabled",
        _ => return None,
    })
}

/// # Safety
/// `address` points to a socket address.
unsafe fn address(address: *const pg_sys::sockaddr_storage) -> Option<IpAddr> {
    // SAFETY: the family says which kind of address it is.
    unsafe {
        match i32::from((*address).ss_family) {
            libc::AF_INET => {
                let address = &*address.cast::<libc::sockaddr_in>();
                Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let address = &*address.cast::<libc::sockaddr_in6>();
                Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}
