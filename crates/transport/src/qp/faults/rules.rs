//! The rules that hold for a queue pair, so ordered that a packet meets only those that count it, and a request only those for its side.

use anyverbs_faults::{Dice, Fault, Limit, PacketKind, Rule, Which};
use anyverbs_links::faults::{InLine, Line};
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Psn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::opcode::{Opcode, Operation};
use anyverbs_proto::wr::AddressVector;

/// A packet, as rules tell it from others.
#[derive(Clone, Copy, Debug)]
pub(in crate::qp) struct Seen {
    received: bool,
    pub(super) opcode: Opcode,
    pub(super) psn: Psn,
    /// The address at the other end.
    peer: Gid,
    /// That at this end.
    pub(in crate::qp) own: Gid,
}

impl Seen {
    /// A packet that is sent.
    pub(in crate::qp) fn sent(av: &AddressVector, bth: &Bth) -> Self {
        Self { received: false, opcode: bth.opcode, psn: bth.psn, peer: av.dgid, own: av.sgid }
    }

    /// A packet that has come.
    pub(in crate::qp) fn received(arrival: &Arrival, bth: &Bth) -> Self {
        let (peer, own) = (arrival.source, arrival.destination);
        Self { received: true, opcode: bth.opcode, psn: bth.psn, peer, own }
    }

    /// The name of its direction.
    pub(super) fn direction(self) -> &'static str {
        if self.received { "received" } else { "sent" }
    }

    fn side(self) -> usize {
        usize::from(self.received)
    }
}

/// An obstacle to all packets of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// Its port is down.
    Port,
    /// The port has lost its GID, which had this index.
    Gid(usize),
}

/// Lines of the log about a rule.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said {
    /// Lines that it writes each time, as long as there are few.
    pub(super) each: u32,
    /// Lines that it writes once.
    pub(super) once: u32,
}

/// A rule that holds for the queue pair.
#[derive(Debug)]
pub(super) struct Armed {
    pub(super) rule: &'static Rule,
    /// The address at the other end of its packets.
    pub(super) peer: Option<Gid>,
    pub(super) dice: Dice,
    /// Its times count from here.
    pub(super) since: Time,
    /// The packets that it has counted. Of a rule for requests: those that were there before it.
    pub(super) seen: u64,
    /// Lines of the log about it.
    pub(super) said: Said,
    /// When the last packet that it delayed leaves.
    pub(super) last_due: Time,
    /// The line behind its port, if the rule limits the rate of that.
    pub(super) line: Option<&'static Line>,
}

impl Armed {
    /// When a packet that it delays leaves: not before one that it delayed earlier.
    pub(super) fn delays(&mut self, due: Time) -> Time {
        self.last_due = self.last_due.max(due);
        self.last_due
    }

    /// Whether a rule for packets, which meets those of this one's class, counts it.
    fn counts(&self, seen: Seen) -> bool {
        let has_opcode = match self.rule.fault {
            Fault::Packets { kind: Some(PacketKind::Single(single)), .. } => {
                single.code == seen.opcode.code()
            }
            _ => true,
        };
        has_opcode && self.peer.is_none_or(|peer| peer == seen.peer)
    }

    /// How many packets wait for the line that it limits, of this queue pair and others.
    pub(super) fn waiting(&self) -> u64 {
        self.line.map_or(0, Line::waiting)
    }

    /// A packet of so many bytes is sent at a limited rate: when it has left, and its place in the queue.
    pub(super) fn leaves(&self, limit: Limit, bytes: usize, now: Time) -> (Time, Option<InLine>) {
        self.rule.fired.set();
        let Some(line) = self.line else { return (now + limit.time(bytes), None) };
        let (left, place) = line.takes(limit, bytes, now);
        (left, Some(place))
    }
}

/// The kinds of packets that rules tell apart, and two more: other requests, and what is neither a request nor a response.
const CLASSES: usize = 8;

/// The rules that hold for a queue pair.
#[derive(Debug, Default)]
pub(super) struct Rules {
    /// All, in the order of the script.
    armed: Vec<Armed>,
    /// For packets that are sent, and those that are received, of each class: the places of the rules that count them.
    packets: [[Vec<usize>; CLASSES]; 2],
    /// The places of the rules for sends, and for receives.
    work: [Vec<usize>; 2],
}

