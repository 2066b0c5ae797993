//! A queue pair's share of a script of faults: which of its packets and requests the rules choose, and what waits meanwhile.

mod rules;
mod waiting;
mod withheld;

use std::collections::VecDeque;
use std::mem::discriminant;
use std::time::Duration;

use anyverbs_causes::Cause;
use anyverbs_faults::{Fault, Limit, PacketAction, Rule, Status, WorkAction};
use anyverbs_links::faults::{Active, Faults, InLine, Known, QpPlace};
use anyverbs_objects::gid::GidTables;
use anyverbs_proto::env::Side;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Psn, Qpn};
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wire::packet::Headers;
pub(super) use rules::Seen;
use rules::{Armed, Cut, Rules, Said};
use waiting::{HeldCompletions, ParkedPackets, index};
pub(super) use waiting::{HeldWc, MOST_PARKED, Parked, Wait};
use withheld::Withheld;
pub(super) use withheld::{Fate, Meddling};

/// The longest wait, in milliseconds, of a packet that changes places with the next one. If it was the last, the peer's answer still
/// comes within the ACK timeout, which is 16 at least (`a_reordered_packet_leaves_behind_the_next_or_soon`).
const NEXT_WITHIN: Duration = Duration::from_millis(2);

/// Lines of the log for one rule and one queue pair; the counter and the trace have all.
const MOST_SAID: u32 = 10;

/// The place of a rule that was cleared.
const CLEARED: usize = usize::MAX;

/// The faults of a queue pair, under its lock.
#[derive(Debug)]
pub(super) struct QpFaults {
    plan: &'static Faults,
    pub(super) place: QpPlace,
    known: Known,
    rules: Rules,
    /// Sends that were posted, and receives that completed.
    work: [u64; 2],
    /// Sends that were posted and that a rule chose: the places in the send queue.
    chosen: VecDeque<(u32, Chosen)>,
    /// Completions that wait, of each side.
    held: [HeldCompletions; 2],
    /// Packets that leave later.
    pub(super) parked: ParkedPackets,
    /// The deeds of the rules on requests that may have no answer yet.
    withheld: Withheld,
    /// The last request of the peer that a rule took away.
    taken: Option<(Psn, &'static Rule)>,
    /// When a send that waits for it fails.
    spoils_at: Option<Time>,
    /// The receive of the packet in hand fails by a rule.
    pub(super) spoils_receive: bool,
    /// A failure flushes the sends behind it.
    flushes: bool,
    /// Rules that name this queue pair and by which it has still to fail, each with its time.
    fails: Vec<(Time, &'static Rule)>,
    /// Those by which it has failed.
    failed: Vec<&'static Rule>,
}

/// The choice of a rule about a work request.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    action: WorkAction,
    /// The number of the request, from 1.
    n: u64,
    rule: &'static Rule,
    /// The place of the rule among those of the queue pair.
    at: usize,
}

impl Chosen {
    /// The fault that it made of a completion.
    fn did(&self, side: Side, wc: &Wc) -> Injected {
        let &Self { action, n, rule, at } = self;
        let happens = match action {
            WorkAction::Never => "never completes".to_owned(),
            WorkAction::Late(late) => format!("completes {late:?} later"),
            WorkAction::Fails(status, late) => {
                let begin = if side == Side::Send { "is not sent and " } else { "" };
                let late = match late {
                    Duration::ZERO => String::new(),
                    late => format!(" after {late:?}"),
                };
                format!("{begin}fails with {status}{late}")
            }
        };
        let kind = if side == Side::Send { "send" } else { "receive" };
        let what = format!("{kind} {n} {happens}: wr_id {:#x}", wc.wr_id);
        Injected { rule, at, what, is_said_once: false }
    }
}

/// The fate of a packet, by all rules that choose it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// It is lost.
    pub(super) is_lost: bool,
    /// It fails the check of its bytes, and is lost by that.
    pub(super) is_corrupt: bool,
    /// It is there twice.
    pub(super) is_double: bool,
    /// The next one overtakes it.
    pub(super) is_overtaken: bool,
    /// It leaves at the rate of the rule at this place.
    pub(super) limit: Option<(usize, Limit)>,
    /// It waits for so long by the rule at this place, behind its line if it has one.
    pub(super) delay: Option<(usize, Duration)>,
    /// It has the mark of a congested network.
    pub(super) is_marked: bool,
    /// It finds no receive.
    pub(super) is_not_ready: bool,
}

