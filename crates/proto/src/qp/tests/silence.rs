//! A peer that does not answer: when the network and its device are asked why, and what the peer is told whose packets are
//! dropped here.

use super::trouble::cause;
use super::*;
use crate::wire::feth::{Feth, Placement, Selectivity};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// The path MTU where the device keeps the bytes of its packets.
const SMALL: u32 = SHORT as u32;

fn world(retry_cnt: u8, props: LinkProps) -> World {
    World::with(QpType::Rc, props, |attr| attr.retry_cnt = retry_cnt)
}

impl World {
    /// Waits for the next timer. False if there is none.
    fn wait(&mut self) -> bool {
        let Some(deadline) = self.qp.deadline() else { return false };
        self.device.now = deadline;
        self.qp.on_timer(&mut self.device);
        true
    }

    /// The PSNs of the soundings.
    fn sounded(&self) -> Vec<u32> {
        self.device.soundings.iter().map(|(_, sent)| sent.headers.bth.psn.get()).collect()
    }
}

/// The cause of a request whose retries run out, whatever is said.
fn silent(says: Option<Cause>) -> (World, u32) {
    let mut world = world(2, LinkProps::new(1 << 20));
    world.device.says = says;
    world.post(SendOp::Send, 8);
    while world.wait() {}
    let (status, number) = world.failure();
    assert_eq!(status, WcStatus::RetryExcErr);
    (world, number)
}

#[test]
fn silence_is_looked_into_early_and_before_the_last_retry() {
    // The timeouts at which it is, with so many retries.
    let soundings = |retry_cnt: u8, was_answered: bool| {
        let mut world = world(retry_cnt, LinkProps::new(1 << 20));
        if was_answered {
            world.post(SendOp::Send, 8);
            world.answer(0, Syndrome::ACK);
        }
        world.post(SendOp::Send, 8);
        let (mut timeouts, mut at) = (0, Vec::new());
        loop {
            let before = world.device.soundings.len();
            if !world.wait() {
                break;
            }
            timeouts += 1;
            at.extend((before..world.device.soundings.len()).map(|_| timeouts));
            assert_eq!(world.qp.awaits_reason(), !at.is_empty() && timeouts <= retry_cnt);
        }
        assert_eq!(timeouts, retry_cnt + 1);
        assert_eq!(world.sounded(), vec![u32::from(was_answered); at.len()]);
        at
    };
    for (retry_cnt, of_stranger, of_known) in [
        (7, vec![1, 7], vec![7]),
        (4, vec![1, 4], vec![4]),
        (3, vec![1, 3], vec![3]),
        (2, vec![1, 2], vec![2]),
        // The first timeout is late already.
        (1, vec![1], vec![1]),
        (0, vec![1], vec![1]),
    ] {
        assert_eq!(soundings(retry_cnt, false), of_stranger, "{retry_cnt}");
        assert_eq!(soundings(retry_cnt, true), of_known, "{retry_cnt}");
    }
}

#[test]
fn silence_of_each_packet_is_looked_into_anew() {
    let mut world = world(2, LinkProps::new(1 << 20));
    for _ in 0..3 {
        world.post(SendOp::Send, 8);
    }
    assert!(world.wait() && world.qp.awaits_reason());
    assert_eq!(world.sounded(), [0]);
    world.answer(1, Syndrome::ACK);
    assert!(!world.qp.awaits_reason());
    assert!(world.wait());
    assert_eq!((world.sounded(), world.qp.awaits_reason()), (vec![0], false));
    assert!(world.wait());
    assert_eq!((world.sounded(), world.qp.awaits_reason()), (vec![0, 2], true));
    // With all answered nobody waits.
    world.answer(2, Syndrome::ACK);
    assert!(!world.qp.awaits_reason());
    assert_eq!((world.wait(), world.sounded()), (false, vec![0, 2]));
}

#[test]
fn an_answer_since_the_timer_began_is_no_silence() {
    let mut world = world(1, LinkProps { immediate: true, ..LinkProps::new(1 << 20) });
    world.post(SendOp::Send, 8);
    world.post(SendOp::Send, 8);
    world.answer(0, Syndrome::ACK);
    assert!(world.wait());
    assert_eq!((world.sounded(), world.qp.state()), (vec![], QpState::Rts));
    assert!(world.wait());
    assert_eq!(world.sounded(), [1]);
}

