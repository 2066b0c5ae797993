//! A script of faults at work: ports, devices and queue pairs that fail at a time.

use std::borrow::Cow;
use std::sync::Arc;

use anyverbs_faults::{Fault, ProcessAction, Rule, Script};
use anyverbs_links::faults::{Faults, Happening, Standstill};
use anyverbs_net::shm::Channel;
use anyverbs_objects::async_event::AsyncEventKind;
use anyverbs_objects::gid::GidTables;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;

use super::Driver;
use super::worker::change_addresses;
use crate::process;
use crate::qp::State;

/// Bytes of a list of rules: an answer, without its mark.
const MOST_LISTED: usize = anyverbs_net::host::MAX_ORDER - 1;

impl Driver {
    /// Does what is due, unless a thread is at it already. One after the other: a change of an address is told before it is made, and the
    /// next one may take it back.
    #[cold]
    pub(super) fn run_script(&'static self, faults: &'static Faults, now: Time) {
        let Some(_turn) = self.script.try_lock() else { return };
        let raise = |port, kind| self.raise_by_rule(port, kind);
        let tell = |happening, changes| self.tell_before(faults, happening, changes);
        while let Some((happening, changed)) = faults.take_due(now, &raise, &tell) {
            let rule = happening.rule();
            match happening {
                // All of it is done.
                Happening::Down(..) | Happening::Up(..) | Happening::Event(..) => {}
                Happening::GidGone(port, index, _) => {
                    if changed {
                        self.tell_of_gid(faults, port, index, rule);
                        change_addresses(self, |gids| gids.withhold(port, index, rule.named()));
                        if !faults.lacks_gids() {
                            // The rules were cleared meanwhile.
                            change_addresses(self, GidTables::give_all_back);
                        }
                    }
                }
                Happening::GidBack(port, index, _) => {
                    let is_it = self.core.gids.withheld(port, index).is_some();
                    change_addresses(self, |gids| gids.give_back(port, index));
                    if is_it {
                        let name = faults.port_name(port);
                        let still = self.core.gids.withheld(port, index).is_some();
                        let is = if still { " again for this rule" } else { " again" };
                        self.tell_of(
                            port,
                            rule,
                            &format!("the port of {name} has GID {index}{is}"),
                        );
                    }
                }
                // Its objects have failed with it, earlier.
                Happening::Fatal(..) if !changed => {}
                Happening::Fatal(device, _) => {
                    self.fail_of(rule);
                    let device = self.core.config.device_of(device).0;
                    self.above().frames.fail_device(device);
                    self.above().management.device_failed(device);
                    // What was flushed may have overrun a completion queue.
                    self.transport.after_unlock();
                }
                Happening::Fails(_) => self.fail_of(rule),
                Happening::Process(action, _) => {
                    // It is of no device.
                    self.tell_of(0, rule, &action.to_string());
                    let struck = match action {
                        ProcessAction::Dies => process::strike(action),
                        ProcessAction::Pauses(time) => {
                            let Standstill { lasts, dies, taken } = faults.take_during(now, time);
                            for (action, rule) in taken {
                                self.tell_of(0, rule, &action.to_string());
                            }
                            // Where the system does not let it stand still, its end comes early and not never.
                            process::stand_still(lasts, dies).or_else(|error| match dies {
                                true => process::strike(ProcessAction::Dies),
                                false => Err(error),
                            })
                        }
                    };
                    if let Err(error) = struck {
                        tracing::error!(target: "anyverbs", %error, "the fault did not happen");
                    }
                }
            }
        }
    }

    /// Tells of what holds from the start, before the program has the device.
    pub(crate) fn tell_of_start(&self) {
        let Some(faults) = &self.links.faults else { return };
        for happening in faults.at_start() {
            match happening {
                Happening::GidGone(port, index, rule) => {
                    self.tell_of_gid(faults, port, index, rule);
                }
                other => self.tell_before(faults, other, true),
            }
        }
    }

    /// Tells of what is about to happen to a port or a device. Others are told where they are done.
    fn tell_before(&self, faults: &Faults, happening: Happening, changes: bool) {
        let (port, rule, what) = match happening {
            Happening::Down(port, rule) => (port, rule, "is down".to_owned()),
            Happening::Up(port, rule) if changes => (port, rule, "is up again".to_owned()),
            Happening::Up(port, rule) => (port, rule, "is up again for this rule".to_owned()),
            Happening::Event(..) if !changes => return,
            Happening::Event(port, event, rule) => (port, rule, format!("has {event}")),
            Happening::Fatal(device, rule) => {
                let name = faults.name(device);
                let what = match rule.fault {
                    Fault::Removed(_) => format!("{name} is removed"),
                    _ => format!("{name} fails for good"),
                };
                return self.tell_of(device, rule, &what);
            }
            _ => return,
        };
        self.tell_of(port, rule, &format!("the port of {} {what}", faults.port_name(port)));
    }

    /// Tells of an entry of a GID table that a rule takes out, or that is not there.
    fn tell_of_gid(&self, faults: &Faults, port: usize, index: usize, rule: &Rule) {
        let (name, gids) = (faults.port_name(port), &self.core.gids);
        let there = gids.entry(port, index).map(|entry| entry.gid);
        match there.or_else(|| gids.withheld(port, index)) {
            Some(gid) => {
                let what = format!("the port of {name} has no GID {index} ({})", gid.to_ip());
                self.tell_of(port, rule, &what);
            }
            None => tracing::warn!(
                target: "anyverbs",
                "faults: the port of {name} has no GID {index}, and nothing happens ({})",
                rule.named()
            ),
        }
    }

