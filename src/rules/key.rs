//! Where a lock stands in the lock manager: its tag.
//!
//! **The mapping from a name to a tag is frozen for ever**: sessions of different releases, on different machines and
//! in databases of different encodings have to meet. The golden values in the tests below guard it.

use super::name::Name;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use xxhash_rust::const_xxh3;
use xxhash_rust::xxh3::xxh3_64;

/// First of the four tag fields' classes that are ours, 0x4000 to 0x7FFF. SQL's own advisory locks use 1 and 2.
const CLASS_BASE: u16 = 0x4000;
const CLASS_MASK: u16 = 0xC000;
const KIND_SHIFT: u16 = 11;
const DOMAIN_MASK: u16 = (1 << KIND_SHIFT) - 1;
const EMPTY_DOMAIN: u16 = const_xxh3::xxh3_64(b"") as u16 & DOMAIN_MASK;

/// The class of `pg_advisory_lock(bigint)`.
const CLASS_BIGINT: u16 = 1;
/// The class of `pg_advisory_lock(int, int)`.
const CLASS_PAIR: u16 = 2;

/// What a tag of ours stands for. Internal kinds keep away from any name a user can give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// A name given by a user.
    Name = 0,
    /// Held by a session as long as its session holds are worth something; see [`Tag::sentinel`].
    Sentinel = 1,
    /// One of several permits of a lease; see [`Tag::permit`].
    Permit = 2,
    /// A queue; see [`Tag::lease_queue`], [`Tag::semaphore_queue`].
    Queue = 3,
    /// The right to raise the fencing tokens' sequence; see [`Tag::token_floor`].
    TokenFloor = 4,
    /// A lease as a whole; see [`Tag::lease`].
    Lease = 5,
    /// A slot of a semaphore; see [`Tag::slot`].
    Slot = 6,
    /// That a session has slots of a semaphore; see [`Tag::slot_count`].
    SlotCount = 7,
}

impl Kind {
    const fn class(self, low_bits: u16) -> u16 {
        CLASS_BASE | (self as u16) << KIND_SHIFT | low_bits
    }
}

/// How many permits a lease or a semaphore can have: their numbers stand in the low bits of [`Tag::permit`], [`Tag::slot`].
pub const MAX_PERMITS: u16 = 1 << KIND_SHIFT;

/// The low bits of the queues' tags.
const LEASE_QUEUE: u16 = 0;
const SEMAPHORE_QUEUE: u16 = 1;

/// What a lease's rows and tags, and a semaphore's tags, are found by: XXH3-64 of its name.
pub fn key_of(name: Name<'_>) -> u64 {
    xxh3_64(name.bytes())
}

/// The longest name that [`LastName`] remembers, in bytes.
const REMEMBERED_NAME: usize = 64;

/// What is worked out of a name for its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NameKey {
    hash: u64,
    class: u16,
    domain_length: u16,
}

impl NameKey {
    fn of(name: Name<'_>) -> Self {
        let domain = name.domain();
        let bits = if domain.is_empty() { EMPTY_DOMAIN } else { xxh3_64(domain) as u16 & DOMAIN_MASK };
        Self { hash: xxh3_64(name.bytes()), class: Kind::Name.class(bits), domain_length: domain.len() as u16 }
    }
}

/// The name that was used last: who unlocks has nearly always just locked, and one program's names are of few domains.
#[derive(Debug)]
pub struct LastName {
    bytes: [u8; REMEMBERED_NAME],
    length: usize,
    key: NameKey,
}

impl LastName {
    /// None yet.
    pub const fn new() -> Self {
        Self { bytes: [0; REMEMBERED_NAME], length: 0, key: NameKey { hash: 0, class: 0, domain_length: 0 } }
    }

