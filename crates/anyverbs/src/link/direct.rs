//! One-sided operations straight into the memory of another process of this user: one system call of the requester, and
//! no message.
//!
//! Each process publishes on its board (`anyverbs_net::shm::published`) which regions there are and which queue pairs take
//! requests, of whom and with which rights. The requester checks there what the responder would check, or that it has not
//! changed since ([`LastTarget`]), and copies. If anything is not as it should be it says no, and the request goes by the ring: the responder finds the fault, answers, and
//! makes its events, as ever.
//!
//! | on the board, in words | what |
//! |---|---|
//! | 0 | the layout |
//! | 8 to 511 | a bit for each block of 4 KiB that may be read: the others have no memory yet |
//! | from block 1 | regions that peers may WRITE or READ, by the index in their keys: valid, generation, rkey · iova · length · address · PD, rights |
//! | behind them | queue pairs, by their number: valid, generation, number · peer, rights · PD · the peer's GID |
//!
//! An entry is a line whose first word says whether it is valid. Its owner changes the others only while it is not, and after
//! waiting for the copies that began before ([`Engine::settle_direct`]); hence under the mark of a copy a valid entry is
//! whole. What is read there is the word of another process: it leads to addresses of that process, which the kernel checks,
//! and to nothing in this one.
//!
//! Deregistration, and the move of a queue pair to RESET or ERR and its end as far as the program asked for them, wait for the
//! copies in progress. A queue pair that an error moves is taken back at once, and waited for when the program acts on it. A
//! peer that is stopped in the middle of a copy is waited for until it goes on or ends: it would write what it had begun.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_net::shm::{self, Board, Copied, Copying};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::direct::{Direct, Direction, Local, Worth};
use anyverbs_proto::mr::{self, Access, Hold, Keys, MAX_REGIONS, Region};
use anyverbs_proto::payload::hold_local;
use anyverbs_proto::qp::Qp;
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_proto::wr::{MAX_SGE, RemoteAddr, Sge};
use parking_lot::Mutex;

use super::mapped::{Lookup, Mapped, Target};
use super::shm::{Peer, ShmRoute};
use crate::engine::Engine;

/// Says that what follows is laid out as here.
const LAYOUT: u64 = u64::from_le_bytes(*b"avb-dir2");
const BITS: usize = 8;
const BLOCK: usize = 4096;
const ENTRY: usize = 64;
const REGIONS: usize = BLOCK;
const QUEUE_PAIRS: usize = REGIONS + MAX_REGIONS * ENTRY;
const LEN: usize = QUEUE_PAIRS + (1 << 16) * ENTRY;
/// Of a queue pair's entry: where its peer and rights are.
const PEER: usize = 8;
const VALID: u64 = 1 << 63;

const _: () = assert!(BITS + LEN / BLOCK / 8 + 8 <= BLOCK, "a bit for each block");

/// From this length on the kernel's copies may be as fast as messages: below, its call alone takes longer.
const LONG: u32 = 16 * 1024;

/// Bytes of the board of a process that does this.
pub(crate) const BOARD: usize = LEN;

/// Where the entry of a region is.
fn region_at(rkey: u32) -> usize {
    REGIONS + mr::index(rkey) * ENTRY
}

/// Where the entry of a queue pair is.
fn qp_at(qpn: Qpn) -> usize {
    QUEUE_PAIRS + usize::from(qpn.get() as u16) * ENTRY
}

/// Where the bit of an entry's block is, and which.
fn bit_of(at: usize) -> (usize, u64) {
    let block = at / BLOCK;
    (BITS + block / 64 * 8, 1 << (block % 64))
}

/// What is published of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QpEntry {
    peer: Qpn,
    access: Access,
    pd: u32,
    gid: Gid,
}

impl QpEntry {
    fn words(&self) -> [u64; 4] {
        let (high, low) = self.gid.0.split_at(8);
        let word = |bytes: &[u8]| bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
        let peer = u64::from(self.access.bits()) << 32 | u64::from(self.peer.get());
        [peer, self.pd.into(), word(high), word(low)]
    }
}

/// What peers are told of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct PublishedQp {
    /// What they may do without a message.
    access: Option<Access>,
    /// Something was taken back, and who copies by it has not been waited for.
    unsettled: bool,
}