    /// Raises an event of a port by a rule, or tells its state. A program that hears of a failed device finds it so.
    fn raise_by_rule(&self, port: usize, kind: Option<AsyncEventKind>) {
        match kind {
            Some(AsyncEventKind::DeviceFatal) => {
                let of = self.core.config.device_of(port);
                self.core.fail(of.0);
                self.listeners.raise(of, AsyncEventKind::DeviceFatal);
            }
            Some(kind) => self.raise_of_port(port, kind),
            None => self.tell_state(port),
        }
    }

    /// Raises an event of a port. A device that has failed has none.
    pub(super) fn raise_of_port(&self, port: usize, kind: AsyncEventKind) {
        let of = self.core.config.device_of(port);
        if !self.core.has_failed(of.0) {
            self.listeners.raise(of, kind);
        }
    }

    /// Raises the event of a port whose state is not that of its last event.
    pub(super) fn tell_state(&self, port: usize) {
        let mut told_down = self.told_down.lock();
        let is_down = self.links.is_down(port) || self.core.gids.is_empty(port);
        let kind = match is_down {
            true => told_down.insert(port).then_some(AsyncEventKind::PortErr),
            false => told_down.remove(&port).then_some(AsyncEventKind::PortActive),
        };
        if let Some(kind) = kind {
            self.raise_of_port(port, kind);
        }
    }

    /// Moves the queue pairs for which a rule holds to a state of failure. One that the rule names, and that is not there or in RESET, fails
    /// when it is ready.
    fn fail_of(&'static self, rule: &'static Rule) {
        for cell in self.transport.qps.filter(|_| true) {
            let mut fails = false;
            self.with_cell(&cell, None, |State { machine, link, .. }, call| {
                fails = call.env(link).is_to_fail_by(rule, machine);
            });
            if !fails {
                continue;
            }
            let what = format!("queue pair {:#08x} goes to {}", cell.qpn.get(), rule.fault.state());
            self.tell_of(cell.port.place(), rule, &what);
            self.with_cell(&cell, None, |State { machine, link, .. }, call| {
                call.env(link).fail_by(rule, machine);
            });
        }
    }

    /// Does what another process of the user tells this one to do, and gives the answer to it.
    ///
    /// # Errors
    /// The reason why not, for people.
    #[cold]
    pub(super) fn obey(&'static self, order: &[u8]) -> Result<String, String> {
        let order = std::str::from_utf8(order).map_err(|_| "the order is no text")?;
        let Some(faults) = &self.links.faults else {
            return Err("it runs without a script of faults, so its packets may go by ways that know none; start it with `anyverbs run --faults 'seed 1'`, and it takes rules".into());
        };
        let (done, up) = match order {
            "list" => {
                let rules = faults.list(MOST_LISTED, self.core.now());
                return Ok(if rules.is_empty() { "no rules\n".to_owned() } else { rules });
            }
            "clear" => {
                // Rules that are due do their work first, however late the timers are. While another thread does that work, what it has not
                // begun is cleared.
                self.run_script(faults, self.core.now());
                let raise = |port, kind| self.raise_by_rule(port, kind);
                let (count, up) = faults.clear(&raise);
                change_addresses(self, GidTables::give_all_back);
                (format!("rules of this process that do not hold any more: {count}\n"), up)
            }
            text => {
                let script = Script::parse(text).map_err(|error| error.to_string())?;
                // The file with which the process began may come again, with its seed.
                let text = match script.seed {
                    Some(seed) if self.began_with(seed) => Script::without_seed(text).into(),
                    _ => Cow::Borrowed(text),
                };
                let is_there = |number| self.transport.qps.find(Qpn::new(number)).is_some();
                let count = faults.add(&text, self.core.now(), is_there)?;
                (format!("rules that were added to this process: {count}\n"), Vec::new())
            }
        };
        self.links.tell_of_rules();
        tracing::warn!(target: "anyverbs", "faults: {}", done.trim_end());
        for cell in self.transport.qps.filter(|_| true) {
            self.with_cell(&cell, None, |State { machine, link, .. }, call| {
                link.renew_props(self.links, machine.init().qp_type);
                let mut env = call.env(link);
                env.learn_faults();
                machine.watch_for_silence(&mut env);
            });
        }
        self.after_unlock();
        for port in up {
            let what =
                format!("the port of {} is up again, for no rule holds", faults.port_name(port));
            tracing::warn!(target: "anyverbs", "faults: {what}");
        }
        Ok(done)
    }

    /// Another process of this host has said what it does to packets.
    #[cold]
    pub(super) fn hear_manner(&'static self, channel: &Arc<Channel>) {
        for cell in self.transport.qps.filter(|_| true) {
            self.with_cell(&cell, None, |State { machine, link, .. }, call| {
                if link.shm_peer().is_some_and(|peer| peer.is(channel)) {
                    link.renew_props(self.links, machine.init().qp_type);
                    machine.watch_for_silence(&mut call.env(link));
                }
            });
        }
    }

    /// Whether the script with which the process began has this seed, or the choices begin with it.
    fn began_with(&self, seed: u64) -> bool {
        let config = &self.core.config;
        let own = config.faults.as_ref().and_then(|script| script.seed);
        config.fault_seed == seed || own == Some(seed)
    }

    /// Tells of a fault, before it happens. `FaultScript` alone may be locked, for which nobody waits: the log may be the program's.
    fn tell_of(&self, port: usize, rule: &Rule, what: &str) {
        rule.fired.set();
        self.core.count(port, Counter::InjectedFaults, 1);
        let line = format!("injected fault ({}): {what}", rule.named());
        self.links.trace_fault(rule, what);
        tracing::error!(target: "anyverbs", "{line}");
    }
}
