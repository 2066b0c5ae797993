//! FLUSH: earlier WRITEs are placed before it is answered (IBA A19.4).

use super::prelude::*;
use anyverbs_proto::mr::Vanishing;
use anyverbs_proto::wire::feth::{Feth, Placement, Selectivity};

const BOTH: Access = Access::FLUSH_GLOBAL.union(Access::FLUSH_PERSISTENT);

fn op(at: RemoteAddr, len: u32, placement: Placement, selectivity: Selectivity) -> SendOp {
    SendOp::Flush { at, len, feth: Feth { placement, selectivity } }
}

/// A connection that grants `access` in addition to WRITE, and a region at `b` that grants the same.
fn flushing(access: Access) -> (Pair, End, End, anyverbs_sim::Mr) {
    let access = access | Access::REMOTE_WRITE | Access::LOCAL_WRITE;
    let (mut t, a, b) = rc(QpOptions { access, ..QpOptions::rc() });
    let mr = t.register(b.device, b.pd, b.mr.addr, 4096, access);
    (t, a, b, mr)
}

#[test]
fn earlier_writes_are_persistent_when_a_flush_completes() {
    let persistence = Placement::PERSISTENCE;
    for lost in [None, Some(O::Flush), Some(O::ReadResponseOnly)] {
        let (mut t, a, b, mr) = flushing(BOTH);
        if let Some(lost) = lost {
            t.net.once(is(lost), Fate::Drop);
        }
        t.post(a, 1, SendOp::Write(mr.remote(0)), &[a.mr.sge(0, 3000)]);
        t.post(a, 2, op(mr.remote(10), 500, persistence, Selectivity::Range), &[]);
        t.run();
        let done = t.sends(a);
        assert_eq!(
            done.iter().map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>(),
            [(1, Success), (2, Success)]
        );
        assert_eq!(done[1].opcode, WcOpcode::Flush);
        assert_eq!(t.memory(b.device).persisted(), [(mr.addr + 10, 500)], "lost {lost:?}");
    }
}

#[test]
fn how_wide_and_how_deep() {
    let (mut t, a, b, mr) = flushing(BOTH);
    // Address and length of a whole region do not count.
    let nowhere = RemoteAddr { va: 1, ..mr.remote(0) };
    let whole = Selectivity::Mr;
    t.post(a, 1, op(nowhere, 9, Placement::PERSISTENCE, whole), &[]);
    t.post(a, 2, op(mr.remote(0), 8, Placement::GLOBAL, Selectivity::Range), &[]);
    t.post(a, 3, op(mr.remote(5), 8, Placement::all(), Selectivity::Range), &[]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success), (3, Success)]);
    assert_eq!(t.memory(b.device).persisted(), [(mr.addr, 4096), (mr.addr + 5, 8)]);
}

#[test]
fn what_is_refused() {
    let range = Selectivity::Range;
    let try_one = |access: Access, of: fn(anyverbs_sim::Mr) -> RemoteAddr, placement, wide| {
        let (mut t, a, b, mr) = flushing(access);
        t.post(a, 1, op(of(mr), 8, placement, wide), &[]);
        t.run();
        assert!(t.memory(b.device).persisted().is_empty());
        t.sent(a)[0].1
    };
    let here = |mr: anyverbs_sim::Mr| mr.remote(0);
    let (global, persistence) = (Placement::GLOBAL, Placement::PERSISTENCE);
    // The queue pair does not grant it.
    assert_eq!(try_one(Access::FLUSH_GLOBAL, here, persistence, range), RemInvReqErr);
    assert_eq!(try_one(Access::FLUSH_PERSISTENT, here, global, range), RemInvReqErr);
    assert_eq!(try_one(Access::empty(), here, global, range), RemInvReqErr);
    // Placements without a meaning.
    assert_eq!(try_one(BOTH, here, Placement::empty(), range), RemInvReqErr);
    assert_eq!(try_one(BOTH, here, Placement::from_bits_retain(4), range), RemInvReqErr);
    assert_eq!(try_one(BOTH, here, global, Selectivity::Reserved(2)), RemInvReqErr);
    // A wrong key, or a range beyond its end.
    let (no_key, beyond) = (
        |mr: anyverbs_sim::Mr| RemoteAddr { rkey: mr.lkey, ..mr.remote(0) },
        |mr: anyverbs_sim::Mr| mr.remote(4089),
    );
    for wide in [range, Selectivity::Mr] {
        assert_eq!(try_one(BOTH, no_key, global, wide), RemAccessErr);
    }
    assert_eq!(try_one(BOTH, beyond, persistence, range), RemAccessErr);
    // The region does not grant it.
    let (mut t, a, b, _) = flushing(BOTH);
    t.post(a, 1, op(b.mr.remote(0), 8, global, range), &[]);
    t.run();
    assert_eq!(t.sent(a), [(1, RemAccessErr)]);
}

