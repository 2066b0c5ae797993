//! The part of a queue pair's environment that a script of faults asks for. Nobody else comes here.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use anyverbs_causes::Cause;
use anyverbs_faults::Rule;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::{Env, ReasonEnv, Side, TransmitError};
use anyverbs_proto::payload::{Data, Payload};
use anyverbs_proto::qp::attr::QpState;
use anyverbs_proto::qp::{Arrival, Incoming, Qp};
use anyverbs_proto::time::{Clock, Time};
use anyverbs_proto::types::Gid;
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::AddressVector;
use tracing::Level;

use super::env::DeviceEnv;
use super::faults::{Fate, HeldWc, Injected, MOST_PARKED, Parked, QpFaults, Seen, Verdict};
use super::qp_context::QpContext;

/// Bytes of a packet besides its payload: Ethernet, IPv4, UDP, BTH, ICRC.
const FRAME: usize = 14 + 20 + 8 + 12 + 4;

/// Whether a queue pair is in a state from which a rule can let it fail.
fn is_at_work(rule: &Rule, machine: &Qp) -> bool {
    let state = machine.attr().state;
    match rule.fault.is_sqe() {
        true => state == QpState::Rts,
        false => !matches!(state, QpState::Reset | QpState::Err),
    }
}

/// How often a completion that waits for room in its CQ looks for it.
const ROOM_AGAIN: Duration = Duration::from_millis(1);

impl DeviceEnv<'_, '_> {
    pub(super) fn faults(&mut self) -> Option<&mut QpFaults> {
        self.link.watch.as_mut()?.faults.as_deref_mut()
    }

    /// Whether a rule can move the queue pair to a state of failure: the rule has not been cleared, holds for it, and has not done so.
    fn may_fail_by(&mut self, rule: &Rule, machine: &Qp) -> bool {
        let may = |faults: &mut QpFaults| faults.is_of(rule) && !faults.has_failed_by(rule);
        is_at_work(rule, machine)
            && self.faults().is_some_and(may)
            && self.transport.links.faults.as_ref().is_some_and(|faults| faults.has(rule))
    }

    /// Whether a rule moves the queue pair to a state of failure. It is told, and then [`fail_by`](Self::fail_by) is called.
    #[cold]
    pub(crate) fn is_to_fail_by(&mut self, rule: &'static Rule, machine: &Qp) -> bool {
        if !self.may_fail_by(rule, machine) {
            return false;
        }
        let (qpn, qp_type) = (self.cell.qpn.get(), self.cell.qp_type);
        let lacks_sqe = rule.fault.is_sqe() && qp_type.is_reliable();
        if lacks_sqe && let Some(faults) = self.faults() {
            faults.is_done_with(rule);
            let named = rule.named();
            let line = format!(
                "faults: queue pair {qpn:#08x} is of type {}, which has no SQE: it stays as it is ({named})",
                qp_type.name()
            );
            self.transport.aftermath.log_each(Level::WARN, line);
        }
        !lacks_sqe
    }

    /// Moves the queue pair to a state of failure by a rule. Since that was told, the queue pair may have come to another state, and the
    /// rule may have been cleared. Then it stays as it is.
    #[cold]
    pub(crate) fn fail_by(&mut self, rule: &'static Rule, machine: &mut Qp) {
        if !self.may_fail_by(rule, machine) {
            return;
        }
        if let Some(faults) = self.faults() {
            faults.fails_by(rule);
        }
        match rule.fault.is_sqe() {
            true => machine.fail_sends(Cause::Injected, self),
            false => machine.fail(Cause::Injected, self),
        }
        self.flush_hung(Cause::Injected.number().into());
    }

    /// The queue pair is ready, perhaps later than the time at which it was to fail.
    #[cold]
    pub(super) fn fail_late(&mut self, machine: &mut Qp) {
        let now = self.now();
        if let Some(faults) = self.faults() {
            faults.is_ready();
        }
        let mut last: Option<&Rule> = None;
        while let Some(rule) = self.faults().and_then(|faults| faults.fails_late(now))
            && !last.is_some_and(|last| std::ptr::eq(last, rule))
        {
            last = Some(rule);
            if self.is_to_fail_by(rule, machine) {
                let what = format!("goes to {}, for its time has passed", rule.fault.state());
                self.tell(&Injected::of_none(rule, what));
                self.fail_by(rule, machine);
            }
        }
    }