/// A probe timeout costs no retry. It is late only where the ACK timeout that comes is the last.
#[test]
fn a_probe_timeout_of_a_stranger_or_without_retries_looks_into_silence() {
    let props = LinkProps { probe_after: Some(MS), ..LinkProps::new(1 << 20) };
    // Whether it was a probe timeout at which silence was looked into, and the ACK timeouts until then.
    let soundings = |retry_cnt: u8, was_answered: bool| {
        let mut world = world(retry_cnt, props);
        if was_answered {
            world.post(SendOp::Send, 8);
            world.answer(0, Syndrome::ACK);
        }
        world.post(SendOp::Send, 8);
        world.counters();
        let (mut ack_timeouts, mut at) = (0, Vec::new());
        loop {
            let before = world.device.soundings.len();
            if !world.wait() {
                break;
            }
            let is_ack = world.counters().contains(&Counter::LocalAckTimeoutErr);
            ack_timeouts += u32::from(is_ack);
            at.extend((before..world.device.soundings.len()).map(|_| (!is_ack, ack_timeouts)));
        }
        let silence = if was_answered { Cause::SilentNow } else { Cause::NeverAnswered };
        assert_eq!(world.failure(), (WcStatus::RetryExcErr, cause(silence)));
        at
    };
    for (retry_cnt, of_stranger, of_known) in [
        (7, vec![(true, 0), (false, 7)], vec![(false, 7)]),
        (1, vec![(true, 0), (false, 1)], vec![(false, 1)]),
        (0, vec![(true, 0)], vec![(true, 0)]),
    ] {
        assert_eq!(soundings(retry_cnt, false), of_stranger, "{retry_cnt}");
        assert_eq!(soundings(retry_cnt, true), of_known, "{retry_cnt}");
    }
}

/// A host reports a few packets for a port that nobody holds. The first repeats would use them up.
#[test]
fn a_stranger_is_asked_about_before_the_first_repeat() {
    for probe_after in [Some(MS), None] {
        let mut world = world(7, LinkProps { probe_after, ..LinkProps::new(1 << 20) });
        world.post(SendOp::Send, 8);
        world.post(SendOp::Send, 8);
        world.device.reported = world.device.sent.len() + 1;
        while world.wait() {}
        assert_eq!(world.failure(), (WcStatus::RetryExcErr, cause(Cause::NobodyOnPort)));
    }
}

/// The sounding is the oldest packet without an answer, with the mark that asks.
#[test]
fn the_oldest_packet_goes_out_once_more_with_a_mark() {
    let feth = Feth { placement: Placement::GLOBAL, selectivity: Selectivity::Range };
    type Op = fn(RemoteAddr) -> SendOp;
    let cases: [(Op, u32, &[Operation]); 9] = [
        (|_| SendOp::Send, 8, &[Operation::SendOnly]),
        (|_| SendOp::SendImm(5), SMALL + 1, &[Operation::SendFirst, Operation::SendLastImm]),
        (
            SendOp::Write,
            3 * SMALL + 5,
            &[
                Operation::WriteFirst,
                Operation::WriteMiddle,
                Operation::WriteMiddle,
                Operation::WriteLast,
            ],
        ),
        (|at| SendOp::WriteImm(at, 6), 0, &[Operation::WriteOnlyImm]),
        (SendOp::Read, 8, &[Operation::ReadRequest]),
        (|at| SendOp::FetchAdd { at, add: 3 }, 8, &[Operation::FetchAdd]),
        (|at| SendOp::CompareSwap { at, compare: 3, swap: 4 }, 8, &[Operation::CompareSwap]),
        (|at| SendOp::AtomicWrite { at, data: Some([7; 8]) }, 0, &[Operation::AtomicWrite]),
        (|_| SendOp::SendInv(9), SMALL, &[Operation::SendOnlyInv]),
    ];
    let flush: Op = |at| SendOp::Flush { at, len: 16, feth: Feth::default() };
    let flush: [(Op, u32, &[Operation]); 1] = [(flush, 0, &[Operation::Flush])];
    for (op, len, operations) in cases.into_iter().chain(flush) {
        for (k, operation) in (0..).zip(operations) {
            let mut world = World::with(QpType::Rc, LinkProps::new(1 << 20), |attr| {
                (attr.retry_cnt, attr.path_mtu) = (2, Mtu::Mtu256);
            });
            let mut op = op(world.remote());
            if let SendOp::Flush { feth: its, .. } = &mut op {
                *its = feth;
            }
            // One before it is answered, and one behind it is not.
            world.post(SendOp::Send, 4);
            world.post(op, len);
            world.post(SendOp::Send, 5);
            world.answer(k, Syndrome::ACK);
            let of = |sent: &Sent| sent.headers.bth.psn == Psn::new(k + 1);
            let original = world.device.sent.iter().find(|sent| of(sent)).unwrap().clone();
            assert_eq!(original.headers.bth.opcode.operation, *operation);
            // The marks of what goes out in the ordinary way say whose it is, and ask nothing.
            assert!(world.device.sent.iter().all(|s| s.headers.bth.reserved == Bth::OURS));
            while world.device.soundings.is_empty() {
                assert!(world.wait());
            }
            assert!(world.device.sent.iter().all(|s| s.headers.bth.reserved == Bth::OURS));
            let reserved = Bth::OURS | Bth::ASKS;
            let bth = Bth { reserved, ack_req: true, ..original.headers.bth };
            let wanted = Sent { headers: Headers { bth, ..original.headers }, ..original };
            assert_eq!(world.device.soundings, [(av(), wanted)], "{operation:?}");
        }
    }
}

