use super::super::esp::{AesGcm, FullOffload};
use super::super::frame::tests::{Builder, udp4};
use super::*;

fn attr(flow_type: FlowType, specs: &[Spec]) -> FlowAttr {
    FlowAttr {
        flow_type,
        priority: 0,
        specs: specs.iter().copied().collect(),
        dont_trap: false,
        egress: false,
        drop: false,
        tag: None,
    }
}

fn outer(filter: Filter) -> Spec {
    Spec { filter, inner: false, over: None }
}

fn ethernet(ether_type: Masked<u16>) -> Spec {
    let any = Masked::default();
    outer(Filter::Ethernet { dst: any, src: any, ether_type, vlan: Masked::default() })
}

fn ipv4(proto: Masked<u8>) -> Spec {
    let (any, any8) = (Masked::default(), Masked::default());
    outer(Filter::Ipv4 { src: any, dst: any, proto, tos: any8, ttl: any8, flags: any8 })
}

fn udp(dst: u16) -> Spec {
    let dst = Masked { val: dst, mask: u16::MAX };
    outer(Filter::Udp { dst, src: Masked::default() })
}

fn any<T: Default>() -> Masked<T> {
    Masked::default()
}

fn rule(attr: FlowAttr) -> FlowRule {
    FlowRule::new(attr).unwrap()
}

/// The destinations that a frame meets.
fn met(table: &FlowTable<u32>, frame: &Builder) -> Vec<(u32, bool, u32)> {
    let mut met = Vec::new();
    let any = table.steer(&frame.parse(), |dest, v| met.push((*dest, v.drop, v.tag)));
    assert_eq!(any, !met.is_empty());
    met
}

#[test]
fn the_lowest_priority_number_takes_the_frame_then_the_oldest() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let at =
        |priority, specs: &[Spec]| rule(FlowAttr { priority, ..attr(FlowType::Normal, specs) });
    table.insert(at(5, &[ipv4(any())]), 1);
    table.insert(at(5, &[udp(5678)]), 2);
    assert_eq!(met(&table, &frame), [(1, false, 0)]);
    let first = table.insert(at(1, &[udp(5678)]), 3);
    table.insert(at(0, &[udp(1)]), 4);
    assert_eq!(met(&table, &frame), [(3, false, 0)]);
    assert_eq!(table.remove(first), Some(3));
    assert_eq!(table.remove(first), None);
    assert_eq!(met(&table, &frame), [(1, false, 0)]);
}

#[test]
fn each_of_the_same_rules_gets_a_copy() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let at = |drop, specs: &[Spec]| rule(FlowAttr { drop, ..attr(FlowType::Normal, specs) });
    table.insert(at(false, &[udp(5678)]), 1);
    table.insert(at(false, &[ipv4(any())]), 2);
    let copy = table.insert(at(false, &[udp(5678)]), 3);
    assert_eq!(met(&table, &frame), [(1, false, 0), (3, false, 0)]);
    table.insert(at(true, &[udp(5678)]), 4);
    assert_eq!(met(&table, &frame), [(1, false, 0), (3, false, 0), (4, true, 0)]);
    table.remove(copy);
    assert_eq!(met(&table, &frame), [(1, false, 0), (4, true, 0)]);
    let mut defaults = FlowTable::default();
    for dest in 1..3 {
        defaults.insert(rule(attr(FlowType::AllDefault, &[])), dest);
    }
    assert_eq!(met(&defaults, &frame), [(1, false, 0), (2, false, 0)]);
}

#[test]
fn dont_trap_lets_the_next_one_have_it_too() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let passes = FlowAttr { dont_trap: true, ..attr(FlowType::Normal, &[]) };
    table.insert(rule(passes), 1);
    table.insert(rule(attr(FlowType::AllDefault, &[])), 3);
    assert_eq!(met(&table, &frame), [(1, false, 0), (3, false, 0)]);
    let drops = FlowAttr { drop: true, tag: Some(9), priority: 2, ..attr(FlowType::Normal, &[]) };
    table.insert(rule(drops), 2);
    assert_eq!(met(&table, &frame), [(1, false, 0), (2, true, 9)]);
}

#[test]
fn defaults_take_what_is_left_and_sniffers_everything() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let mut group = frame.clone();
    group.0[0] |= 1;
    assert!(table.is_empty() && met(&table, &frame).is_empty());
    table.insert(rule(attr(FlowType::McDefault, &[])), 1);
    assert!(met(&table, &frame).is_empty());
    assert_eq!(met(&table, &group), [(1, false, 0)]);
    table.insert(rule(attr(FlowType::AllDefault, &[])), 2);
    assert_eq!(met(&table, &frame), [(2, false, 0)]);
    assert_eq!(met(&table, &group), [(1, false, 0)]);
    table.insert(rule(attr(FlowType::Normal, &[udp(5678)])), 3);
    table.insert(rule(attr(FlowType::Sniffer, &[])), 4);
    table.insert(rule(attr(FlowType::Sniffer, &[])), 5);
    assert_eq!(met(&table, &frame), [(4, false, 0), (5, false, 0), (3, false, 0)]);
}

