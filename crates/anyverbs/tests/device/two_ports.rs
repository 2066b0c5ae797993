//! A device with two ports.

use std::fs;

use anyverbs::error::CreateError;
use anyverbs::*;
use anyverbs_testing::in_own_process;

use crate::endpoint::*;

/// Runs a test of this module in a process that has a device with two ports, at 127.0.0.1 and 127.0.0.2, and one with one.
fn with(name: &str, variables: &[(&str, &str)], test: impl FnOnce()) {
    in_own_process(&format!("two_ports::{name}"), || {
        let file = std::env::temp_dir().join(format!("anyverbs-ports-{}.toml", std::process::id()));
        fs::write(&file, "devices = [{ name = 'dual0', ports = 2 }, { name = 'plain0' }]").unwrap();
        let path = file.to_str().unwrap();
        let own = [("ANYVERBS_CONFIG", path), ("ANYVERBS_INTERFACES", "")];
        for (variable, value) in own.iter().chain(variables) {
            // SAFETY: before the device is opened, and by the only thread that runs a test.
            unsafe { std::env::set_var(variable, value) };
        }
        isolate();
        assert_eq!(devices().unwrap().len(), 2);
        // It is read once more when the device starts.
        drop(open("dual0"));
        fs::remove_file(file).unwrap();
        test();
    });
}

fn open(name: &str) -> Context {
    Context::open(name).unwrap()
}

/// Two endpoints on a port, connected to each other.
fn pair_on(port: u8) -> (Endpoint, Endpoint) {
    let [a, b] = [(); 2].map(|()| Endpoint::on_port(open("dual0"), port, QpType::Rc));
    a.connect_with(b.address(), 17, 7);
    b.connect_with(a.address(), 17, 7);
    (a, b)
}

fn event(context: &Context) -> (AsyncEventKind, EventElement) {
    let event = context.get_async_event().unwrap();
    (event.kind(), event.element())
}

#[test]
fn a_port_goes_down_and_the_other_stays() {
    // The test connects before the port goes down, and sees the state before it comes up, on a busy machine too.
    let faults = [("ANYVERBS_FAULTS", "on device dual0 port 2: down for 3s after 1s")];
    with("a_port_goes_down_and_the_other_stays", &faults, || {
        let pairs = [1, 2].map(pair_on);
        let other = open("plain0");
        let buffers = pairs.each_ref().map(|(a, b)| [a, b].map(|e| Buffer::new(&e.pd, 64)));
        let write = |at: usize| {
            let [src, dst] = &buffers[at];
            pairs[at].0.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        };
        let context = &pairs[0].0.context;
        let states = || [1, 2].map(|port| context.port_attr(port).unwrap().state);
        // Each context of the device hears of it, whatever port it uses.
        assert_eq!(event(context), (AsyncEventKind::PortErr, EventElement::Port(2)));
        assert_eq!(states(), [PortState::Active, PortState::Down]);
        assert_eq!(other.port_attr(1).unwrap().state, PortState::Active);
        write(1);
        for _ in 0..10 {
            write(0);
            assert_eq!(pairs[0].0.poll(1)[0].status, WcStatus::Success);
        }
        assert_eq!(pairs[1].0.cq.poll(&mut [Wc::default()]).unwrap(), 0);
        assert_eq!(event(context), (AsyncEventKind::PortActive, EventElement::Port(2)));
        assert_eq!(states(), [PortState::Active; 2]);
        assert_eq!(pairs[1].0.poll(1)[0].status, WcStatus::Success, "the retries outlast it");
    });
}

#[test]
fn a_rule_for_a_port_holds_for_its_queue_pairs() {
    let faults =
        [("ANYVERBS_FAULTS", "on device dual0 port 2: send 1 completes with IBV_WC_REM_OP_ERR")];
    with("a_rule_for_a_port_holds_for_its_queue_pairs", &faults, || {
        for (port, status) in [(1, WcStatus::Success), (2, WcStatus::RemOpErr)] {
            let (a, b) = pair_on(port);
            let dst = Buffer::new(&b.pd, 64);
            a.send(1, SendOp::Write(dst.remote(0)), &[]);
            assert_eq!(a.poll(1)[0].status, status, "port {port}");
            let injected = a.context.counters_of_port(port).unwrap();
            let wanted = u64::from(port == 2);
            assert_eq!(injected.read(Counter::InjectedFaults), wanted, "port {port}");
        }
    });
}

/// Sends so much by a port and gives what each port of all devices counted: packets sent and received.
fn count(port: u8) -> [[u64; 2]; 3] {
    let (dual, plain) = (open("dual0"), open("plain0"));
    let read = || {
        let all = [(&dual, 1), (&dual, 2), (&plain, 1)];
        all.map(|(device, port)| {
            let counters = device.counters_of_port(port).unwrap();
            [Counter::SentPkts, Counter::RcvdPkts].map(|counter| counters.read(counter))
        })
    };
    let (a, b) = pair_on(port);
    let (src, dst) = (Buffer::new(&a.pd, 4096), Buffer::new(&b.pd, 4096));
    let before = read();
    for n in 0..20 {
        a.send(n, SendOp::Write(dst.remote(0)), &[src.sge(0, 4096)]);
        assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    }
    let after = read();
    std::array::from_fn(|n| std::array::from_fn(|k| after[n][k] - before[n][k]))
}