/// A link that takes long pieces has no part in it.
#[test]
fn a_repeated_packet_is_no_longer_than_the_path_mtu() {
    let props = LinkProps { segment: 16 * MTU, ..LinkProps::new(1 << 20) };
    let mut world = world(1, props);
    world.post(SendOp::Write(world.remote()), 4 * MTU);
    assert_eq!(world.sent(), [(0, 4 * MTU as usize)]);
    world.answer(0, Syndrome::ACK);
    assert!(world.wait());
    let [(_, sounding)] = &world.device.soundings[..] else { panic!() };
    let bth = &sounding.headers.bth;
    assert_eq!((bth.psn, sounding.len), (Psn::new(1), MTU as usize));
    assert_eq!(bth.opcode.operation, Operation::WriteMiddle);
}

/// The program may have given its memory away.
#[test]
fn inline_data_goes_out_once_more_as_it_was_posted() {
    let mut world = world(1, LinkProps::new(1 << 20));
    let sges = [Sge { addr: 100, len: 8, lkey: 0 }];
    let flags = SendFlags::SIGNALED | SendFlags::INLINE;
    let wr = SendWr { wr_id: 1, op: SendOp::Send, flags, sges: &sges, ud: None, xrc_srqn: 0 };
    world.qp.post_send(&wr, &mut world.device).unwrap();
    world.qp.transmit(&mut world.device);
    let original = world.device.sent[0].bytes.clone();
    world.device.memory = Bytes::counted(1);
    assert!(world.wait());
    assert_eq!((original.len(), &world.device.soundings[0].1.bytes), (8, &original));
}

#[test]
fn silence_has_the_reason_that_somebody_knows() {
    let (world, number) = silent(None);
    assert_eq!(number, cause(Cause::NeverAnswered));
    assert_eq!(world.device.listened, [(av(), Psn::new(0))]);
    for says in [
        Cause::NoRoute,
        Cause::NobodyOnPort,
        Cause::PeerHasNoQp,
        Cause::PeerNotReady,
        Cause::PeerInError,
        Cause::PsnDiffers,
        Cause::GidDiffers,
        Cause::QpnDiffers,
        Cause::TypeDiffers,
        Cause::PkeyDiffers,
    ] {
        let (world, number) = silent(Some(says));
        assert_eq!(number, cause(says));
        assert_eq!(world.device.listened, [(av(), Psn::new(0))]);
        let (line, text) = (&world.device.lines[0], says.text());
        let own = if says == Cause::PsnDiffers { ", and sq_psn is 0x0 here" } else { "" };
        let name = WcStatus::RetryExcErr.name();
        assert!(line.contains(&format!("({name}): {text}{own};")), "{line}");
    }
}