#[test]
fn the_right_that_is_missing_is_named() {
    // By the queue pair, then by the region.
    for (rights, cause) in [(Access::empty(), 903), (BOTH, 1006)] {
        let options = QpOptions { access: rights | Access::REMOTE_WRITE, ..QpOptions::rc() };
        // The receives of an SRQ are not flushed.
        let Some((mut t, a, b)) = both_ways(options) else { return };
        let at = b.mr.remote(0);
        t.recv(b, 7, &[b.mr.sge(0, 10)]);
        t.post(a, 1, op(at, 8, Placement::GLOBAL, Selectivity::Range), &[]);
        t.run();
        assert_eq!(t.recvs(b)[0].vendor_err, cause);
    }
}

#[test]
fn memory_that_is_gone() {
    let (mut t, a, b, mr) = flushing(BOTH);
    t.memory(b.device).unmap(mr.addr, 4096);
    t.post(a, 1, op(mr.remote(0), 8, Placement::PERSISTENCE, Selectivity::Range), &[]);
    t.run();
    assert_eq!(t.sent(a), [(1, RemAccessErr)]);
}

/// The byte at this address is gone, as by a script of faults.
#[derive(Debug)]
struct Gone(u64);

impl Vanishing for Gone {
    fn registered(&self, _: usize, _: usize, _: u64) {}
    fn moved(&self, _: usize, _: u64) {}
    fn is_gone(&self, _: usize, addr: u64, len: u64) -> bool {
        (addr..addr + len).contains(&self.0)
    }
    fn has_failed(&self, _: usize, addr: u64, len: u64) -> bool {
        self.is_gone(0, addr, len)
    }
}

#[test]
fn memory_that_a_script_lets_vanish() {
    let (range, whole) = (Selectivity::Range, Selectivity::Mr);
    for placement in [Placement::GLOBAL, Placement::PERSISTENCE] {
        for (at, selectivity, is_gone) in
            [(0, range, false), (1500, range, true), (3000, range, false), (0, whole, true)]
        {
            let access = BOTH | Access::REMOTE_WRITE | Access::LOCAL_WRITE;
            let options = QpOptions { access, ..QpOptions::rc() };
            // The receives of an SRQ are not flushed.
            let Some((mut t, a, b)) = both_ways(options) else { return };
            let gone = Box::leak(Box::new(Gone(b.mr.addr + 2000)));
            t.mrs(b.device).let_vanish(gone);
            let mr = t.register(b.device, b.pd, b.mr.addr, 4096, access);
            t.recv(b, 7, &[b.mr.sge(0, 10)]);
            t.post(a, 1, op(mr.remote(at), 1000, placement, selectivity), &[]);
            t.run();
            let status = if is_gone { RemAccessErr } else { Success };
            assert_eq!(t.sent(a), [(1, status)], "{placement:?} {selectivity:?} at {at}");
            let cause = t.recvs(b).first().map(|wc| wc.vendor_err);
            assert_eq!(cause, is_gone.then_some(9901));
        }
    }
}
