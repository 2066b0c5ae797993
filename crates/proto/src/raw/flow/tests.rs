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

/// The destination's number is the rule's age, too.
fn add(table: &mut FlowTable<u32>, rule: FlowRule, dest: u32) -> u64 {
    table.insert(rule, dest.into(), dest)
}

/// The destinations that a frame meets.
fn met(table: &FlowTable<u32>, frame: &Builder) -> Vec<(u32, bool, u32)> {
    met_by(table, frame, Ingress::Host, |_| true)
}

fn met_by(
    table: &FlowTable<u32>,
    frame: &Builder,
    ingress: Ingress,
    lives: impl FnMut(u8) -> bool,
) -> Vec<(u32, bool, u32)> {
    let mut met = Vec::new();
    table.steer(&frame.parse(), ingress, lives, |dest, v| met.push((*dest, v.drop, v.tag)));
    met
}

const EVERYWHERE: Reach = Reach { host: true, interface: 2 };

/// As another process would read it.
fn foreign(rule: &FlowRule, age: u64, reach: Reach) -> ForeignRule {
    ForeignRule::parse(&rule.record(age, reach).unwrap()).unwrap()
}

fn other(attr: FlowAttr, age: u64) -> ForeignRule {
    foreign(&rule(attr), age, EVERYWHERE)
}

#[test]
fn the_lowest_priority_number_takes_the_frame_then_the_oldest() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let at =
        |priority, specs: &[Spec]| rule(FlowAttr { priority, ..attr(FlowType::Normal, specs) });
    add(&mut table, at(5, &[ipv4(any())]), 1);
    add(&mut table, at(5, &[udp(5678)]), 2);
    assert_eq!(met(&table, &frame), [(1, false, 0)]);
    let first = add(&mut table, at(1, &[udp(5678)]), 3);
    add(&mut table, at(0, &[udp(1)]), 4);
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
    add(&mut table, at(false, &[udp(5678)]), 1);
    add(&mut table, at(false, &[ipv4(any())]), 2);
    let copy = add(&mut table, at(false, &[udp(5678)]), 3);
    assert_eq!(met(&table, &frame), [(1, false, 0), (3, false, 0)]);
    add(&mut table, at(true, &[udp(5678)]), 4);
    assert_eq!(met(&table, &frame), [(1, false, 0), (3, false, 0), (4, true, 0)]);
    table.remove(copy);
    assert_eq!(met(&table, &frame), [(1, false, 0), (4, true, 0)]);
    let mut defaults = FlowTable::default();
    for dest in 1..3 {
        add(&mut defaults, rule(attr(FlowType::AllDefault, &[])), dest);
    }
    assert_eq!(met(&defaults, &frame), [(1, false, 0), (2, false, 0)]);
}

#[test]
fn dont_trap_lets_the_next_one_have_it_too() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let passes = FlowAttr { dont_trap: true, ..attr(FlowType::Normal, &[]) };
    add(&mut table, rule(passes), 1);
    add(&mut table, rule(attr(FlowType::AllDefault, &[])), 3);
    assert_eq!(met(&table, &frame), [(1, false, 0), (3, false, 0)]);
    let drops = FlowAttr { drop: true, tag: Some(9), priority: 2, ..attr(FlowType::Normal, &[]) };
    add(&mut table, rule(drops), 2);
    assert_eq!(met(&table, &frame), [(1, false, 0), (2, true, 9)]);
}

#[test]
fn defaults_take_what_is_left_and_sniffers_everything() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let mut group = frame.clone();
    group.0[0] |= 1;
    assert!(table.is_empty() && met(&table, &frame).is_empty());
    add(&mut table, rule(attr(FlowType::McDefault, &[])), 1);
    assert!(met(&table, &frame).is_empty());
    assert_eq!(met(&table, &group), [(1, false, 0)]);
    add(&mut table, rule(attr(FlowType::AllDefault, &[])), 2);
    assert_eq!(met(&table, &frame), [(2, false, 0)]);
    assert_eq!(met(&table, &group), [(1, false, 0)]);
    add(&mut table, rule(attr(FlowType::Normal, &[udp(5678)])), 3);
    add(&mut table, rule(attr(FlowType::Sniffer, &[])), 4);
    add(&mut table, rule(attr(FlowType::Sniffer, &[])), 5);
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
    add(&mut table, rule(attr(true, 2)), 1);
    assert!(table.is_empty() && table.has_egress());
    let mut counted = 0;
    assert!(!table.leave(&frame.parse(), |dest| counted = *dest));
    assert_eq!(counted, 1);
    add(&mut table, rule(attr(false, 1)), 2);
    assert!(table.leave(&frame.parse(), |dest| counted = *dest));
    assert_eq!(counted, 2);
}

