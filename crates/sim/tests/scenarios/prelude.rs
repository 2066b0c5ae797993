//! The names that nearly every scenario uses.

pub(crate) use std::time::Duration;

pub(crate) use anyverbs_proto::counters::Counter;
pub(crate) use anyverbs_proto::event::QpEvent;
pub(crate) use anyverbs_proto::mr::Access;
pub(crate) use anyverbs_proto::qp::PostSendError;
pub(crate) use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState, QpType};
pub(crate) use anyverbs_proto::types::{Mtu, PKey, Psn, QKey};
pub(crate) use anyverbs_proto::wc::WcStatus::{self, *};
pub(crate) use anyverbs_proto::wc::{WcFlags, WcOpcode};
pub(crate) use anyverbs_proto::wire::bth::Bth;
pub(crate) use anyverbs_proto::wire::opcode::{Opcode, Operation as O, Service};
pub(crate) use anyverbs_proto::wire::packet::Headers;
pub(crate) use anyverbs_proto::wire::xrceth::XrcEth;
pub(crate) use anyverbs_proto::wr::{RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};
pub(crate) use anyverbs_sim::link::{Full, Link, Rate};
pub(crate) use anyverbs_sim::net::{Fate, Passing, emit};
pub(crate) use anyverbs_sim::{End, Event, Pair, QpOptions, Sim};

/// A reliable connection and its ends.
pub(crate) fn rc(options: QpOptions) -> (Pair, End, End) {
    let t = Pair::new(1, options);
    let (a, b) = t.ends();
    (t, a, b)
}

/// As [`rc`], for scenarios in which both sides send; `None` over a service with one direction.
pub(crate) fn both_ways(options: QpOptions) -> Option<(Pair, End, End)> {
    Some(rc(options))
}

/// The fate of receives that wait when an end goes to ERR: those of its own are flushed, those of an SRQ stay.
pub(crate) fn flushed(end: End, recvs: &[u64]) -> Vec<(u64, WcStatus)> {
    let own = recvs.iter().filter(|_| end.srq.is_none());
    own.map(|wr_id| (*wr_id, WrFlushErr)).collect()
}

/// Headers of a forged packet that no queue pair made, in the service of the queue pair of `to`.
pub(crate) fn forged(t: &Pair, to: End, operation: O, psn: Psn) -> Headers {
    let qp = t.get(to.qp);
    let opcode = Opcode::new(qp.init().qp_type.service(), operation);
    let mut headers = Headers::new(Bth::new(opcode, qp.qpn(), psn));
    headers.xrceth = Some(XrcEth { srqn: to.srq.map_or(0, |srq| t.srqn(srq)) });
    headers
}

/// Picks the packets with this operation.
pub(crate) fn is(operation: O) -> impl FnMut(&Passing<'_>) -> bool {
    move |p| p.operation() == operation
}

/// Picks the `n`th packet (from 0) that `picks` picks.
pub(crate) fn nth(
    n: usize,
    mut picks: impl FnMut(&Passing<'_>) -> bool,
) -> impl FnMut(&Passing<'_>) -> bool {
    let mut seen = 0;
    move |p| {
        seen += usize::from(picks(p));
        seen == n + 1 && picks(p)
    }
}

/// Picks the packet with this PSN.
pub(crate) fn psn(psn: Psn) -> impl FnMut(&Passing<'_>) -> bool {
    move |p| p.headers.bth.psn == psn
}

/// Every operation of a reliable connection on 3000 bytes (atomics: 8) at the start of `a`'s and `b`'s regions.
pub(crate) fn every_op(b: End) -> [SendOp; 8] {
    let at = b.mr.remote(0);
    [
        SendOp::Send,
        SendOp::SendImm(7),
        SendOp::Write(at),
        SendOp::WriteImm(at, 7),
        SendOp::Read(at),
        SendOp::CompareSwap { at, compare: 1, swap: 2 },
        SendOp::FetchAdd { at, add: 3 },
        SendOp::Write(b.mr.remote(1)),
    ]
}

/// Whether the operation takes a receive.
pub(crate) fn takes_recv(op: &SendOp) -> bool {
    matches!(op, SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) | SendOp::WriteImm(..))
}

/// Bytes that [`every_op`] is tried with.
pub(crate) fn len_of(op: &SendOp) -> usize {
    match op {
        SendOp::Send if QpOptions::rc().lanes => 300,
        _ if op.is_atomic() => 8,
        _ => 3000,
    }
}

/// Puts a receive where `op` needs one, does it from `a` to `b`, and checks data and completions.
pub(crate) fn do_one(t: &mut Pair, op: SendOp) {
    let (a, b) = t.ends();
    let len = len_of(&op);
    if takes_recv(&op) {
        t.recv(b, 100, &[b.mr.sge(0, 4096)]);
    }
    let (local, remote) = (t.bytes(a.mr, 0, len), t.bytes(b.mr, 0, len));
    let word = t.word(b.mr, 0);
    t.post(a, 200, op, &[a.mr.sge(0, len)]);
    t.run();
    assert_eq!(t.sent(a), [(200, Success)], "{op:?}");
    let recvs = t.recvs(b);
    assert_eq!(recvs.len(), usize::from(takes_recv(&op)), "{op:?}");
    assert!(recvs.iter().all(|wc| wc.status == Success && wc.byte_len == len as u32), "{recvs:?}");
    match op {
        SendOp::Read(_) => assert_eq!(t.bytes(a.mr, 0, len), remote),
        SendOp::CompareSwap { compare, swap, .. } => {
            assert_eq!(t.word(a.mr, 0), word);
            assert_eq!(t.word(b.mr, 0), if word == compare { swap } else { word });
        }
        SendOp::FetchAdd { add, .. } => {
            assert_eq!(t.word(a.mr, 0), word);
            assert_eq!(t.word(b.mr, 0), word.wrapping_add(add));
        }
        SendOp::Write(at) => {
            assert_eq!(t.bytes(b.mr, (at.va - b.mr.addr) as usize, len), local);
        }
        _ => assert_eq!(t.bytes(b.mr, 0, len), local),
    }
}