    /// The rules have changed.
    #[cold]
    pub(crate) fn learn_faults(&mut self) {
        let now = self.now();
        if let Some(faults) = self.faults() {
            faults.learn(now);
            self.release_held(now);
            self.release_parked(Some(now));
            self.look_again();
        }
    }

    /// Whether a packet that is sent once more, beside the script, would carry its data past that.
    pub(super) fn is_withheld(&mut self, av: &AddressVector, headers: &Headers) -> bool {
        let (now, packet) = (self.now(), Seen::sent(av, &headers.bth));
        let gids = &self.transport.core.gids;
        self.faults().is_some_and(|faults| faults.is_withheld(now, packet, gids))
    }

    /// Whether its port is down, or has lost this address of its own.
    pub(super) fn is_cut(&mut self, own: Gid) -> bool {
        let gids = &self.transport.core.gids;
        self.faults().is_some_and(|faults| faults.is_cut(own, gids))
    }

    fn tell(&mut self, injected: &Injected) {
        if let Some(watch) = &mut self.link.watch {
            watch.injected(self.transport, self.cell.port.place(), injected);
        }
    }

    /// Wakes the queue pair when the next of all that waits is due.
    fn look_again(&mut self) {
        let due = self.faults().and_then(|faults| faults.next_due());
        if let Some(due) = due
            && self.link.timers.add(due)
        {
            self.transport.add_timer(due, self.cell.qpn);
        }
    }