#[test]
fn what_is_no_rule() {
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

fn at(priority: u16, specs: &[Spec]) -> FlowAttr {
    FlowAttr { priority, ..attr(FlowType::Normal, specs) }
}

#[test]
fn what_another_process_takes_first_is_not_here() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    add(&mut table, rule(at(5, &[udp(5678)])), 10);
    let here = [(10, false, 0)];
    // A younger one of the same priority, one of a higher number, and one that does not match come after or not at all.
    assert!(table.set_foreign(7, [other(at(5, &[ipv4(any())]), 11), other(at(9, &[]), 1)]));
    assert!(table.set_foreign(8, [other(at(0, &[udp(1)]), 2)]));
    assert_eq!(met(&table, &frame), here);
    for (age, before) in [(9, at(5, &[])), (12, FlowAttr { drop: true, ..at(4, &[]) })] {
        table.set_foreign(8, [other(before, age)]);
        assert_eq!(met(&table, &frame), []);
        // The process has ended.
        assert_eq!(met_by(&table, &frame, Ingress::Host, |owner| owner != 8), here);
        table.set_foreign(8, []);
        assert_eq!(met(&table, &frame), here);
    }
    assert_eq!(table.foreign_len(), 2);
    table.set_foreign(7, []);
    assert_eq!(table.foreign_len(), 0);
}

#[test]
fn a_process_that_does_not_get_a_frame_takes_it_from_nobody() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    add(&mut table, rule(at(5, &[])), 10);
    let taken =
        |table: &FlowTable<u32>, ingress| met_by(table, &frame, ingress, |_| true).is_empty();
    for (reach, host, interface) in [
        (EVERYWHERE, true, true),
        (Reach { host: true, interface: 0 }, true, false),
        (Reach { host: false, interface: 2 }, false, true),
        (Reach { host: false, interface: 0 }, false, false),
    ] {
        table.set_foreign(7, []);
        table.set_foreign(7, [foreign(&rule(at(0, &[])), 1, reach)]);
        assert_eq!(taken(&table, Ingress::Host), host, "{reach:?}");
        assert_eq!(taken(&table, Ingress::Interface(2)), interface, "{reach:?}");
        assert!(!taken(&table, Ingress::Interface(0)) && !taken(&table, Ingress::Interface(3)));
        assert!(!taken(&table, Ingress::Process), "nobody else has it");
    }
}

#[test]
fn twins_of_two_processes_get_a_copy_each_at_the_place_of_the_oldest() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    add(&mut table, rule(at(5, &[ipv4(any())])), 3);
    add(&mut table, rule(at(5, &[udp(5678)])), 5);
    assert_eq!(met(&table, &frame), [(3, false, 0)]);
    table.set_foreign(7, [other(at(5, &[udp(5678)]), 1)]);
    assert_eq!(met(&table, &frame), [(5, false, 0)], "with the older one's place");
    table.set_foreign(7, []);
    assert_eq!(met(&table, &frame), [(3, false, 0)]);
    // Nobody gets a copy of what is dropped, but for those who had it before.
    let drops = FlowAttr { drop: true, ..at(5, &[udp(5678)]) };
    table.set_foreign(7, [other(drops.clone(), 1)]);
    assert_eq!(met(&table, &frame), []);
    table.set_foreign(7, [other(drops, 6)]);
    table.set_foreign(8, [other(at(5, &[udp(5678)]), 2)]);
    assert_eq!(met(&table, &frame), [(5, false, 0)]);
}