/// A reason of another packet is none of this one.
#[test]
fn only_the_silence_that_was_looked_into_has_a_reason() {
    // Retries that end with a NAK: the peer is there, and nobody was asked.
    let mut lost = world(0, LinkProps::new(1 << 20));
    lost.device.says = Some(Cause::NoRoute);
    lost.post(SendOp::Send, 8);
    lost.post(SendOp::Send, 8);
    lost.answer(0, Syndrome::ACK);
    lost.answer(1, Syndrome::Nak(NakCode::PsnSequence));
    assert_eq!(lost.failure(), (WcStatus::RetryExcErr, cause(Cause::PacketLost)));
    assert_eq!((lost.sounded(), &lost.device.listened[..]), (vec![], &[][..]));
    // They were asked about the packet before.
    let props = LinkProps { probe_after: Some(MS), ..LinkProps::new(1 << 20) };
    let mut lost = world(0, props);
    lost.device.says = Some(Cause::NoRoute);
    lost.post(SendOp::Send, 8);
    lost.post(SendOp::Send, 8);
    assert!(lost.wait());
    assert_eq!(lost.sounded(), [0]);
    lost.answer(0, Syndrome::ACK);
    lost.answer(1, Syndrome::Nak(NakCode::PsnSequence));
    assert_eq!(lost.failure(), (WcStatus::RetryExcErr, cause(Cause::PacketLost)));
    assert_eq!((lost.sounded(), &lost.device.listened[..]), (vec![0], &[][..]));
}

#[test]
fn a_peer_that_has_answered_before_is_silent_now() {
    let run = |says: Option<Cause>| {
        let mut world = world(2, LinkProps::new(1 << 20));
        world.device.says = says;
        world.post(SendOp::Send, 8);
        world.answer(0, Syndrome::ACK);
        world.device.now = world.device.now + SECOND;
        let begin = world.device.now;
        world.post(SendOp::Send, 8);
        while world.wait() {}
        let ms = world.device.now.since(begin).as_millis();
        assert_eq!(world.device.listened, [(av(), Psn::new(1))]);
        (world.failure().1, ms, world.device.lines[0].clone())
    };
    let (number, ms, line) = run(None);
    assert_eq!(number, cause(Cause::SilentNow));
    assert!(ms > 100 && line.contains(&format!("is silent since {ms} ms")), "{ms}: {line}");
    // Where nobody holds the port any more, the process has ended.
    assert_eq!(run(Some(Cause::NobodyOnPort)).0, cause(Cause::PeerEnded));
    assert_eq!(silent(Some(Cause::NobodyOnPort)).1, cause(Cause::NobodyOnPort));
    assert_eq!(run(Some(Cause::NoRoute)).0, cause(Cause::NoRoute));
}

#[test]
fn the_time_of_a_silence_begins_with_its_first_timeout() {
    let mut world = world(2, LinkProps::new(1 << 20));
    let begin = world.device.now;
    world.post(SendOp::Send, 8);
    while world.wait() {}
    let ms = world.device.now.since(begin).as_millis();
    let line = &world.device.lines[0];
    assert!(ms > 100 && line.contains(&format!("never answered, {ms} ms long")), "{ms}: {line}");
}

#[test]
fn a_peer_that_has_ended_is_the_cause() {
    let mut world = world(1, LinkProps::new(1 << 20));
    world.post(SendOp::Send, 8);
    // Whatever else is said.
    world.device.says = Some(Cause::NoRoute);
    assert!(world.wait());
    assert_eq!(world.sounded(), [0]);
    world.qp.peer_gone(&mut world.device);
    assert_eq!(world.failure(), (WcStatus::RetryExcErr, cause(Cause::PeerEnded)));
    let line = &world.device.lines[0];
    assert!(line.contains("the peer's process (pid 4711) has ended;"), "{line}");
}

/// A packet that is dropped, and the queue pair that drops it.
struct Dropped {
    qp_type: QpType,
    /// The states that it has gone through.
    states: &'static [QpState],
    arrival: Arrival,
    opcode: Opcode,
    psn: u32,
    pkey: PKey,
    counter: Counter,
}

const RQ_PSN: u32 = 0x100;
const TO_RTS: &[QpState] = &[QpState::Init, QpState::Rtr, QpState::Rts];
const TO_ERR: &[QpState] = &[QpState::Init, QpState::Rtr, QpState::Err];

