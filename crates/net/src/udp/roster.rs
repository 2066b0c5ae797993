//! Who on this host has joined which multicast groups: a list in memory that processes of one user share which use groups of one
//! port ([`crate::held_file`]), so that a sender looks once, and then at one word.
//!
//! | offset | what |
//! |---|---|
//! | 0 | *generation*: counts the changes of the list |
//! | 64 | slots that have a section, a bit each |
//! | slot x 32 KiB | its section: how many entries; from byte 64 on 24 bytes each: the group (as IPv6), the interface |
//!
//! A section is written by the owner of its slot alone, who holds a lock of the byte of the file that has the slot's number, one of the open
//! file ([`crate::ofd_lock`]): a section whose byte nobody holds is that of a process that has ended, and says nothing. (A child that
//! forked and did not exec keeps its parent's lock, as it keeps its slot and its sockets.) A section counts a change when it has made it, before the call that joins
//! returns: who sends after that sees it. A list that is read during a change may be any mixture, and is read again
//! since its generation is not the last. What stands there was written by other processes: the reader compares it with what the
//! kernel says ([`super::multicast`]).

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::held_file;
use crate::ofd_lock;
use crate::registry::{Lock, NameGuard, Slot};
use crate::shm::{Access, Area, Memory, SharedObject};
use crate::sys::Uncancelled;

const SECTION: usize = 32 << 10;
const LEN: usize = 256 * SECTION;
// In the section of slot 0, which nobody has.
const GENERATION: usize = 0;
const USED: usize = 64;
/// In a section.
const ENTRIES: usize = 64;
const ENTRY: usize = 24;
const MOST: usize = (SECTION - ENTRIES) / ENTRY;
/// What memory a section gets at a time; the kernel makes whole pages of it.
const STEP: usize = 4 << 10;

/// The list, as one process has it.
#[derive(Debug)]
pub(super) struct Roster {
    area: Area,
    slot: u8,
    /// How many bytes of the section have memory behind them.
    allocated: AtomicUsize,
    /// Found by its number. Its open file, which no other process has, holds the lock.
    file: SharedObject,
    _name: NameGuard,
}

/// A group and an interface.
pub(super) type Joined = (IpAddr, u32);

impl Roster {
    /// That of the other processes, or a new one. What an earlier owner of the slot left is cleared.
    ///
    /// # Errors
    /// `ResourceBusy` where another process has the slot's section; those of [`held_file::join`], fallocate(2), fcntl(2) and mmap(2).
    pub(super) fn join(slot: &Slot, port: u16) -> io::Result<Self> {
        let new = || Ok(File::from(OwnedFd::from(SharedObject::new(LEN)?)));
        let kind = format!("groups/{port}");
        let (file, name) = held_file::join(slot.registry(), &kind, Lock::Groups, new)?;
        let file = SharedObject::check(file.into(), LEN).ok_or(io::ErrorKind::InvalidData)?;
        file.allocate(0, USED + 32)?;
        let area = Area::map(file.as_fd(), LEN, Access::ReadWrite)?;
        file.allocate(usize::from(slot.number()) * SECTION, STEP)?;
        let allocated = AtomicUsize::new(STEP);
        let roster = Self { area, slot: slot.number(), allocated, file, _name: name };
        let byte = slot.number().into();
        if ofd_lock::is_locked_by_another(&roster.file, byte)? {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        // Before the lock, with which it would be believed.
        if roster.has_section(slot.number()) {
            roster.publish(std::iter::empty());
        }
        if !ofd_lock::try_lock(&roster.file, byte) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(roster)
    }

    /// How often the list has changed.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.area.load(GENERATION, Ordering::SeqCst)
    }

    /// Replaces what this process has joined. What finds no room is left out. One at a time.
    pub(super) fn publish<'a>(&self, all: impl ExactSizeIterator<Item = &'a Joined>) {
        let section = usize::from(self.slot) * SECTION;
        let room = self.make_room(ENTRIES + all.len().min(MOST) * ENTRY);
        let count = all.len().min((room - ENTRIES) / ENTRY);
        for (n, (group, interface)) in all.take(count).enumerate() {
            let at = section + ENTRIES + n * ENTRY;
            for (i, word) in words(*group, *interface).into_iter().enumerate() {
                self.area.store(at + 8 * i, word, Ordering::Relaxed);
            }
        }
        self.area.store(section, count as u64, Ordering::Release);
        self.area.fetch_or(USED + usize::from(self.slot) / 64 * 8, 1 << (self.slot % 64));
        self.area.fetch_add(GENERATION, 1);
    }

    /// How many bytes of the section may be written: `len` or more, if the system has memory to give.
    fn make_room(&self, len: usize) -> usize {
        let has = self.allocated.load(Ordering::Relaxed);
        if len <= has {
            return has;
        }
        let _uncancelled = Uncancelled::new();
        let len = len.next_multiple_of(STEP);
        match self.file.allocate(usize::from(self.slot) * SECTION + has, len - has) {
            Ok(()) => {
                self.allocated.store(len, Ordering::Relaxed);
                len
            }
            Err(error) => {
                tracing::debug!(%error, "no room on the list of the host's groups");
                has
            }
        }
    }

    fn has_section(&self, slot: u8) -> bool {
        let used = self.area.load(USED + usize::from(slot) / 64 * 8, Ordering::Acquire);
        used >> (slot % 64) & 1 == 1
    }

    /// The slots of those who joined a group on an interface, as they say, and have not ended.
    pub(super) fn members(&self, group: IpAddr, interface: u32) -> Vec<u8> {
        let wanted = words(group, interface);
        let has_joined = |slot: &u8| {
            let section = usize::from(*slot) * SECTION;
            let count = self.area.load(section, Ordering::Acquire).min(MOST as u64) as usize;
            (0..count).any(|n| {
                let at = section + ENTRIES + n * ENTRY;
                let word = |i: usize| self.area.load(at + 8 * i, Ordering::Relaxed);
                wanted == [word(0), word(1), word(2)]
            })
        };
        // Who is left out though it lives is counted by the kernel.
        let lives = |slot: &u8| {
            *slot == self.slot
                || ofd_lock::is_locked_by_another(&self.file, (*slot).into()).unwrap_or(false)
        };
        let named = (1..=255).filter(|slot| self.has_section(*slot)).filter(has_joined);
        named.filter(lives).collect()
    }
}