#[test]
fn sniffers_and_defaults_rank_with_those_of_others() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    add(&mut table, rule(attr(FlowType::Sniffer, &[])), 10);
    add(&mut table, rule(attr(FlowType::AllDefault, &[])), 11);
    let (sniffed, both) = ([(10, false, 0)], [(10, false, 0), (11, false, 0)]);
    table.set_foreign(7, [other(attr(FlowType::AllDefault, &[]), 12)]);
    assert_eq!(met(&table, &frame), both, "twins");
    let low = FlowAttr { priority: 1, ..attr(FlowType::AllDefault, &[]) };
    table.set_foreign(7, [other(low, 1)]);
    assert_eq!(met(&table, &frame), both);
    // A normal rule of any number comes before, but for one that lets frames pass.
    table.set_foreign(7, [other(FlowAttr { dont_trap: true, ..at(0, &[]) }, 2)]);
    assert_eq!(met(&table, &frame), both);
    table.set_foreign(7, [other(at(9, &[]), 3)]);
    assert_eq!(met(&table, &frame), sniffed);
    table.set_foreign(7, [other(attr(FlowType::McDefault, &[]), 4)]);
    assert_eq!(met(&table, &frame), both);
    let mut group = frame.clone();
    group.0[0] |= 1;
    assert_eq!(met(&table, &group), sniffed);
    assert!(!table.is_empty());
    table.remove(0);
    table.remove(1);
    assert!(table.is_empty(), "others have rules");
}

#[test]
fn the_rules_of_others_are_bounded() {
    let mut table = FlowTable::default();
    let many = |from: u64| (from..from + 40_000).map(|age| other(at(0, &[]), age));
    assert!(table.set_foreign(7, many(0)));
    assert!(!table.set_foreign(8, many(100_000)));
    assert_eq!((table.foreign_len(), table.normal.len()), (MAX_FLOWS, MAX_FLOWS));
    table.set_foreign(7, []);
    assert!(table.set_foreign(8, many(100_000)));
    assert_eq!((table.foreign_len(), table.normal.len()), (40_000, 40_000));
    add(&mut table, rule(at(0, &[])), 1);
    assert_eq!(table.remove(0), Some(1));
}

#[test]
fn a_record_that_was_read_as_it_was_written_is_replaced() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    add(&mut table, rule(at(5, &[])), 10);
    let (takes, not) = (at(0, &[udp(5678)]), at(0, &[udp(1)]));
    for (torn, reach) in [(not, EVERYWHERE), (takes.clone(), Reach { host: false, interface: 0 })] {
        table.set_foreign(7, [foreign(&rule(torn), 1, reach)]);
        assert_eq!(met(&table, &frame), [(10, false, 0)]);
        table.set_foreign(7, [other(takes.clone(), 1)]);
        assert_eq!((met(&table, &frame), table.foreign_len()), (vec![], 1));
    }
}

#[test]
fn other_ages_move_rules_with_their_twins() {
    let mut table = FlowTable::default();
    let frame = udp4().bytes(b"abcd");
    let a = add(&mut table, rule(at(5, &[udp(5678)])), 1);
    let b = add(&mut table, rule(at(5, &[ipv4(any())])), 2);
    let c = add(&mut table, rule(at(5, &[udp(5678)])), 3);
    assert!(table.own_rules().iter().map(|(id, _)| *id).eq([a, b, c]));
    table.set_ages(&BTreeMap::from([(a, 13), (b, 12), (c, 14)]));
    assert_eq!(met(&table, &frame), [(2, false, 0)]);
    assert!(table.own_rules().iter().map(|(id, _)| *id).eq([b, a, c]));
    table.set_ages(&BTreeMap::from([(c, 11)]));
    assert_eq!(met(&table, &frame), [(3, false, 0), (1, false, 0)]);
    table.set_foreign(7, [other(at(5, &[]), 10)]);
    assert_eq!(met(&table, &frame), []);
}

