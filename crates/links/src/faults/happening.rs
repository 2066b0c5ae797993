//! Rules that happen at a time: to ports, devices, queue pairs and the process.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_faults::{Fault, PortEvent, ProcessAction, Rule};
use anyverbs_objects::async_event::AsyncEventKind;
use anyverbs_proto::time::Time;

use super::{Faults, Raise, Tell, nanos};

/// Something that happens at a time, by a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A port goes down.
    Down(usize, &'static Rule),
    /// It comes up again.
    Up(usize, &'static Rule),
    /// A port has not the address at this place of its GID table.
    GidGone(usize, usize, &'static Rule),
    /// It has it again.
    GidBack(usize, usize, &'static Rule),
    /// A port has an event.
    Event(usize, PortEvent, &'static Rule),
    /// A device, which its first port stands for, fails for good.
    Fatal(usize, &'static Rule),
    /// Queue pairs go to a state of failure.
    Fails(&'static Rule),
    /// The process ends or stands still.
    Process(ProcessAction, &'static Rule),
}

impl Happening {
    /// The rule.
    pub fn rule(self) -> &'static Rule {
        match self {
            Self::Down(_, rule)
            | Self::Up(_, rule)
            | Self::GidGone(_, _, rule)
            | Self::GidBack(_, _, rule)
            | Self::Event(_, _, rule)
            | Self::Fatal(_, rule)
            | Self::Fails(rule)
            | Self::Process(_, rule) => rule,
        }
    }
}

/// A time for which the process stands still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standstill {
    /// It lasts so long.
    pub lasts: Duration,
    /// At its end the process dies, and does not go on.
    pub dies: bool,
    /// Other actions of rules that fall into it.
    pub taken: Vec<(ProcessAction, &'static Rule)>,
}

impl Faults {
    /// Takes the next thing that is due: it is told, it holds from now on, and its event is raised. True beside it: a port or a device
    /// is another than before, or the caller has to change a GID table. What holds from the start was told then. A device that has
    /// failed has no more events. One thread calls this at a time.
    pub fn take_due(
        &self,
        now: Time,
        raise: Raise<'_>,
        tell: Tell<'_>,
    ) -> Option<(Happening, bool)> {
        if self.next() > now.as_nanos() {
            return None;
        }
        let mut plan = self.plan.lock();
        let first = plan.schedule.first_entry().filter(|entry| entry.key().0 <= now.as_nanos())?;
        let (happening, holds) = first.remove();
        let cleared = plan.cleared;
        self.publish(&plan);
        let has_failed = |port: usize| self.ports[port].failed.load(Ordering::Acquire);
        let changes = match happening {
            Happening::Down(port, _) => holds || !self.is_down(port),
            Happening::Up(port, _) => self.is_down_once(port),
            Happening::Event(port, ..) => !has_failed(port),
            Happening::Fatal(device, _) => holds || !has_failed(device),
            // It is there to be done, unless it was done when the device was made.
            Happening::GidGone(..) | Happening::GidBack(..) => !holds,
            Happening::Fails(_) | Happening::Process(..) => false,
        };
        if !holds {
            drop(plan);
            tell(happening, changes);
            plan = self.plan.lock();
            if plan.cleared != cleared {
                // Its rule holds no more, and it does not happen.
                return None;
            }
            self.apply(happening);
        }
        match happening {
            Happening::Down(port, _) | Happening::Up(port, _) => raise(port, None),
            Happening::Event(port, event, _) if changes => raise(port, Some(kind_of(event))),
            Happening::Fatal(device, _) if changes => {
                raise(device, Some(AsyncEventKind::DeviceFatal));
            }
            _ => {}
        }
        Some((happening, changes))
    }

    /// A pause of the process begins now and lasts so long. Takes what happens to the process before its end, for nobody in it
    /// could do that then: pauses make this one longer, and the process dies in it.
    pub fn take_during(&self, now: Time, lasts: Duration) -> Standstill {
        let mut plan = self.plan.lock();
        let mut end = now.as_nanos().saturating_add(nanos(lasts));
        let (mut dies, mut taken) = (false, Vec::new());
        let mut later = Vec::new();
        while let Some(first) =
            plan.schedule.first_entry().filter(|first| !dies && first.key().0 < end)
        {
            let ((at, number), (happening, holds)) = first.remove_entry();
            let Happening::Process(action, rule) = happening else {
                later.push(((at, number), (happening, holds)));
                continue;
            };
            let at = at.max(now.as_nanos());
            match action {
                ProcessAction::Pauses(time) => end = end.max(at.saturating_add(nanos(time))),
                ProcessAction::Dies => (end, dies) = (at, true),
            }
            taken.push((action, rule));
        }
        plan.schedule.extend(later);
        self.publish(&plan);
        Standstill { lasts: Time::from_nanos(end).since(now), dies, taken }
    }

    pub(super) fn apply(&self, happening: Happening) {
        if let Happening::Down(_, rule) | Happening::Fatal(_, rule) = happening {
            rule.fired.set();
        }
        let (port, n) = match happening {
            Happening::Down(port, _) => (port, 1),
            Happening::Up(port, _) => (port, -1),
            Happening::Fatal(device, rule) => {
                let is_removed = matches!(rule.fault, Fault::Removed(_));
                self.ports[device].removed.fetch_or(is_removed, Ordering::Release);
                let fail = |port: usize| self.ports[port].failed.store(true, Ordering::Release);
                return self.ports_of(device).for_each(fail);
            }
            Happening::GidGone(..) => {
                self.gids_gone.fetch_add(1, Ordering::AcqRel);
                return;
            }
            Happening::GidBack(..) => {
                self.gids_gone.fetch_sub(1, Ordering::AcqRel);
                return;
            }
            Happening::Event(..) | Happening::Fails(_) | Happening::Process(..) => return,
        };
        self.ports[port].down.fetch_add(n, Ordering::AcqRel);
    }

    /// The faults that hold from the start.
    pub fn at_start(&self) -> Vec<Happening> {
        let plan = self.plan.lock();
        plan.schedule
            .values()
            .filter(|(_, holds)| *holds)
            .map(|(happening, _)| *happening)
            .collect()
    }

    /// The places in GID tables that are empty from the start: of a port, and in its table, each with the rule.
    pub(crate) fn gids_gone_at_start(&self) -> Vec<(usize, usize, &'static Rule)> {
        let place = |happening| match happening {
            Happening::GidGone(port, index, rule) => Some((port, index, rule)),
            _ => None,
        };
        self.at_start().into_iter().filter_map(place).collect()
    }

    /// Whether a port is down for one reason, and up without it.
    fn is_down_once(&self, port: usize) -> bool {
        let of = &self.ports[port];
        of.down.load(Ordering::Acquire) <= 1 && !of.failed.load(Ordering::Acquire)
    }

    fn ports_of(&self, device: usize) -> impl Iterator<Item = usize> {
        let (ports, name) = (self.ports.iter().enumerate(), self.name(device));
        ports.filter(move |(_, port)| port.name == name).map(|(n, _)| n)
    }
}

fn kind_of(event: PortEvent) -> AsyncEventKind {
    match event {
        PortEvent::LidChange => AsyncEventKind::LidChange,
        PortEvent::PkeyChange => AsyncEventKind::PkeyChange,
        PortEvent::SmChange => AsyncEventKind::SmChange,
        PortEvent::ClientReregister => AsyncEventKind::ClientReregister,
        PortEvent::GidChange => AsyncEventKind::GidChange,
    }
}
