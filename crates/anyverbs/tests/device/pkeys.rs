//! Partitions: tables of P_Keys, and packets that have another partition's.

use anyverbs::error::CreateError;
use anyverbs::*;
use anyverbs_proto::counters::Counter;
use anyverbs_testing::in_own_process;

use crate::capture::BY_UDP;
use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer, exercise};

/// Runs a test of this module in a process of its own, whose devices have these tables, and with variables.
fn with(name: &str, tables: &str, variables: &[(&str, &str)], test: impl FnOnce()) {
    in_own_process(&format!("pkeys::{name}"), || {
        let file = std::env::temp_dir().join(format!("anyverbs-pkeys-{}.toml", std::process::id()));
        std::fs::write(&file, format!("devices = [{tables}]")).unwrap();
        let config = [("ANYVERBS_CONFIG", file.to_str().unwrap()), ("ANYVERBS_INTERFACES", "")];
        for (variable, value) in [&config, variables].concat() {
            // SAFETY: before the device is opened, and by the only thread that runs a test.
            unsafe { std::env::set_var(variable, value) };
        }
        isolate();
        test();
        std::fs::remove_file(file).unwrap();
    });
}

fn dropped(context: &Context) -> u64 {
    context.counters().unwrap().read(Counter::DropPkey)
}

/// The default partition, full; 1, full and limited; 2, limited.
const TABLE: &str = "{ pkeys = [0xffff, 0x8001, 0x0001, 0x0002] }";

#[test]
fn each_device_has_a_table_of_its_own() {
    with("each_device_has_a_table_of_its_own", &format!("{TABLE}, {{}}"), &[], || {
        let [one, other] =
            [0, 1].map(|n| Context::open(&anyverbs::devices().unwrap()[n].name).unwrap());
        let keys = [0, 1, 2, 3].map(|index| one.pkey(1, index).unwrap().0);
        assert_eq!(keys, [0xffff, 0x8001, 0x0001, 0x0002]);
        assert_eq!(one.pkey(1, 4), Err(CreateError::Invalid("P_Key index")));
        assert_eq!(other.pkey(1, 0), Ok(PKey::DEFAULT));
        assert!(other.pkey(1, 1).is_err());
        let lengths = |context: &Context| {
            let (device, port) = (context.device_attr().unwrap(), context.port_attr(1).unwrap());
            (device.max_pkeys, port.pkey_tbl_len)
        };
        assert_eq!([lengths(&one), lengths(&other)], [(4, 4), (1, 1)]);
        // A queue pair takes an index of its device.
        let takes = |context: Context, pkey_index| {
            let e = Endpoint::on(context, QpType::Rc);
            e.to_init();
            let attr = QpAttr { pkey_index, ..QpAttr::default() };
            e.qp.modify(&attr, QpAttrMask::PKEY_INDEX)
        };
        assert_eq!(takes(one, 3), Ok(()));
        assert_eq!(takes(other, 1).unwrap_err().errno(), libc::EINVAL);
    });
}

/// Whether an endpoint with one index of the table reaches one with another. `expected` alone decides how long it waits.
fn reaches(from: u16, to: u16, expected: bool) -> bool {
    let [a, b] = [(); 2].map(|()| Endpoint::new(QpType::Rc));
    // Without an answer it gives up after three times 16 ms.
    let (timeout, retries) = if expected { (14, 7) } else { (10, 2) };
    a.connect_in(from, b.address(), timeout, retries);
    b.connect_in(to, a.address(), timeout, retries);
    let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
    b.recv(7, &[dst.sge(0, 64)]);
    let before = dropped(&a.context);
    a.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
    a.send(2, SendOp::Send, &[src.sge(0, 8)]);
    let sent = a.poll(2);
    let lost = dropped(&a.context) - before;
    match sent[0].status {
        WcStatus::Success => {
            assert_eq!((sent[1].status, b.poll(1)[0].wr_id, lost), (WcStatus::Success, 7, 0));
            true
        }
        status => {
            assert_eq!((status, sent[0].vendor_err), (WcStatus::RetryExcErr, 1215));
            assert!(lost >= 3, "{lost}");
            assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
            false
        }
    }
}