fn words(group: IpAddr, interface: u32) -> [u64; 3] {
    let bits = match group {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
    .to_bits();
    [(bits >> 64) as u64, bits as u64, interface.into()]
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn each_sees_what_all_have_joined_and_that_it_has_changed() {
        let name = format!("roster-{}", std::process::id());
        let slots = [(); 3].map(|()| Slot::claim(&name).unwrap());
        let rosters = slots.each_ref().map(|slot| Roster::join(slot, 4791).unwrap());
        let other_port = Roster::join(&slots[0], 4792).unwrap();
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        let (a, b) = ((ip("239.1.2.3"), 2), (ip("ff15::1"), 7));
        let before = rosters[2].generation();
        rosters[0].publish([a, b].iter());
        rosters[1].publish([b].iter());
        assert_ne!(rosters[2].generation(), before);
        let numbers = |of: &[usize]| {
            let mut all: Vec<u8> = of.iter().map(|i| slots[*i].number()).collect();
            all.sort_unstable();
            all
        };
        assert_eq!(rosters[2].members(a.0, a.1), numbers(&[0]));
        assert_eq!(rosters[2].members(b.0, b.1), numbers(&[0, 1]));
        assert!(rosters[2].members(a.0, 3).is_empty() && other_port.members(a.0, a.1).is_empty());
        // One ends without a word: what it has left is believed no more, and who has its slot next has joined nothing.
        let [first, _second, third] = rosters;
        drop(first);
        assert!(third.members(a.0, a.1).is_empty());
        assert_eq!(third.members(b.0, b.1), numbers(&[1]));
        let before = third.generation();
        let next = Roster::join(&slots[0], 4791).unwrap();
        assert_ne!(next.generation(), before);
        assert!(third.members(a.0, a.1).is_empty() && third.members(b.0, b.1) == numbers(&[1]));
        // It is the only one, and stays as it is.
        next.publish([a].iter());
        let error = Roster::join(&slots[0], 4791).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(third.members(a.0, a.1), numbers(&[0]));
    }

    #[test]
    fn nonsense_and_too_many_entries_are_bounded() {
        let slot = Slot::claim(&format!("roster-many-{}", std::process::id())).unwrap();
        let roster = Roster::join(&slot, 4791).unwrap();
        let group = |n: u32| (IpAddr::from(std::net::Ipv4Addr::from_bits(0xef00_0000 + n)), 1);
        let all: Vec<_> = (0..MOST as u32 + 5).map(group).collect();
        // Memory comes before it is touched, and once.
        let file = File::from(roster.file.as_fd().try_clone_to_owned().unwrap());
        for (n, bytes) in [(0, STEP), (1, STEP), (168, STEP), (169, 2 * STEP), (1, 2 * STEP)] {
            roster.publish(all[..n].iter());
            assert_eq!(roster.allocated.load(Ordering::Relaxed), bytes, "{n} groups");
        }
        assert_eq!(roster.make_room(3 * STEP - 1), 3 * STEP);
        assert!(file.metadata().unwrap().blocks() * 512 >= 4 * STEP as u64, "with the first page");
        roster.publish(all.iter());
        let last = group(MOST as u32 - 1);
        assert_eq!(roster.members(last.0, last.1), [slot.number()]);
        assert!(roster.members(group(MOST as u32).0, 1).is_empty());
        // Whoever shares it may write anything.
        roster.area.store(usize::from(slot.number()) * SECTION, u64::MAX, Ordering::Relaxed);
        for word in 0..4 {
            roster.area.store(USED + 8 * word, u64::MAX, Ordering::Relaxed);
        }
        assert_eq!(roster.members(last.0, last.1), [slot.number()]);
    }
}
