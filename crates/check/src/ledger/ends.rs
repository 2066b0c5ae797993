//! Objects that the program ends, and those that it leaves.

use std::time::Instant;

use crate::catalogue::Check;
use crate::facts::{Activity, Completion, Kind, LONGEST_WAIT, QueuePair, Region, Work};
use crate::report::{self, Finding, Left, Reporter};
use crate::stack::Stack;

use super::outstanding::Posted;
use super::{Abandoned, Group, Ledger, Object, Unacknowledged, here};

/// `IBV_EVENT_QP_LAST_WQE_REACHED`.
const LAST_WQE_REACHED: u32 = 16;

/// Reports of leaks.
const MOST_LEAKS: usize = 20;

impl Group {
    /// Where the queue pair came into it.
    fn origin(&self) -> (String, Stack) {
        let joined =
            if self.id == 0 { "It was attached here" } else { "The group was joined here" };
        (joined.to_owned(), self.stack)
    }
}

impl Ledger {
    /// The program ends an object. `activity` tells of the address of a queue pair what it does, and `waiting` of the address of a
    /// completion queue what lies there and was not polled. If the call waits for events to be
    /// acknowledged, its number is returned.
    pub fn ends(
        &mut self,
        address: usize,
        activity: impl Fn(usize) -> Activity,
        waiting: impl Fn(usize) -> Vec<Completion>,
    ) -> Option<u64> {
        let works = |qp| activity(qp) == Activity::Works;
        let object = self.objects.get_mut(&address)?;
        self.endings += 1;
        object.ending = Some(self.endings);
        let waits = (!object.unacknowledged.is_empty()).then_some(self.endings);
        let kind = object.kind;
        if let Some(closed) = object.closed {
            self.is_too_late(address, closed);
        }
        match kind {
            Kind::Qp => {
                if works(address) {
                    self.check_qp(address, waiting);
                }
                if activity(address) != Activity::Idle {
                    self.check_last_wqe(address);
                }
            }
            Kind::Mr => self.check_region(address, "deregistered", works, waiting),
            Kind::Ah => self.check_ah(address, works, waiting),
            _ => {}
        }
        waits
    }

    /// The queue pair is about to end or to be reset. Its completions that were not polled go then, and those of its SRQ's receives
    /// are never told.
    pub fn takes_along(&mut self, address: usize, waiting: impl Fn(usize) -> Vec<Completion>) {
        let Some(queues) = self.queues.get_mut(&address) else { return };
        let Some(qp) = queues.qp.filter(|qp| qp.srq != 0) else { return };
        let of_it = |c: &Completion| c.is_receive && c.number == qp.number;
        let received = waiting(qp.recv_cq).into_iter().filter(of_it);
        queues.takes_along = received.map(|completion| completion.wr_id).collect();
    }

    /// The call that ends an object was refused, `is_in_use` because others use it.
    pub fn not_ended(&mut self, address: usize, is_in_use: bool) {
        let Some(object) = self.objects.get_mut(&address) else { return };
        object.ending = None;
        if let Some(queues) = self.queues.get_mut(&address) {
            queues.abandons = None;
        }
        if !is_in_use {
            return;
        }
        let kind = object.kind;
        if self.is_used(address, "is not ended, since", "the call returns EBUSY") {
        } else if kind == Kind::Mr {
            self.has_windows(address);
        } else {
            self.is_in_group(address);
        }
    }

    /// Reports the object of which others are made, if there are some.
    fn is_used(&mut self, address: usize, is: &str, then: &str) -> bool {
        let Some(object) = self.objects.get(&address) else { return false };
        let name = object.kind.name();
        let mut users: Vec<_> =
            self.objects.iter().filter(|(_, user)| user.uses.contains(&address)).collect();
        users.sort_by_key(|(address, _)| **address);
        let Some((_, user)) = users.first() else { return false };
        let (n, first) = (users.len(), user.kind.name());
        let a = if first.starts_with(['a', 'e', 'i', 'o', 'u', 'X']) { "an" } else { "a" };
        let of = if n == 1 { String::new() } else { format!(", the first of {n} such objects") };
        let place = object.at(address);
        let what = format!("the {place} {is} {a} {first} uses it{of}; {then}");
        let user = (format!("The {first} was made here"), user.stack);
        let made = self.origin(address, &format!("The {name} was made here"));
        self.report(Check::EndedInUse, what, vec![here(Stack::here()), user, made]);
        true
    }

