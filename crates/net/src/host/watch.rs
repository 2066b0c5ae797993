//! Looks at the pages of all processes of a host, from another process of their user. They serve the look on their own thread, and their
//! programs do not notice it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use socket2::Socket;

use super::name::{Name, Registry};
use super::page::{self, Contents};
use super::pass;
use super::store::LOOK_AGAIN;
use crate::shm::{PeerProcess, peer_process};
use crate::sockopt;

/// The processes of a host that are looked at.
#[derive(Debug)]
pub struct Watcher {
    registry: Registry,
    known: BTreeMap<u8, Known>,
}

#[derive(Debug)]
struct Known {
    socket: Socket,
    process: PeerProcess,
    page: Option<File>,
    /// The process may have no page.
    refuses: bool,
    last: Option<Contents>,
}

/// A process, as it was seen last.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Its slot.
    pub slot: u8,
    /// Its number here; 0 where it has none.
    pub pid: i32,
    /// The contents of its page, if it ever had any. They are another process's, and may be anything.
    pub contents: Option<&'a [u8]>,
    /// The age of these.
    pub age: Duration,
    /// It may have no page.
    pub refuses: bool,
}

impl Watcher {
    /// Looks at the processes of a registry.
    #[must_use]
    pub fn new(registry: Registry) -> Self {
        Self { registry, known: BTreeMap::new() }
    }

    /// Ends its connections. The next look makes them anew.
    pub fn rest(&mut self) {
        self.known.clear();
    }

    /// Looks now. Waits up to `patience` for processes whose page is older than the call.
    pub fn look(&mut self, patience: Duration) -> Vec<Seen<'_>> {
        let (begin, asked_at) = (Instant::now(), page::monotonic());
        self.known.retain(|_, known| !known.has_ended());
        self.meet();
        for known in self.known.values() {
            // One that is stopped does not empty its socket.
            let _ = pass::look(&known.socket);
        }
        self.known.values_mut().for_each(Known::read);
        loop {
            let mut waits = false;
            // While one is silent, those that have answered are left alone.
            for known in self.known.values_mut().filter(|known| known.is_awaited(asked_at)) {
                known.read();
                waits |= known.is_awaited(asked_at);
            }
            if !waits || begin.elapsed() >= patience {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        let now = page::monotonic();
        let seen = |(slot, known): (&u8, &'_ Known)| (*slot, known.process.pid, known.refuses);
        self.known
            .iter()
            .map(|entry| {
                let (slot, pid, refuses) = seen(entry);
                let last = entry.1.last.as_ref();
                let at = last.map_or(now, |last| last.at);
                Seen {
                    slot,
                    pid,
                    contents: last.map(|last| last.bytes.as_slice()),
                    age: Duration::from_nanos(now.saturating_sub(at)),
                    refuses,
                }
            })
            .collect()
    }

    /// Connects to the processes that have come.
    fn meet(&mut self) {
        for slot in 1..=255 {
            if self.known.contains_key(&slot) {
                continue;
            }
            let Ok((socket, _)) = self.registry.connect(Name::Slot(slot)) else { continue };
            let Ok(process) = peer_process(socket.as_fd()) else { continue };
            let known = Known { socket, process, page: None, refuses: false, last: None };
            // A child that it forked may have its socket still.
            if !known.has_ended() {
                self.known.insert(slot, known);
            }
        }
    }
}

impl Known {
    fn has_ended(&self) -> bool {
        // Its answer, if it waits there, is read before.
        let hung_up = sockopt::poll(self.socket.as_fd(), libc::POLLRDHUP, 0).unwrap_or(true);
        hung_up || self.process.has_ended()
    }

    /// Its page is older than the question.
    fn is_awaited(&self, asked_at: u64) -> bool {
        !self.refuses && self.last.as_ref().is_none_or(|last| last.at < asked_at)
    }

    fn read(&mut self) {
        if self.page.is_none()
            && sockopt::poll(self.socket.as_fd(), libc::POLLIN, 0).unwrap_or(false)
        {
            let page = pass::take(&self.socket).map(|(file, _)| file);
            self.page = page.filter(page::is_in_memory);
            // It may have one at the next look.
            self.refuses = self.page.is_none();
        }
        let Some(page) = &self.page else { return };
        if self.last.as_ref().is_some_and(|last| page::written_at(page) == Some(last.at)) {
            return;
        }
        if let Some(contents) = page::read(page) {
            self.last = Some(contents);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::slot::{Received, Slot};
    use super::*;

    #[test]
    fn a_process_is_seen_while_it_lives_and_writes_only_when_asked() {
        let name = format!("anyverbs-watch-{}", std::process::id());
        let registry = Registry::new(&name).unwrap();
        let mut watcher = Watcher::new(registry.clone());
        assert!(watcher.look(Duration::ZERO).is_empty());
        let slot = Slot::claim_in(&registry).unwrap();
        let woken = Arc::new(AtomicBool::new(false));
        slot.page().on_look({
            let woken = Arc::clone(&woken);
            move || woken.store(true, Ordering::SeqCst)
        });
        // It does not serve the look yet, as one that is stopped.
        let seen = watcher.look(Duration::from_millis(20));
        assert_eq!(seen.len(), 1);
        assert_eq!((seen[0].slot, seen[0].pid), (slot.number(), std::process::id() as i32));
        assert!(seen[0].contents.is_none() && slot.page().looks() == 0);
        assert_eq!(slot.receive(&mut [0; 100]).unwrap(), Received::Nothing);
        assert!(woken.load(Ordering::SeqCst) && slot.page().looks() == 1);
        slot.page().write(b"hello").unwrap();
        let seen = watcher.look(Duration::from_millis(20));
        assert_eq!(seen[0].contents, Some(&b"hello"[..]));
        assert!(seen[0].age >= Duration::from_millis(20));
        drop(slot);
        assert!(watcher.look(Duration::ZERO).is_empty());
    }
}