impl Verdict {
    /// Whether it waits before it leaves.
    pub(super) fn waits(&self) -> bool {
        self.is_overtaken || self.limit.is_some() || self.delay.is_some()
    }

    /// How often it is there.
    pub(super) fn times(&self) -> u8 {
        if self.is_lost { 0 } else { 1 + u8::from(self.is_double) }
    }
}

/// The effect of a rule, for log and trace.
#[derive(Debug)]
pub(super) struct Injected {
    pub(super) rule: &'static Rule,
    /// The place of the rule among those of the queue pair.
    at: usize,
    pub(super) what: String,
    /// The log says it of the first packet alone. There may be thousands, and they are all alike.
    is_said_once: bool,
}

impl Injected {
    /// A rule of the same action has chosen the packet.
    fn is_like(&self, fault: &Fault) -> bool {
        match (&self.rule.fault, fault) {
            (Fault::Packets { action, .. }, Fault::Packets { action: other, .. }) => {
                discriminant(action) == discriminant(other)
            }
            _ => false,
        }
    }

    /// The packet waits by this rule.
    pub(super) fn is_wait(&self) -> bool {
        use PacketAction as A;
        let Fault::Packets { action, .. } = &self.rule.fault else { return false };
        matches!(action, A::Reorder | A::Delay(..) | A::Limit(_))
    }

    /// The packet finds no receive by this rule.
    pub(super) fn is_not_ready(&self) -> bool {
        matches!(self.rule.fault, Fault::Packets { action: PacketAction::NotReady, .. })
    }

    /// The packet waits for a line by this rule.
    pub(super) fn is_line(&self) -> bool {
        matches!(self.rule.fault, Fault::Packets { action: PacketAction::Limit(_), .. })
    }

    /// The effect of a rule that has no place among those of the queue pair.
    pub(super) fn of_none(rule: &'static Rule, what: String) -> Self {
        Self { rule, at: CLEARED, what, is_said_once: false }
    }
}

impl QpFaults {
    /// The faults of a new queue pair of a device.
    pub(super) fn new(plan: &'static Faults, device: usize, qpn: Qpn) -> Self {
        let place = plan.add_qp(device, qpn.get());
        let mut faults = Self {
            plan,
            place,
            known: Known::default(),
            rules: Rules::default(),
            work: [0; 2],
            chosen: VecDeque::new(),
            held: Default::default(),
            parked: ParkedPackets::default(),
            withheld: Withheld::default(),
            taken: None,
            spoils_at: None,
            spoils_receive: false,
            flushes: false,
            fails: Vec::new(),
            failed: Vec::new(),
        };
        faults.learn(Time::from_nanos(0));
        faults
    }

    /// Takes the rules that were added. If those before them were cleared, completions and packets that wait are due. A send that was to fail was
    /// not sent, so it fails now.
    pub(super) fn learn(&mut self, now: Time) {
        let (cleared, new) = self.plan.news(&mut self.known);
        if cleared {
            self.unlearn(now);
        }
        for Active { number, rule, since, lines } in new {
            if self.is_of(rule) {
                if let Fault::Fails(_, after) = rule.fault
                    && rule.place.qp.is_some()
                    && !self.has_failed_by(rule)
                {
                    self.fails.push((since + after, rule));
                }
                let dice = self.plan.dice(number, self.place);
                let line = lines.get(self.place.port);
                let last_due = Time::default();
                let peer = rule.place.peer.map(Gid::from);
                let (seen, said) = (0, Said::default());
                let new = Armed { rule, peer, dice, since, seen, said, last_due, line };
                self.rules.add(new, self.work);
            }
        }
    }

    /// No rule that it knows holds any more.
    fn unlearn(&mut self, now: Time) {
        self.rules = Rules::default();
        self.fails.clear();
        self.chosen.retain(|(_, chosen)| matches!(chosen.action, WorkAction::Fails(..)));
        self.chosen.iter_mut().for_each(|(_, chosen)| chosen.at = CLEARED);
        self.spoils_at = self.spoils_at.map(|_| now);
        self.held.iter_mut().for_each(|held| held.release(now));
        self.parked.release(now);
    }