    /// A name's tag, XXH3-64 (seed 0) of the name and 11 bits of that of its domain; and that [domain](Name::domain).
    ///
    /// `database` is 0 for a lock of the whole cluster.
    #[inline(always)]
    pub fn tag_and_domain<'a>(&mut self, name: Name<'a>, database: u32) -> (Tag, &'a [u8]) {
        let bytes = name.bytes();
        // Names of one kind differ at their ends.
        if bytes.last() != self.bytes[..self.length].last() || bytes != &self.bytes[..self.length] {
            self.remember(name);
        }
        let NameKey { hash, class, domain_length } = self.key;
        (Tag::from_hash(database, hash, class), &bytes[..usize::from(domain_length)])
    }

    #[inline(never)]
    fn remember(&mut self, name: Name<'_>) {
        let bytes = name.bytes();
        self.key =
            if self.has_domain_of(bytes) { NameKey { hash: xxh3_64(bytes), ..self.key } } else { NameKey::of(name) };
        self.length = 0;
        if let Some(remembered) = self.bytes.get_mut(..bytes.len()) {
            remembered.copy_from_slice(bytes);
            self.length = bytes.len();
        }
    }

    /// Whether a name is in the same domain, as far as is seen at once.
    fn has_domain_of(&self, name: &[u8]) -> bool {
        let length = usize::from(self.key.domain_length);
        self.length > 0 && name.get(length) == Some(&b':') && name[..length] == self.bytes[..length]
    }
}

/// A LOCKTAG_ADVISORY's four fields. Their order is the one in which several locks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub struct Tag {
    /// The database's OID, or 0 for a lock of the whole cluster.
    pub database: u32,
    /// `classid` in `pg_locks`.
    pub high: u32,
    /// `objid` in `pg_locks`.
    pub low: u32,
    /// `objsubid` in `pg_locks`.
    pub class: u16,
}

/// Whose lock a tag is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// A named lock.
    Named,
    /// A slot of a semaphore.
    Slot,
    /// A native advisory lock of SQL.
    Native,
    /// An internal lock of this extension.
    Internal,
    /// Another extension's.
    Foreign,
}

impl Tag {
    /// The tag of `pg_advisory_lock(bigint)`.
    pub fn of_bigint(key: i64, database: u32) -> Self {
        Self::from_hash(database, key as u64, CLASS_BIGINT)
    }

    /// The tag of `pg_advisory_lock(int, int)`.
    pub fn of_pair(key1: i32, key2: i32, database: u32) -> Self {
        Self { database, high: key1 as u32, low: key2 as u32, class: CLASS_PAIR }
    }

    /// A session's private tag. Where the lock on it is gone, so is all that stood on it, session holds and bound leases:
    /// `DISCARD ALL` and `pg_advisory_unlock_all()` release them without telling us. `session` is another number each time.
    pub fn sentinel(pid: i32, session: u32, database: u32) -> Self {
        Self { database, high: pid as u32, low: session, class: Kind::Sentinel.class(0) }
    }

    /// A lease as a whole, held to the end of a transaction by whoever
    /// - guards writes by it: intent share;
    /// - grants one more of its permits: intent exclusive;
    /// - grants it when it is free, so that the number of permits may be another than before: exclusive.
    ///
    /// Nobody waits for it in the last two modes, which would shut out guards.
    pub fn lease(key: u64, database: u32) -> Self {
        Self::from_hash(database, key, Kind::Lease.class(0))
    }

    /// One of several permits of a lease. Whoever grants it takes this exclusively, whoever guards writes by it in share
    /// mode, beside the [lease's](Tag::lease) tag.
    pub fn permit(key: u64, slot: u16, database: u32) -> Self {
        Self::from_hash(database, key, Kind::Permit.class(slot & DOMAIN_MASK))
    }

    /// The queue for a lease: whoever holds it is next.
    pub fn lease_queue(key: u64, database: u32) -> Self {
        Self::from_hash(database, key, Kind::Queue.class(LEASE_QUEUE))
    }

    /// The queue for a semaphore: whoever holds it is next. It stands for the semaphore as a whole too.
    pub fn semaphore_queue(key: u64, database: u32) -> Self {
        Self::from_hash(database, key, Kind::Queue.class(SEMAPHORE_QUEUE))
    }

    /// A slot of a semaphore, by its number from 1 to [`MAX_PERMITS`].
    pub fn slot(key: u64, number: u16, database: u32) -> Self {
        Self::from_hash(database, key, Kind::Slot.class((number - 1) & DOMAIN_MASK))
    }

    /// Held in share mode by every session that has at least so many slots of a semaphore, from 1 to [`MAX_PERMITS`]. All
    /// of these together have as many holders as slots are taken.
    pub fn slot_count(key: u64, at_least: u16, database: u32) -> Self {
        Self::from_hash(database, key, Kind::SlotCount.class((at_least - 1) & DOMAIN_MASK))
    }