impl PublishedQp {
    /// Whether [`Engine::settle_direct`] is to be called, which the caller then does.
    pub(crate) fn take_unsettled(&mut self) -> bool {
        std::mem::take(&mut self.unsettled)
    }
}

/// What a process has on its board.
#[derive(Debug, Default)]
pub(crate) struct Published {
    /// Of entries; each validity has another, so that an entry that was replaced is another. It has 31 bits: who remembers an
    /// entry ([`LastTarget`], [`super::mapped`]) would have to sleep through all of them to take one for another.
    generation: AtomicU64,
    /// What is in the port's counters of what others, and we, copied.
    counted: Mutex<(Copied, Copied)>,
}

/// Opens a board to readers.
pub(crate) fn begin(board: &Board) {
    let (at, bit) = bit_of(0);
    board.set_bits(at, bit);
    board.store(0, LAYOUT);
}

impl Published {
    /// Makes an entry valid. If the system has no memory for it, requests go by the ring.
    fn enter(&self, board: &Board, at: usize, name: u32, words: &[u64]) {
        let (bits, bit) = bit_of(at);
        if board.load(bits) & bit == 0 {
            if !board.allocate(at / BLOCK * BLOCK, BLOCK) {
                return;
            }
            board.set_bits(bits, bit);
        }
        for (n, &word) in words.iter().enumerate() {
            board.store(at + 8 * (n + 1), word);
        }
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) & 0x7fff_ffff;
        board.store(at, VALID | generation << 32 | u64::from(name));
    }
}

/// Takes an entry back; whether there was one.
fn take_back(board: &Board, at: usize) -> bool {
    let (bits, bit) = bit_of(at);
    if board.load(bits) & bit == 0 || board.load(at) & VALID == 0 {
        return false;
    }
    board.store(at, 0);
    true
}

impl Engine {
    fn board(&self) -> Option<(&Board, &Published)> {
        self.shm.as_ref().and_then(|shm| Some((shm.endpoint().board(), shm.published()?)))
    }

    /// Lets peers see a region that they may WRITE or READ.
    pub(crate) fn publish_region(&self, keys: Keys, region: &Region) {
        // A key that a peer can invalidate goes by the ring, as its invalidation does.
        if !region.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_READ)
            || region.access.contains(Access::INVALIDATABLE)
        {
            return;
        }
        let Some((board, published)) = self.board() else { return };
        let rights = u64::from(region.pd) << 32 | u64::from(region.access.bits());
        let words = [region.iova, region.len, region.addr, rights];
        published.enter(board, region_at(keys.rkey), keys.rkey, &words);
    }

    /// No copy touches a region any more when this returns.
    pub(crate) fn withdraw_region(&self, keys: Keys) {
        if let Some((board, _)) = self.board()
            && take_back(board, region_at(keys.lkey))
        {
            self.settle_direct();
        }
    }

    /// Brings what is published of a queue pair up to date. What was taken back may be in use until
    /// [`settle_direct`](Self::settle_direct).
    #[inline]
    pub(crate) fn publish_qp(&self, machine: &Qp, published: &mut PublishedQp) {
        if published.access != machine.open_to_direct() {
            self.republish_qp(machine, published);
        }
    }

    #[cold]
    fn republish_qp(&self, machine: &Qp, known: &mut PublishedQp) {
        let Some((board, published)) = self.board() else { return };
        let (at, attr) = (qp_at(machine.qpn()), machine.attr());
        let Some(access) = machine.open_to_direct().filter(|_| attr.dest_qpn.slot() != self.slot)
        else {
            return self.withdraw_qp(machine.qpn(), known);
        };
        let entry =
            QpEntry { peer: attr.dest_qpn, access, pd: machine.init().pd, gid: attr.av.dgid };
        if known.access.is_some() {
            // Only the rights are others, which share a word with what stays.
            board.store(at + PEER, entry.words()[0]);
            known.unsettled = true;
        } else {
            published.enter(board, at, machine.qpn().get(), &entry.words());
        }
        known.access = Some(access);
    }

    /// Takes a queue pair back.
    pub(crate) fn withdraw_qp(&self, qpn: Qpn, known: &mut PublishedQp) {
        if known.access.take().is_some()
            && let Some((board, _)) = self.board()
        {
            known.unsettled |= take_back(board, qp_at(qpn));
        }
    }

    /// Waits until nobody copies by what was taken back before.
    pub(crate) fn settle_direct(&self) {
        if let Some(shm) = self.shm.as_ref().filter(|shm| shm.published().is_some()) {
            shm.endpoint().settle();
        }
    }

    /// Brings the port's counters up to date with what was copied without packets.
    pub(crate) fn count_direct(&self) {
        let Some((board, published)) = self.board() else { return };
        let mut counted = published.counted.lock();
        let ours = Copied {
            writes: self.counter(Counter::ShmDirectWrites),
            written: self.counter(Counter::ShmDirectWrittenBytes),
            reads: self.counter(Counter::ShmDirectReads),
            read: self.counter(Counter::ShmDirectReadBytes),
        };
        let theirs = board.copied();
        let (our_past, their_past) = std::mem::replace(&mut *counted, (ours, theirs));
        // A peer may write any number there; what it says of the past may shrink.
        let since = |now: u64, past: u64| now.saturating_sub(past);
        let (out, into) =
            ((our_past.writes, their_past.reads), (our_past.reads, their_past.writes));
        self.count(Counter::SentPkts, since(ours.writes, out.0) + since(theirs.reads, out.1));
        self.count(Counter::RcvdPkts, since(ours.reads, into.0) + since(theirs.writes, into.1));
        let sent = since(ours.written, our_past.written) + since(theirs.read, their_past.read);
        let received = since(ours.read, our_past.read) + since(theirs.written, their_past.written);
        self.count(Counter::SentBytes, sent);
        self.count(Counter::RcvdBytes, received);
    }
}

