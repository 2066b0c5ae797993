//! An attacker on the network that knows every number of a connection, but has another address than the peer.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::wire::aeth::{Aeth, NakCode, Syndrome};
use anyverbs_proto::wire::opcode::Operation;
use anyverbs_proto::wire::reth::Reth;

use crate::endpoint::*;
use crate::forged::*;
use crate::same_host::turn;

#[test]
fn packets_of_another_address_change_nothing() {
    let _alone = counting_alone();
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    assert_eq!(b.address().gid.to_ip(), IpAddr::V4(VICTIM));
    a.connect(b.address());
    b.connect(a.address());
    let (from, to) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
    to.write(0, &[1; 64]);
    from.write(0, &[2; 64]);
    let psn = Psn::new(100);
    let mut write = forged(Operation::WriteOnly, &b, psn);
    write.reth = Some(Reth { va: to.addr(), rkey: to.mr.rkey(), len: 64 });
    let mut stray = write;
    stray.reth = Some(Reth { va: 0, rkey: 0, len: 64 });
    let mut nak = forged(Operation::Ack, &a, psn);
    nak.aeth = Some(Aeth { syndrome: Syndrome::Nak(NakCode::RemoteAccess), msn: 0 });

    // The first would write, the second end b's side, the third a's.
    for (headers, payload) in [(write, &[9; 64][..]), (stray, &[9; 64]), (nak, &[])] {
        let before = a.context.counters().unwrap().read(Counter::DropForeign);
        Forged::from(Ipv4Addr::new(127, 0, 0, 2)).send(headers, payload);
        counted(&a, Counter::DropForeign, before);
    }
    assert_eq!(to.read(0, 64), [1; 64]);
    a.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 64)]);
    let wcs = a.poll(1);
    assert_eq!((wcs[0].wr_id, wcs[0].status), (1, WcStatus::Success));
    assert_eq!(to.read(0, 64), [2; 64]);

    // The peer's address with the right numbers is the peer, so the attempts above would have worked. The WRITE took no PSN.
    Forged::from(VICTIM).send(write, &[9; 64]);
    let begin = Instant::now();
    while to.read(0, 64) != [9; 64] {
        b.cq.poll(&mut [Wc::default(); 4]).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "it was not taken for the peer");
    }
}

/// On another link there may be a host with the peer's link-local address. It cannot send to the queue pair's own address.
#[test]
fn packets_to_another_of_our_addresses_change_nothing() {
    let _alone = counting_alone();
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    a.connect(b.address());
    b.connect(a.address());
    let to = Buffer::new(&b.pd, 64);
    to.write(0, &[1; 64]);
    let mut write = forged(Operation::WriteOnly, &b, Psn::new(100));
    write.reth = Some(Reth { va: to.addr(), rkey: to.mr.rkey(), len: 64 });
    let before = a.context.counters().unwrap().read(Counter::DropForeign);
    // No other test has a socket at this address, which would take the packet.
    Forged { to: Ipv4Addr::new(127, 0, 0, 5), ..Forged::from(VICTIM) }.send(write, &[9; 64]);
    counted(&a, Counter::DropForeign, before);
    assert_eq!(to.read(0, 64), [1; 64]);
}

/// Packets that come in one buffer are executed together, but each is looked at. A batch may begin with another ID than 0
/// where it was cut on its way.
#[test]
fn a_damaged_packet_in_a_batch_is_dropped_alone() {
    const N: usize = 12;
    let _alone = counting_alone();
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    a.connect(b.address());
    b.connect(a.address());
    let to = Buffer::new(&b.pd, 64 * N);
    let mut psn = Psn::new(100);
    let filled = |n: usize, byte: u8| {
        let begin = Instant::now();
        while to.read(0, 64 * n) != vec![byte; 64 * n] {
            b.cq.poll(&mut [Wc::default(); 4]).unwrap();
            assert!(begin.elapsed() < Duration::from_secs(60), "{n} WRITEs are not executed");
        }
    };
    let cases = [None, Some(0), Some(1), Some(7), Some(N - 1)];
    let cases = [0, 0, 30, 30, 5].into_iter().flat_map(|id| cases.map(|damaged| (id, damaged)));
    for (byte, (id, damaged)) in (1..).zip(cases) {
        let dropped = || b.context.counters().unwrap().read(Counter::DropIcrc);
        let write = |i: usize| {
            let mut headers = forged(Operation::WriteOnly, &b, psn.plus(i as u32));
            let va = to.addr() + 64 * i as u64;
            headers.reth = Some(Reth { va, rkey: to.mr.rkey(), len: 64 });
            headers
        };
        let packets: [_; N] = std::array::from_fn(|i| (write(i), [byte; 64]));
        let peer = Forged { id, ..Forged::from(VICTIM) };
        let before = dropped();
        peer.send_batch(&packets, damaged);
        if let Some(damaged) = damaged {
            counted(&b, Counter::DropIcrc, before);
            filled(damaged, byte);
            assert_ne!(to.read(64 * damaged, 64), [byte; 64]);
            // Within a process, where nothing is lost, those behind it are not kept.
            for (headers, payload) in &packets[damaged..] {
                peer.send(*headers, payload);
            }
        }
        filled(N, byte);
        assert_eq!(dropped(), before + u64::from(damaged.is_some()));
        psn = psn.plus(N as u32);
    }
}

