//! Inline data is copied at post: the buffer may be used again at once, and its key is not looked at (S2.2).

use super::prelude::*;

const INLINE: SendFlags = SendFlags::INLINE.union(SendFlags::SIGNALED);

#[test]
fn the_buffer_changes_after_the_post() {
    for lost in [false, true] {
        for options in [QpOptions::rc(), QpOptions::uc(), QpOptions::ud()] {
            let reliable = options.qp_type == QpType::Rc;
            let mut t = Pair::new(1, options);
            let (a, b) = t.ends();
            if lost && reliable {
                // The data is kept for the second try, too.
                t.net.once(|_| true, Fate::Drop);
            }
            t.recv(b, 1, &[b.mr.sge(0, 40 + 200)]);
            let sent = t.bytes(a.mr, 0, 200);
            let [x, y] =
                [(0, 150), (150, 50)].map(|(at, len)| Sge { lkey: 0, ..a.mr.sge(at, len) });
            t.try_post(a, 2, SendOp::Send, INLINE, &[x, y]).unwrap();
            t.write(a.mr, 0, &[0; 200]);
            t.run();
            assert_eq!(t.sent(a), [(2, Success)]);
            assert_eq!(t.received(b), [(1, Success)]);
            let grh = if options.qp_type == QpType::Ud { 40 } else { 0 };
            assert_eq!(t.bytes(b.mr, grh, 200), sent);
        }
    }
}

#[test]
fn several_packets_of_inline_data() {
    let mut options = QpOptions { mtu: Mtu::Mtu256, ..QpOptions::rc() };
    options.cap.max_inline_data = 900;
    let (mut t, a, b) = rc(options);
    let sent = t.bytes(a.mr, 0, 900);
    t.try_post(a, 1, SendOp::Write(b.mr.remote(0)), INLINE, &[a.mr.sge(0, 900)]).unwrap();
    t.write(a.mr, 0, &[0; 900]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 900), sent);
}

#[test]
fn more_than_was_asked_for_is_refused() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let most = t.get(a.qp).init().cap.max_inline_data as usize;
    assert!(most >= QpOptions::rc().cap.max_inline_data as usize);
    let op = SendOp::Write(b.mr.remote(0));
    let refused = t.try_post(a, 1, op, INLINE, &[a.mr.sge(0, most), a.mr.sge(0, 1)]);
    assert_eq!(refused, Err(PostSendError::InlineTooLong));
    t.try_post(a, 2, op, INLINE, &[a.mr.sge(0, most)]).unwrap();
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let hole = Sge { addr: 8, len: 8, lkey: 0 };
    let op = SendOp::Write(b.mr.remote(0));
    assert_eq!(t.try_post(a, 1, op, INLINE, &[hole]), Err(PostSendError::Fault));
    do_one(&mut t, op);
}