/// The private region that a queue pair was last admitted to. A valid entry of the board does not change but for a queue pair's
/// rights, and another validity has another first word: so while these three words stand, so does what was read behind them.
#[derive(Debug, Default)]
pub(crate) struct LastTarget(Option<(Arc<Peer>, Admitted)>);

#[derive(Debug)]
struct Admitted {
    dest: Qpn,
    /// Of the queue pair's entry: the first word, and the one with its rights.
    qp: [u64; 2],
    /// What both entries permit.
    access: Access,
    iova: u64,
    target: Target,
}

impl LastTarget {
    /// The region of an operation, if that is the same, and where in it that begins.
    #[inline]
    fn find(
        &self,
        seen: &Seen<'_>,
        peer: &Arc<Peer>,
        operation: &Direct<'_>,
    ) -> Option<(Target, u64)> {
        let (of, last) = self.0.as_ref()?;
        let Direct { dest_qpn, direction, remote, len, .. } = operation;
        let is_same = Arc::ptr_eq(of, peer)
            && last.dest == *dest_qpn
            && last.target.rkey == remote.rkey
            && last.access.contains(right_to(*direction));
        if !is_same {
            return None;
        }
        let [qp, region] = [qp_at(last.dest), region_at(remote.rkey)];
        let stands = seen.0.board(qp)? == last.qp[0]
            && seen.0.board(qp + PEER)? == last.qp[1]
            && seen.0.board(region)? == last.target.state;
        let offset = offset_in((last.iova, last.target.len), remote.va, *len)?;
        stands.then_some((last.target, offset))
    }
}

/// Where `bytes` bytes from `va` on begin in a region, if they lie in it.
#[inline]
fn offset_in((iova, len): (u64, u64), va: u64, bytes: u32) -> Option<u64> {
    let offset = va.checked_sub(iova)?;
    let end = offset.checked_add(bytes.into())?;
    (end <= len).then_some(offset)
}

