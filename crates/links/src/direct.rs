//! Copies straight from or to the memory of another process of this user, by one system call. A one-sided operation is copied by
//! the requester without a message. The payload of a long SEND is fetched by the responder.
//!
//! Each process publishes in its published memory (`anyverbs_net::shm::published`) its regions and its queue pairs that take
//! requests, with their peers and rights. Whoever copies checks there all that the other side would check, or that it has
//! not changed since ([`LastCopy`]). If anything is wrong, the request goes by the ring with its payload. The responder
//! then finds the fault, answers, and makes its events, as ever.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use anyverbs_net::shm::{self, Copying};
use anyverbs_objects::base::Digest;
use anyverbs_objects::base::directory::{
    FETCHES, LAYOUT, PEER, QpEntry, VALID, bit_of, generation_in, qp_at, region_at,
};
use anyverbs_objects::memory::ProcessMemory;
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::direct::{Direct, Direction, Local, Place};
use anyverbs_proto::memory::Memory as _;
use anyverbs_proto::mr::{Access, Hold, LastLocal};
use anyverbs_proto::payload::{Payload, hold_local};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wr::{MAX_SGE, RemoteAddr, Sge};
use arrayvec::ArrayVec;

use super::mapped::{Lookup, Mapped, Target};
use super::shm::{Peer, ShmRoute};
use crate::Links;

/// The regions of a queue pair's last copy.
#[derive(Debug, Default)]
pub struct LastCopy {
    /// The peer's private region. A valid entry of the published memory does not change but for a queue pair's rights, and another
    /// validity has another first word. So while these three words stand, the rest of the entry stands as well.
    far: Option<(Arc<Peer>, Admitted)>,
    /// Our own region, which the queue pair keeps in use.
    near: LastLocal<'static>,
}

#[derive(Debug)]
struct Admitted {
    dest: Qpn,
    /// Two words of the queue pair's entry: the first, and the one with its rights.
    qp: [u64; 2],
    /// The rights by both entries.
    access: Access,
    iova: u64,
    target: Target,
}

impl Admitted {
    /// The device of the peer's queue pair.
    #[inline]
    fn device(&self) -> u8 {
        QpEntry::device_in(self.qp[1])
    }
}

impl LastCopy {
    /// Lets go of the region that it keeps in use.
    pub fn release_region(&mut self) {
        self.near.release();
    }

    /// The memory of one element, and whether it may be read or written.
    #[inline]
    fn near(
        &mut self,
        links: &'static Links,
        (from, pd): (Qpn, u32),
        sge: &Sge,
        need: Access,
    ) -> Option<shm::Local> {
        let range = (sge.addr, sge.len.into());
        let addr = self.near.find_kept(&links.core.mrs, from.get(), sge.lkey, pd, range, need);
        let iov_base = addr.ok()?? as usize as *mut _;
        Some(shm::Local { iov_base, iov_len: sge.len as usize })
    }

    /// The region of an operation, if that is the same, and where in it that begins.
    #[inline]
    fn find(
        &self,
        seen: &Seen<'_>,
        peer: &Arc<Peer>,
        operation: &Direct<'_>,
    ) -> Option<(Target, u64, u8)> {
        let (of, last) = self.far.as_ref()?;
        let Direct { dest_qpn, remote, len, .. } = operation;
        let is_same = Arc::ptr_eq(of, peer)
            && last.dest == *dest_qpn
            && last.target.rkey == remote.rkey
            && last.access.contains(operation.right())
            && is_sender(operation, last.qp[0]);
        if !is_same {
            return None;
        }
        let [qp, region] = [qp_at(last.dest), region_at(remote.rkey)];
        let stands = seen.0.published(qp)? == last.qp[0]
            && seen.0.published(qp + PEER)? == last.qp[1]
            && seen.0.published(region)? == last.target.state;
        let offset = offset_in((last.iova, last.target.len), remote.va, *len)?;
        stands.then_some((last.target, offset, last.device()))
    }
}

/// Whether the peer's queue pair, whose entry begins with this word, is the one that has sent a payload.
#[inline]
fn is_sender(operation: &Direct<'_>, entry: u64) -> bool {
    operation.payload_of.is_none_or(|generation| generation == generation_in(entry))
}

/// Where `bytes` bytes from `va` on begin in a region, if they lie in it.
#[inline]
fn offset_in((iova, len): (u64, u64), va: u64, bytes: u32) -> Option<u64> {
    let offset = va.checked_sub(iova)?;
    let end = offset.checked_add(bytes.into())?;
    (end <= len).then_some(offset)
}