#[test]
fn egress_rules_are_for_what_is_sent_alone() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let attr = |drop, priority| FlowAttr {
        egress: true,
        drop,
        priority,
        ..attr(FlowType::Normal, &[udp(5678)])
    };
    table.insert(rule(attr(true, 2)), 1);
    assert!(table.is_empty() && table.has_egress());
    let mut counted = 0;
    assert!(!table.leave(&frame.parse(), |dest| counted = *dest));
    assert_eq!(counted, 1);
    table.insert(rule(attr(false, 1)), 2);
    assert!(table.leave(&frame.parse(), |dest| counted = *dest));
    assert_eq!(counted, 2);
}

#[test]
fn invalid_rules_are_refused() {
    let refused = |attr| FlowRule::new(attr).unwrap_err();
    let normal = |specs: &[Spec]| attr(FlowType::Normal, specs);
    assert_eq!(refused(normal(&[udp(1), udp(2)])), FlowError::Twice);
    assert_eq!(refused(normal(&[ipv4(any()), ipv4(any())])), FlowError::Twice);
    assert_eq!(refused(attr(FlowType::Sniffer, &[udp(1)])), FlowError::Filters);
    assert_eq!(refused(attr(FlowType::AllDefault, &[udp(1)])), FlowError::Filters);
    let dont_trap = |attr| FlowAttr { dont_trap: true, ..attr };
    assert_eq!(refused(dont_trap(attr(FlowType::Sniffer, &[]))), FlowError::DontTrap);
    assert_eq!(refused(FlowAttr { drop: true, ..dont_trap(normal(&[])) }), FlowError::DontTrap);
    let six = Masked { val: 0x86dd, mask: u16::MAX };
    assert_eq!(refused(normal(&[ethernet(six), ipv4(any())])), FlowError::Contradiction);
    let tcp = Masked { val: 6, mask: u8::MAX };
    assert_eq!(refused(normal(&[ipv4(tcp), udp(1)])), FlowError::Contradiction);
    let egress = |attr| FlowAttr { egress: true, ..attr };
    assert_eq!(refused(egress(attr(FlowType::Sniffer, &[]))), FlowError::Egress);
    assert_eq!(refused(FlowAttr { tag: Some(1), ..egress(normal(&[])) }), FlowError::Egress);
    let inner = Spec { inner: true, ..udp(2) };
    assert!(FlowRule::new(normal(&[udp(1), inner])).is_ok(), "one for each level");
}

#[test]
fn mpls_lies_on_what_stands_before_it() {
    let mpls = outer(Filter::Mpls { entry: any() });
    let over = |specs: &[Spec]| {
        let rule = rule(attr(FlowType::Normal, specs));
        rule.0.specs.iter().find(|s| matches!(s.filter, Filter::Mpls { .. })).unwrap().over
    };
    assert_eq!(over(&[mpls]), None);
    assert_eq!(over(&[ethernet(any()), mpls]), Some(MplsOver::Ethernet));
    assert_eq!(over(&[ipv4(any()), udp(6635), mpls]), Some(MplsOver::Udp));
    let refused = |specs: &[Spec]| FlowRule::new(attr(FlowType::Normal, specs)).unwrap_err();
    assert_eq!(refused(&[ipv4(any()), mpls]), FlowError::MplsOrder);
    assert_eq!(refused(&[mpls, ipv4(any())]), FlowError::MplsOrder);
}

#[test]
fn an_ethernet_type_has_to_fit_the_filter_of_ip() {
    let any_ip = |proto: Masked<u8>| {
        let (any, any8) = (Masked::default(), Masked::default());
        let ipv6 = Filter::Ipv6 {
            src: Masked::default(),
            dst: Masked::default(),
            flow_label: any,
            next_hdr: proto,
            traffic_class: any8,
            hop_limit: any8,
        };
        [ipv4(proto), outer(ipv6)]
    };
    let types = [0x0800, 0x86dd];
    let new = |specs: &[Spec]| FlowRule::new(attr(FlowType::Normal, specs)).map(drop);
    for (n, ip) in any_ip(any()).into_iter().enumerate() {
        for (m, ether_type) in types.into_iter().enumerate() {
            let exact = ethernet(Masked { val: ether_type, mask: u16::MAX });
            let wanted = if n == m { Ok(()) } else { Err(FlowError::Contradiction) };
            assert_eq!(new(&[exact, ip]), wanted, "{n} {m}");
            // Bits that the mask leaves out do not count.
            let masked = ethernet(Masked { val: ether_type, mask: 0 });
            assert_eq!(new(&[masked, ip]), Ok(()), "{n} {m}");
            assert_eq!(new(&[exact]), Ok(()));
        }
        assert_eq!(new(&[ip]), Ok(()));
    }
    // Each of the filters above IP, and the protocol that it needs.
    let esp = outer(Filter::Esp { spi: any(), seq: any() });
    let gre = outer(Filter::Gre { flags: any(), protocol: any(), key: any() });
    let tcp = outer(Filter::Tcp { dst: any(), src: any() });
    for (above, wanted) in [(tcp, 6), (udp(1), 17), (esp, 50), (gre, 47)] {
        for proto in [6, 17, 47, 50, 51] {
            for ip in any_ip(Masked { val: proto, mask: u8::MAX }) {
                let fits = if proto == wanted { Ok(()) } else { Err(FlowError::Contradiction) };
                assert_eq!(new(&[ip, above]), fits, "{proto} {wanted}");
            }
        }
        for ip in any_ip(any()) {
            assert_eq!(new(&[ip, above]), Ok(()));
        }
        assert_eq!(new(&[above]), Ok(()));
        let vxlan = outer(Filter::Vxlan { vni: any() });
        let fits = if wanted == 17 { Ok(()) } else { Err(FlowError::Contradiction) };
        assert_eq!(new(&[above, vxlan]), fits, "VXLAN lies on UDP");
        assert_eq!(new(&[vxlan]), Ok(()));
    }
}