/// Does a one-sided operation of the queue pair `from`; false if it has to go by the ring.
pub(crate) fn perform(
    engine: &'static Engine,
    route: &ShmRoute,
    last: &mut LastTarget,
    from: Qpn,
    operation: &Direct<'_>,
) -> bool {
    let Some(copying) = route.peer.channel().begin_copy() else { return false };
    let seen = Seen(&copying);
    let (target, offset, mapped) = match last.find(&seen, &route.peer, operation) {
        Some((target, offset)) => (target, offset, None),
        None => {
            let Some((admitted, offset)) = seen.admitted(
                route,
                from,
                operation.dest_qpn,
                operation.direction,
                operation.remote,
                operation.len,
            ) else {
                return false;
            };
            let target = admitted.target;
            let mapped = match route.mapped(engine, &copying, &target) {
                Lookup::Mapped { region, .. } => Some(region),
                Lookup::NotYet => None,
                Lookup::Private => {
                    *last = LastTarget(Some((Arc::clone(&route.peer), admitted)));
                    None
                }
            };
            (target, offset, mapped)
        }
    };
    let len = operation.len as usize;
    let far = Far { engine, copying: &copying, target, offset, len, mapped };
    let copied = match operation.local {
        Local::Inline(bytes) => {
            let base = bytes.as_ptr().cast_mut().cast();
            far.write(&[shm::Local { iov_base: base, iov_len: bytes.len() }])
        }
        Local::Sges(sges) if sges.len() <= 4 => with_pieces::<4>(operation, sges, &far),
        Local::Sges(sges) => with_pieces::<MAX_SGE>(operation, sges, &far),
    };
    if !copied {
        return false;
    }
    let (times, bytes) = match operation.direction {
        Direction::Write => (Counter::ShmDirectWrites, Counter::ShmDirectWrittenBytes),
        Direction::Read => (Counter::ShmDirectReads, Counter::ShmDirectReadBytes),
    };
    engine.count(times, 1);
    engine.count(bytes, len as u64);
    true
}

/// What a peer must have granted.
fn right_to(direction: Direction) -> Access {
    match direction {
        Direction::Write => Access::REMOTE_WRITE,
        Direction::Read => Access::REMOTE_READ,
    }
}

/// What [`perform`] has over messages, as long as nothing changes: no help of the kernel where the region is mapped; and one copy
/// instead of two, which for long operations may be faster or, since two processors share those, slower.
pub(crate) fn worth_of_rest(
    engine: &'static Engine,
    route: &ShmRoute,
    (from, dest): (Qpn, Qpn),
    direction: Direction,
    remote: RemoteAddr,
    len: u32,
) -> Worth {
    let Some(copying) = route.peer.channel().begin_copy() else { return Worth::Nothing };
    let admitted = Seen(&copying).admitted(route, from, dest, direction, remote, len);
    let Some((admitted, _)) = admitted else { return Worth::Nothing };
    match route.mapped(engine, &copying, &admitted.target) {
        Lookup::Mapped { .. } => Worth::Much,
        Lookup::Private | Lookup::NotYet if len >= LONG => Worth::Perhaps,
        Lookup::Private | Lookup::NotYet => Worth::Nothing,
    }
}

/// The peer's memory that an operation names.
struct Far<'a> {
    engine: &'static Engine,
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

    fn write(&self, pieces: &[shm::Local]) -> bool {
        let Self { engine, copying, offset, len, mapped, .. } = self;
        let Some(addr) = mapped.as_ref().and_then(|mapped| mapped.addr(*offset, *len)) else {
            return engine.memory.write_remote(copying, pieces, self.addr(), *len);
        };
        let copied = engine.memory.write_shared(pieces, addr, *len);
        if copied {
            copying.count_write(*len);
        }
        copied
    }

    fn read(&self, pieces: &[shm::Local]) -> bool {
        let Self { engine, copying, offset, len, mapped, .. } = self;
        let Some(addr) = mapped.as_ref().and_then(|mapped| mapped.addr(*offset, *len)) else {
            return engine.memory.read_remote(copying, pieces, self.addr(), *len);
        };
        let copied = engine.memory.read_shared(pieces, addr);
        if copied {
            copying.count_read(*len);
        }
        copied
    }
}

