//! What time it is, by the wall clock and by the time since the machine has booted.

use super::ffi;
use super::process_local::ProcessLocal;
use crate::rules::lease::Now;
use std::cell::Cell;
use std::mem::MaybeUninit;
use xxhash_rust::xxh3::xxh3_64;

/// Now.
pub fn now() -> Now {
    let wall = ffi::now();
    match boot() {
        0 => Now { wall, boot: 0, uptime: 0 },
        boot => uptime().map_or(Now { wall, boot: 0, uptime: 0 }, |uptime| Now { wall, boot, uptime }),
    }
}

/// Microseconds since the boot, time asleep included.
fn uptime() -> Option<i64> {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: memory for the answer, read if the call has succeeded.
    unsafe {
        (libc::clock_gettime(libc::CLOCK_BOOTTIME, time.as_mut_ptr()) == 0).then(|| {
            let time = time.assume_init();
            time.tv_sec * 1_000_000 + time.tv_nsec / 1_000
        })
    }
}

/// Which boot this is, as a number; 0 where it cannot be told. A time namespace shifts the time since the boot for those
/// within it, so it counts as a boot of its own.
fn boot() -> i64 {
    static BOOT: ProcessLocal<Cell<i64>> = ProcessLocal::cell(0);
    if BOOT.get() == 0 {
        BOOT.set(read_boot());
    }
    BOOT.get()
}

fn read_boot() -> i64 {
    let Ok(mut boot) = std::fs::read("/proc/sys/kernel/random/boot_id") else { return 0 };
    if let Ok(namespace) = std::fs::read_link("/proc/self/ns/time") {
        boot.extend_from_slice(namespace.as_os_str().as_encoded_bytes());
    }
    xxh3_64(&boot) as i64
}