    /// The queue pair got this port, among those of all devices. The rules of the new one hold, from the first packet on.
    pub(super) fn moves_to(&mut self, port: usize, now: Time) {
        if self.place.port != port {
            self.place.port = port;
            self.known = Known::default();
            self.unlearn(now);
            self.learn(now);
        }
    }

    /// Whether the rule at a place of the script holds for it.
    pub(super) fn is_of(&self, rule: &Rule) -> bool {
        self.plan.concerns(rule, self.place)
    }

    /// The queue pair is ready, and may have left SQE.
    pub(super) fn is_ready(&mut self) {
        self.flushes = false;
    }

    /// The rule by which the queue pair, which is ready now, should have failed before.
    pub(super) fn fails_late(&self, now: Time) -> Option<&'static Rule> {
        self.fails.iter().find(|(at, _)| *at <= now).map(|(_, rule)| *rule)
    }

    pub(super) fn has_failed_by(&self, rule: &Rule) -> bool {
        self.failed.iter().any(|known| std::ptr::eq(*known, rule))
    }

    /// It fails by a rule. One that names it does so once: it may be reset, and used again.
    pub(super) fn fails_by(&mut self, rule: &'static Rule) {
        self.flushes = true;
        self.is_done_with(rule);
    }

    /// It has failed by a rule, or cannot.
    pub(super) fn is_done_with(&mut self, rule: &'static Rule) {
        self.fails.retain(|(_, known)| !std::ptr::eq(*known, rule));
        if rule.place.qp.is_some() {
            self.failed.push(rule);
        }
    }

    /// Whether its port is down, or has lost this address of its own.
    pub(super) fn is_cut(&self, own: Gid, gids: &GidTables) -> bool {
        self.cut(own, gids).is_some()
    }

    fn cut(&self, own: Gid, gids: &GidTables) -> Option<Cut> {
        let port = self.place.port;
        if self.plan.is_down(port) {
            return Some(Cut::Port);
        }
        if !self.plan.lacks_gids() || own.is_multicast() || gids.has(port, own) {
            return None;
        }
        gids.withheld_index(port, own).map(Cut::Gid)
    }

    /// The fate of a packet, and the rules that decide it: of each action the first that chooses it, in the order of the script. One
    /// that loses it is the last. Nothing is counted yet.
    pub(super) fn judge(
        &self,
        now: Time,
        packet: Seen,
        gids: &GidTables,
    ) -> (Verdict, Vec<Injected>) {
        let (mut verdict, mut all) = (Verdict::default(), Vec::<Injected>::new());
        let (direction, opcode, psn) = (packet.direction(), packet.opcode, packet.psn.get());
        let shown = || format!("{opcode}, PSN {psn:#x}");
        if let Some(cut) = self.cut(packet.own, gids) {
            verdict.is_lost = true;
            return (verdict, self.lost_by(cut, now, packet).into_iter().collect());
        }
        for (at, armed) in self.rules.of_packet(packet) {
            let Armed { rule, dice, since, seen, .. } = armed;
            let Fault::Packets { action, which, span, .. } = &rule.fault else { continue };
            let n = seen + 1;
            if !span.has(now.since(*since))
                || !dice.chooses(*which, n)
                || all.iter().any(|earlier| earlier.is_like(&rule.fault))
            {
                continue;
            }
            let happens = match *action {
                PacketAction::Drop => {
                    verdict.is_lost = true;
                    "is lost"
                }
                PacketAction::Duplicate => {
                    verdict.is_double = true;
                    "is there twice"
                }
                PacketAction::Corrupt => {
                    (verdict.is_lost, verdict.is_corrupt) = (true, true);
                    "is corrupt"
                }
                PacketAction::Reorder => {
                    verdict.is_overtaken = true;
                    "is overtaken"
                }
                PacketAction::Delay(least, most) => {
                    verdict.delay = Some((at, dice.time((least, most), n)));
                    "is late"
                }
                PacketAction::Limit(limit) => {
                    let has_room = limit.queue.is_none_or(|queue| armed.waiting() < queue);
                    verdict.is_lost = !has_room || self.parked.is_full();
                    verdict.limit = (!verdict.is_lost).then_some((at, limit));
                    if verdict.is_lost { "finds a full queue and is lost" } else { "waits" }
                }
                PacketAction::Mark => {
                    verdict.is_marked = true;
                    "has the mark of congestion"
                }
                PacketAction::NotReady => {
                    verdict.is_not_ready = true;
                    "finds no receive"
                }
            };
            let what = format!("{direction} packet {n} {happens}: {}", shown());
            let is_said_once = matches!(action, PacketAction::Limit(_)) && !verdict.is_lost;
            let injected = Injected { rule, at, what, is_said_once };
            if verdict.is_lost {
                // The other rules do nothing with it.
                return (verdict, vec![injected]);
            }
            all.push(injected);
        }
        (verdict, all)
    }

    /// The effect of a cut on a packet. None if no rule of now is the cause: the cut ends soon.
    fn lost_by(&self, cut: Cut, now: Time, packet: Seen) -> Option<Injected> {
        let port = self.plan.port_name(self.place.port);
        let why = match cut {
            Cut::Port => format!("the port of {port} is down"),
            Cut::Gid(_) => format!("the port of {port} has lost this GID"),
        };
        let (direction, opcode, psn) = (packet.direction(), packet.opcode, packet.psn.get());
        let what = format!("{direction} packet is lost: {opcode}, PSN {psn:#x}, for {why}");
        let (at, rule) = self.rules.cutting(cut, now)?;
        Some(Injected { rule, at, what, is_said_once: true })
    }

    /// A packet that has waited is due: the effect of the rule that loses it now, since its port went down meanwhile.
    pub(super) fn loses_late(&self, now: Time, packet: Seen, gids: &GidTables) -> Option<Injected> {
        self.lost_by(self.cut(packet.own, gids)?, now, packet)
    }

    /// Whether rules lose a packet that is sent, or let it wait and have let none of its tries leave yet.
    pub(super) fn is_withheld(&self, now: Time, packet: Seen, gids: &GidTables) -> bool {
        let (verdict, _) = self.judge(now, packet, gids);
        verdict.is_lost || verdict.waits() && !self.withheld.has_left(packet.psn)
    }

    /// A rule, or none, decided what becomes of a packet that is sent. `is_again`: it was sent before.
    pub(super) fn note_fate(&mut self, headers: &Headers, fate: Fate, is_again: bool, now: Time) {
        if headers.bth.opcode.is_request() {
            self.withheld.note(headers.bth.psn, fate, is_again, now);
        }
    }

    /// A rule took a packet away that came from the peer. `acks`: the packet that it answers besides.
    pub(super) fn note_taken(&mut self, rule: &'static Rule, headers: &Headers, acks: Option<Psn>) {
        let answers = headers.bth.opcode.is_response().then_some(headers.bth.psn);
        if let Some(psn) = acks.or(answers) {
            self.withheld.note_answer(psn, rule);
        }
        if headers.bth.opcode.is_request() {
            self.taken = Some((headers.bth.psn, rule));
        }
    }

    /// The rule that took away the last of the peer's requests, if that was from `first` to the one before `next`.
    pub(super) fn taken_by(&self, first: Psn, next: Psn) -> Option<&'static Rule> {
        let is_it = |psn: Psn| psn.since(first) >= 0 && psn.since(next) < 0;
        self.taken.filter(|(psn, _)| is_it(*psn)).map(|(_, rule)| rule)
    }

    /// Tells the deeds of the rules on the oldest packet that has no answer.
    pub(super) fn meddling(&self, una: Psn, now: Time) -> Option<Meddling> {
        self.withheld.with(una, now)
    }

    /// When a packet that the rule at a place delays until `due` leaves.
    fn delays(&mut self, at: usize, due: Time) -> Time {
        self.rules.at(at).map_or(due, |rule| rule.delays(due))
    }

    /// Counts a packet that was judged.
    pub(super) fn count(&mut self, packet: Seen) {
        self.rules.count(packet);
    }

    /// How a packet of so many bytes waits. A line is before a delay, and its queue has no packets that are late.
    pub(super) fn wait_of(&mut self, verdict: &Verdict, bytes: usize, now: Time) -> Wait {
        let next = if verdict.is_overtaken { NEXT_WITHIN } else { Duration::ZERO };
        let (left, in_line) = match verdict.limit {
            Some((at, limit)) => self.leaves(at, limit, bytes, now),
            None => (now, None),
        };
        let due = verdict.delay.map_or(left, |(at, late)| self.delays(at, left + late)) + next;
        match verdict.limit {
            Some(_) => {
                Wait { due: left, then: (due > left).then_some(due), in_line, ..Wait::default() }
            }
            None => {
                let behind_next = verdict.is_overtaken && verdict.delay.is_none();
                Wait { due, behind_next, ..Wait::default() }
            }
        }
    }

    /// A packet of so many bytes is sent at the rate of the rule at a place: when it has left, and its place in the queue.
    fn leaves(
        &mut self,
        at: usize,
        limit: Limit,
        bytes: usize,
        now: Time,
    ) -> (Time, Option<InLine>) {
        self.rules.at(at).map_or((now, None), |rule| rule.leaves(limit, bytes, now))
    }

    /// A send is about to be posted at a place of the send queue.
    pub(super) fn posts_send(&mut self, position: u32, now: Time) {
        self.work[0] += 1;
        if let Some(chosen) = self.choose_work(false, self.work[0], now) {
            self.chosen.push_back((position, chosen));
        }
    }

    /// It was not posted after all.
    pub(super) fn takes_back(&mut self, position: u32) {
        self.work[0] -= 1;
        if self.chosen.back().is_some_and(|(at, _)| *at == position) {
            self.chosen.pop_back();
        }
    }

    /// The status with which the send at this place fails instead of being sent, and whether that waits.
    pub(super) fn spoils(&mut self, position: u32, now: Time) -> Option<(WcStatus, bool)> {
        let (_, chosen) = self.chosen.back().filter(|(at, _)| *at == position)?;
        let WorkAction::Fails(status, late) = chosen.action else { return None };
        let waits = late > Duration::ZERO;
        if waits {
            self.spoils_at.get_or_insert(now + late);
        }
        Some((status_of(status), waits))
    }

    /// Whether the send that waits for its failure fails now.
    pub(super) fn take_spoiled(&mut self, now: Time) -> bool {
        self.spoils_at.take_if(|at| *at <= now).is_some()
    }

    /// Whether the log says this of a rule. A rule that is about each packet would fill it.
    pub(super) fn is_said(&mut self, injected: &Injected) -> Option<bool> {
        let Some(Armed { said, .. }) = self.rules.at(injected.at) else { return Some(false) };
        let (count, most) = match injected.is_said_once {
            true => (&mut said.once, 1),
            false => (&mut said.each, MOST_SAID),
        };
        *count = count.saturating_add(1);
        (*count <= most).then_some(*count == most)
    }

    /// The status with which the receive fails that the packet in hand completes, if it completes one.
    pub(super) fn status_of_receive(&self, now: Time) -> Option<WcStatus> {
        match self.choose_work(true, self.work[1] + 1, now)?.action {
            WorkAction::Fails(status, _) => Some(status_of(status)),
            WorkAction::Late(_) | WorkAction::Never => None,
        }
    }

    fn choose_work(&self, receives: bool, n: u64, now: Time) -> Option<Chosen> {
        self.rules.of_work(receives).find_map(|(at, Armed { rule, dice, since, seen, .. })| {
            let n = n.saturating_sub(*seen);
            let age = now.since(*since);
            match rule.fault {
                Fault::Work { action, which, span, .. }
                    if span.has(age) && dice.chooses(which, n) =>
                {
                    Some(Chosen { action, n, rule, at })
                }
                _ => None,
            }
        })
    }

    /// A completion was made. True: it waits. What rules did to it, and to the sends without completions that it stands for, stands
    /// beside: what comes last decides.
    pub(super) fn keeps(
        &mut self,
        (side, now): (Side, Time),
        wc: &Wc,
        solicited: bool,
    ) -> (bool, Vec<Injected>) {
        let mut chosen = match side {
            Side::Send => self.take_chosen(wc.sq_count),
            Side::Recv => {
                self.work[1] += 1;
                self.choose_work(true, self.work[1], now).into_iter().collect()
            }
        };
        // A flush has overtaken what the rules wanted, unless it is what they wanted. A receive may also have failed by itself.
        let is_flush = wc.status == WcStatus::WrFlushErr;
        let by_rule = !self.flushes && wc.vendor_err == u32::from(Cause::Injected.number());
        // An ACK that came with the packet may have completed sends before.
        let is_spoiled = side == Side::Recv && std::mem::take(&mut self.spoils_receive);
        chosen.retain(|chosen| match chosen.action {
            WorkAction::Fails(status, _) if side == Side::Recv => {
                is_spoiled && status_of(status) == wc.status
            }
            WorkAction::Fails(status, _) => !is_flush || by_rule && status.is_flush(),
            WorkAction::Late(_) | WorkAction::Never => !is_flush,
        });
        self.flushes |= side == Side::Send && wc.status != WcStatus::Success;
        let due = |chosen: &Chosen| match chosen.action {
            WorkAction::Never => None,
            WorkAction::Late(late) => Some(now + late),
            WorkAction::Fails(_, late) if side == Side::Recv => Some(now + late),
            // A send that fails has waited for its time.
            WorkAction::Fails(..) => Some(now),
        };
        let due = chosen.iter().map(due).try_fold(now, |a, b| Some(a.max(b?)));
        let injected = chosen.iter().map(|chosen| chosen.did(side, wc)).collect();
        let held = &mut self.held[index(side)];
        if held.len() == 0 && due.is_some_and(|due| due <= now) {
            return (false, injected);
        }
        held.add(HeldWc { wc: *wc, solicited, due });
        (true, injected)
    }

    /// The choices about the sends that a completion stands for.
    fn take_chosen(&mut self, sq_count: u32) -> Vec<Chosen> {
        let is_before =
            |(position, _): &&(u32, Chosen)| sq_count.wrapping_sub(*position).cast_signed() > 0;
        let count = self.chosen.iter().take_while(is_before).count();
        self.chosen.drain(..count).map(|(_, chosen)| chosen).collect()
    }

    /// Whether a rule holds completions or packets, or has lost the oldest packet that has no answer.
    pub(super) fn holds(&self, una: Psn, now: Time) -> bool {
        self.held.iter().any(|held| held.len() > 0)
            || self.parked.len() > 0
            || self.spoils_at.is_some()
            || self.withheld.with(una, now).is_some_and(|meddling| meddling.is_cause)
    }

    /// Whether a completion waits that will not come.
    pub(super) fn is_hung(&self) -> bool {
        self.held.iter().any(HeldCompletions::is_hung)
    }

    /// The queue pair is in an error state: what hangs, and what is behind it, is flushed.
    pub(super) fn flush_hung(&mut self, now: Time, vendor_err: u32) {
        self.held.iter_mut().for_each(|held| held.flush_hung(now, vendor_err));
    }

    /// The completions of a side that wait.
    pub(super) fn held(&mut self, side: Side) -> &mut HeldCompletions {
        &mut self.held[index(side)]
    }

    /// When the next of all that waits is due.
    pub(super) fn next_due(&self) -> Option<Time> {
        let completions = self.held.iter().filter_map(HeldCompletions::next_due);
        completions.chain(self.parked.next_due()).chain(self.spoils_at).min()
    }

    /// The queue pair is reset or destroyed.
    pub(super) fn forget(&mut self) {
        self.chosen.clear();
        self.held.iter_mut().for_each(HeldCompletions::clear);
        self.parked.clear();
        self.withheld = Withheld::default();
        self.taken = None;
        self.spoils_at = None;
        self.flushes = false;
    }
}

fn status_of(status: Status) -> WcStatus {
    use WcStatus as S;
    let all = [
        S::LocLenErr,
        S::LocQpOpErr,
        S::LocProtErr,
        S::WrFlushErr,
        S::MwBindErr,
        S::BadRespErr,
        S::LocAccessErr,
        S::RemInvReqErr,
        S::RemAccessErr,
        S::RemOpErr,
        S::RetryExcErr,
        S::RnrRetryExcErr,
        S::RemAbortErr,
        S::FatalErr,
        S::RespTimeoutErr,
    ];
    let found = all.into_iter().find(|known| *known as u8 == status.number);
    found.unwrap_or(S::GeneralErr)
}