    /// Held while the sequence of fencing tokens is raised.
    pub fn token_floor(database: u32) -> Self {
        Self { database, high: 0, low: 0, class: Kind::TokenFloor.class(0) }
    }

    /// Whose lock this is.
    pub fn space(self) -> Space {
        match self.class {
            CLASS_BIGINT | CLASS_PAIR => Space::Native,
            class if class & CLASS_MASK != CLASS_BASE => Space::Foreign,
            _ if self.is(Kind::Name) => Space::Named,
            _ if self.is(Kind::Slot) => Space::Slot,
            _ => Space::Internal,
        }
    }

    /// Whether it is one of our tags, of that kind.
    pub fn is(self, kind: Kind) -> bool {
        self.class & !DOMAIN_MASK == kind.class(0)
    }

    /// Whether it is the queue of a semaphore.
    pub fn is_semaphore(self) -> bool {
        self.class == Kind::Queue.class(SEMAPHORE_QUEUE)
    }

    /// The semaphore that a slot is one of, as its queue's tag; None for other tags.
    pub fn semaphore(self) -> Option<Self> {
        self.is(Kind::Slot).then(|| Self::semaphore_queue(self.key(), self.database))
    }

    /// The number of a slot, from 1.
    pub fn slot_number(self) -> u16 {
        (self.class & DOMAIN_MASK) + 1
    }

    /// Whether another tag is this one or, where this is a semaphore, a slot of it.
    pub fn covers(self, other: Self) -> bool {
        self == other || other.semaphore() == Some(self)
    }

    /// What a lease's or a semaphore's tag is about.
    pub fn key(self) -> u64 {
        self.hash64()
    }

    /// The tag as two words, for shared memory.
    pub fn to_words(self) -> [u64; 2] {
        [self.hash64(), u64::from(self.database) << 16 | u64::from(self.class)]
    }

    /// Out of such words.
    pub fn from_words([hash, rest]: [u64; 2]) -> Self {
        Self::from_hash((rest >> 16) as u32, hash, rest as u16)
    }

    /// A native lock as its SQL call shows it: `42` or `1, 2`.
    pub fn native_key(self) -> String {
        if self.class == CLASS_PAIR {
            format!("{}, {}", self.high as i32, self.low as i32)
        } else {
            (self.hash64() as i64).to_string()
        }
    }

    fn hash64(self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low)
    }

    fn from_hash(database: u32, hash: u64, class: u16) -> Self {
        Self { database, high: (hash >> 32) as u32, low: hash as u32, class }
    }
}

impl Hash for Tag {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Most of a named lock's tag is a hash already, and native keys are told apart by these two.
        state.write_u64(self.hash64());
    }
}

/// Hashes a [`Tag`] for a map in one session.
#[derive(Default)]
pub struct TagHasher(u64);

/// [`TagHasher`] as `HashMap` wants it.
pub type BuildTagHasher = BuildHasherDefault<TagHasher>;

