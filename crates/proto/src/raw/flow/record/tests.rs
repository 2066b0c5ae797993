use super::*;
use crate::raw::frame::MplsOver;

const REACH: Reach = Reach { host: true, interface: 0x0102_0304 };

fn spec(filter: Filter, inner: bool) -> Spec {
    Spec { filter, inner, over: None }
}

/// Different numbers everywhere.
struct Numbers(u8);

impl Numbers {
    fn next<T: Integer>(&mut self) -> T {
        self.0 = self.0.wrapping_add(1);
        T::take(&mut &[self.0; 16][..]).unwrap()
    }

    fn masked<T: Integer>(&mut self) -> Masked<T> {
        Masked { val: self.next(), mask: self.next() }
    }
}

fn attr(specs: &[Spec]) -> FlowAttr {
    FlowAttr {
        flow_type: FlowType::Normal,
        priority: 0x1234,
        specs: specs.iter().copied().collect(),
        dont_trap: false,
        egress: false,
        drop: false,
        tag: Some(5),
    }
}

/// Rules with every filter, the longest one among them.
fn rules() -> Vec<FlowAttr> {
    let n = &mut Numbers(0);
    let any = Masked::default();
    let ethernet =
        Filter::Ethernet { dst: n.masked(), src: n.masked(), ether_type: any, vlan: n.masked() };
    let ipv6 = |next_hdr, n: &mut Numbers| Filter::Ipv6 {
        src: n.masked(),
        dst: n.masked(),
        flow_label: n.masked(),
        next_hdr,
        traffic_class: n.masked(),
        hop_limit: n.masked(),
    };
    let ipv4 = Filter::Ipv4 {
        src: n.masked(),
        dst: n.masked(),
        proto: Masked::default(),
        tos: n.masked(),
        ttl: n.masked(),
        flags: n.masked(),
    };
    let gre = Filter::Gre { flags: n.masked(), protocol: n.masked(), key: n.masked() };
    let mpls = Filter::Mpls { entry: n.masked() };
    let esp = Filter::Esp { spi: n.masked(), seq: n.masked() };
    let next_hdr = Masked { val: 47, mask: 0xff };
    let longest = [
        spec(ethernet, false),
        spec(ipv6(next_hdr, n), false),
        spec(gre, false),
        spec(mpls, false),
        spec(ethernet, true),
        spec(ipv6(Masked::default(), n), true),
        spec(gre, true),
        spec(mpls, true),
    ];
    vec![
        attr(&longest),
        attr(&[]),
        FlowAttr { drop: true, ..attr(&[spec(ipv4, false), spec(esp, false)]) },
        FlowAttr {
            dont_trap: true,
            ..attr(&[spec(Filter::Tcp { dst: n.masked(), src: n.masked() }, true)])
        },
        attr(&[
            spec(Filter::Udp { dst: n.masked(), src: n.masked() }, false),
            spec(Filter::Vxlan { vni: n.masked() }, false),
        ]),
        FlowAttr { flow_type: FlowType::AllDefault, ..attr(&[]) },
        FlowAttr { flow_type: FlowType::McDefault, drop: true, ..attr(&[]) },
    ]
}

#[test]
fn a_rule_is_read_as_it_was_written() {
    for attr in rules() {
        let rule = FlowRule::new(attr).unwrap();
        let record = rule.record(0x0807_0605_0403_0201, REACH).unwrap();
        let read = ForeignRule::parse(&record).unwrap();
        assert_eq!((read.age, read.reach), (0x0807_0605_0403_0201, REACH));
        // But for the tag, which is for its own process.
        let expected = FlowRule(FlowAttr { tag: None, ..rule.0 });
        assert_eq!(format!("{:?}", read.rule), format!("{expected:?}"));
        assert!(read.rule.is_twin_of(&expected));
    }
    let longest = FlowRule::new(rules().remove(0)).unwrap();
    let record = longest.record(1, REACH).unwrap();
    let mpls = ForeignRule::parse(&record).unwrap().rule.0.specs[3];
    assert_eq!(mpls.over, Some(MplsOver::Gre), "it is seen from the order");
}

#[test]
fn what_takes_nothing_from_others_has_no_record() {
    let sniffer = FlowAttr { flow_type: FlowType::Sniffer, ..attr(&[]) };
    let egress = FlowAttr { egress: true, tag: None, ..attr(&[]) };
    for attr in [sniffer, egress] {
        assert!(FlowRule::new(attr).unwrap().record(1, REACH).is_none());
    }
}

#[test]
fn what_is_no_rule_is_not_read() {
    let record = FlowRule::new(attr(&[])).unwrap().record(1, REACH).unwrap();
    let spoilt = |at: usize, byte: u8| {
        let mut record = record;
        record[at] = byte;
        ForeignRule::parse(&record).is_none()
    };
    assert!(!spoilt(2, 9), "another priority");
    assert!(spoilt(0, 0) && spoilt(0, 4) && spoilt(0, 255));
    assert!(spoilt(1, 8) && spoilt(1, 3), "a flag, flags that exclude each other");
    assert!(spoilt(16, 1) && spoilt(16, MAX_SPECS as u8 + 1) && spoilt(16, 255));
    assert!(spoilt(17, 1) && spoilt(RECORD_LEN - 1, 1), "behind the end");
    // Two filters of a layer are none of the device's own, either.
    let mut twice = [0; RECORD_LEN];
    twice[0] = 1;
    twice[16] = 2;
    twice[17] = 9;
    assert!(ForeignRule::parse(&twice).is_none(), "a filter of no kind");
    twice[26] = 9;
    assert!(ForeignRule::parse(&twice).is_none());
    twice[26] = 0x89;
    assert!(ForeignRule::parse(&twice).is_some());
}

/// As it was written or not at all, whatever stands there.
#[test]
fn any_bytes_are_read_or_not() {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    let mut rng = StdRng::seed_from_u64(1);
    let records: Vec<_> = rules()
        .into_iter()
        .map(|attr| FlowRule::new(attr).unwrap().record(1, REACH).unwrap())
        .collect();
    let (mut read, mut refused) = (0, 0);
    for _ in 0..50_000 {
        let mut record = records[rng.random_range(0..records.len())];
        for _ in 0..rng.random_range(0..4) {
            let most = if rng.random() { 40 } else { RECORD_LEN };
            let at = rng.random_range(0..most);
            record[at] = rng.random();
        }
        match ForeignRule::parse(&record) {
            Some(rule) => {
                assert_eq!(rule.rule.record(rule.age, rule.reach), Some(record));
                read += 1;
            }
            None => refused += 1,
        }
    }
    assert!(read > 10_000 && refused > 10_000, "{read} {refused}");
}