impl Dropped {
    fn new(states: &'static [QpState], counter: Counter) -> Self {
        let opcode = Opcode::new(Service::Rc, Operation::SendOnly);
        let arrival = Arrival { port: 0xbeef, ..from_peer() };
        let pkey = PKey::DEFAULT;
        Self { qp_type: QpType::Rc, states, arrival, opcode, psn: RQ_PSN, pkey, counter }
    }

    fn world(&self) -> World {
        let mut world = World::in_reset(self.qp_type, LinkProps::new(1 << 20));
        let rq_psn = Psn::new(RQ_PSN);
        let attr = QpAttr { rq_psn, ..World::new(QpType::Rc).qp.attr() };
        self.states.iter().for_each(|state| world.go(*state, &attr));
        world.device.counters.borrow_mut().clear();
        world
    }

    fn headers(&self, reserved: u8) -> Headers {
        let bth = Bth::new(self.opcode, Qpn::new(OURS), Psn::new(self.psn));
        Headers::new(Bth { reserved, pkey: self.pkey, ..bth })
    }

    /// The reasons that its sender is told, and the lines of the log.
    fn drop_in(&self, world: &mut World, headers: Headers) -> (Vec<Cause>, Vec<String>) {
        world.receive_from(&self.arrival, headers, &[1; 4]);
        assert_eq!(world.counters()[..], [self.counter], "{:?}", self.opcode);
        let reasons = std::mem::take(&mut world.device.reasons);
        for (arrival, bth, _) in &reasons {
            assert_eq!((*arrival, *bth), (self.arrival, headers.bth));
        }
        let causes = reasons.iter().map(|(.., cause)| *cause).collect();
        (causes, std::mem::take(&mut world.device.lines))
    }
}

/// Packets that are dropped, with the cause and the words for the log.
fn drops() -> Vec<(Dropped, Cause, Option<&'static str>)> {
    use Counter::{DropForeign, DropPkey, DropQpState, DuplicateRequest, OutOfSequence};
    let arrival = Arrival { port: 0xbeef, ..from_peer() };
    let elsewhere = Arrival { destination: gid(9), ..arrival };
    let stranger = Arrival { source: gid(9), ..arrival };
    let other_link = Arrival { interface: 4, ..arrival };
    let uc = Opcode::new(Service::Uc, Operation::SendOnly);
    let rc = Opcode::new(Service::Rc, Operation::WriteOnly);
    let xrc = Opcode::new(Service::Xrc, Operation::SendOnly);
    let of = |states, counter| Dropped::new(states, counter);
    let init: &[QpState] = &[QpState::Init];
    let rtr: &[QpState] = &[QpState::Init, QpState::Rtr];
    let to_ours = "they go to 101:101:101:101:101:101:101:101, and the queue pair is connected from \
                   101:101:101:101:101:101:101:101 to 202:202:202:202:202:202:202:202";
    let to_others = "they go to 909:909:909:909:909:909:909:909, and the queue pair is connected from \
                     101:101:101:101:101:101:101:101 to 202:202:202:202:202:202:202:202";
    let type_of_rc = Some("the queue pair is of type RC, and UC SEND_ONLY came");
    let type_of_uc = Some("the queue pair is of type UC, and RC WRITE_ONLY came");
    let differs = Cause::TypeDiffers;
    let psn = Cause::PsnDiffers;
    let other = PKey(0x8001);
    let partition = Some("they have P_Key 0x8001, and that of the queue pair is 0xffff");
    let before = Some("they begin at PSN 0xff, and rq_psn is 0x100");
    let behind = Some("they begin at PSN 0x101, and rq_psn is 0x100");
    vec![
        (Dropped { opcode: uc, ..of(TO_RTS, DropQpState) }, differs, type_of_rc),
        (Dropped { opcode: uc, ..of(&[], DropQpState) }, differs, type_of_rc),
        (Dropped { opcode: uc, arrival: stranger, ..of(TO_ERR, DropQpState) }, differs, type_of_rc),
        (
            Dropped { qp_type: QpType::Uc, opcode: rc, ..of(TO_RTS, DropQpState) },
            differs,
            type_of_uc,
        ),
        (of(&[], DropQpState), Cause::PeerNotReady, None),
        (Dropped { psn: 5, ..of(init, DropQpState) }, Cause::PeerNotReady, None),
        (Dropped { arrival: stranger, ..of(init, DropQpState) }, Cause::PeerNotReady, None),
        (Dropped { arrival: stranger, ..of(rtr, DropForeign) }, Cause::GidDiffers, Some(to_ours)),
        (
            Dropped { arrival: elsewhere, ..of(TO_RTS, DropForeign) },
            Cause::GidDiffers,
            Some(to_others),
        ),
        (
            Dropped { arrival: other_link, ..of(TO_RTS, DropForeign) },
            Cause::GidDiffers,
            Some(to_ours),
        ),
        (
            Dropped { arrival: stranger, ..of(TO_ERR, DropQpState) },
            Cause::GidDiffers,
            Some(to_ours),
        ),
        (of(TO_ERR, DropQpState), Cause::PeerInError, None),
        (Dropped { psn: 5, ..of(TO_ERR, DropQpState) }, Cause::PeerInError, None),
        (Dropped { pkey: other, ..of(init, DropQpState) }, Cause::PeerNotReady, None),
        (Dropped { pkey: other, ..of(TO_RTS, DropPkey) }, Cause::PkeyDiffers, partition),
        (
            Dropped { pkey: other, psn: RQ_PSN + 1, ..of(TO_RTS, DropPkey) },
            Cause::PkeyDiffers,
            partition,
        ),
        (
            Dropped { qp_type: QpType::XrcRecv, opcode: xrc, pkey: other, ..of(rtr, DropPkey) },
            Cause::PkeyDiffers,
            partition,
        ),
        (Dropped { psn: RQ_PSN - 1, ..of(TO_RTS, DuplicateRequest) }, psn, before),
        (Dropped { psn: RQ_PSN + 1, ..of(TO_RTS, OutOfSequence) }, psn, behind),
        (
            Dropped {
                qp_type: QpType::XrcRecv,
                opcode: xrc,
                psn: RQ_PSN + 1,
                ..of(rtr, OutOfSequence)
            },
            psn,
            behind,
        ),
    ]
}