impl Hasher for TagHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }
    fn write_u64(&mut self, word: u64) {
        // Native keys are often small numbers: multiply so that the high bits, which the map looks at, differ.
        self.0 = (self.0.rotate_left(32) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tag_of(name: Name<'_>, database: u32) -> Tag {
        LastName::new().tag_and_domain(name, database).0
    }

    fn tag(name: &str) -> Tag {
        tag_of(Name::new(name.as_bytes()).unwrap(), 5)
    }

    /// Computed by xxHash's own library. A change here splits every running installation in two.
    #[test]
    fn golden_values() {
        let longest = "a".repeat(1024);
        for (name, database, high, low, class) in [
            ("nightly", 5, 2_023_954_546, 990_674_899, 17_602),
            ("nightly", 0, 2_023_954_546, 990_674_899, 17_602),
            ("report:daily", 5, 1_463_495_031, 3_447_802_259, 17_796),
            (":x", 5, 2_929_561_854, 1_171_337_141, 17_602),
            ("\u{1F512}", 5, 2_716_548_176, 1_463_245_049, 17_602),
            ("\u{e9}", 5, 4_153_674_240, 1_827_736_755, 17_602),
            (longest.as_str(), 5, 1_247_636_233, 2_841_147_932, 17_602),
        ] {
            let name = Name::new(name.as_bytes()).unwrap();
            assert_eq!(tag_of(name, database), Tag { database, high, low, class });
        }
    }

    #[test]
    fn two_names_with_one_key_exist() {
        assert_eq!(tag("order-36325"), tag("M0plytOy"));
    }

    #[test]
    fn names_that_other_hashes_confuse_differ() {
        // Equal under hashtext(), and equal under CRC32.
        for (one, two) in [("order-116870", "order-126592"), ("plumless", "buckeroo")] {
            assert_ne!(tag(one), tag(two));
        }
        for (one, two) in [("Job", "job"), ("a", "a "), ("caf\u{e9}", "cafe\u{301}")] {
            assert_ne!(tag(one), tag(two));
        }
    }

    proptest! {
        #[test]
        fn no_name_meets_a_native_or_an_internal_lock(
            bytes in prop::collection::vec(any::<u8>(), 1..64), key: i64, key1: i32, key2: i32, pid in 1..i32::MAX,
            session: u32, slot in 0..MAX_PERMITS,
        ) {
            let named = tag_of(Name::new(&bytes).unwrap(), 5);
            prop_assert_eq!(named.space(), Space::Named);
            prop_assert!((0x4000..0x4800).contains(&named.class));
            let bigint = Tag::of_bigint(key, 5);
            prop_assert_eq!(bigint.space(), Space::Native);
            prop_assert_eq!(bigint.native_key(), key.to_string());
            let pair = Tag::of_pair(key1, key2, 5);
            prop_assert_eq!(pair.space(), Space::Native);
            prop_assert_eq!(pair.native_key(), format!("{key1}, {key2}"));
            for (internal, kind) in [
                (Tag::sentinel(pid, session, 5), Kind::Sentinel),
                (Tag::lease(key as u64, 5), Kind::Lease),
                (Tag::permit(key as u64, slot, 5), Kind::Permit),
                (Tag::lease_queue(key as u64, 5), Kind::Queue),
                (Tag::semaphore_queue(key as u64, 5), Kind::Queue),
                (Tag::slot_count(key as u64, slot + 1, 5), Kind::SlotCount),
                (Tag::token_floor(5), Kind::TokenFloor),
            ] {
                prop_assert_eq!(internal.space(), Space::Internal);
                prop_assert!(internal.is(kind) && !named.is(kind) && !bigint.is(kind));
            }
            prop_assert_eq!(Tag::permit(key as u64, slot, 5).key(), key as u64);
        }

        /// Names of few letters, so that many have a domain, or a beginning, in common.
        #[test]
        fn the_last_name_changes_no_key(
            names in prop::collection::vec(prop_oneof!["[ab:]{1,6}", "[ab]{1,40}:[ab]{20,30}", "a{60,70}:?a?"], 1..40),
            database: u32,
        ) {
            let mut last = LastName::new();
            for name in &names {
                let name = Name::new(name.as_bytes()).unwrap();
                for _ in 0..2 {
                    prop_assert_eq!(
                        last.tag_and_domain(name, database),
                        (tag_of(name, database), name.domain())
                    );
                }
            }
        }

        #[test]
        fn a_semaphore_covers_its_slots_and_no_others(key: u64, other: u64, number in 1..=MAX_PERMITS) {
            let (semaphore, slot) = (Tag::semaphore_queue(key, 5), Tag::slot(key, number, 5));
            prop_assert_eq!(slot.space(), Space::Slot);
            prop_assert_eq!(slot.slot_number(), number);
            prop_assert_eq!(slot.semaphore(), Some(semaphore));
            prop_assert!(semaphore.is_semaphore() && semaphore.covers(slot) && slot.covers(slot));
            prop_assert!(!slot.covers(semaphore) && !Tag::lease_queue(key, 5).covers(slot));
            prop_assert!(!Tag::semaphore_queue(key, 6).covers(slot));
            prop_assert_eq!(Tag::semaphore_queue(other, 5).covers(slot), key == other);
            prop_assert_eq!(Tag::slot(key, number % MAX_PERMITS + 1, 5).covers(slot), false);
            for tag in [semaphore, slot, Tag::slot_count(key, number, 0)] {
                prop_assert_eq!(Tag::from_words(tag.to_words()), tag);
            }
        }

        #[test]
        fn classes_of_others_are_foreign(class in prop_oneof![3u16..0x4000, 0x8000u16..=0xFFFF]) {
            prop_assert_eq!(Tag { database: 5, high: 1, low: 1, class }.space(), Space::Foreign);
        }
    }
}
