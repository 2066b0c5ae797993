//! UC: a message with a lost packet is lost as a whole, the next one is whole again (IBA 9.8.2, 9.8.3).

use super::prelude::*;

fn uc() -> (Pair, End, End) {
    rc(QpOptions::uc())
}

/// Sends three messages of five packets with packet `lost` of the second one dropped.
fn middle_one_lost(lost: u32) {
    let (mut t, a, b) = uc();
    let dropped = QpOptions::uc().sq_psn.plus(5 + lost);
    t.net.once(psn(dropped), Fate::Drop);
    for i in 0..3 {
        t.recv(b, i, &[b.mr.sge(i as usize * 8192, 5000)]);
    }
    for i in 0..3 {
        t.post(a, i, SendOp::SendImm(i as u32), &[a.mr.sge(i as usize * 8192, 5000)]);
    }
    t.run();
    assert_eq!(t.sent(a), [(0, Success), (1, Success), (2, Success)], "the sender never knows");
    let wcs = t.recvs(b);
    // The receive of the lost message is used by the next one.
    let got: Vec<_> = wcs.iter().map(|wc| (wc.wr_id, wc.status, wc.imm, wc.byte_len)).collect();
    assert_eq!(got, [(0, Success, 0, 5000), (1, Success, 2, 5000)], "packet {lost}");
    assert_eq!(t.bytes(b.mr, 0, 5000), t.bytes(a.mr, 0, 5000));
    assert_eq!(t.bytes(b.mr, 8192, 5000), t.bytes(a.mr, 2 * 8192, 5000));
    assert!(t.counter(b.device, Counter::DropUcGap) > 0);
    assert_eq!(t.net.trace.iter().filter(|r| r.from == b.device).count(), 0, "nobody answers");
}

#[test]
fn first_middle_or_last() {
    for lost in 0..5 {
        middle_one_lost(lost);
    }
}

#[test]
fn last_and_first_of_neighbours() {
    // The rest of both looks like one message, but for the PSNs.
    let (mut t, a, b) = uc();
    let first = QpOptions::uc().sq_psn;
    t.net.once(psn(first.plus(4)), Fate::Drop);
    t.net.once(psn(first.plus(5)), Fate::Drop);
    t.recv(b, 0, &[b.mr.sge(0, 10_000)]);
    for i in 0..3 {
        t.post(a, i, SendOp::SendImm(i as u32), &[a.mr.sge(i as usize * 8192, 5000)]);
    }
    t.run();
    let wcs = t.recvs(b);
    assert_eq!(wcs.iter().map(|wc| (wc.wr_id, wc.imm)).collect::<Vec<_>>(), [(0, 2)]);
    assert_eq!(t.bytes(b.mr, 0, 5000), t.bytes(a.mr, 2 * 8192, 5000));
}

#[test]
fn without_a_receive_it_is_dropped() {
    let (mut t, a, b) = uc();
    t.post(a, 1, SendOp::SendImm(1), &[a.mr.sge(0, 5000)]);
    t.run();
    assert!(t.counter(b.device, Counter::DropNoRecv) > 0);
    t.recv(b, 5, &[b.mr.sge(0, 5000)]);
    t.post(a, 2, SendOp::SendImm(2), &[a.mr.sge(0, 5000)]);
    t.run();
    assert_eq!(t.recvs(b).iter().map(|wc| (wc.wr_id, wc.imm)).collect::<Vec<_>>(), [(5, 2)]);
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
}

#[test]
fn a_receive_posted_within_a_message_takes_the_next() {
    let (mut t, a, b) = uc();
    t.net.once(nth(2, |_| true), Fate::Delay(Duration::from_micros(50)));
    t.net.once(nth(2, |_| true), Fate::Delay(Duration::from_micros(60)));
    t.post(a, 1, SendOp::SendImm(1), &[a.mr.sge(0, 5000)]);
    t.run_for(Duration::from_micros(20));
    t.recv(b, 5, &[b.mr.sge(0, 5000)]);
    t.run();
    assert_eq!(t.recvs(b), []);
    t.post(a, 2, SendOp::SendImm(2), &[a.mr.sge(0, 5000)]);
    t.run();
    assert_eq!(t.recvs(b).iter().map(|wc| (wc.wr_id, wc.imm)).collect::<Vec<_>>(), [(5, 2)]);
}

