//! Messages of megabytes: READs in pieces, paced responses, windows that turn over many times.

use super::prelude::*;
use anyverbs_proto::wire::reth::Reth;
use anyverbs_proto::wr::MAX_MESSAGE;
use anyverbs_sim::Mr;

const LEN: usize = (3 << 20) + 12_345;

/// Regions of 4 MiB at both ends.
fn large(options: QpOptions) -> (Pair, End, End, Mr, Mr) {
    let mut t = Pair::new(1, options);
    let (a, b) = t.ends();
    let [x, y] = [a, b].map(|end| {
        let mr = t.mr(end.device, end.pd, 4 << 20, Access::VERBS);
        t.fill(mr, mr.addr);
        mr
    });
    (t, a, b, x, y)
}

fn lossy() -> Link {
    Link { loss: 0.002, duplicate: 0.002, reorder: 0.002, ..Link::default() }
}

#[test]
fn each_operation() {
    for link in [Link::default(), lossy()] {
        for window in [32 << 10, 1 << 20] {
            for i in 0..4 {
                let (mut t, a, b, x, y) = large(QpOptions { window, ..QpOptions::rc() });
                t.net.default_link = link.clone();
                let op = [
                    SendOp::Send,
                    SendOp::Write(y.remote(7)),
                    SendOp::WriteImm(y.remote(7), 1),
                    SendOp::Read(y.remote(7)),
                ][i];
                t.recv(b, 1, &[y.sge(7, LEN)]);
                t.post(a, 2, op, &[x.sge(100, LEN)]);
                t.run();
                assert_eq!(t.sent(a), [(2, Success)]);
                assert!(t.bytes(x, 100, LEN) == t.bytes(y, 7, LEN), "{op:?}");
            }
        }
    }
}

#[test]
fn reads_of_both_ends_at_once() {
    let (mut t, a, b, x, y) = large(QpOptions::rc());
    t.net.default_link = lossy();
    let (there, here) = (t.bytes(y, 0, 1 << 20), t.bytes(x, 0, 1 << 20));
    for i in 0..4 {
        let offset = i << 18;
        t.post(a, i as u64, SendOp::Read(y.remote(offset)), &[x.sge((2 << 20) + offset, 1 << 18)]);
        t.post(b, i as u64, SendOp::Read(x.remote(offset)), &[y.sge((2 << 20) + offset, 1 << 18)]);
    }
    t.run();
    for end in [a, b] {
        assert_eq!(t.sent(end), (0..4).map(|i| (i, Success)).collect::<Vec<_>>());
    }
    assert!(t.bytes(x, 2 << 20, 1 << 20) == there);
    assert!(t.bytes(y, 2 << 20, 1 << 20) == here);
}

#[test]
fn the_responses_to_one_request_leave_in_bursts() {
    let (mut t, a, b, _, y) = large(QpOptions::rc());
    // Other requesters than this one ask for much in one request.
    let RemoteAddr { va, rkey } = y.remote(0);
    let mut read = forged(&t, b, O::ReadRequest, QpOptions::rc().sq_psn);
    read.reth = Some(Reth { va, rkey, len: 1 << 20 });
    t.inject(a.device, b.device, read, &[]);
    t.run();
    let mut bursts: Vec<(_, usize)> = Vec::new();
    for r in t.net.trace.iter().filter(|r| r.from == b.device) {
        match bursts.last_mut() {
            Some((at, bytes)) if *at == r.at => *bytes += r.payload_len,
            _ => bursts.push((r.at, r.payload_len)),
        }
    }
    assert_eq!(bursts.iter().map(|(_, bytes)| bytes).sum::<usize>(), 1 << 20);
    assert!(bursts.iter().all(|(_, bytes)| *bytes <= 128 << 10), "{bursts:?}");
    let pauses = bursts.windows(2).map(|two| two[1].0.since(two[0].0));
    assert!(pauses.min() >= Some(Duration::from_micros(50)), "{bursts:?}");
}

#[test]
fn a_write_does_not_overtake_a_paced_read() {
    // The responses of the READ go out in bursts; requests behind it are executed meanwhile, and acknowledged after.
    let (mut t, a, b, x, y) = large(QpOptions::rc());
    let there = t.bytes(y, 0, 1 << 20);
    t.post(a, 1, SendOp::Read(y.remote(0)), &[x.sge(0, 1 << 20)]);
    t.post(a, 2, SendOp::Write(y.remote(2 << 20)), &[x.sge(3 << 20, 3000)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
    assert!(t.bytes(x, 0, 1 << 20) == there);
    assert_eq!(t.bytes(y, 2 << 20, 3000), t.bytes(x, 3 << 20, 3000));
    let _ = b;
}

#[test]
fn only_the_longest_message_is_accepted_not_longer() {
    // MAX_MESSAGE bytes. They do not exist here; only the length is looked at.
    let (mut t, a, _, x, _) = large(QpOptions { retry_cnt: 0, ..QpOptions::rc() });
    let half = Sge { len: MAX_MESSAGE / 2, ..x.sge(0, 0) };
    let flags = SendFlags::SIGNALED;
    let one = Sge { len: 1, ..half };
    let refused = t.try_post(a, 1, SendOp::Send, flags, &[half, half, one]);
    assert_eq!(refused, Err(PostSendError::TooLong));
    t.try_post(a, 2, SendOp::Send, flags, &[half, half]).unwrap();
    t.run();
    assert_eq!(t.sent(a), [(2, LocProtErr)], "it is not in the region");
}