#[test]
fn each_port_counts_its_own_traffic() {
    with("each_port_counts_its_own_traffic", &[("ANYVERBS_INPROC", "0")], || {
        for port in [1, 2] {
            let counted = count(port);
            for (at, [sent, received]) in counted.into_iter().enumerate() {
                let is_it = at == usize::from(port) - 1;
                assert_eq!(sent >= 20 && received >= 20, is_it, "port {port}: {counted:?}");
                // The last ACK of the queue pairs before may be among them.
                assert_eq!(sent < 5 && received < 5, !is_it, "port {port}: {counted:?}");
            }
        }
        let context = open("dual0");
        for port in [0, 3] {
            let refused = context.counters_of_port(port).unwrap_err();
            let wanted = format!("port_num is {port}, and it must be between 1 and 2");
            assert_eq!(refused.to_string(), wanted);
        }
    });
}

#[test]
fn a_device_fails_with_both_ports() {
    let faults = [("ANYVERBS_FAULTS", "on device dual0: fatal after 1s")];
    with("a_device_fails_with_both_ports", &faults, || {
        let (a, _b) = pair_on(2);
        let plain = open("plain0");
        assert_eq!(event(&a.context).0, AsyncEventKind::DeviceFatal);
        for port in [1, 2] {
            assert_eq!(a.context.port_attr(port).unwrap().state, PortState::Down, "port {port}");
        }
        assert!(Context::open("dual0").is_err());
        assert_eq!(plain.port_attr(1).unwrap().state, PortState::Active);
        plain.alloc_pd().unwrap();
    });
}

#[test]
fn a_script_that_names_a_port_that_is_not_there_is_refused() {
    let of = |script: &str| {
        let file = "devices = [{ name = 'dual0', ports = 2 }, { name = 'plain0' }]";
        let faults = |name: &str| (name == "ANYVERBS_FAULTS").then(|| script.to_owned());
        config::Config::parse("rack.toml", file, faults).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(of("on device dual0 port 2: down"), Ok(()));
    let wanted = "faults, line 1: \"plain0\" has no port 2, but port 1 alone";
    assert_eq!(of("on device plain0 port 2: down").unwrap_err(), wanted);
}

#[test]
fn raw_packets_count_at_the_port_of_their_queue_pair() {
    with("raw_packets_count_at_the_port_of_their_queue_pair", &[], || {
        let context = open("dual0");
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(64, None, 0, 0).unwrap();
        let init = raw::RawQpInit {
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            cap: CAP,
            sq_sig_all: true,
            max_tso_header: 0,
            flags: raw::ReceiveFlags::empty(),
            cookie: 0,
        };
        let made = [1, 2].map(|port| (port, context.create_raw_qp(&pd, &init)));
        if matches!(made[0].1, Err(CreateError::NotPermitted)) {
            return anyverbs_testing::skip("no CAP_NET_RAW");
        }
        let [a, b] = made.map(|(port, qp)| {
            let qp = qp.unwrap();
            let attr = QpAttr { state: QpState::Init, port, ..QpAttr::default() };
            qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::PORT).unwrap();
            for state in [QpState::Rtr, QpState::Rts] {
                qp.modify(&QpAttr { state, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
            }
            assert_eq!(qp.query().unwrap().0.port, port);
            qp
        });
        let rule = raw::FlowAttr {
            flow_type: raw::FlowType::AllDefault,
            priority: 0,
            specs: std::iter::empty().collect(),
            dont_trap: false,
            egress: false,
            drop: false,
            tag: None,
        };
        let _rule = b.create_flow(rule, None, None).unwrap();
        let buffer = Buffer::new(&pd, 4096);
        b.recv(&RecvWr { wr_id: 1, sges: &[buffer.sge(2048, 2048)] }).unwrap();
        let wr = raw::RawSendWr {
            wr_id: 2,
            flags: SendFlags::SIGNALED,
            fill_in_checksums: false,
            segmentation: None,
            sges: &[buffer.sge(0, 64)],
        };
        a.post().unwrap().send(&wr).unwrap();
        let mut ids = Vec::new();
        while ids.len() < 2 {
            let mut wcs = [Wc::default(); 2];
            let n = cq.poll(&mut wcs).unwrap();
            ids.extend(wcs[..n].iter().map(|wc| (wc.wr_id, wc.status)));
        }
        ids.sort_by_key(|(id, _)| *id);
        assert_eq!(ids, [(1, WcStatus::Success), (2, WcStatus::Success)]);
        use anyverbs_proto::counters::Counter::{RcvdPkts, SentPkts};
        let counts =
            |counter| [1, 2].map(|port| context.counters_of_port(port).unwrap().read(counter));
        assert_eq!([counts(SentPkts), counts(RcvdPkts)], [[1, 0], [0, 1]]);
    });
}