#[test]
fn the_sender_of_an_asking_dropped_packet_learns_why() {
    for (drop, cause, said) in drops() {
        let name = format!("{cause:?} in {:?} of {:?}", drop.states, drop.qp_type);
        let mut world = drop.world();
        for reserved in [Bth::ASKS, Bth::ASKS | Bth::OURS, 0x3f] {
            let (told, lines) = drop.drop_in(&mut world, drop.headers(reserved));
            assert_eq!(told, [cause], "{name}");
            // The log says a difference once, when a sender asks. It says a state when a sender asks again, since that may pass.
            let turn = if said.is_some() { Bth::ASKS } else { Bth::ASKS | Bth::OURS };
            let state = match cause {
                Cause::PeerNotReady => Some(format!(
                    "it is in {}, and takes packets in RTR and RTS",
                    if drop.states.is_empty() { "RESET" } else { "INIT" }
                )),
                Cause::PeerInError => {
                    Some("it is in ERR, and takes packets in RTR and RTS".to_owned())
                }
                _ => None,
            };
            let said = said.map(str::to_owned).or(state);
            let wanted = said.filter(|_| reserved == turn).map(|said| {
                let source = drop.arrival.source.to_ip();
                format!(
                    "queue pair 0x000011 drops packets from {source}: {said}; see `anyverbs explain {cause}`"
                )
            });
            assert_eq!(lines, Vec::from_iter(wanted), "{name}");
        }
    }
}

#[test]
fn nobody_is_told_who_has_not_asked() {
    for (drop, ..) in drops() {
        for reserved in [0, Bth::OURS, 0x3f - Bth::ASKS] {
            let (told, lines) = drop.drop_in(&mut drop.world(), drop.headers(reserved));
            // The log says of a duplicate before the first packet that it is lost.
            let said = usize::from(drop.counter == Counter::DuplicateRequest);
            assert_eq!((told, lines.len()), (vec![], said), "{reserved:#x}");
        }
    }
}

