//! WRITE with immediate data: the data goes where the RETH says, the receive says that it is there (IBA 9.4.3).

use super::prelude::*;
use anyverbs_proto::wire::reth::Reth;

#[test]
fn the_receive_tells_length_and_immediate() {
    for len in [0, 1, 1024, 1025, 5000] {
        let (mut t, a, b) = rc(QpOptions::rc());
        let aside = t.bytes(b.mr, 50_000, 100);
        t.recv(b, 1, &[b.mr.sge(50_000, 100)]);
        t.post(a, 2, SendOp::WriteImm(b.mr.remote(10), 0xdead_beef), &[a.mr.sge(0, len)]);
        t.run();
        let wc = t.recvs(b)[0];
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, Success, WcOpcode::RecvRdmaWithImm));
        assert_eq!((wc.byte_len, wc.imm, wc.flags), (len as u32, 0xdead_beef, WcFlags::WITH_IMM));
        assert_eq!(t.bytes(b.mr, 10, len), t.bytes(a.mr, 0, len));
        assert_eq!(t.bytes(b.mr, 50_000, 100), aside, "the receive's buffer is not used");
    }
}

#[test]
fn not_ready_at_the_last_packet() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::WriteImm(b.mr.remote(0), 5), &[a.mr.sge(0, 3000)]);
    t.run_for(Duration::from_micros(100));
    assert_eq!(t.counter(b.device, Counter::RnrNakSent), 1);
    assert_eq!(t.bytes(b.mr, 0, 2048), t.bytes(a.mr, 0, 2048), "the first packets are there");
    t.net.trace.clear();
    t.recv(b, 2, &[]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.received(b), [(2, Success)]);
    assert_eq!(t.bytes(b.mr, 0, 3000), t.bytes(a.mr, 0, 3000));
    let again: Vec<_> =
        t.net.trace.iter().filter(|r| r.from == a.device).map(|r| r.operation()).collect();
    assert_eq!(again, [O::WriteLastImm], "only that one is sent again");
}

#[test]
fn a_plain_write_takes_no_receive() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.recv(b, 1, &[]);
    t.post(a, 2, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
    t.run();
    assert_eq!(t.recvs(b), []);
    t.post(a, 3, SendOp::WriteImm(b.mr.remote(0), 1), &[a.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.received(b), [(1, Success)]);
}

#[test]
fn a_wrong_key_fails_the_receive_that_the_packet_takes() {
    // IBA 11.6.2, local access error. The first packet of several takes none yet.
    for len in [10, 3000] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.recv(b, 1, &[]);
        t.recv(b, 2, &[]);
        let nowhere = RemoteAddr { va: 0, rkey: 0 };
        t.post(a, 3, SendOp::WriteImm(nowhere, 1), &[a.mr.sge(0, len)]);
        t.run();
        assert_eq!(t.sent(a), [(3, RemAccessErr)]);
        let received = match len {
            10 => [vec![(1, LocAccessErr)], flushed(b, &[2])].concat(),
            _ => flushed(b, &[1, 2]),
        };
        assert_eq!(t.received(b), received);
    }
}

#[test]
fn a_write_of_the_wrong_length_takes_no_receive() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.recv(b, 1, &[]);
    let opcode = Opcode::new(Service::Rc, O::WriteOnlyImm);
    let mut headers = Headers::new(Bth::new(opcode, t.get(b.qp).qpn(), QpOptions::rc().sq_psn));
    headers.reth = Some(Reth { va: b.mr.addr, rkey: b.mr.rkey, len: 200 });
    headers.imm = Some(5);
    t.inject(a.device, b.device, headers, &[7; 100]);
    assert_eq!(t.received(b), flushed(b, &[1]));
}
