//! A script of faults at work: ports, devices and queue pairs that fail at a time.

use anyverbs_causes::Cause;
use anyverbs_faults::Rule;
use anyverbs_links::faults::{Faults, Happening};
use anyverbs_objects::async_event::AsyncEventKind;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::qp::attr::QpState;
use anyverbs_proto::time::Time;

use super::Driver;
use crate::qp::State;

impl Driver {
    /// Does what is due.
    #[cold]
    pub(super) fn run_script(&'static self, faults: &'static Faults, now: Time) {
        while let Some((happening, changed)) = faults.take_due(now) {
            let (Happening::Down(_, rule)
            | Happening::Up(_, rule)
            | Happening::Fatal(_, rule)
            | Happening::Fails(rule)) = happening;
            let Some(rule) = faults.rules().get(rule) else { continue };
            match happening {
                Happening::Down(device, _) => {
                    self.tell_of(rule, &format!("the port of {} is down", faults.name(device)));
                    if changed {
                        self.listeners.raise(device, AsyncEventKind::PortErr);
                    }
                }
                Happening::Up(device, _) => {
                    let is = if changed { "is up again" } else { "is up again for this rule" };
                    self.tell_of(rule, &format!("the port of {} {is}", faults.name(device)));
                    if changed {
                        self.listeners.raise(device, AsyncEventKind::PortActive);
                    }
                }
                Happening::Fatal(device, _) => {
                    self.core.fail(device);
                    self.tell_of(rule, &format!("{} fails for good", faults.name(device)));
                    self.listeners.raise(device, AsyncEventKind::DeviceFatal);
                    self.fail_of(rule);
                }
                Happening::Fails(_) => self.fail_of(rule),
            }
        }
    }

    /// Moves the queue pairs for which a rule holds to the error state.
    fn fail_of(&'static self, rule: &Rule) {
        for cell in self.transport.qps.filter(|_| true) {
            let mut failed = false;
            self.with_cell(&cell, None, |State { machine, link, .. }, call| {
                let mut env = call.env(link);
                let is_at_work = !matches!(machine.attr().state, QpState::Reset | QpState::Err);
                if is_at_work && env.is_faulty_by(rule) {
                    machine.fail(Cause::Injected, &mut env);
                    env.flush_hung(Cause::Injected.number().into());
                    failed = true;
                }
            });
            if failed {
                let qpn = cell.qpn.get();
                self.tell_of(rule, &format!("queue pair {qpn:#08x} goes to the error state"));
            }
        }
    }

    fn tell_of(&self, rule: &Rule, what: &str) {
        self.core.count(Counter::InjectedFaults, 1);
        let line = format!("injected fault (line {} of the script): {what}", rule.line);
        if let Some(trace) = &self.links.trace {
            let args = anyverbs_record::trace::Object::default().text("rule", &rule.text);
            trace.instant(0, "fault", what, &args);
        }
        tracing::error!(target: "anyverbs", "{line}");
    }
}