/// Does a one-sided operation of the queue pair `from`, whose device has these counters; false if it has to go by the ring.
pub fn perform(
    links: &'static Links,
    route: &ShmRoute,
    last: &mut LastCopy,
    (from, counters): (Qpn, &Counters),
    operation: &Direct<'_>,
) -> bool {
    let Some(copying) = begin(links, route) else { return false };
    let seen = Seen(&copying);
    let (target, offset, theirs, mapped) = match last.find(&seen, &route.peer, operation) {
        Some((target, offset, theirs)) => (target, offset, theirs, None),
        None => {
            let Some((admitted, offset)) = seen.admitted(route, from, operation) else {
                return false;
            };
            let (target, theirs) = (admitted.target, admitted.device());
            let mapped = match route.mapped(links, &copying, &target) {
                Lookup::Mapped { region, .. } => Some(region),
                Lookup::NotYet => None,
                Lookup::Private => {
                    last.far = Some((Arc::clone(&route.peer), admitted));
                    None
                }
            };
            (target, offset, theirs, mapped)
        }
    };
    let len = operation.len as usize;
    let far = Far { links, copying: &copying, target, offset, len, mapped };
    let copied = match operation.local {
        Local::Inline(bytes) => {
            let base = bytes.as_ptr().cast_mut().cast();
            far.write(&[shm::Local { iov_base: base, iov_len: bytes.len() }])
        }
        Local::Sges([sge]) => {
            let near = last.near(links, (from, operation.pd), sge, need_of(operation));
            near.is_some_and(|piece| far.copy(operation.direction, &[piece]))
        }
        Local::Sges(sges) => with_pieces(operation, sges, &far),
    };
    if !copied {
        return false;
    }
    if operation.payload_of.is_some() {
        // Its message is counted. The memory was the sender's until now, or the copy may have other bytes. The look comes behind
        // the copy.
        fence(Ordering::Acquire);
        return seen.admitted(route, from, operation).is_some();
    }
    let (times, bytes) = match operation.direction {
        Direction::Write => {
            copying.count_write(theirs.into(), len);
            (Counter::ShmDirectWrites, Counter::ShmDirectWrittenBytes)
        }
        Direction::Read => {
            copying.count_read(theirs.into(), len);
            (Counter::ShmDirectReads, Counter::ShmDirectReadBytes)
        }
    };
    counters.add(times, 1);
    counters.add(bytes, len as u64);
    true
}

/// A peer of this process that takes an operation.
#[derive(Clone, Copy, Debug)]
pub struct Within<'a> {
    /// Protection domain and queue pair by which its keys are checked.
    pub reach: (u32, Qpn),
    /// The counters of its device.
    pub counters: &'a Counters,
}

/// As [`perform`], where the peer is a queue pair of this process. It counts as a packet without headers at both ends.
pub fn perform_within(
    links: &'static Links,
    last: &mut LastCopy,
    (from, counters): (Qpn, &Counters),
    peer: &Within<'_>,
    operation: &Direct<'_>,
) -> bool {
    let &Direct { direction, remote, len, local, pd, .. } = operation;
    let ((far_pd, qpn), right) = (peer.reach, operation.right());
    let reach = (far_pd, qpn.get());
    // The key is in use until the copy is done: deregistration waits.
    let Ok(far) = links.core.mrs.remote(remote.rkey, reach, remote.va, len.into(), right) else {
        return false;
    };
    let near = match local {
        Local::Inline(bytes) => Some(bytes.as_ptr() as u64),
        Local::Sges([sge]) => {
            let near = last.near(links, (from, pd), sge, need_of(operation));
            near.map(|piece| piece.iov_base as u64)
        }
        Local::Sges(_) => None,
    };
    // Where both overlap, a packet has a copy of the bytes.
    let Some(near) = near.filter(|near| near.abs_diff(far.addr()) >= len.into()) else {
        return false;
    };
    let (to, from, sender, receiver) = match direction {
        Direction::Write => (far.addr(), near, counters, peer.counters),
        Direction::Read => (near, far.addr(), peer.counters, counters),
    };
    if links.core.memory.copy(to, from, len as usize).is_err() {
        return false;
    }
    sender.add(Counter::SentPkts, 1);
    sender.add(Counter::SentBytes, len.into());
    receiver.add(Counter::RcvdPkts, 1);
    receiver.add(Counter::RcvdBytes, len.into());
    true
}