fn check_each_pair() {
    // Two limited members of a partition do not talk.
    let same = [(0, 0), (1, 1), (1, 2), (2, 1)];
    for (from, to) in (0..4).flat_map(|from| (0..4).map(move |to| (from, to))) {
        let expected = same.contains(&(from, to));
        assert_eq!(reaches(from, to, expected), expected, "{from} to {to}");
    }
}

#[test]
fn queue_pairs_of_one_partition_talk_within_a_process() {
    let name = "queue_pairs_of_one_partition_talk_within_a_process";
    with(name, TABLE, &[], check_each_pair);
}

#[test]
fn queue_pairs_of_one_partition_talk_by_udp() {
    with("queue_pairs_of_one_partition_talk_by_udp", TABLE, &BY_UDP, check_each_pair);
}

#[test]
fn a_datagram_of_another_partition_is_lost_without_a_word() {
    let name = "a_datagram_of_another_partition_is_lost_without_a_word";
    with(name, TABLE, &[], || {
        let [a, b] = [(); 2].map(|()| Endpoint::new(QpType::Ud));
        a.connect_in(1, b.address(), 14, 7);
        b.connect_in(0, a.address(), 14, 7);
        let other = Endpoint::new(QpType::Ud);
        other.connect_in(0, b.address(), 14, 7);
        let [src, dst] = [&other, &b].map(|e| Buffer::new(&e.pd, 128));
        let lost = Buffer::new(&a.pd, 64);
        b.recv(7, &[dst.sge(0, 128)]);
        let to = |e: &Endpoint| e.dest(b.address());
        a.send_to(1, SendOp::Send, &[lost.sge(0, 8)], Some(to(&a)));
        assert_eq!(a.poll(1)[0].status, WcStatus::Success);
        other.send_to(2, SendOp::Send, &[src.sge(0, 8)], Some(to(&other)));
        assert_eq!(b.poll(1)[0].src_qpn, other.qp.qpn());
        assert_eq!(dropped(&b.context), 1);
    });
}

/// Runs a test with a peer. Queue pairs of both have the first key of their tables.
fn with_peer(name: &str, first: &str, peers_config: &[(&str, &str)], talks: bool) {
    with(name, &format!("{{ pkeys = [{first}] }}"), &[], || {
        let mut peer = Peer::spawn("rc", peers_config);
        let e = Endpoint::new(QpType::Rc);
        let [src, dst] = [(); 2].map(|()| Buffer::new(&e.pd, OFFERED));
        let (_, remote) = peer.connect(&e, &dst);
        if talks {
            exercise(&e, &src, &dst, remote);
        } else {
            e.send(1, SendOp::Write(remote), &[src.sge(0, 8)]);
            let wc = e.poll(1)[0];
            assert_eq!((wc.status, wc.vendor_err), (WcStatus::RetryExcErr, 1215));
        }
        let counters = e.context.counters().unwrap();
        let [by_shm, sent] = [Counter::ShmSentPkts, Counter::SentPkts].map(|c| counters.read(c));
        // The others are questions to a silent peer, which go by UDP: at the first silence, and before the last repeat. A peer on a
        // busy machine may be silent, too.
        let questions = if talks { 0..=2 } else { 2..=2 };
        assert!(by_shm > 0 && questions.contains(&(sent - by_shm)), "{by_shm} of {sent}");
        assert_eq!(counters.read(Counter::ShmDirectWrites), 0);
    });
}

/// The configuration of a peer that has no table. It has an address of the loopback interface, as the devices of a table.
const NONE: [(&str, &str); 2] = [("ANYVERBS_CONFIG", ""), ("ANYVERBS_INTERFACES", "lo")];

#[test]
fn processes_of_one_partition_talk() {
    with_peer("processes_of_one_partition_talk", "0x8001", &[], true);
}

#[test]
fn a_process_without_a_table_is_in_the_default_partition() {
    with_peer("a_process_without_a_table_is_in_the_default_partition", "0x7fff", &NONE, true);
}

#[test]
fn a_process_without_a_table_takes_nothing_of_another_partition() {
    let name = "a_process_without_a_table_takes_nothing_of_another_partition";
    with_peer(name, "0x8001", &NONE, false);
}