    /// A packet is about to leave. `None`: it leaves as ever. Otherwise the script has decided, and all is counted.
    #[cold]
    pub(super) fn transmit_faulty(
        &mut self,
        av: &AddressVector,
        (headers, payload): (&Headers, &Payload<'_>),
        note: Option<&str>,
    ) -> Option<Result<(), TransmitError>> {
        let (now, blocked) = (self.now(), self.link.blocked);
        let gids = &self.transport.core.gids;
        let faults = self.faults()?;
        let (mut verdict, mut injected) = faults.judge(now, Seen::sent(av, &headers.bth), gids);
        let overtakes = faults.parked.keeps_overtaken();
        if verdict.waits() && faults.parked.is_full() {
            verdict.is_lost = true;
            injected.retain(Injected::is_wait);
            injected.truncate(1);
            for injected in &mut injected {
                injected.what += &format!("; it is lost, for {MOST_PARKED} packets wait already");
            }
        }
        if verdict == Verdict::default() && !overtakes {
            return None;
        }
        if blocked {
            // It will be tried again.
            return Some(Err(TransmitError::Blocked));
        }
        let waits = verdict.waits() && !verdict.is_lost;
        let once = |env: &mut Self, injected: &mut [Injected]| match waits {
            true => env.park(av, (headers, payload), (&verdict, now), injected),
            false => env.send_seen(av, (headers, payload), note),
        };
        let result = match verdict.is_lost {
            true => self.lose(headers),
            false => once(self, &mut injected),
        };
        if result.is_err() {
            return Some(result);
        }
        let is_again = self.link.watch.as_ref().is_some_and(|watch| watch.is_again(&headers.bth));
        // The last one that it waits for.
        let by = injected.iter().rfind(|injected| injected.is_wait() || !waits);
        let fate = match by.map(|injected| injected.rule) {
            Some(rule) if waits => Fate::Waits(rule),
            Some(rule) if verdict.is_lost => Fate::Lost(rule),
            _ => Fate::Left,
        };
        let times = verdict.times().max(1);
        for n in 0..times {
            // Nobody misses a duplicate that finds no room.
            if (n == 0 || once(self, &mut []).is_ok())
                && let Some(faults) = self.faults()
            {
                faults.note_fate(headers, fate, is_again || n > 0, now);
            }
        }
        if let Some(watch) = &mut self.link.watch {
            watch.note_sent(headers);
        }
        self.count_sent(av, headers);
        injected.iter().for_each(|injected| self.tell(injected));
        if overtakes && !waits && !verdict.is_lost {
            self.release_parked(None);
        }
        self.look_again();
        Some(Ok(()))
    }

    /// A packet leaves later. What rules did to it says when, if they let it wait for a line.
    fn park(
        &mut self,
        av: &AddressVector,
        (headers, payload): (&Headers, &Payload<'_>),
        (verdict, now): (&Verdict, Time),
        injected: &mut [Injected],
    ) -> Result<(), TransmitError> {
        let mut bytes = vec![0; payload.len()];
        let core = self.transport.core;
        payload.copy_to(&core.mrs, &core.memory, &mut bytes)?;
        self.lose(headers)?;
        if let Some(faults) = self.faults() {
            let wait = faults.wait_of(verdict, payload.len() + FRAME, now);
            for injected in injected.iter_mut().filter(|injected| injected.is_line()) {
                let _ = write!(injected.what, "; it leaves after {:?}", wait.due.since(now));
            }
            let packet = Parked { av: *av, headers: *headers, payload: bytes };
            faults.parked.add(wait, packet);
        }
        Ok(())
    }

    /// Gives a packet to its link, and tells the watch.
    fn send_seen(
        &mut self,
        av: &AddressVector,
        packet: (&Headers, &Payload<'_>),
        note: Option<&str>,
    ) -> Result<(), TransmitError> {
        self.hand_over(av, packet, None, note)?;
        let QpContext { watch, to, .. } = &mut *self.link;
        if let (Some(watch), Some(route)) = (watch, to.route()) {
            watch.sent(route.way(), av, packet, note.unwrap_or_default());
        }
        Ok(())
    }

    /// A packet has left as ever.
    pub(super) fn note_left(&mut self, headers: &Headers) {
        let now = self.now();
        if let Some(faults) = self.faults() {
            faults.note_fate(headers, Fate::Left, false, now);
        }
    }

    /// A packet has left, or was lost.
    pub(super) fn count_sent(&mut self, av: &AddressVector, headers: &Headers) {
        if let Some(faults) = self.faults() {
            faults.count(Seen::sent(av, &headers.bth));
        }
    }

    /// A packet does not leave now. A reliable one waits for its turn on the path all the same.
    fn lose(&mut self, headers: &Headers) -> Result<(), TransmitError> {
        let (qpn, bth) = (self.cell.qpn, &headers.bth);
        let waits = self.cell.qp_type.is_reliable() && bth.opcode.is_request();
        if waits && !self.link.may_request(qpn, bth.psn) {
            return Err(TransmitError::Blocked);
        }
        Ok(())
    }

    /// Sends packets that waited: those that are due, or those that a packet has overtaken.
    fn release_parked(&mut self, now: Option<Time>) {
        let next = |faults: &mut QpFaults| match now {
            Some(now) => faults.parked.take_due(now),
            None => faults.parked.take_overtaken(),
        };
        while let Some(packet) = self.faults().and_then(next) {
            let left_at = self.now();
            let gids = &self.transport.core.gids;
            let mut lost = None;
            if let Some(faults) = self.faults() {
                let seen = Seen::sent(&packet.av, &packet.headers.bth);
                lost = faults.loses_late(left_at, seen, gids);
                let fate = lost.as_ref().map_or(Fate::Released, |lost| Fate::LostLate(lost.rule));
                faults.note_fate(&packet.headers, fate, true, left_at);
            }
            if let Some(lost) = lost {
                self.tell(&lost);
                continue;
            }
            // If there is no room the network has lost it.
            let payload = Payload::bytes(&packet.payload);
            let watch = self.link.watch.as_mut();
            let note = watch.map(|watch| watch.describe(&packet.headers.bth));
            let _ = self.send_seen(&packet.av, (&packet.headers, &payload), note.as_deref());
        }
    }

    /// The queue pair is destroyed: what waits leaves now. A network that is slow would bring it as well.
    #[cold]
    pub(super) fn release_all(&mut self) {
        self.release_parked(Some(Time::from_nanos(u64::MAX)));
    }

    /// A completion was made. True: it waits, or was given to the program here.
    #[cold]
    pub(super) fn complete_watched(&mut self, side: Side, wc: &Wc, solicited: bool) -> bool {
        if self.faults().is_none() {
            if let Some(watch) = &mut self.link.watch {
                watch.completed(side, wc);
            }
            return false;
        }
        let now = self.now();
        let mut wc = wc;
        let flushed = Wc { status: WcStatus::WrFlushErr, ..*wc };
        if wc.status != WcStatus::Success {
            // A completion behind one that hangs is flushed with it: no failure comes behind a flush.
            if self.faults().is_some_and(|faults| faults.held(side).is_hung()) {
                wc = &flushed;
            }
            self.flush_hung(wc.vendor_err);
        }
        let kept = self.faults().map(|faults| faults.keeps((side, now), wc, solicited));
        let (kept, injected) = kept.unwrap_or_default();
        injected.iter().for_each(|injected| self.tell(injected));
        if kept {
            self.keep_few(side, now);
            self.look_again();
        } else {
            self.tell_completed(side, wc);
            if std::ptr::eq(wc, &raw const flushed) {
                self.hand_completion(side, *wc, solicited);
                return true;
            }
        }
        kept
    }

    /// The queue pair is in an error state: completions that hang are flushed.
    pub(crate) fn flush_hung(&mut self, vendor_err: u32) {
        let now = self.now();
        if let Some(faults) = self.faults().filter(|faults| faults.is_hung()) {
            faults.flush_hung(now, vendor_err);
            self.release_held(now);
            self.look_again();
        }
    }

    /// No more completions wait than the CQ can hold. Above that the oldest comes after all.
    fn keep_few(&mut self, side: Side, now: Time) {
        // The receives of a target complete in the CQ of each one's SRQ.
        let most = self.cell.cq(side).map_or(MOST_PARKED, |cq| cq.capacity());
        while let Some(faults) = self.faults()
            && faults.held(side).len() > most
        {
            let Some(HeldWc { wc, solicited, due }) = faults.held(side).pop() else { return };
            if due.is_none_or(|due| due > now) {
                let line = format!(
                    "faults: queue pair {:#08x} holds {most} completions back and no more: wr_id {:#x} completes after all",
                    self.cell.qpn.get(),
                    wc.wr_id
                );
                self.transport.aftermath.log_at(Level::WARN, now, line);
            }
            self.tell_completed(side, &wc);
            self.hand_completion(side, wc, solicited);
        }
        self.release_held(now);
    }

    /// Gives completions that are due to the program. They wait while their CQ has no room: all at once they would overrun it where the
    /// program would have polled them one by one.
    fn release_held(&mut self, now: Time) {
        for side in [Side::Send, Side::Recv] {
            while let Some(held) = self.faults().and_then(|faults| faults.held(side).due(now)) {
                let has_room = self.push_held(side, &held);
                let Some(faults) = self.faults() else { return };
                if !has_room {
                    faults.held(side).put_off(now + ROOM_AGAIN);
                    break;
                }
                faults.held(side).pop();
                self.tell_completed(side, &held.wc);
            }
        }
    }

    fn tell_completed(&mut self, side: Side, wc: &Wc) {
        if let Some(watch) = &mut self.link.watch {
            watch.completed(side, wc);
        }
    }

    /// Gives a completion to the program. False if its CQ has no room.
    fn push_held(&mut self, side: Side, held: &HeldWc) -> bool {
        // Completions that were gathered before it come first.
        self.flush_completions();
        let Some(cq) = self.cell.cq(side) else {
            self.hand_completion(side, held.wc, held.solicited);
            return true;
        };
        let lost = cq.push_into_room(held.wc, held.solicited);
        if lost == Some(true) {
            self.transport.core.progress().note_overrun(Arc::clone(cq) as _, self.cell.qpn);
        }
        lost.is_some()
    }

    /// A send was posted: fails it instead of sending it, if a rule says so.
    #[cold]
    pub(super) fn spoil_send(&mut self, machine: &mut anyverbs_proto::qp::Qp) {
        let (now, position) = (self.now(), machine.sends_posted().wrapping_sub(1));
        let spoiled = self.faults().and_then(|faults| faults.spoils(position, now));
        if let Some((status, waits)) = spoiled {
            machine.spoil_last_send(status, waits);
            self.look_again();
        }
    }

    /// The time has come for something that waits.
    pub(crate) fn run_faults(&mut self, machine: &mut anyverbs_proto::qp::Qp, now: Time) {
        if self.faults().is_some_and(|faults| faults.take_spoiled(now)) {
            machine.fail_spoiled_send(self);
        }
        self.release_held(now);
        self.release_parked(Some(now));
        self.look_again();
    }

    /// A packet has come, and somebody watches: gives it to the machine, or not.
    #[cold]
    pub(crate) fn receive_watched(
        &mut self,
        machine: &mut anyverbs_proto::qp::Qp,
        by_ring: bool,
        (arrival, packet): (&Arrival, &Incoming<'_>),
    ) {
        if let Data::Joined(joined) = packet.payload {
            for packet in joined.packets() {
                self.receive_watched(machine, by_ring, (arrival, &packet.into()));
            }
            return;
        }
        let (now, gids) = (self.now(), &self.transport.core.gids);
        let verdict = self.faults().map(|faults| {
            let seen = Seen::received(arrival, &packet.headers.bth);
            let judged = faults.judge(now, seen, gids);
            faults.count(seen);
            judged
        });
        let (verdict, mut injected) = verdict.unwrap_or_default();
        let mut arrival = Cow::Borrowed(arrival);
        let mut times = verdict.times();
        if verdict.is_corrupt {
            self.count(Counter::DropIcrc, 1);
        }
        if verdict.is_marked && !verdict.is_lost {
            self.count(Counter::EcnMarked, 1);
            arrival.to_mut().mark();
        }
        if verdict.is_not_ready && !verdict.is_lost {
            if machine.refuse_without_receive(&arrival, packet, self) {
                times = 0;
            } else {
                // It needs none, or is not the next one: the rule does nothing.
                injected.retain(|injected| !injected.is_not_ready());
            }
        }
        for injected in &injected {
            if verdict.is_lost {
                if let Some(faults) = self.faults() {
                    faults.note_taken(injected.rule, &packet.headers, packet.acks);
                }
                let bth = &packet.headers.bth;
                if bth.reserved & Bth::ASKS != 0 && bth.opcode.is_request() {
                    self.tell_why(&arrival, bth, Cause::Injected);
                }
            }
            self.tell(injected);
        }
        self.receive_times(machine, (by_ring, times), (&arrival, packet));
    }

    fn receive_times(
        &mut self,
        machine: &mut anyverbs_proto::qp::Qp,
        (by_ring, times): (bool, u8),
        (arrival, packet): (&Arrival, &Incoming<'_>),
    ) {
        for _ in 0..times {
            if let Some(watch) = &self.link.watch {
                watch.received(by_ring, arrival, packet);
            }
            if !self.fails_receive(machine, (arrival, packet)) {
                machine.receive(arrival, packet, self);
            }
        }
    }

    /// Lets the receive fail that a packet completes, if a rule says so. False: the machine is to take the packet.
    fn fails_receive(&mut self, machine: &mut Qp, packet: (&Arrival, &Incoming<'_>)) -> bool {
        let now = self.now();
        let Some(faults) = self.faults() else { return false };
        let Some(status) = faults.status_of_receive(now) else { return false };
        faults.spoils_receive = true;
        let failed = machine.fail_receive(status, packet, self);
        if let Some(faults) = self.faults() {
            faults.spoils_receive = false;
        }
        failed
    }
}