/// Memory of a peer that this process has mapped. The mapping stays while this is held, also when the peer takes its region
/// back meanwhile.
#[derive(Debug)]
pub struct MappedMemory {
    _region: Arc<Mapped>,
    addr: u64,
}

impl MappedMemory {
    /// Copies bytes of this process there. They need not be mapped; false: not all were.
    #[must_use]
    pub fn write(&self, memory: &ProcessMemory, from: *const u8, len: usize) -> bool {
        let piece = shm::Local { iov_base: from.cast_mut().cast(), iov_len: len };
        memory.write_shared(&[piece], self.addr, len)
    }
}

/// The memory that a WRITE of the queue pair `from` is about, if this process has mapped it and the peer admits that. The WRITE is
/// counted.
pub fn mapped_memory(
    links: &'static Links,
    route: &ShmRoute,
    (from, counters): (Qpn, &Counters),
    operation: &Direct<'_>,
) -> Option<MappedMemory> {
    let copying = begin(links, route)?;
    let (admitted, offset) = Seen(&copying).admitted(route, from, operation)?;
    let Lookup::Mapped { region, .. } = route.mapped(links, &copying, &admitted.target) else {
        return None;
    };
    let len = operation.len as usize;
    let addr = region.addr(offset, len)?;
    copying.count_write(admitted.device().into(), len);
    counters.add(Counter::ShmDirectWrites, 1);
    counters.add(Counter::ShmDirectWrittenBytes, len as u64);
    Some(MappedMemory { _region: region, addr })
}

/// Tells whether the peer takes an operation of the queue pair `from` without a message.
pub fn admits(links: &Links, route: &ShmRoute, from: Qpn, operation: &Direct<'_>) -> bool {
    let copying = begin(links, route);
    copying.is_some_and(|copying| Seen(&copying).admitted(route, from, operation).is_some())
}

/// Where the peer may fetch the payload of a SEND from, if it can.
pub fn fetched(links: &Links, route: &ShmRoute, from: Qpn, payload: &Payload<'_>) -> Option<Place> {
    let (sge, pd) = payload.element()?;
    let directory = links.core.directory.as_ref()?;
    let (rkey, qp) = (directory.published(region_at(sge.lkey))?, directory.published(qp_at(from))?);
    let held = hold_local(&links.core.mrs, pd, &sge, Access::empty()).ok()?;
    let copying = begin(links, route)?;
    let fetches = copying.is_mutual() && copying.published(FETCHES) == Some(1);
    let at = RemoteAddr { va: sge.addr, rkey: rkey as u32 };
    (fetches && !held.is_null()).then_some(Place { at, generation: generation_in(qp) })
}

/// Begins a copy, if there is such a way. Where this process does not want it, it has none of its own memory copied either.
#[inline]
fn begin<'a>(links: &Links, route: &'a ShmRoute) -> Option<Copying<'a>> {
    links.core.directory.as_ref()?;
    route.peer.channel().begin_copy()
}

/// The peer's memory that an operation names.
struct Far<'a> {
    links: &'static Links,
    copying: &'a Copying<'a>,
    target: Target,
    /// In the region.
    offset: u64,
    len: usize,
    /// The region, where this process has mapped it.
    mapped: Option<Arc<Mapped>>,
}

impl Far<'_> {
    fn addr(&self) -> u64 {
        self.target.addr.wrapping_add(self.offset)
    }

    fn copy(&self, direction: Direction, pieces: &[shm::Local]) -> bool {
        match direction {
            Direction::Write => self.write(pieces),
            Direction::Read => self.read(pieces),
        }
    }

    fn write(&self, pieces: &[shm::Local]) -> bool {
        let Self { links, copying, offset, len, mapped, .. } = self;
        let Some(addr) = mapped.as_ref().and_then(|mapped| mapped.addr(*offset, *len)) else {
            return links.core.memory.write_remote(copying, pieces, self.addr(), *len);
        };
        links.core.memory.write_shared(pieces, addr, *len)
    }

    fn read(&self, pieces: &[shm::Local]) -> bool {
        let Self { links, copying, offset, len, mapped, .. } = self;
        let Some(addr) = mapped.as_ref().and_then(|mapped| mapped.addr(*offset, *len)) else {
            return links.core.memory.read_remote(copying, pieces, self.addr(), *len);
        };
        links.core.memory.read_shared(pieces, addr)
    }
}

