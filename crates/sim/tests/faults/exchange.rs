//! One case: messages of all lengths from one queue pair to another, checked byte by byte.

use std::time::Duration;

use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::time::Time;
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wr::SendOp;
use anyverbs_sim::net::Fate;
use anyverbs_sim::{End, Pair, QpOptions};

use crate::{Case, Fault, Op};

const MESSAGES: usize = 14;
/// Room for each message, and for its GRH.
const SLOT: usize = 8320;
const GRH: usize = 40;
const PARTITION: Duration = Duration::from_millis(300);

/// Codes of the ACK timeout and number of retries: 67 ms, seven times more.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;

fn bound() -> Duration {
    Duration::from_nanos(4 * (4096 << TIMEOUT)) * u32::from(RETRIES + 1) + Duration::from_secs(1)
}

/// The kind of message `i`.
fn kind(case: &Case, i: usize) -> Op {
    const MIXED: [Op; 5] = [Op::Write, Op::WriteImm, Op::Read, Op::CompareSwap, Op::AtomicWrite];
    match case.op {
        Op::Mixed => {
            let mixed =
                (case.seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(5 * i as u32);
            MIXED[(mixed % 5) as usize]
        }
        op => op,
    }
}

fn takes_recv(op: Op) -> bool {
    matches!(op, Op::Send | Op::SendImm | Op::WriteImm)
}

fn is_atomic(op: Op) -> bool {
    matches!(op, Op::CompareSwap | Op::FetchAdd | Op::AtomicWrite)
}

fn len_of(case: &Case, i: usize) -> usize {
    let mtu = case.mtu.bytes() as usize;
    if is_atomic(kind(case, i)) {
        return 8;
    }
    let lens = [0, 1, 3, mtu - 1, mtu, mtu + 1, 2 * mtu, 2 * mtu + 1, 3001, 4096, 8192];
    let len = lens[(i + case.seed as usize) % lens.len()];
    if case.service == QpType::Ud { len.min(mtu) } else { len }
}

fn op_of(case: &Case, i: usize, b: End, words: &[u64]) -> SendOp {
    let at = b.mr.remote(i * SLOT);
    match kind(case, i) {
        Op::Mixed => unreachable!("it is one of the others"),
        Op::Send => SendOp::Send,
        Op::SendImm => SendOp::SendImm(i as u32),
        Op::Write => SendOp::Write(at),
        Op::WriteImm => SendOp::WriteImm(at, i as u32),
        Op::Read => SendOp::Read(at),
        Op::CompareSwap => {
            // Every third one finds another value than it compares with.
            let compare = words[i] ^ u64::from(i.is_multiple_of(3));
            SendOp::CompareSwap { at, compare, swap: !words[i] }
        }
        // All on one word: each of them must count once.
        Op::FetchAdd => SendOp::FetchAdd { at: b.mr.remote(0), add: 1 << i },
        Op::AtomicWrite => SendOp::AtomicWrite { at, data: None },
    }
}

/// The bytes at `b` before anything happened, and at `a`.
struct Before {
    a: Vec<Vec<u8>>,
    b: Vec<Vec<u8>>,
    words: Vec<u64>,
}

/// Runs it. Returns the completions and their times.
pub(crate) fn run(case: &Case) -> Vec<(u64, u64, Time)> {
    let mut t = pair(case);
    if matches!(case.fault, Fault::Partition | Fault::End) {
        // Fewer packets pass than there are messages.
        let mut pass = 2 + case.seed * 3 % 8;
        t.net.rule(move |_| match pass.checked_sub(1) {
            Some(rest) => {
                pass = rest;
                Fate::Pass
            }
            None => Fate::Drop,
        });
    }
    let (a, b) = t.ends();
    let slots =
        |end: End, t: &Pair| (0..MESSAGES).map(|i| t.bytes(end.mr, i * SLOT, SLOT)).collect();
    let before = Before {
        a: slots(a, &t),
        b: slots(b, &t),
        words: (0..MESSAGES).map(|i| t.word(b.mr, i * SLOT)).collect(),
    };
    for i in 0..MESSAGES {
        t.recv(b, i as u64, &[b.mr.sge(i * SLOT, SLOT)]);
    }
    for i in 0..MESSAGES {
        let op = op_of(case, i, b, &before.words);
        t.post(a, i as u64, op, &[a.mr.sge(i * SLOT, len_of(case, i))]);
    }
    let (sent, received) = observe(&mut t, case);
    let reliable = matches!(case.service, QpType::Rc | QpType::XrcSend);
    match (reliable, case.fault) {
        (true, Fault::End) => check_end(&sent),
        (true, _) => check_reliable(&t, case, &before, &sent, &received),
        (false, _) => check_unreliable(&t, case, &before, &sent, &received),
    }
    sent.iter().map(|(wc, at)| (wc.wr_id, wc.status as u64, *at)).collect()
}

fn pair(case: &Case) -> Pair {
    let options = |qp_type| QpOptions {
        qp_type,
        mtu: case.mtu,
        timeout: TIMEOUT,
        retry_cnt: RETRIES,
        // As on a real network.
        window: 60_000,
        batch: if case.seed.is_multiple_of(2) { 0 } else { 4 * (case.mtu.bytes() + 64) },
        probe_after: Some(Duration::from_millis(8)),
        out_of_order_room: if case.seed.is_multiple_of(3) { 0 } else { 256 << 10 },
        srq: (qp_type == QpType::XrcRecv).then_some(64),
        ..QpOptions::rc()
    };
    let target = if case.service == QpType::XrcSend { QpType::XrcRecv } else { case.service };
    let mut t = Pair::with(case.seed, options(case.service), options(target));
    t.net.default_link = case.fault.link();
    t
}

/// Lets time pass until nothing more happens; completions with their times. A reliable requester must not be silent for
/// longer than the bound while something is outstanding.
fn observe(t: &mut Pair, case: &Case) -> (Vec<(Wc, Time)>, Vec<Wc>) {
    let (a, b) = t.ends();
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    let begin = t.now();
    let mut alive = begin;
    loop {
        if case.fault == Fault::Partition && t.now().since(begin) >= PARTITION {
            t.net.clear_rules();
        }
        let goes_on = t.step();
        received.extend(t.recvs(b));
        for wc in t.sends(a) {
            alive = t.now();
            sent.push((wc, t.now()));
        }
        let silence = t.now().since(alive);
        assert!(sent.len() == MESSAGES || silence <= bound(), "silent for {silence:?}");
        if !goes_on {
            return (sent, received);
        }
    }
}

/// Successes in order, then the right error, then flushes; all of them.
fn check_end(sent: &[(Wc, Time)]) {
    let ids: Vec<u64> = sent.iter().map(|(wc, _)| wc.wr_id).collect();
    assert_eq!(ids, (0..MESSAGES as u64).collect::<Vec<_>>());
    let good = sent.iter().take_while(|(wc, _)| wc.status == WcStatus::Success).count();
    assert!(good < MESSAGES, "nothing was left when the peer ended");
    assert_eq!(sent[good].0.status, WcStatus::RetryExcErr);
    assert!(sent[good + 1..].iter().all(|(wc, _)| wc.status == WcStatus::WrFlushErr), "{sent:?}");
}

fn check_reliable(t: &Pair, case: &Case, before: &Before, sent: &[(Wc, Time)], received: &[Wc]) {
    let (a, b) = t.ends();
    let ids: Vec<_> = sent.iter().map(|(wc, _)| (wc.wr_id, wc.status)).collect();
    let wanted: Vec<_> = (0..MESSAGES as u64).map(|i| (i, WcStatus::Success)).collect();
    assert_eq!(ids, wanted);
    let with_recv: Vec<_> = (0..MESSAGES).filter(|&i| takes_recv(kind(case, i))).collect();
    let ids: Vec<_> = received.iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(ids, wanted[..with_recv.len()]);
    for (i, wc) in with_recv.into_iter().zip(received) {
        assert_eq!(wc.byte_len as usize, len_of(case, i));
        assert!(case.op == Op::Send || wc.imm == i as u32, "{wc:?}");
    }
    let mut added = before.words[0];
    for i in 0..MESSAGES {
        let len = len_of(case, i);
        let (mine, theirs) = (t.bytes(a.mr, i * SLOT, SLOT), t.bytes(b.mr, i * SLOT, SLOT));
        let (old_mine, old_theirs) = (&before.a[i], &before.b[i]);
        let word = before.words[i];
        // The expected memory of each side: the length of the message at the front, the old contents behind it.
        let (mut want_mine, mut want_theirs) = (old_mine.clone(), old_theirs.clone());
        match kind(case, i) {
            Op::Mixed => unreachable!("it is one of the others"),
            Op::Send | Op::SendImm | Op::Write | Op::WriteImm | Op::AtomicWrite => {
                want_theirs[..len].copy_from_slice(&old_mine[..len]);
            }
            Op::Read => want_mine[..len].copy_from_slice(&old_theirs[..len]),
            Op::CompareSwap => {
                want_mine[..8].copy_from_slice(&word.to_ne_bytes());
                let new = if i.is_multiple_of(3) { word } else { !word };
                want_theirs[..8].copy_from_slice(&new.to_ne_bytes());
            }
            Op::FetchAdd => {
                want_mine[..8].copy_from_slice(&added.to_ne_bytes());
                added = added.wrapping_add(1 << i);
                if i == 0 {
                    let all = (0..MESSAGES).fold(word, |sum, i| sum.wrapping_add(1 << i));
                    want_theirs[..8].copy_from_slice(&all.to_ne_bytes());
                }
            }
        }
        assert!(mine == want_mine, "message {i}: the requester's bytes");
        assert!(theirs == want_theirs, "message {i}: the responder's bytes");
    }
}

/// The sender never knows. A message that arrives is whole and right. A message that does not arrive leaves a receive
/// for the next.
fn check_unreliable(t: &Pair, case: &Case, before: &Before, sent: &[(Wc, Time)], received: &[Wc]) {
    let (_, b) = t.ends();
    assert_eq!(sent.len(), MESSAGES);
    assert!(sent.iter().all(|(wc, _)| wc.status == WcStatus::Success), "{sent:?}");
    let grh = if case.service == QpType::Ud { GRH } else { 0 };
    let mut times = [0; MESSAGES];
    for (place, wc) in received.iter().enumerate() {
        assert_eq!((wc.wr_id, wc.status), (place as u64, WcStatus::Success));
        let i = wc.imm as usize;
        times[i] += 1;
        let len = len_of(case, i);
        assert_eq!(wc.byte_len as usize, len + grh);
        // A SEND lies where the receive was; a WRITE where it was to go.
        let at = if case.op == Op::SendImm { place } else { i };
        let bytes = t.bytes(b.mr, at * SLOT + grh, len);
        // The start of a later message that was lost may lie over a repetition of this one, nothing over its first arrival.
        assert!(bytes == before.a[i][..len], "message {i} of {len} bytes");
    }
    let repeats = matches!(case.fault, Fault::Duplication | Fault::Everything);
    assert!(repeats || times.iter().all(|times| *times <= 1), "{times:?}");
    if matches!(case.fault, Fault::None | Fault::Delay) {
        assert_eq!(times, [1; MESSAGES]);
    }
}