/// A receiver whose `rq_psn` is above the first PSN of its peer acknowledges the first packets as duplicates (IBA 9.7.5.1.3).
#[test]
fn a_duplicate_of_nothing_is_acknowledged_and_said_once() {
    let world = || Dropped::new(TO_RTS, Counter::DuplicateRequest).world();
    let mut ends = world();
    for psn in [RQ_PSN - 2, RQ_PSN - 1] {
        ends.receive_message(Operation::SendOnly, psn, 4);
        assert!(ends.qp.owes_ack());
        ends.qp.acknowledge(&mut ends.device);
    }
    assert_eq!(ends.sent(), [(RQ_PSN - 1, 0); 2]);
    let said = "queue pair 0x000011: a packet with PSN 0xfe came from queue pair 0x000022 at 202:202:202:202:202:202:202:202 \
                as a duplicate, but nothing was received before, and rq_psn is 0x100 here; it is not executed, and its \
                sender may take it for done; see `anyverbs explain AV1208`";
    assert_eq!(ends.device.lines, [said]);
    let lost = ends.qp.lost();
    assert_eq!((lost.len(), lost[0].cause, lost[0].count), (1, Cause::PsnDiffers, 1));
    assert!(said.contains(&lost[0].first), "{}", lost[0].first);
    // A READ gets no answer at all.
    let mut ends = world();
    let mut headers = ends.headers(Operation::ReadRequest, RQ_PSN - 1);
    headers.reth = Some(Reth { va: IOVA, rkey: ends.device.keys.rkey, len: 4 });
    ends.receive(headers, &[]);
    assert_eq!((ends.sent(), ends.device.lines.len()), (vec![], 1));
    // Once something was executed, a duplicate is ordinary.
    let mut ends = world();
    ends.receive_message(Operation::WriteOnly, RQ_PSN, 4);
    ends.receive_message(Operation::WriteOnly, RQ_PSN, 4);
    ends.receive_message(Operation::WriteOnly, RQ_PSN - 1, 4);
    assert_eq!((&ends.device.lines[..], ends.qp.lost()), (&[][..], &[][..]));
}

/// The peer of a crossed connection answers a queue pair that has asked nothing.
#[test]
fn an_answer_to_a_packet_that_was_never_sent_is_noted() {
    let mut world = World::new(QpType::Rc);
    let strays = |world: &World| std::mem::take(&mut *world.device.strays.borrow_mut());
    world.answer(0, Syndrome::ACK);
    world.answer(7, Syndrome::Nak(NakCode::InvalidRequest));
    assert_eq!(strays(&world), [(av(), Psn::new(0)), (av(), Psn::new(7))]);
    world.post(SendOp::Send, 8);
    world.answer(0, Syndrome::ACK);
    // Again, and of earlier packets.
    world.answer(0, Syndrome::ACK);
    world.answer(0xff_ffff, Syndrome::ACK);
    assert_eq!(strays(&world), []);
    world.answer(1, Syndrome::ACK);
    assert_eq!(strays(&world), [(av(), Psn::new(1))]);
    // Once it has failed, its late answers are no strays, unless it is crossed.
    for (says, noted) in [(None, 0), (Some(Cause::QpnDiffers), 1)] {
        let (world, _) = &mut silent(says);
        world.answer(0, Syndrome::ACK);
        assert_eq!(strays(world).len(), noted, "{says:?}");
    }
}

#[test]
fn a_peer_of_another_family_has_no_way() {
    let ip = |text: &str| Gid::from(text.parse::<std::net::IpAddr>().unwrap());
    let run = |[sgid, dgid]: [&str; 2], says: Option<Cause>| {
        let mut world = World::with(QpType::Rc, LinkProps::new(1 << 20), |attr| {
            attr.retry_cnt = 1;
            attr.av = AddressVector { sgid: ip(sgid), dgid: ip(dgid), ..av() };
        });
        world.device.says = says;
        world.post(SendOp::Send, 8);
        while world.wait() {}
        (world.failure().1, world.device.lines[0].clone())
    };
    let families = "no route leads to the peer: the two addresses are of different families;";
    for says in [None, Some(Cause::NoRoute)] {
        for gids in [["10.0.0.1", "fd00::2"], ["fd00::1", "10.0.0.2"]] {
            let (number, line) = run(gids, says);
            assert_eq!(number, cause(Cause::NoRoute));
            assert!(line.contains(families), "{line}");
        }
    }
    let (number, line) = run(["10.0.0.1", "255.255.255.255"], None);
    assert!(number == cause(Cause::NoRoute) && line.contains("that of a broadcast;"), "{line}");
    assert_eq!(run(["10.0.0.1", "10.0.0.2"], None).0, cause(Cause::NeverAnswered));
    // Somebody is there.
    let heard = run(["10.0.0.1", "fd00::2"], Some(Cause::PeerHasNoQp)).0;
    assert_eq!(heard, cause(Cause::PeerHasNoQp));
}