/// Ages that others say may collide.
#[test]
fn whatever_ages_others_say_the_order_is_kept() {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    for seed in 0..200 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut table = FlowTable::default();
        let mut own = Vec::new();
        let mut of: BTreeMap<u8, BTreeMap<u64, ForeignRule>> = BTreeMap::new();
        let random = |rng: &mut StdRng| {
            let specs = [udp(rng.random_range(0..3))];
            let flow_type =
                if rng.random_ratio(1, 4) { FlowType::AllDefault } else { FlowType::Normal };
            let specs = if flow_type == FlowType::Normal { &specs[..] } else { &[] };
            rule(FlowAttr { priority: rng.random_range(0..2), ..attr(flow_type, specs) })
        };
        for _ in 0..60 {
            match rng.random_range(0..4) {
                0 => own.push(table.insert(random(&mut rng), rng.random_range(0..4), 0u32)),
                1 if !own.is_empty() => {
                    let id = own.swap_remove(rng.random_range(0..own.len()));
                    assert_eq!(table.remove(id), Some(0));
                }
                _ => {
                    let owner = rng.random_range(1..4);
                    let n = rng.random_range(0..6);
                    let rules = (0..n).map(|_| {
                        let age = rng.random_range(0..4);
                        (age, foreign(&random(&mut rng), age, EVERYWHERE))
                    });
                    let rules: BTreeMap<_, _> = rules.collect();
                    assert!(table.set_foreign(owner, rules.values().cloned()));
                    of.insert(owner, rules);
                }
            }
            of.retain(|_, rules| !rules.is_empty());
            assert!(table.owners().eq(of.keys().copied()));
            assert_eq!(table.foreign_len(), of.values().map(BTreeMap::len).sum::<usize>());
            let len = table.normal.len() + table.defaults.len();
            assert_eq!(len, own.len() + table.foreign_len(), "seed {seed}");
            for list in [&table.normal, &table.defaults] {
                assert!(list.is_sorted_by_key(|e| (e.rule.0.priority, e.rank)), "seed {seed}");
                let groups: Vec<_> = list.chunk_by(|a, b| a.rule.is_twin_of(&b.rule)).collect();
                for (n, group) in groups.iter().enumerate() {
                    assert!(group.is_sorted_by_key(|e| e.age), "seed {seed}");
                    assert!(group.iter().all(|e| e.rank == group[0].age), "seed {seed}");
                    let more = &groups[n + 1..];
                    assert!(more.iter().all(|g| !g[0].rule.is_twin_of(&group[0].rule)));
                }
            }
        }
    }
}

/// Processes that know each other's rules do together what one table does.
#[test]
fn processes_steer_as_one_table() {
    use rand::rngs::StdRng;
    use rand::seq::IndexedRandom;
    use rand::{Rng, SeedableRng};

    let filters =
        [vec![], vec![ipv4(any())], vec![udp(5678)], vec![udp(1)], vec![udp(5678), ipv4(any())]];
    let frame = udp4().bytes(b"abcd");
    let mut group = frame.clone();
    group.0[0] |= 1;
    let mut met_by_several = 0;
    for seed in 0..300 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut whole = FlowTable::default();
        let mut tables: [FlowTable<u32>; 3] = Default::default();
        // The process, the ids in its table and in the whole one, the rule and its age.
        let mut rules: Vec<(usize, u64, u64, FlowRule, u64)> = Vec::new();
        for age in 0..20u32 {
            if rng.random_ratio(1, 4) && !rules.is_empty() {
                let (process, id, in_whole, ..) =
                    rules.swap_remove(rng.random_range(0..rules.len()));
                assert_eq!(tables[process].remove(id), whole.remove(in_whole));
            } else {
                let flow_type = *[
                    FlowType::Normal,
                    FlowType::Normal,
                    FlowType::AllDefault,
                    FlowType::McDefault,
                    FlowType::Sniffer,
                ]
                .choose(&mut rng)
                .unwrap();
                let normal = flow_type == FlowType::Normal;
                let specs = if normal { filters.choose(&mut rng).unwrap().as_slice() } else { &[] };
                let drop = rng.random_ratio(1, 5);
                let rule = rule(FlowAttr {
                    priority: rng.random_range(0..2),
                    drop,
                    dont_trap: normal && !drop && rng.random_ratio(1, 5),
                    ..attr(flow_type, specs)
                });
                let process = rng.random_range(0..3);
                let id = tables[process].insert(rule.clone(), age.into(), age);
                let in_whole = whole.insert(rule.clone(), age.into(), age);
                rules.push((process, id, in_whole, rule, age.into()));
            }
            for (here, table) in tables.iter_mut().enumerate() {
                for there in (0..3).filter(|there| *there != here) {
                    let of = rules.iter().filter(|(process, ..)| *process == there);
                    let records = of.filter_map(|(.., rule, age)| rule.record(*age, EVERYWHERE));
                    table
                        .set_foreign(there as u8, records.map(|r| ForeignRule::parse(&r).unwrap()));
                }
            }
            for frame in [&frame, &group] {
                let mut each: Vec<_> = tables.iter().flat_map(|table| met(table, frame)).collect();
                let mut one = met(&whole, frame);
                met_by_several +=
                    usize::from(tables.iter().filter(|t| !met(t, frame).is_empty()).count() > 1);
                each.sort_unstable();
                one.sort_unstable();
                assert_eq!(each, one, "seed {seed}, {rules:?}");
            }
        }
    }
    assert!(met_by_several > 100, "{met_by_several}");
}