    /// The program destroys an event channel. The call succeeds in any case.
    pub fn destroys_channel(&mut self, address: usize) {
        self.is_used(address, "is destroyed while", "its events are lost");
    }

    /// The program closes a context. The call succeeds in any case. Objects of it that are never ended are leaks.
    pub fn closes(&mut self, context: usize) {
        let closed = Stack::here();
        let of_it = |object: &&mut Object| object.context == context && !object.is_own;
        self.objects.values_mut().filter(of_it).for_each(|object| object.closed = Some(closed));
    }

    /// An object ends after its context.
    #[cold]
    fn is_too_late(&mut self, address: usize, closed: Stack) {
        let Some(object) = self.objects.get(&address) else { return };
        let (name, context) = (object.kind.name(), object.context);
        let place = object.at(address);
        // Once for a context.
        for other in self.objects.values_mut().filter(|other| other.context == context) {
            other.closed = None;
        }
        let what = format!("the context of the {place} was closed before the {name} ended");
        let ended = (format!("The {name} is ended here"), Stack::here());
        let made = self.origin(address, &format!("The {name} was made here"));
        self.report(Check::EndedInUse, what, vec![here(closed), ended, made]);
    }

    /// A region is not ended, since memory windows are bound to it. The ledger does not follow binds: they are done by work requests.
    fn has_windows(&mut self, address: usize) {
        let Some(&mut Region { addr, len, lkey, .. }) = self.regions.at(address) else { return };
        let what = format!(
            "the memory region at {addr:#x} ({len} bytes, lkey {lkey:#x}) is not ended, since memory windows are bound to it; the call returns EBUSY"
        );
        let made = self.origin(address, "The region was registered here");
        self.report(Check::EndedInUse, what, vec![here(Stack::here()), made]);
    }

    /// A queue pair is not ended, since it is attached to a multicast group.
    fn is_in_group(&mut self, address: usize) {
        let Some(object) = self.objects.get(&address) else { return };
        let (name, place, n) = (object.kind.name(), object.at(address), object.groups.len());
        let Some(group) = object.groups.first() else { return };
        let of = if n == 1 { String::new() } else { format!(", the first of {n} such groups") };
        let what = format!(
            "the {place} is not ended, since it is attached to the multicast group {}{of}; the call returns EBUSY",
            group.gid
        );
        let attached = group.origin();
        let made = self.origin(address, &format!("The {name} was made here"));
        self.report(Check::EndedInUse, what, vec![here(Stack::here()), attached, made]);
    }

    /// The program read an event about an object. Each type of event has a code.
    pub fn read_event(&mut self, address: usize, code: u32, name: &'static str) {
        if code == LAST_WQE_REACHED
            && let Some(queues) = self.queues.get_mut(&address)
        {
            queues.saw_last_wqe = true;
        }
        let Some(object) = self.objects.get_mut(&address) else { return };
        let stack = Stack::here();
        let events = &mut object.unacknowledged;
        if let Some(same) = events.iter_mut().find(|event| event.code == code) {
            same.count += 1;
            same.stack = stack;
        } else {
            events.push(Unacknowledged { code, name, count: 1, stack });
        }
    }

    /// The program acknowledged events of one type.
    pub fn acknowledged(&mut self, address: usize, code: u32, count: u32) {
        let Some(object) = self.objects.get_mut(&address) else { return };
        let (name, place) = (object.kind.name(), object.at(address));
        let mut left = count;
        for event in object.unacknowledged.iter_mut().filter(|event| event.code == code) {
            left = left.saturating_sub(event.count);
            event.count = event.count.saturating_sub(count);
        }
        object.unacknowledged.retain(|event| event.count > 0);
        if left > 0 {
            let events = if count == 1 { "event" } else { "events" };
            let what = format!(
                "the call acknowledges {count} {events} of the {place}, and {} of them were read and not acknowledged before",
                count - left
            );
            let made = self.origin(address, &format!("The {name} was made here"));
            self.report(Check::Unacknowledged, what, vec![here(Stack::here()), made]);
        }
    }