#[test]
fn a_response_or_a_notification_that_is_dropped_asks_nothing() {
    let mut count = 0;
    for (drop, cause, _) in drops() {
        // A PSN of a request says nothing of responses, which are taken.
        if cause == Cause::PsnDiffers {
            continue;
        }
        for operation in [Operation::Ack, Operation::ReadResponseOnly] {
            let mut headers = drop.headers(Bth::OURS | Bth::ASKS);
            let service = drop.opcode.service;
            let service = if service == Service::Uc { Service::Xrc } else { service };
            headers.bth.opcode = Opcode::new(service, operation);
            headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 0 });
            assert_eq!(drop.drop_in(&mut drop.world(), headers), (vec![], vec![]), "{cause:?}");
            count += 1;
        }
    }
    assert_eq!(count, 34);
    // A peer that asks by a response gets none where the response is taken.
    let mut world = World::new(QpType::Rc);
    let mut headers = world.headers(Operation::Ack, 7);
    headers.bth.reserved = Bth::ASKS;
    headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 0 });
    world.receive(headers, &[]);
    let mut headers =
        Headers::new(Bth { opcode: Opcode::new(Service::Cnp, Operation::Cnp), ..headers.bth });
    headers.bth.reserved = Bth::ASKS;
    world.receive_from(&Arrival { source: gid(9), ..from_peer() }, headers, &[0; 16]);
    assert_eq!((&world.device.reasons[..], &world.device.lines[..]), (&[][..], &[][..]));
}

#[test]
fn a_request_in_its_turn_gets_no_reason() {
    let asks = |world: &World, psn: u32| {
        let mut headers = world.headers(Operation::WriteOnly, psn);
        headers.bth.reserved = Bth::OURS | Bth::ASKS;
        headers.reth = Some(Reth { va: IOVA, rkey: world.device.keys.rkey, len: 4 });
        headers
    };
    let mut world = Dropped::new(TO_RTS, Counter::DuplicateRequest).world();
    let executed = asks(&world, RQ_PSN);
    world.receive(executed, &[1; 4]);
    assert_eq!(world.counters(), []);
    // It has begun with the right number: a duplicate and a gap are no difference.
    for (psn, counter) in [
        (RQ_PSN, Counter::DuplicateRequest),
        (RQ_PSN - 1, Counter::DuplicateRequest),
        (RQ_PSN + 2, Counter::OutOfSequence),
    ] {
        let headers = asks(&world, psn);
        world.receive(headers, &[1; 4]);
        assert_eq!(world.counters(), [counter]);
    }
    assert_eq!((&world.device.reasons[..], &world.device.lines[..]), (&[][..], &[][..]));
}

#[test]
fn a_reset_lets_the_log_say_a_difference_again() {
    let asks = Bth::OURS | Bth::ASKS;
    let of = |counter| Dropped::new(TO_RTS, counter);
    let foreign =
        Dropped { arrival: Arrival { source: gid(9), ..from_peer() }, ..of(Counter::DropForeign) };
    let gap = Dropped { psn: RQ_PSN + 9, ..of(Counter::OutOfSequence) };
    let early = of(Counter::DropQpState);
    // A queue pair that was not ready has said nothing.
    let mut world = Dropped::new(&[], Counter::DropQpState).world();
    let attr = QpAttr { rq_psn: Psn::new(RQ_PSN), ..World::new(QpType::Rc).qp.attr() };
    for _ in 0..2 {
        let told = early.drop_in(&mut world, early.headers(asks));
        assert_eq!(told, (vec![Cause::PeerNotReady], vec![]));
        TO_RTS.iter().for_each(|state| world.go(*state, &attr));
        let (told, lines) = foreign.drop_in(&mut world, foreign.headers(asks));
        assert_eq!((told, lines.len()), (vec![Cause::GidDiffers], 1));
        // Another difference is told to the peer, and is not logged.
        let told = gap.drop_in(&mut world, gap.headers(asks));
        assert_eq!(told, (vec![Cause::PsnDiffers], vec![]));
        world.go(QpState::Reset, &attr);
        world.counters();
    }
}