#[test]
fn a_write_that_is_refused_is_dropped_and_counted() {
    let (mut t, a, b) = uc();
    let before = t.bytes(b.mr, 0, 8192);
    t.post(a, 1, SendOp::Write(RemoteAddr { rkey: 0, ..b.mr.remote(0) }), &[a.mr.sge(0, 5000)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 8192), before);
    assert!(t.counter(b.device, Counter::DropUcAccess) > 0);
    assert_eq!(t.state(b), QpState::Rts);
    t.post(a, 2, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 5000)]);
    t.run();
    assert_eq!(t.bytes(b.mr, 0, 5000), t.bytes(a.mr, 0, 5000));
}

#[test]
fn writes_with_immediate() {
    for lost in 0..5 {
        let (mut t, a, b) = uc();
        t.net.once(psn(QpOptions::uc().sq_psn.plus(lost)), Fate::Drop);
        t.recv(b, 0, &[]);
        t.recv(b, 1, &[]);
        for i in 0..2 {
            let at = b.mr.remote(i as usize * 8192);
            t.post(a, i, SendOp::WriteImm(at, i as u32), &[a.mr.sge(i as usize * 8192, 5000)]);
        }
        t.run();
        let wcs = t.recvs(b);
        assert_eq!(wcs.iter().map(|wc| (wc.wr_id, wc.imm)).collect::<Vec<_>>(), [(0, 1)]);
        assert_eq!(t.bytes(b.mr, 8192, 5000), t.bytes(a.mr, 8192, 5000));
    }
}

#[test]
fn every_operation_across_the_end_of_the_psns() {
    for back in 0..6 {
        let sq_psn = Psn::new(0u32.wrapping_sub(back));
        let (mut t, _, b) = rc(QpOptions { sq_psn, ..QpOptions::uc() });
        for _ in 0..2 {
            for op in every_op(b).into_iter().filter(|op| !op.has_response_data()) {
                do_one(&mut t, op);
            }
        }
    }
}

#[test]
fn a_peer_that_guesses_keys_ends_the_queue_pair() {
    let (mut t, a, b) = uc();
    let hidden = t.bytes(b.mr, 0, 8192);
    for guess in 0..100u32 {
        let at = RemoteAddr { rkey: b.mr.remote(0).rkey.wrapping_add(1 + guess), ..b.mr.remote(0) };
        t.post(a, u64::from(guess), SendOp::Write(at), &[a.mr.sge(0, 16)]);
        t.run();
        t.sent(a);
        let state = if guess < 7 { QpState::Rts } else { QpState::Err };
        assert_eq!(t.state(b), state, "guess {guess}");
    }
    assert!(t.qp_events(b).contains(&QpEvent::AccessErr));
    t.post(a, 100, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 16)]);
    t.run();
    assert_eq!(t.bytes(b.mr, 0, 8192), hidden, "not even with the right key");
}

/// A forger of the peer's address needs no sequence number to send a message. It cannot touch one of the peer's
/// messages but to lose it.
#[test]
fn a_forged_sequence_number_adds_to_no_message() {
    let first = QpOptions::uc().sq_psn;
    for operation in [O::SendFirst, O::SendMiddle, O::SendLast, O::WriteMiddle, O::WriteLast] {
        for ahead in [1, 2, 3, 5, 1000, 1 << 22, (1 << 23) + 1, (1 << 24) - 1] {
            let (mut t, a, b) = uc();
            t.recv(b, 0, &[b.mr.sge(0, 5000)]);
            // The second packet of a message of five is late, and the forgery comes in its place.
            t.net.once(psn(first.plus(1)), Fate::Delay(Duration::from_micros(100)));
            t.post(a, 1, SendOp::SendImm(1), &[a.mr.sge(0, 5000)]);
            let headers = forged(&t, b, operation, first.plus(1 + ahead));
            t.inject(a.device, b.device, headers, &[0xee; 1024]);
            t.run();
            assert_eq!(t.recvs(b), [], "{operation} {ahead}");
            // The next message is whole.
            t.post(a, 2, SendOp::SendImm(2), &[a.mr.sge(0, 5000)]);
            t.run();
            let got: Vec<_> = t.recvs(b).iter().map(|wc| (wc.wr_id, wc.imm, wc.byte_len)).collect();
            assert_eq!(got, [(0, 2, 5000)], "{operation} {ahead}");
            assert_eq!(t.bytes(b.mr, 0, 5000), t.bytes(a.mr, 0, 5000));
            assert_eq!(t.state(b), QpState::Rts);
        }
    }
}
