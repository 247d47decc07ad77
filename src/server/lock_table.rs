//! One pass over the lock manager's table: who holds and who waits for advisory locks of any kind.

use super::ffi;
use crate::rules::key::Tag;
use pgrx::pg_sys;
use std::collections::HashSet;

/// A process's or a prepared transaction's part in one lock.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The lock.
    pub tag: Tag,
    /// The process; None for a prepared transaction.
    pub pid: Option<i32>,
    /// Its virtual transaction; a prepared transaction keeps the one it had.
    pub virtual_transaction: (i32, u32),
    /// The modes it holds the lock in, bit `1 << lockmode`.
    pub hold_mask: u32,
    /// The mode it waits for, as the lock manager numbers it.
    pub waits_for: Option<i32>,
    /// Since when, in microseconds of the server's clock; 0 at the very beginning.
    pub wait_start: i64,
}

/// A pass over the table.
#[derive(Debug, Default)]
pub struct LockTable {
    /// The rows of advisory locks.
    pub rows: Vec<Row>,
    /// Everything else that a process waits for: the process, and the server's word for the kind of lock.
    pub other_waits: Vec<(i32, &'static str)>,
    /// The transaction ids that prepared transactions hold: virtual transaction and id.
    prepared: Vec<((i32, u32), u32)>,
}

/// Reads the table.
pub fn read() -> LockTable {
    // SAFETY: the server returns an array of so many elements, in the current memory context.
    let instances = unsafe {
        let data = pg_sys::GetLockStatusData();
        match (*data).nelements {
            0 => &[],
            length => std::slice::from_raw_parts((*data).locks, length as usize),
        }
    };
    let mut table = LockTable::default();
    for instance in instances {
        let tag = &instance.locktag;
        let pid = (instance.pid != 0).then_some(instance.pid);
        let virtual_transaction = ffi::virtual_transaction(instance);
        let waits_for = (instance.waitLockMode != 0).then_some(instance.waitLockMode);
        match u32::from(tag.locktag_type) {
            pg_sys::LockTagType::LOCKTAG_ADVISORY => table.rows.push(Row {
                tag: Tag {
                    database: tag.locktag_field1,
                    high: tag.locktag_field2,
                    low: tag.locktag_field3,
                    class: tag.locktag_field4,
                },
                pid,
                virtual_transaction,
                hold_mask: instance.holdMask as u32,
                waits_for,
                wait_start: instance.waitStart,
            }),
            pg_sys::LockTagType::LOCKTAG_TRANSACTION if pid.is_none() => {
                table.prepared.push((virtual_transaction, tag.locktag_field1));
            }
            kind => {
                if let (Some(pid), true) = (pid, waits_for.is_some()) {
                    table.other_waits.push((pid, word_for(kind)));
                }
            }
        }
    }
    table
}

impl LockTable {
    /// The id of the prepared transaction that was that virtual transaction.
    pub fn prepared_transaction(&self, virtual_transaction: (i32, u32)) -> Option<u32> {
        self.prepared.iter().find(|prepared| prepared.0 == virtual_transaction).map(|prepared| prepared.1)
    }
}

/// Which virtual transactions, prepared ones too, hold which advisory locks.
pub fn held_by_transactions() -> HashSet<((i32, u32), Tag)> {
    read().rows.iter().filter(|row| row.hold_mask != 0).map(|row| (row.virtual_transaction, row.tag)).collect()
}

fn word_for(kind: u32) -> &'static str {
    match kind {
        pg_sys::LockTagType::LOCKTAG_RELATION => "relation",
        pg_sys::LockTagType::LOCKTAG_RELATION_EXTEND => "extend",
        pg_sys::LockTagType::LOCKTAG_TUPLE => "tuple",
        pg_sys::LockTagType::LOCKTAG_TRANSACTION => "transactionid",
        pg_sys::LockTagType::LOCKTAG_VIRTUALTRANSACTION => "virtualxid",
        pg_sys::LockTagType::LOCKTAG_OBJECT => "object",
        _ => "other",
    }
}

/// The place of a waiting process in the queue for its lock, from 1; None if it does not wait any more.
pub fn queue_position(pid: i32) -> Option<i32> {
    // SAFETY: the server returns arrays of the lengths beside them, in the current memory context.
    unsafe {
        let data = pg_sys::GetBlockerStatusData(pid);
        match (*data).nprocs {
            0 => None,
            length => std::slice::from_raw_parts((*data).procs, length as usize)
                .iter()
                .find(|process| process.pid == pid)
                .map(|process| process.num_waiters + 1),
        }
    }
}

/// The processes that a waiting one waits for, as `pg_blocking_pids()` tells; 0 for a prepared transaction.
pub fn blocking_pids(pid: i32) -> Vec<i32> {
    use pgrx::datum::IntoDatum;
    // SAFETY: SQL's own function, with its one argument.
    unsafe { pgrx::direct_function_call::<Vec<i32>>(pg_sys::pg_blocking_pids, &[pid.into_datum()]) }.unwrap_or_default()
}
