//! Many connections at once.

use std::process::Command;
use std::time::Instant;

use anyverbs::cm::*;
use anyverbs::*;

use super::*;

/// A listener takes no more requests than it was told to; the others ask again.
#[test]
fn a_backlog_is_kept() {
    const ASKED: usize = 5;
    let listener = Node::tcp();
    listener.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    listener.id.listen(2).unwrap();
    let ask = |to: &Address| {
        let active = Node::towards(to);
        active.id.connect(&PARAM).unwrap();
        active
    };
    let _actives: Vec<_> = (0..ASKED).map(|_| ask(&listener.on("127.0.0.1"))).collect();
    // Later requests are answered later.
    let nobody = Node::tcp();
    nobody.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    expect(&ask(&nobody.on("127.0.0.1")).channel, EventKind::Rejected);
    let mut passives = Vec::new();
    while !is_quiet(&listener.channel) {
        passives.push(listener.request());
    }
    // Each that was taken made room for one that happened to ask again at that moment.
    assert!((2..ASKED).contains(&passives.len()), "{}", passives.len());
    while passives.len() < ASKED {
        passives.push(listener.request());
    }
}

/// All at once, as `cmtime` does it. Shows the cost of each side to a process, and the time.
fn connect_many(count: usize) {
    let channel = create_event_channel().unwrap();
    let new = |cookie| Id::create(&channel, PortSpace::Tcp, QpType::Rc, cookie).unwrap();
    let e = Endpoint::with(QpType::Rc, CAP, 64);
    let cap = QpCap {
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let init = QpInitAttr {
        send_cq: &e.cq,
        recv_cq: &e.cq,
        srq: None,
        cap,
        qp_type: QpType::Rc,
        sq_sig_all: false,
        cookie: 0,
    };
    let listener = new(u64::MAX);
    listener.bind_addr(&at("127.0.0.1", 0)).unwrap();
    listener.listen(0).unwrap();
    let Some(Address::Ip(to)) = listener.info().local else { panic!() };
    let before = resident();
    let begin = Instant::now();
    let mut active: Vec<_> = (0..count as u64).map(|i| (new(i), None)).collect();
    let mut passive: Vec<(Id, Qp)> = Vec::new();
    for (id, _) in &active {
        id.resolve_addr(None, &Address::Ip(to)).unwrap();
    }
    let mut established = 0;
    while established < 2 * count {
        let event = channel.get_event().unwrap();
        let at = event.cookie as usize;
        match event.kind {
            EventKind::AddrResolved => active[at].0.resolve_route().unwrap(),
            EventKind::RouteResolved => {
                let qp = e.context.create_qp(&e.pd, &init).unwrap();
                active[at].0.attach_qp(&qp).unwrap();
                active[at].0.connect(&PARAM).unwrap();
                active[at].1 = Some(qp);
            }
            EventKind::ConnectRequest => {
                let id = event.new_id.unwrap();
                id.set_cookie((count + passive.len()) as u64);
                let qp = e.context.create_qp(&e.pd, &init).unwrap();
                id.attach_qp(&qp).unwrap();
                id.accept(Some(&PARAM)).unwrap();
                passive.push((id, qp));
            }
            EventKind::Established => established += 1,
            other => panic!("{other:?}"),
        }
        match at {
            _ if event.kind == EventKind::ConnectRequest => listener.ack_events(1),
            _ if at < count => active[at].0.ack_events(1),
            _ => passive[at - count].0.ack_events(1),
        }
    }
    let took = begin.elapsed();
    let cost = (resident() - before) / (2 * count);
    println!(
        "{count} connections in {took:?}: {:.0} a second, {cost} bytes a side",
        count as f64 / took.as_secs_f64()
    );
    assert!(cost <= 24 << 10, "{cost} bytes a side");
    let begin = Instant::now();
    for (id, _) in &active {
        id.disconnect().unwrap();
    }
    let mut parted = 0;
    while parted < 2 * count {
        let event = channel.get_event().unwrap();
        let at = event.cookie as usize;
        match event.kind {
            EventKind::Disconnected if at >= count => {
                passive[at - count].0.disconnect().unwrap();
                parted += 1;
            }
            EventKind::Disconnected => parted += 1,
            EventKind::TimewaitExit => {}
            other => panic!("{other:?}"),
        }
        let id = if at < count { &active[at].0 } else { &passive[at - count].0 };
        id.ack_events(1);
    }
    println!("parted in {:?}", begin.elapsed());
    let begin = Instant::now();
    for (id, _) in &active {
        id.destroy().unwrap();
    }
    drop((active, passive));
    println!("destroyed in {:?}", begin.elapsed());
    listener.destroy().unwrap();
    assert!(is_quiet(&channel));
}

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Runs in a process of its own: other tests need queue pairs and memory too.
#[test]
fn ten_thousand_connections() {
    const ROLE: &str = "ANYVERBS_TEST_CM_MANY";
    isolate();
    if std::env::var_os(ROLE).is_some() {
        return connect_many(10_000);
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cm::many::ten_thousand_connections", "--nocapture"])
        .envs([(ROLE, "1"), ("ANYVERBS_MAX_QP", "32768")])
        .output()
        .unwrap();
    crate::host::succeeds(&output);
    println!("{}", String::from_utf8_lossy(&output.stdout));
}