    /// The call of this number that ends an object has begun a second ago. `stack` is the call's.
    pub(crate) fn is_late(&mut self, address: usize, call: u64, stack: Stack) {
        let waits = |object: &&Object| object.ending == Some(call);
        let Some(object) = self.objects.get(&address).filter(waits) else { return };
        let Some(event) = object.unacknowledged.first() else { return };
        let (name, Unacknowledged { name: event, count, stack: read, .. }) =
            (object.kind.name(), event);
        let what = format!(
            "the call that ends the {} waits, since events were read and not acknowledged: {event} ({count})",
            object.at(address)
        );
        let read = ("The last one was read here".into(), *read);
        let made = self.origin(address, &format!("The {name} was made here"));
        self.report(Check::Unacknowledged, what, vec![here(stack), read, made]);
    }

    /// It has ended.
    pub fn ended(&mut self, address: usize) {
        self.reset(address);
        let object = self.objects.remove(&address);
        let region = self.regions.remove(address);
        if let Some(region) = &region {
            self.unpins(region.pinned());
        }
        self.cqs.remove(&address);
        if let Some(queues) = self.queues.remove(&address)
            && let Some(qp) = queues.qp
        {
            if self.numbers.get(&qp.number) == Some(&address) {
                self.numbers.remove(&qp.number);
            }
            if let (Some(ended), Some(object), Some(srq)) =
                (queues.abandons, &object, self.queues.get_mut(&qp.srq))
            {
                let (number, made) = (qp.number, object.stack);
                srq.abandoned_by = Some(Abandoned { number, made, ended });
            }
        }
        if self.has_joins && object.as_ref().is_some_and(|object| object.kind == Kind::CmId) {
            // It has left its groups.
            self.objects.values_mut().for_each(|object| {
                object.groups.retain(|group| group.id != address);
            });
        }
        if let Some(object) = object {
            self.dead.add(address, object, region.map(|region| region.lkey));
        }
    }

    /// A completion queue has lost completions.
    pub fn overrun(&mut self, address: usize) {
        let Some(cq) = self.cqs.get_mut(&address).filter(|cq| !cq.is_overrun) else { return };
        cq.is_overrun = true;
        let capacity = cq.capacity.unwrap_or(0);
        let what = format!(
            "the {} holds {capacity} completions, and more came: some are lost, and its queue pairs are in the error state",
            self.place(Kind::Cq, address)
        );
        let made = self.origin(address, "The completion queue was made here");
        let seen = ("It was seen here".into(), Stack::here());
        self.report(Check::CqOverrun, what, vec![seen, made]);
    }

    /// The program ends with this status. Nobody has asked since the last empty poll which datagrams were dropped, and nobody at all of
    /// other queue pairs.
    pub(crate) fn end(&mut self, status: i32) {
        let deadline = Instant::now() + LONGEST_WAIT;
        for qp in self.qps_that(|_| true) {
            (self.drops_of)(qp, deadline).iter().for_each(|drops| self.dropped(qp, drops));
        }
        // A program that failed leaves what it had, and its reports would bury what made it fail.
        let left = self.report_leaks(status == 0 || self.reporter.is_fatal);
        if let Some(summary) = self.reporter.summary(&left, status) {
            report::say(&summary);
        }
    }

    /// Returns what is left and not suppressed. Unless it `is_said`, the file alone has the reports.
    fn report_leaks(&mut self, is_said: bool) -> Left {
        let mut objects: Vec<_> = self.objects.drain().collect();
        objects.sort_by_key(|(address, _)| *address);
        let leaks = objects.into_iter().filter_map(|(address, object)| {
            let is_leak = object.kind.can_leak() && !object.is_own;
            is_leak.then_some((address, object))
        });
        let mut left = Left::default();
        for (address, object) in leaks {
            let name = object.kind.name();
            let mut what = format!("the {} was not ended when the program did", object.at(address));
            let mut stacks = vec![("It was made here".into(), object.stack)];
            if let Some(group) = object.groups.first() {
                what.push_str(&format!(", and is in the multicast group {}", group.gid));
                stacks.push(group.origin());
            }
            if let Some(closed) = object.closed {
                stacks.push(("Its context was closed here".into(), closed));
            }
            let finding = Finding { check: Check::Leak, about: String::new(), what, stacks };
            if self.reporter.is_suppressed(&finding) {
                continue;
            }
            *left.kinds.entry(name).or_default() += 1;
            let report = if is_said { Reporter::report } else { Reporter::report_to_file };
            if left.reported < MOST_LEAKS && report(&mut self.reporter, &finding) {
                left.reported += 1;
            }
        }
        left
    }