/// A packet for another process is looked at as any other before it is handed on.
#[test]
fn a_damaged_packet_for_another_process_is_not_handed_on() {
    // Packets for a process that is not there may go to any, and other tests stop theirs for a while.
    let _turn = turn();
    let _alone = counting_alone();
    let e = Endpoint::new(QpType::Rc);
    let mut headers = forged(Operation::SendOnly, &e, Psn::new(100));
    let other = e.qp.qpn().slot() ^ 0xff;
    headers.bth.dest_qpn = Qpn::new(u32::from(other.max(1)) << 16 | 0x77);
    let counters = e.context.counters().unwrap();
    let read = |counter| counters.read(counter);
    let (icrc, no_qp) = (read(Counter::DropIcrc), read(Counter::DropNoQp));
    // The ICRC is that of an ID which the header did not have, and the socket never sends.
    let host = Ipv4Addr::new(127, 0, 0, 4);
    let socket = UdpSocket::bind((host, 0)).unwrap();
    for (n, id) in (0..64).cycle().take(256).enumerate() {
        Forged { id, ..Forged::from(host) }.send_by(&socket, headers, &[9; 64]);
        counted(&e, Counter::DropNoQp, no_qp + n as u64);
    }
    Forged { id: 40_000, ..Forged::from(host) }.send_by(&socket, headers, &[9; 64]);
    counted(&e, Counter::DropIcrc, icrc);
    assert_eq!(read(Counter::DropNoQp), no_qp + 256);
}

/// One of 65,536 damaged packets is right for some ID that the IPv4 header did not have.
#[test]
fn a_packet_with_an_unusual_ip_id_counts_as_damaged() {
    let _alone = counting_alone();
    let host = Ipv4Addr::new(127, 0, 0, 3);
    let socket = UdpSocket::bind((host, 0)).unwrap();
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    a.connect(b.address());
    b.connect(a.address());
    let to_nobody = forged(Operation::SendOnly, &b, Psn::new(100));
    let counters = a.context.counters().unwrap();
    let mut foreign = counters.read(Counter::DropForeign);
    for id in (0..64).cycle().take(256) {
        Forged { id, ..Forged::from(host) }.send_by(&socket, to_nobody, &[9; 64]);
        counted(&a, Counter::DropForeign, foreign);
        foreign += 1;
    }
    let before = counters.read(Counter::DropIcrc);
    Forged { id: 40_000, ..Forged::from(host) }.send_by(&socket, to_nobody, &[9; 64]);
    counted(&a, Counter::DropIcrc, before);
    Forged::from(host).send_by(&socket, to_nobody, &[9; 64]);
    counted(&a, Counter::DropForeign, foreign);
}

/// `struct __user_cap_header_struct` and two of `__user_cap_data_struct` (capget(2), version 3).
fn without_net_raw() {
    const VERSION_3: u32 = 0x2008_0522;
    const NET_RAW: u32 = 1 << 13;
    let mut header = [VERSION_3, 0];
    let mut data = [0u32; 6];
    // SAFETY: the kernel reads the header and fills three words for each half.
    let got = unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), data.as_mut_ptr()) };
    assert_eq!(got, 0);
    data[0] &= !NET_RAW;
    // SAFETY: as above; it reads both. Only this thread changes.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), data.as_ptr()) };
    assert_eq!(set, 0);
}

#[test]
fn controlled_q_keys_take_a_privilege() {
    let e = Endpoint::new(QpType::Ud);
    let attr = |qkey| QpAttr { state: QpState::Init, port: 1, qkey, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::QKEY;
    let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    without_net_raw();
    let refused = e.qp.modify(&attr(QKey(0x8000_0001)), mask).unwrap_err();
    assert_eq!(refused.errno(), libc::EPERM, "{refused}");
    e.qp.modify(&attr(QKey(0x7fff_ffff)), mask).unwrap();
    e.qp.modify(&reset, QpAttrMask::STATE).unwrap();
}

#[test]
fn a_key_dies_with_its_registration() {
    let e = Endpoint::new(QpType::Rc);
    let mut keys = std::collections::HashSet::new();
    for _ in 0..1000 {
        let buffer = Buffer::new(&e.pd, 64);
        assert!(keys.insert(buffer.mr.rkey()), "a key came again");
    }
}