#[test]
fn a_rule_that_lets_frames_pass_on_delivers_what_arrives() {
    let with = |change: fn(&mut FlowAttr)| {
        let mut attr = FlowAttr { dont_trap: true, ..attr(FlowType::Normal, &[udp(1)]) };
        change(&mut attr);
        FlowRule::new(attr).map(drop)
    };
    assert_eq!(with(|_| {}), Ok(()));
    assert_eq!(with(|attr| attr.drop = true), Err(FlowError::DontTrap));
    assert_eq!(with(|attr| attr.egress = true), Err(FlowError::DontTrap));
    let egress = |change: fn(&mut FlowAttr)| {
        let mut attr = FlowAttr { egress: true, ..attr(FlowType::Normal, &[udp(1)]) };
        change(&mut attr);
        FlowRule::new(attr).map(drop)
    };
    assert_eq!(egress(|_| {}), Ok(()));
    assert_eq!(egress(|attr| attr.drop = true), Ok(()));
    assert_eq!(egress(|attr| attr.tag = Some(0)), Err(FlowError::Egress));
}

#[test]
fn an_esp_action_needs_a_rule_for_its_packets() {
    let keymat = AesGcm { key: (0..16).collect(), salt: [0; 4], iv: 0, icv_len: 16 };
    let esp = |direction, inline| {
        let full = FullOffload {
            spi: 1,
            seq: 0,
            tfc_pad: 0,
            hard_limit: 0,
            replay_window: 0,
            tunnel: None,
        };
        let offload = if inline {
            Offload::InlineCrypto { new_window: false, tunnel: true }
        } else {
            Offload::Full(full)
        };
        EspAttr { direction, offload, keymat: keymat.clone(), esn: None }
    };
    let spi = outer(Filter::Esp { spi: any(), seq: any() });
    let found = [ipv4(any()), spi];
    for (egress, direction) in [(true, Direction::Encrypt), (false, Direction::Decrypt)] {
        let other = if egress { Direction::Decrypt } else { Direction::Encrypt };
        let make = |specs: &[Spec]| rule(FlowAttr { egress, ..attr(FlowType::Normal, specs) });
        for inline in [false, true] {
            assert_eq!(make(&found).check_esp(&esp(direction, inline)), Ok(()));
            assert_eq!(make(&found).check_esp(&esp(other, inline)), Err(FlowError::EspPlace));
            // Inline crypto does not look for its packets by itself.
            let wanted = if inline { Err(FlowError::EspFilters) } else { Ok(()) };
            let inner = |spec| Spec { inner: true, ..spec };
            for specs in [&[][..], &[ipv4(any())], &[spi], &found.map(inner)] {
                assert_eq!(make(specs).check_esp(&esp(direction, inline)), wanted, "{specs:?}");
            }
        }
    }
    let decrypt = esp(Direction::Decrypt, false);
    let passes = rule(FlowAttr { dont_trap: true, ..attr(FlowType::Normal, &found) });
    assert_eq!(passes.check_esp(&decrypt), Err(FlowError::EspPlace));
    for flow_type in [FlowType::AllDefault, FlowType::McDefault, FlowType::Sniffer] {
        assert_eq!(rule(attr(flow_type, &[])).check_esp(&decrypt), Err(FlowError::EspPlace));
    }
}

#[test]
fn nothing_of_the_outer_headers_lies_above_a_label() {
    let mpls = outer(Filter::Mpls { entry: any() });
    let new = |specs: &[Spec]| FlowRule::new(attr(FlowType::Normal, specs)).map(drop);
    let inner = |spec| Spec { inner: true, ..spec };
    assert_eq!(new(&[mpls, inner(ipv4(any()))]), Ok(()));
    assert_eq!(new(&[inner(ipv4(any())), mpls]), Ok(()));
    assert_eq!(new(&[mpls, inner(ipv4(any())), udp(1)]), Err(FlowError::MplsOrder));
    // A label of the inner headers is no label of the outer ones.
    assert_eq!(new(&[inner(mpls), ipv4(any())]), Ok(()));
    assert_eq!(new(&[ipv4(any()), inner(ethernet(any())), inner(mpls), udp(1)]), Ok(()));
}