    fn check_qp(&mut self, address: usize, waiting: impl Fn(usize) -> Vec<Completion>) {
        let Some(queues) = self.queues.get(&address).filter(|queues| !queues.is_unwatched) else {
            return;
        };
        let Some(qp) = queues.qp.filter(|_| !queues.sends.is_empty()) else { return };
        let is_its_own = |c: &&Completion| c.number == qp.number && !c.is_receive;
        let waiting = waiting(qp.send_cq);
        let mut unsent = queues.sends.unsent(waiting.iter().filter(is_its_own));
        let Some(oldest) = unsent.next() else { return };
        let (n, Work { name, wr_id, .. }) = (1 + unsent.count(), &oldest.work);
        let what = format!(
            "queue pair {:#08x} is destroyed, and {n} of its sends {} no completion; the oldest is a {name} (wr_id {wr_id:#x})",
            qp.number,
            if n == 1 { "has" } else { "have" }
        );
        let posted = ("The oldest was posted here".into(), oldest.stack);
        let made = self.origin(address, "The queue pair was made here");
        self.report(Check::QpDestroyed, what, vec![here(Stack::here()), posted, made]);
    }

    /// The queue pair may have taken a receive of its SRQ. It matters if the SRQ is used on.
    fn check_last_wqe(&mut self, address: usize) {
        let Some(queues) = self.queues.get(&address).filter(|queues| !queues.saw_last_wqe) else {
            return;
        };
        let Some(qp) = queues.qp.filter(|qp| qp.is_reliable) else { return };
        let has_receives = self.queues.get(&qp.srq).is_some_and(|srq| !srq.receives.is_empty());
        if let Some(queues) = self.queues.get_mut(&address).filter(|_| has_receives) {
            queues.abandons = Some(Stack::here());
        }
    }

    /// The region is `ended`: deregistered or changed.
    pub(super) fn check_region(
        &mut self,
        address: usize,
        ended: &str,
        works: impl Fn(usize) -> bool,
        waiting: impl Fn(usize) -> Vec<Completion>,
    ) {
        let Some(&mut Region { addr, len, lkey, .. }) = self.regions.at(address) else { return };
        if !self.users.of_region(lkey) {
            return;
        }
        let uses = |posted: &&Posted| posted.uses_region(lkey);
        let Some((owner, posted)) = self.outstanding(&works, &waiting, uses) else { return };
        let what = format!(
            "the memory region at {addr:#x} ({len} bytes, lkey {lkey:#x}) is {ended} while a {} (wr_id {:#x}) of {owner} uses it",
            posted.work.name, posted.work.wr_id
        );
        let work = ("The work was posted here".into(), posted.stack);
        let mut stacks = vec![here(Stack::here()), work];
        stacks.extend(self.origins_of_region(address));
        self.report(Check::MrDeregistered, what, stacks);
    }

    fn check_ah(
        &mut self,
        address: usize,
        works: impl Fn(usize) -> bool,
        waiting: impl Fn(usize) -> Vec<Completion>,
    ) {
        if !self.users.of_ah(address) {
            return;
        }
        let uses = |posted: &&Posted| posted.work.ah == address;
        let Some((owner, posted)) = self.outstanding(&works, &waiting, uses) else { return };
        let what = format!(
            "the address handle at {address:#x} is destroyed while a {} (wr_id {:#x}) of {owner} has no completion",
            posted.work.name, posted.work.wr_id
        );
        let work = ("The work was posted here".into(), posted.stack);
        let made = self.origin(address, "The address handle was made here");
        self.report(Check::AhDestroyed, what, vec![here(Stack::here()), work, made]);
    }