impl Rules {
    /// Adds one. There were so many sends and receives before it.
    pub(super) fn add(&mut self, new: Armed, work: [u64; 2]) {
        let (at, rule) = (self.armed.len(), new.rule);
        let mut seen = 0;
        match &rule.fault {
            Fault::Packets { received, kind, .. } => {
                let classes = self.packets[usize::from(*received)].iter_mut().enumerate();
                for (_, rules) in classes.filter(|(class, _)| may_count(*kind, *class)) {
                    rules.push(at);
                }
            }
            Fault::Work { receives, .. } => {
                let side = usize::from(*receives);
                seen = work[side];
                self.work[side].push(at);
            }
            // It counts no packets, for none passes.
            Fault::Down(_) | Fault::Gid(..) | Fault::Fatal(_) | Fault::Removed(_) => {}
            // Others than the queue pair do these.
            Fault::Call { .. }
            | Fault::Memory { .. }
            | Fault::Event(..)
            | Fault::Fails(..)
            | Fault::Process(..) => return,
        }
        self.armed.push(Armed { seen, ..new });
    }

    /// The rules that count a packet, in the order of the script, each with its place.
    pub(super) fn of_packet(&self, seen: Seen) -> impl Iterator<Item = (usize, &Armed)> {
        let places = &self.packets[seen.side()][class(seen.opcode)];
        let all = places.iter().map(|at| (*at, &self.armed[*at]));
        all.filter(move |(_, armed)| armed.counts(seen))
    }

    /// Counts a packet. A rule whose last number has passed meets no further one.
    pub(super) fn count(&mut self, packet: Seen) {
        let Self { armed, packets, .. } = self;
        packets[packet.side()][class(packet.opcode)].retain(|at| {
            if !armed[*at].counts(packet) {
                return true;
            }
            let Armed { rule, seen, .. } = &mut armed[*at];
            *seen += 1;
            let Fault::Packets { which: Which::Numbers(_, last), .. } = rule.fault else {
                return true;
            };
            *seen < last
        });
    }

    /// The rules for sends, or for receives, in the order of the script, each with its place.
    pub(super) fn of_work(&self, receives: bool) -> impl Iterator<Item = (usize, &Armed)> {
        self.work[usize::from(receives)].iter().map(|at| (*at, &self.armed[*at]))
    }

    /// A rule by which nothing passes now, with its place. No lock is taken for it: this may be under the lock of a ring.
    pub(super) fn cutting(&self, cut: Cut, now: Time) -> Option<(usize, &'static Rule)> {
        let holds = |Armed { rule, since, .. }: &Armed| match (cut, &rule.fault) {
            (Cut::Port, Fault::Down(span)) => span.has(now.since(*since)),
            // It is back a little after its time.
            (Cut::Gid(index), Fault::Gid(n, span)) => {
                *n == index && now.since(*since) >= span.after
            }
            (Cut::Port, Fault::Fatal(after) | Fault::Removed(after)) => now.since(*since) >= *after,
            _ => false,
        };
        let at = self.armed.iter().position(holds)?;
        Some((at, self.armed[at].rule))
    }

    /// The rule at a place.
    pub(super) fn at(&mut self, place: usize) -> Option<&mut Armed> {
        self.armed.get_mut(place)
    }
}

/// The class of a packet.
fn class(opcode: Opcode) -> usize {
    use Operation as O;
    match opcode.operation {
        O::Ack => 0,
        O::ReadRequest => 1,
        O::CompareSwap | O::FetchAdd => 2,
        O::AtomicWrite => 3,
        _ if opcode.is_write() => 3,
        _ if opcode.is_send() => 4,
        _ if opcode.is_response() => 5,
        _ if opcode.is_request() => 6,
        _ => 7,
    }
}

