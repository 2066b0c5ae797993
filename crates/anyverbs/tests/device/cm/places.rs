//! Places of ids: bind, resolve, listen.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;

use anyverbs::cm::*;
use anyverbs::*;

use super::*;

fn local(id: &Id) -> SocketAddr {
    match id.info().local.unwrap() {
        Address::Ip(a) => a,
        Address::Ib(a) => panic!("{a:?}"),
    }
}

#[test]
fn an_id_is_bound_to_addresses_of_the_device() {
    for ip in ["127.0.0.1", "::1"] {
        let node = Node::tcp();
        assert!(node.id.info().local.is_none());
        node.id.bind_addr(&at(ip, 7171)).unwrap();
        let info = node.id.info();
        assert_eq!(info.local, Some(at(ip, 7171)));
        assert_eq!(info.device, Some(0));
        assert_eq!(info.sgid, Gid::from(ip.parse::<IpAddr>().unwrap()));
        assert_eq!(node.id.bind_addr(&at(ip, 7171)).unwrap_err().errno(), libc::EINVAL);
    }
    for any in ["0.0.0.0", "::"] {
        let node = Node::tcp();
        node.id.bind_addr(&at(any, 0)).unwrap();
        assert_eq!(node.id.info().device, None);
        assert_ne!(local(&node.id).port(), 0, "a port of its own");
    }
    for (foreign, errno) in [
        ("192.0.2.1:1", libc::EADDRNOTAVAIL),
        ("[2001:db8::1]:1", libc::EADDRNOTAVAIL),
        ("[fe80::1]:1", libc::EINVAL),
        ("224.1.2.3:1", libc::EADDRNOTAVAIL),
        ("[::ffff:127.0.0.1]:1", libc::EADDRNOTAVAIL),
    ] {
        let node = Node::tcp();
        let address = Address::Ip(foreign.parse().unwrap());
        let error = node.id.bind_addr(&address).unwrap_err();
        assert_eq!(error.errno(), errno, "{foreign}: {error}");
        // The attempt changed nothing.
        node.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    }
}

#[test]
fn a_port_is_taken_once_for_each_address() {
    let refused = |address: &Address| Node::tcp().id.bind_addr(address).unwrap_err();
    let bound = |address: &Address| {
        let node = Node::tcp();
        node.id.bind_addr(address).unwrap();
        node
    };
    let first = bound(&at("127.0.0.1", 0));
    let port = first.port();
    assert_eq!(refused(&at("127.0.0.1", port)), CmError::InUse(port));
    assert_eq!(refused(&at("0.0.0.0", port)), CmError::NotAvailable(port));
    assert_eq!(refused(&at("::", port)), CmError::NotAvailable(port));
    assert_eq!(CmError::NotAvailable(port).errno(), libc::EADDRNOTAVAIL);
    let _other_address = bound(&at("::1", port));
    Node::new(PortSpace::Udp, QpType::Ud).id.bind_addr(&at("127.0.0.1", port)).unwrap();
    // The port is free again when its id is gone.
    first.id.destroy().unwrap();
    let any = bound(&at("0.0.0.0", port));
    assert_eq!(refused(&at("127.0.0.1", port)), CmError::NotAvailable(port));
    assert_eq!(refused(&at("0.0.0.0", port)), CmError::NotAvailable(port));
    drop(any);
    bound(&at("127.0.0.1", port));
}

#[test]
fn sharers_of_a_port_share_it_until_one_listens() {
    let sharing = || {
        let node = Node::tcp();
        node.id.set_option(IdOption::ReuseAddr(true)).unwrap();
        node
    };
    let first = sharing();
    first.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    let (address, port) = (first.on("127.0.0.1"), first.port());
    assert_eq!(Node::tcp().id.bind_addr(&address).unwrap_err(), CmError::InUse(port));
    let second = sharing();
    second.id.bind_addr(&address).unwrap();
    assert_eq!(first.id.listen(0).unwrap_err(), CmError::InUse(port));
    drop(second);
    first.id.listen(0).unwrap();
    assert_eq!(sharing().id.bind_addr(&address).unwrap_err(), CmError::InUse(port));
    let active = Node::towards(&address);
    active.id.connect(&PARAM).unwrap();
    first.request();
    for reuse in [false, true] {
        let late = first.id.set_option(IdOption::ReuseAddr(reuse));
        assert_eq!(late.unwrap_err().errno(), libc::EINVAL);
    }
}

#[test]
fn the_hosts_routes_choose_the_source() {
    for (to, from) in [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("0.0.0.0", "127.0.0.1")] {
        let node = Node::tcp();
        node.id.resolve_addr(None, &at(to, 7)).unwrap();
        node.expect(EventKind::AddrResolved);
        let (info, from) = (node.id.info(), from.parse::<IpAddr>().unwrap());
        assert_eq!(local(&node.id).ip(), from);
        assert_ne!(local(&node.id).port(), 0);
        assert_eq!(info.peer, Some(Address::Ip((from, 7).into())));
        assert_eq!((info.sgid, info.dgid), (from.into(), from.into()));
        assert!(info.path.is_none());
        node.id.resolve_route().unwrap();
        node.expect(EventKind::RouteResolved);
        let path = node.id.info().path.unwrap();
        assert_eq!((path.sgid, path.dgid), (info.sgid, info.dgid));
        assert_eq!((path.pkey, path.packet_life_time), (PKey::DEFAULT, 16));
        assert_eq!((path.mtu, path.hop_limit), (Mtu::Mtu4096, 64));
    }
    // A source that is given, or bound to before.
    for bound in [false, true] {
        let node = Node::tcp();
        let source = at("127.0.0.1", 7172);
        if bound {
            node.id.bind_addr(&source).unwrap();
        }
        node.id.resolve_addr((!bound).then_some(&source), &at("127.0.0.1", 7)).unwrap();
        node.expect(EventKind::AddrResolved);
        assert_eq!(node.id.info().local, Some(source));
    }
}