    /// A work request that a queue pair works on, with the queue that has it.
    fn outstanding(
        &self,
        works: impl Fn(usize) -> bool,
        waiting: impl Fn(usize) -> Vec<Completion>,
        fits: impl Fn(&&Posted) -> bool,
    ) -> Option<(String, &Posted)> {
        self.queues.iter().find_map(|(&address, queues)| {
            let qp = queues.qp.filter(|_| !queues.is_unwatched)?;
            let sends = queues.sends.iter().any(|posted| fits(&posted));
            // Those of an SRQ are nobody's until a message comes.
            let srq = self.queues.get(&qp.srq).filter(|_| qp.srq != 0);
            let receives = &srq.unwrap_or(queues).receives;
            let is_received = receives.iter().any(|posted| fits(&posted));
            if !sends && !is_received || !works(address) {
                return None;
            }
            let is_its_own = |c: &&Completion| c.number == qp.number && !c.is_receive;
            let completions = waiting(qp.send_cq);
            let own = || format!("queue pair {:#08x}", qp.number);
            if let Some(found) =
                queues.sends.unsent(completions.iter().filter(is_its_own)).find(&fits)
            {
                return Some((own(), found));
            }
            let takers = if srq.is_some() { self.takers_of(qp.srq) } else { vec![qp] };
            let mut cqs: Vec<_> = takers.iter().map(|taker| taker.recv_cq).collect();
            cqs.sort_unstable();
            cqs.dedup();
            let received: Vec<_> = cqs.into_iter().flat_map(&waiting).collect();
            let is_theirs = |c: &&Completion| {
                c.is_receive && takers.iter().any(|taker| taker.number == c.number)
            };
            let owner = || match srq {
                Some(_) => format!("the {}", self.place(Kind::Srq, qp.srq)),
                None => own(),
            };
            let found = receives.unreceived(received.iter().filter(is_theirs)).find(&fits);
            found.map(|found| (owner(), found))
        })
    }