/// Whether a rule for packets of a kind counts some of a class.
fn may_count(kind: Option<PacketKind>, of: usize) -> bool {
    use PacketKind as K;
    match kind {
        None => true,
        Some(K::Ack) => of == 0,
        Some(K::Read) => of == 1,
        Some(K::Atomic) => of == 2,
        Some(K::Write) => of == 3,
        Some(K::Send) => of == 4,
        Some(K::Response) => of == 5,
        Some(K::Request) => matches!(of, 1..=4 | 6),
        Some(K::Single(opcode)) => Opcode::parse(opcode.code).map(class) == Some(of),
    }
}

#[cfg(test)]
mod tests {
    use anyverbs_faults::Script;

    use super::*;

    fn rules(text: &str) -> Rules {
        let script: &'static Script = Box::leak(Box::new(Script::parse(text).unwrap()));
        let mut rules = Rules::default();
        for (n, rule) in script.rules.iter().enumerate() {
            let (dice, since) = (Dice::new(1, n, 1), Time::from_nanos(0));
            let last_due = since;
            let peer = rule.place.peer.map(Gid::from);
            let (seen, said) = (0, Said::default());
            let new = Armed { rule, peer, dice, since, seen, said, last_due, line: None };
            rules.add(new, [0; 2]);
        }
        rules
    }

    fn texts(rules: &Rules, received: bool, opcode: Opcode) -> Vec<&str> {
        let seen = Seen { received, ..sent(opcode) };
        rules.of_packet(seen).map(|(_, armed)| armed.rule.text.as_str()).collect()
    }

    /// A packet to nobody.
    fn sent(opcode: Opcode) -> Seen {
        Seen { received: false, opcode, psn: Psn::new(0), peer: Gid::ZERO, own: Gid::ZERO }
    }

    fn all_opcodes() -> impl Iterator<Item = Opcode> {
        (0..=u8::MAX).filter_map(Opcode::parse)
    }

    #[test]
    fn a_packet_meets_the_rules_of_its_kind_and_direction_alone() {
        // The wider ones are behind the narrower ones, or they would leave those nothing to do.
        let kinds = ["send ", "write ", "read ", "atomic ", "request ", "response ", "ack ", ""];
        let all: Vec<_> = ["received ", ""]
            .iter()
            .flat_map(|way| kinds.map(|kind| format!("drop {way}{kind}packets")))
            .collect();
        let rules = rules(&(all.join("\n") + "\nsend 1 never completes\ndown after 1s"));
        for opcode in all_opcodes() {
            use Operation as O;
            let op = opcode.operation;
            let is = |kind: &str| match kind {
                "request " => opcode.is_request(),
                "send " => opcode.is_send(),
                "write " => opcode.is_write() || op == O::AtomicWrite,
                "read " => op == O::ReadRequest,
                "atomic " => matches!(op, O::CompareSwap | O::FetchAdd),
                "response " => opcode.is_response() && op != O::Ack,
                "ack " => op == O::Ack,
                _ => true,
            };
            for (received, way) in [(true, "received "), (false, "")] {
                let wanted = kinds.into_iter().filter(|kind| is(kind));
                let wanted: Vec<_> =
                    wanted.map(|kind| format!("drop {way}{kind}packets")).collect();
                assert_eq!(texts(&rules, received, opcode), wanted, "{opcode}");
            }
        }
        assert_eq!(rules.of_work(false).count(), 1);
        assert_eq!(rules.of_work(true).count(), 0);
    }

    #[test]
    fn a_rule_of_one_opcode_counts_that_alone() {
        let names: Vec<_> = anyverbs_faults::Opcode::all().collect();
        assert!(names.iter().map(|name| name.code).eq(codes_of_the_wire()));
        let text: String = names.iter().map(|name| format!("drop {name} packet 2\n")).collect();
        let mut rules = rules(&text);
        for opcode in all_opcodes() {
            let name = names.iter().find(|name| name.code == opcode.code()).unwrap();
            let wanted = format!("drop {name} packet 2");
            for seen in 0..2 {
                assert_eq!(texts(&rules, false, opcode), [wanted.as_str()]);
                let (_, armed) = rules.of_packet(sent(opcode)).next().unwrap();
                assert_eq!(armed.seen, seen, "{opcode}");
                rules.count(sent(opcode));
            }
            assert!(texts(&rules, false, opcode).is_empty(), "its number has passed");
            assert!(texts(&rules, true, opcode).is_empty());
        }
    }

