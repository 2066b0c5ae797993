//! GIDs that go and come, and devices that are removed.

use super::*;

fn gone(e: &Endpoint) -> bool {
    e.context.gid(1, 0).unwrap().is_none()
}

/// Two endpoints, each on a device of its own.
fn across() -> (Endpoint, Endpoint) {
    let [a, b] = [0, 1]
        .map(|n| Endpoint::on(Context::open(&devices().unwrap()[n].name).unwrap(), QpType::Rc));
    a.connect_with(b.address(), 17, 7);
    b.connect_with(a.address(), 17, 7);
    (a, b)
}

const TWO: [(&str, &str); 2] = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")];

/// The second device has no address for two seconds.
const GONE: &str = "on device anyverbs1: gid 0 removed for 2s after 2s";

fn lose_the_address() {
    let begin = Instant::now();
    let (a, b) = across();
    let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
    let write = || a.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
    write();
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    let events = [event(&b.context), event(&b.context)];
    assert_eq!(events, [AsyncEventKind::GidChange, AsyncEventKind::PortErr]);
    assert!(begin.elapsed() >= Duration::from_secs(2));
    assert!(gone(&b) && !gone(&a));
    assert_eq!(b.context.port_attr(1).unwrap().state, PortState::Down);
    write();
    let events = [event(&b.context), event(&b.context)];
    assert_eq!(events, [AsyncEventKind::GidChange, AsyncEventKind::PortActive]);
    assert_eq!(b.address().gid.to_ip(), std::net::Ipv4Addr::new(127, 0, 0, 2));
    assert_eq!(a.poll(1)[0].status, WcStatus::Success, "the retries outlast it");
    assert!(begin.elapsed() >= Duration::from_secs(4));
    let again = a.context.counters().unwrap().read(Counter::Retransmitted);
    assert!(again > 0, "nothing arrived");
    // The address goes and comes back, and each try is lost but the last.
    assert_eq!(injected(&b.context), 2 + again);
}

#[test]
fn an_address_goes_and_comes_back() {
    with("addresses::an_address_goes_and_comes_back", GONE, &TWO, lose_the_address);
}

#[test]
fn an_address_goes_and_comes_back_by_udp() {
    let name = "addresses::an_address_goes_and_comes_back_by_udp";
    with(name, GONE, &[&BY_UDP[..], &TWO].concat(), lose_the_address);
}

#[test]
fn an_address_may_be_gone_from_the_start() {
    let name = "addresses::an_address_may_be_gone_from_the_start";
    with(name, "on device anyverbs1: gid 0 removed; gid 9 removed", &TWO, || {
        let [a, b] = [0, 1].map(|n| Context::open(&devices().unwrap()[n].name).unwrap());
        assert_eq!([&a, &b].map(|c| c.gid(1, 0).unwrap().is_some()), [true, false]);
        assert!(b.gids().unwrap().is_empty() && b.addresses().unwrap().is_empty());
        let way = AhAttr { is_global: true, hop_limit: 1, port: 1, ..AhAttr::default() };
        let said = |sgid_index| {
            let way = AhAttr { dgid: a.gid(1, 0).unwrap().unwrap().gid, sgid_index, ..way };
            b.alloc_pd().unwrap().create_ah(&way).unwrap_err().to_string()
        };
        let no = "of port 1 holds no address";
        let taken = "a fault has taken it away (line 1 of the script, rule 1)";
        assert_eq!(said(0), format!("GID index 0 {no}: {taken}"));
        assert_eq!(said(1), format!("GID index 1 {no}, and no other does"));
        // A program may end now, and its log has the rule.
        assert_eq!([&a, &b].map(injected), [0, 1], "there is no GID 9");
    });
}

#[test]
fn a_connection_that_is_asked_for_meanwhile_begins_when_the_address_is_there() {
    use crate::cm::{Node, PARAM, at, expect};
    let name =
        "addresses::a_connection_that_is_asked_for_meanwhile_begins_when_the_address_is_there";
    with(name, "gid 0 removed for 3s after 3s", &[], || {
        let begin = Instant::now();
        let listener = Node::listener(&at("0.0.0.0", 0));
        let active = Node::towards(&listener.on("127.0.0.1"));
        let context = context();
        assert_eq!(event(&context), AsyncEventKind::GidChange);
        active.expect(EventKind::AddrChange);
        active.id.connect(&PARAM).unwrap();
        let (mut passive, _) = listener.request();
        assert!(begin.elapsed() >= Duration::from_secs(6));
        passive.attach(QpType::Rc);
        passive.id.accept(Some(&PARAM)).unwrap();
        expect(&active.channel, EventKind::Established);
        passive.expect(EventKind::Established);
    });
}

#[test]
fn a_device_that_is_removed_is_not_listed() {
    let name = "addresses::a_device_that_is_removed_is_not_listed";
    with(name, "on device anyverbs1: removed after 1s", &TWO, || {
        let (a, b) = across();
        let names = || devices().unwrap().into_iter().map(|d| d.name).collect::<Vec<_>>();
        assert_eq!(names(), ["anyverbs0", "anyverbs1"]);
        assert_eq!(event(&b.context), AsyncEventKind::DeviceFatal);
        assert_eq!(names(), ["anyverbs0"]);
        let begin = Instant::now();
        while b.qp.state().unwrap() != QpState::Err {
            assert!(begin.elapsed() < Duration::from_secs(30));
            std::thread::yield_now();
        }
        let reopened = Context::open("anyverbs1");
        assert!(matches!(reopened, Err(OpenError::Failed)), "{reopened:?}");
        assert_eq!(a.qp.state().unwrap(), QpState::Rts);
        b.qp.destroy().unwrap();
    });
}