/// Copies between up to `N` elements and the peer's memory.
fn with_pieces<const N: usize>(operation: &Direct<'_>, sges: &[Sge], far: &Far<'_>) -> bool {
    let (engine, write) = (far.engine, operation.direction == Direction::Write);
    let need = if write { Access::empty() } else { Access::LOCAL_WRITE };
    let mut holds: [Option<Hold<'_>>; N] = [const { None }; N];
    let mut pieces = [shm::Local { iov_base: std::ptr::null_mut(), iov_len: 0 }; N];
    let mut n = 0;
    for sge in sges.iter().filter(|sge| sge.len > 0) {
        let (Some(hold), Some(piece)) = (holds.get_mut(n), pieces.get_mut(n)) else { return false };
        let Ok(held) = hold_local(&engine.mrs, operation.pd, sge, need) else { return false };
        if held.is_null() {
            return false;
        }
        *piece = shm::Local { iov_base: held.addr() as usize as *mut _, iov_len: sge.len as usize };
        *hold = Some(held);
        n += 1;
    }
    if write { far.write(&pieces[..n]) } else { far.read(&pieces[..n]) }
}

/// Gives up the mappings of regions that the peer has taken back; whether any is left. Without the peer's board all are.
pub(crate) fn sweep(peer: &Peer) -> bool {
    let Some(copying) = peer.channel().begin_copy() else {
        peer.mapped().clear();
        return false;
    };
    peer.mapped().sweep(|rkey| copying.board(region_at(rkey)).unwrap_or(0))
}

/// A peer's board, read under the mark of a copy.
struct Seen<'a>(&'a Copying<'a>);

impl Seen<'_> {
    /// The region of an operation that the peer's queue pair `dest` takes from ours, and where in it that begins.
    #[inline]
    fn admitted(
        &self,
        route: &ShmRoute,
        from: Qpn,
        dest: Qpn,
        direction: Direction,
        remote: RemoteAddr,
        len: u32,
    ) -> Option<(Admitted, u64)> {
        let need = right_to(direction);
        let (pd, rights, qp) = self.pd_of(dest, from, route.source(), need)?;
        let (target, iova, offset) = self.target(remote, len, pd, need)?;
        let access = rights & target.access;
        Some((Admitted { dest, qp, access, iova, target }, offset))
    }

    /// Whether there is anything to see.
    #[inline]
    fn is_laid_out(&self) -> bool {
        self.0.board(0) == Some(LAYOUT)
    }

    /// The words of a valid entry of this name, behind them the one that says so.
    #[inline]
    fn entry(&self, at: usize, name: u32) -> Option<[u64; 5]> {
        let (bits, bit) = bit_of(at);
        if !self.is_laid_out() || self.0.board(bits)? & bit == 0 {
            return None;
        }
        let state = self.0.board(at)?;
        if state & VALID == 0 || state as u32 != name {
            return None;
        }
        Some([
            self.0.board(at + 8)?,
            self.0.board(at + 16)?,
            self.0.board(at + 24)?,
            self.0.board(at + 32)?,
            state,
        ])
    }

    /// The protection domain of the peer's queue pair, if that takes such requests from ours, its rights, and the words that
    /// say that it is valid and has those.
    #[inline]
    fn pd_of(
        &self,
        qpn: Qpn,
        from: Qpn,
        source: Gid,
        need: Access,
    ) -> Option<(u32, Access, [u64; 2])> {
        let words = self.entry(qp_at(qpn), qpn.get())?;
        let [peer, pd, high, low, state] = words;
        let access = Access::from_bits_retain((peer >> 32) as u32);
        let pd = pd as u32;
        let expected = QpEntry { peer: from, access, pd, gid: source }.words();
        let takes = expected == [peer, u64::from(pd), high, low] && access.contains(need);
        takes.then_some((pd, access, [state, peer]))
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
        let [iova, len, addr, rights, state] = self.entry(region_at(rkey), rkey)?;
        let access = Access::from_bits_retain(rights as u32);
        if (rights >> 32) as u32 != pd || !access.contains(need) {
            return None;
        }
        let offset = offset_in((iova, len), remote.va, bytes)?;
        Some((Target { rkey, state, addr, len, access }, iova, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_lie_apart_and_inside() {
        assert_eq!(region_at(0), BLOCK);
        assert_eq!(region_at(u32::MAX) + ENTRY, QUEUE_PAIRS);
        assert_eq!(qp_at(Qpn::new(0xff_ffff)) + ENTRY, LEN);
        assert_eq!(qp_at(Qpn::new(0xff_0000)), QUEUE_PAIRS);
        assert_eq!(bit_of(0), (BITS, 1));
        assert_eq!(bit_of(REGIONS), (BITS, 2));
        assert!(bit_of(LEN - 1).0 < BLOCK);
    }
}
