//! Messages of no bytes (S5.5; IBA 9.7.4.1.4: no key is checked).

use super::prelude::*;

const NOWHERE: RemoteAddr = RemoteAddr { va: 0xdead_beef, rkey: 0x1234_5678 };

fn empty_sges() -> [Vec<Sge>; 3] {
    let empty = Sge { addr: 0x1234, len: 0, lkey: 0x5678 };
    [vec![], vec![empty], vec![empty; 3]]
}

#[test]
fn every_operation_with_keys_that_nobody_has() {
    let ops = [
        SendOp::Send,
        SendOp::SendImm(5),
        SendOp::Write(NOWHERE),
        SendOp::WriteImm(NOWHERE, 5),
        SendOp::Read(NOWHERE),
    ];
    for op in ops {
        for sges in empty_sges() {
            for recv in empty_sges() {
                let (mut t, a, b) = rc(QpOptions::rc());
                t.recv(b, 1, &recv);
                t.post(a, 2, op, &sges);
                t.run();
                assert_eq!(t.sent(a), [(2, Success)], "{op:?}");
                let recvs = t.recvs(b);
                if takes_recv(&op) {
                    assert_eq!(
                        (recvs[0].wr_id, recvs[0].status, recvs[0].byte_len),
                        (1, Success, 0)
                    );
                } else {
                    assert_eq!(recvs, []);
                }
            }
        }
    }
}

#[test]
fn empty_elements_among_others() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let empty = Sge { addr: 0x1234, len: 0, lkey: 0x5678 };
    t.recv(b, 1, &[empty, b.mr.sge(0, 50), empty, b.mr.sge(50, 50)]);
    t.post(a, 2, SendOp::Send, &[empty, a.mr.sge(0, 70), empty, a.mr.sge(70, 30)]);
    t.run();
    assert_eq!(t.sent(a), [(2, Success)]);
    assert_eq!(t.received(b), [(1, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 100), t.bytes(a.mr, 0, 100));
}

#[test]
fn on_uc_and_ud_as_well() {
    for options in [QpOptions::uc(), QpOptions::ud()] {
        let mut t = Pair::new(1, options);
        let (a, b) = t.ends();
        t.recv(b, 1, &[b.mr.sge(0, 40)]);
        t.post(a, 2, SendOp::SendImm(9), &[]);
        t.run();
        assert_eq!(t.sent(a), [(2, Success)]);
        let recvs = t.recvs(b);
        let grh = if options.qp_type == QpType::Ud { 40 } else { 0 };
        assert_eq!((recvs[0].byte_len, recvs[0].imm), (grh, 9));
    }
}

#[test]
fn lost_and_duplicated_like_any_other() {
    for op in [SendOp::Send, SendOp::Read(NOWHERE)] {
        for lost in 0..2 {
            let (mut t, a, b) = rc(QpOptions::rc());
            t.net.once(nth(lost, |_| true), Fate::Drop);
            t.net.rule(|_| Fate::Again(Duration::from_micros(3)));
            t.recv(b, 1, &[]);
            t.post(a, 2, op, &[]);
            t.run();
            assert_eq!(t.sent(a), [(2, Success)]);
            assert_eq!(t.recvs(b).len(), usize::from(op == SendOp::Send));
        }
    }
}