    /// The queue pairs that take the receives of an SRQ.
    fn takers_of(&self, srq: usize) -> Vec<QueuePair> {
        self.queues.values().filter_map(|queues| queues.qp).filter(|qp| qp.srq == srq).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn many(ledger: &mut Ledger) {
        (1..=1000).for_each(|address| ledger.made(address, Kind::Cq, 0));
    }

    fn few(ledger: &mut Ledger) {
        ledger.made(1001, Kind::Pd, 0);
        ledger.made(1002, Kind::Cq, 0);
    }

    #[test]
    fn a_queue_pair_in_a_group_is_in_use_until_it_leaves() {
        let mut ledger = Ledger::new(Reporter::new("", None), |_, _| false, |_, _| vec![]);
        ledger.made(1, Kind::Qp, 0);
        ledger.attached(1, "ff0e::1".into());
        ledger.attached(1, "ff0e::1".into());
        ledger.detached(1, "ff0e::1");
        ledger.not_ended(1, true);
        assert_eq!(ledger.reporter.findings, 0);
        ledger.attached(1, "ff0e::2".into());
        ledger.not_ended(1, true);
        assert_eq!(ledger.reporter.findings, 1);
    }

    #[test]
    fn a_finding_has_the_number_that_the_log_prints() {
        for (kind, number, name) in [
            (Kind::Cq, Some(7), "completion queue at 0x10 (CQ 7)"),
            (Kind::Qp, Some(0x0003_0011), "queue pair at 0x10 (QP 0x030011)"),
            (Kind::Pd, Some(0x0300_0002), "protection domain at 0x10 (PD 2)"),
            (Kind::Mr, None, "memory region at 0x10"),
        ] {
            let mut ledger = Ledger::new(Reporter::new("", None), |_, _| false, |_, _| vec![]);
            ledger.made(16, kind, 0);
            if let Some(number) = number {
                ledger.numbered(16, number);
            }
            ledger.made(17, Kind::Mw, 0);
            ledger.made_of(17, &[16]);
            ledger.not_ended(16, true);
            let summary = ledger.reporter.summary(&Left::default(), 0).unwrap();
            assert!(summary.contains(&format!("the {name} is not ended")), "{name}: {summary}");
        }
    }

    #[test]
    fn a_call_that_was_refused_does_not_wait() {
        let mut ledger = Ledger::new(Reporter::new("", None), |_, _| false, |_, _| vec![]);
        ledger.made(1, Kind::Srq, 0);
        ledger.read_event(1, 15, "SRQ_LIMIT_REACHED");
        let ends = |ledger: &mut Ledger| ledger.ends(1, |_| Activity::Idle, |_| vec![]).unwrap();
        let refused = ends(&mut ledger);
        ledger.not_ended(1, false);
        let waits = ends(&mut ledger);
        ledger.is_late(1, refused, Stack::here());
        assert_eq!(ledger.reporter.findings, 0);
        ledger.is_late(1, waits, Stack::here());
        assert_eq!(ledger.reporter.findings, 1);
    }

    #[test]
    fn a_region_with_windows_is_in_use() {
        let mut ledger = Ledger::new(Reporter::new("", None), |_, _| false, |_, _| vec![]);
        ledger.made(1, Kind::Mr, 0);
        let region = Region { addr: 4096, iova: 4096, len: 64, lkey: 5, rkey: 6, pd: 0, access: 0 };
        ledger.made_region(1, region);
        ledger.not_ended(1, false);
        assert_eq!(ledger.reporter.findings, 0);
        ledger.not_ended(1, true);
        assert_eq!(ledger.reporter.findings, 1);
    }

    #[test]
    fn a_queue_pair_is_in_a_group_until_its_identifier_has_left_as_often_as_joined() {
        let mut ledger = Ledger::new(Reporter::new("", None), |_, _| false, |_, _| vec![]);
        let is_in_use = |ledger: &mut Ledger| {
            let before = ledger.reporter.findings;
            ledger.not_ended(1, true);
            ledger.reporter.findings > before
        };
        ledger.made(1, Kind::Qp, 0);
        ledger.made(2, Kind::CmId, 0);
        ledger.joined(1, 2, "ff0e::1".into());
        ledger.joined(1, 2, "ff0e::1".into());
        // It is another way into the same group.
        ledger.detached(1, "ff0e::1");
        ledger.left(1, 2, "ff0e::1");
        assert!(is_in_use(&mut ledger));
        ledger.left(1, 2, "ff0e::1");
        assert!(!is_in_use(&mut ledger));
        ledger.joined(1, 2, "ff0e::1".into());
        ledger.ended(2);
        assert!(!is_in_use(&mut ledger));
    }

    #[test]
    fn a_leaked_queue_pair_is_reported_with_its_group() {
        let file = std::env::temp_dir().join(format!("anyverbs-leak-{}", std::process::id()));
        let reporter = Reporter::new("", Some(file.clone()));
        let mut ledger = Ledger::new(reporter, |_, _| false, |_, _| vec![]);
        ledger.made(1, Kind::Qp, 0);
        ledger.joined(1, 2, "ff0e::7".into());
        ledger.report_leaks(true);
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        for part in ["is in the multicast group ff0e::7", "The group was joined here"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn leaks_that_are_not_reported_are_counted() {
        let left = |suppressions| {
            let mut ledger =
                Ledger::new(Reporter::new(suppressions, None), |_, _| false, |_, _| vec![]);
            many(&mut ledger);
            few(&mut ledger);
            let Left { kinds, reported } = ledger.report_leaks(true);
            let kinds: Vec<_> = kinds.into_iter().collect();
            (ledger.reporter.findings, reported, kinds)
        };
        // A test has this library inside, whose frames are alike for all places: three are reported.
        let (cqs, pd) = ("completion queue", ("protection domain", 1));
        assert_eq!(left(""), (3, 3, vec![(cqs, 1001), pd]));
        assert_eq!(left("leak:tests::few"), (3, 3, vec![(cqs, 1000)]));
        assert_eq!(left("leak:tests::many"), (2, 2, vec![(cqs, 1), pd]));
        assert_eq!(left("leak:tests::"), (0, 0, vec![]));
    }
}