/// The right to our own memory that a copy needs.
#[inline]
fn need_of(operation: &Direct<'_>) -> Access {
    match operation.direction {
        Direction::Write => Access::empty(),
        Direction::Read => Access::LOCAL_WRITE,
    }
}

/// Copies between several elements and the peer's memory.
fn with_pieces(operation: &Direct<'_>, sges: &[Sge], far: &Far<'_>) -> bool {
    let need = need_of(operation);
    let mut holds = ArrayVec::<Hold<'_>, MAX_SGE>::new();
    let mut pieces = ArrayVec::<shm::Local, MAX_SGE>::new();
    for sge in sges.iter().filter(|sge| sge.len > 0) {
        let Ok(held) = hold_local(&far.links.core.mrs, operation.pd, sge, need) else {
            return false;
        };
        let iov_base = held.addr() as usize as *mut _;
        let piece = shm::Local { iov_base, iov_len: sge.len as usize };
        if held.is_null() || holds.try_push(held).is_err() || pieces.try_push(piece).is_err() {
            return false;
        }
    }
    far.copy(operation.direction, &pieces)
}

/// Gives up the mappings of regions that the peer has taken back; whether any is left. Without the peer's published memory all
/// are.
pub(crate) fn sweep(peer: &Peer) -> bool {
    let Some(copying) = peer.channel().begin_copy() else {
        peer.mapped().clear();
        return false;
    };
    peer.mapped().sweep(|rkey| copying.published(region_at(rkey)).unwrap_or(0))
}

/// A peer's published memory, read under the mark of a copy.
struct Seen<'a>(&'a Copying<'a>);

impl Seen<'_> {
    /// The region of an operation that the peer's queue pair `dest` takes from ours, and where in it that begins.
    #[inline]
    fn admitted(
        &self,
        route: &ShmRoute,
        from: Qpn,
        operation: &Direct<'_>,
    ) -> Option<(Admitted, u64)> {
        let Direct { dest_qpn: dest, remote, len, .. } = *operation;
        let need = operation.right();
        let (pd, rights, qp) = self.pd_of(dest, from, route.digest(), need)?;
        if !is_sender(operation, qp[0]) {
            return None;
        }
        let (target, iova, offset) = self.target(remote, len, pd, need)?;
        let access = rights & target.access;
        Some((Admitted { dest, qp, access, iova, target }, offset))
    }

    /// Whether there is anything to see.
    #[inline]
    fn is_laid_out(&self) -> bool {
        self.0.published(0) == Some(LAYOUT)
    }

    /// The word that says that an entry of this name is valid, and those behind it.
    #[inline]
    fn entry<const N: usize>(&self, at: usize, name: u32) -> Option<(u64, [u64; N])> {
        let (bits, bit) = bit_of(at);
        if !self.is_laid_out() || self.0.published(bits)? & bit == 0 {
            return None;
        }
        let state = self.0.published(at)?;
        if state & VALID == 0 || state as u32 != name {
            return None;
        }
        let mut words = [0; N];
        for (n, word) in words.iter_mut().enumerate() {
            *word = self.0.published(at + 8 * (n + 1))?;
        }
        Some((state, words))
    }

    /// The protection domain of the peer's queue pair, if that takes such requests from ours. Also its rights, and the
    /// words that prove both.
    #[inline]
    fn pd_of(
        &self,
        qpn: Qpn,
        from: Qpn,
        digest: Digest,
        need: Access,
    ) -> Option<(u32, Access, [u64; 2])> {
        let (state, words @ [peer, pd]) = self.entry(qp_at(qpn), qpn.get())?;
        let access = Access::from_bits_retain((peer >> 32) as u32);
        let expected =
            QpEntry { peer: from, access, pd: pd as u32, digest, device: QpEntry::device_in(peer) };
        let takes = expected.words() == words && access.contains(need);
        takes.then_some((expected.pd, access, [state, peer]))
    }

    /// The region that holds `len` bytes, where it and where they begin.
    #[inline]
    fn target(
        &self,
        remote: RemoteAddr,
        bytes: u32,
        pd: u32,
        need: Access,
    ) -> Option<(Target, u64, u64)> {
        let rkey = remote.rkey;
        let (state, [iova, len, addr, rights]) = self.entry(region_at(rkey), rkey)?;
        let access = Access::from_bits_retain(rights as u32);
        if (rights >> 32) as u32 != pd || !access.contains(need) {
            return None;
        }
        let offset = offset_in((iova, len), remote.va, bytes)?;
        Some((Target { rkey, state, addr, len, access }, iova, offset))
    }
}