#[test]
fn unreachable_addresses_are_reported() {
    let node = Node::tcp();
    // No route, an address of another family, one without its link: at once.
    let refused = |source: Option<&str>, to: &str| {
        let source = source.map(|s| Address::Ip(s.parse().unwrap()));
        let to = Address::Ip(to.parse().unwrap());
        Node::tcp().id.resolve_addr(source.as_ref(), &to).unwrap_err().errno()
    };
    assert_eq!(refused(Some("[::1]:0"), "127.0.0.1:1"), libc::EINVAL);
    assert_eq!(refused(None, "[fe80::1]:1"), libc::EINVAL);
    assert_eq!(refused(Some("192.0.2.1:0"), "127.0.0.1:1"), libc::EADDRNOTAVAIL);
    // A source that is no device's, as an event; the id can be tried again.
    let own = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    if own.connect("192.0.2.1:1").is_ok() {
        node.id.resolve_addr(None, &at("192.0.2.1", 1)).unwrap();
        let event = expect(&node.channel, EventKind::AddrError);
        assert_eq!(event.status, -libc::ENODEV, "the tests' device is the loopback alone");
        node.id.ack_events(1);
        assert_eq!(node.id.resolve_route().unwrap_err().errno(), libc::EINVAL);
        node.resolve(&at("127.0.0.1", 1));
    }
}

#[test]
fn a_wildcard_listens_at_every_address() {
    let connects = |listener: &Node, ip: &str| {
        let active = Node::towards(&listener.on(ip));
        active.id.connect(&PARAM).unwrap();
        let (passive, _) = listener.request();
        assert_eq!(passive.id.info().local, Some(listener.on(ip)));
    };
    let refuses = |listener: &Node, ip: &str| {
        let active = Node::towards(&listener.on(ip));
        active.id.connect(&PARAM).unwrap();
        assert_eq!(expect(&active.channel, EventKind::Rejected).status, 8);
    };
    let v4 = Node::listener(&at("0.0.0.0", 0));
    connects(&v4, "127.0.0.1");
    refuses(&v4, "::1");
    let both = Node::listener(&at("::", 0));
    connects(&both, "127.0.0.1");
    connects(&both, "::1");
    let v6 = Node::tcp();
    v6.id.set_option(IdOption::AfOnly(true)).unwrap();
    let v6 = v6.listening(&at("::", 0));
    refuses(&v6, "127.0.0.1");
    connects(&v6, "::1");
    let late = v6.id.set_option(IdOption::AfOnly(false));
    assert_eq!(late.unwrap_err().errno(), libc::EINVAL);
    // An id that was not bound has a port of its own.
    let unbound = Node::tcp();
    unbound.id.listen(0).unwrap();
    connects(&unbound, "127.0.0.1");
    // The most particular listener is asked.
    let port = v6.port();
    let one = Node::listener(&at("127.0.0.1", port));
    connects(&one, "127.0.0.1");
    connects(&v6, "::1");
}

#[test]
fn gids_and_service_ids_are_addresses_too() {
    let ib = |ip: &str, sid, sid_mask| {
        Address::Ib(IbAddress {
            pkey: PKey(0xffff),
            flow_info: 0,
            gid: Gid::from(ip.parse::<IpAddr>().unwrap()),
            sid,
            sid_mask,
            scope_id: 0,
        })
    };
    let ib_id = || Node::new(PortSpace::Ib, QpType::Rc);
    let listener = ib_id().listening(&ib("127.0.0.1", 0x0106_0000, 0xffff_ffff_ffff_0000));
    let Some(Address::Ib(bound)) = listener.id.info().local else { panic!() };
    assert_eq!((bound.sid >> 16, bound.sid_mask), (0x0106, u64::MAX));
    assert_ne!(bound.sid & 0xffff, 0);
    // The port is one with that of an IP address.
    let same = Node::tcp().id.bind_addr(&at("127.0.0.1", bound.sid as u16));
    assert_eq!(same.unwrap_err(), CmError::InUse(bound.sid as u16));
    let mut active = ib_id();
    active.resolve(&ib("127.0.0.1", bound.sid, u64::MAX));
    active.attach(QpType::Rc);
    active.id.connect(&ConnParam { private_data: &[3; 92], ..PARAM }).unwrap();
    let (passive, request) = listener.request();
    assert_eq!(&*conn(&request).private_data, &[3; 92], "there is no IP CM header");
    let info = passive.id.info();
    assert_eq!((info.sgid, info.dgid), (bound.gid, bound.gid));
    let foreign = ib_id().id.bind_addr(&ib("127.0.0.1", 0x1234_0000_0000, u64::MAX));
    assert_eq!(foreign.unwrap_err().errno(), libc::EPROTONOSUPPORT);
}

#[test]
fn an_id_that_connects_costs_no_descriptor() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (channel, mut ids) = (Node::tcp().channel, Vec::new());
    let before = descriptors();
    for _ in 0..200 {
        let id = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0).unwrap();
        id.resolve_addr(None, &at("127.0.0.1", 1)).unwrap();
        ids.push(id);
    }
    // Other tests run at the same time.
    assert!(descriptors() < before + 150, "{} {before}", channel.as_fd().as_raw_fd());
    let ports: std::collections::HashSet<_> = ids.iter().map(|id| local(id).port()).collect();
    assert_eq!(ports.len(), 200, "each has a port of its own");
}