    /// The codes that the wire has, in the order of the language.
    fn codes_of_the_wire() -> impl Iterator<Item = u8> {
        let services = [0x00..=0x1f, 0x20..=0x3f, 0x60..=0x7f, 0xa0..=0xbf, 0x81..=0x81];
        services.into_iter().flatten().filter(|code| Opcode::parse(*code).is_some())
    }

    #[test]
    fn a_rule_of_a_peer_counts_packets_to_and_from_it_alone() {
        let mut rules =
            rules("on peer 10.0.0.2: drop packet 2\non peer fe80::1: drop received packets");
        let opcode = all_opcodes().next().unwrap();
        let at = |ip: &str| Gid::from(ip.parse::<std::net::IpAddr>().unwrap());
        let to = |ip| Seen { peer: at(ip), ..sent(opcode) };
        let met = |rules: &Rules, seen| rules.of_packet(seen).count();
        for _ in 0..5 {
            rules.count(to("10.0.0.3"));
        }
        assert_eq!((met(&rules, to("10.0.0.2")), met(&rules, to("10.0.0.3"))), (1, 0));
        assert_eq!(rules.of_packet(to("10.0.0.2")).next().unwrap().1.seen, 0);
        let from = Seen { received: true, ..to("fe80::1") };
        assert_eq!((met(&rules, to("fe80::1")), met(&rules, from)), (0, 1));
        for _ in 0..2 {
            rules.count(to("10.0.0.2"));
        }
        assert_eq!(met(&rules, to("10.0.0.2")), 0, "its number has passed");
    }

    #[test]
    fn the_rule_by_which_a_port_is_down_is_found_while_it_holds() {
        let rules = rules(
            "drop packets\ndown after 1s for 2s\nfatal after 5s\ngid 0 removed\ngid 1 removed after 1s",
        );
        let by = |cut, second: u64| {
            let now = Time::from_nanos(second * 1_000_000_000);
            rules.cutting(cut, now).map(|(at, rule)| (at, rule.line))
        };
        let of_gid = |second| by(Cut::Gid(1), second);
        assert_eq!([0, 1].map(of_gid), [None, Some((4, 5))]);
        let found = [0, 1, 2, 3, 4, 5, 99].map(|second| by(Cut::Port, second));
        let (down, fatal) = (Some((1, 2)), Some((2, 3)));
        assert_eq!(found, [None, down, down, None, None, fatal, fatal]);
    }

    #[test]
    fn a_rule_whose_numbers_have_passed_meets_no_packet() {
        let text: String = (1..=1000).map(|n| format!("drop send packet {n}\n")).collect();
        let mut rules = rules(&(text + "drop packet 3\ndrop request packets 2 to 1001"));
        let mut all = all_opcodes();
        let send = all.find(|opcode| opcode.is_send()).unwrap();
        let write = all.find(|opcode| opcode.is_write()).unwrap();
        let ack = all.find(|opcode| opcode.operation == Operation::Ack).unwrap();
        for n in 1..=1000 {
            let met = rules.of_packet(sent(send)).map(|(_, armed)| armed);
            let met: Vec<_> = met.map(|armed| armed.dice.chooses(which(armed), n)).collect();
            assert_eq!(met.len() as u64, 1000 - n + 1 + u64::from(n <= 3) + 1);
            assert!(met[0], "the rule of packet {n} comes first");
            rules.count(sent(send));
        }
        assert_eq!(
            texts(&rules, false, write),
            ["drop packet 3", "drop request packets 2 to 1001"]
        );
        // It has counted the others, and meets one packet more at most.
        rules.count(sent(write));
        assert!(texts(&rules, false, write).is_empty());
        assert_eq!(texts(&rules, false, ack), ["drop packet 3"]);
    }

    fn which(armed: &Armed) -> Which {
        let Fault::Packets { which, .. } = armed.rule.fault else { unreachable!() };
        which
    }
}
