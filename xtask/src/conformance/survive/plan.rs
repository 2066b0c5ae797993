//! The plan of a round: the workload, the fault, and the promise to the survivor.

use std::fmt;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::super::hosts::Side;

/// The work of two programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Workload {
    /// `exchange`, with these options.
    Exchange(&'static str, &'static str),
    /// The same, with the fault while it sets up.
    SetUp,
    /// A server for one client after the other, a client.
    Rping,
    /// Connections by the hundred: most of its time is handshakes of the CM.
    Ucmatose,
    /// An XRC domain of several processes; this one is the victim.
    SharedXrc(Part),
}

/// A process of those that share an XRC domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Initiator,
    /// Has the SRQ.
    Holder,
    /// Has the target queue pair.
    Target,
    /// Has the target open, too.
    Opener,
}

const WORKLOADS: [Workload; 14] = [
    Workload::Exchange("everything", "-t rc"),
    Workload::Exchange("SENDs", "-t rc -o s"),
    Workload::Exchange("WRITEs", "-t rc -o w"),
    Workload::Exchange("READs", "-t rc -o r -s 100000"),
    Workload::Exchange("atomics", "-t rc -o a"),
    Workload::Exchange("everything on an SRQ, by events", "-t rc -R -e"),
    Workload::Exchange("everything on XRC", "-t xrc"),
    Workload::SetUp,
    Workload::Rping,
    Workload::Ucmatose,
    Workload::SharedXrc(Part::Initiator),
    Workload::SharedXrc(Part::Holder),
    Workload::SharedXrc(Part::Target),
    Workload::SharedXrc(Part::Opener),
];

/// The fault of the victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Kill,
    /// The launcher above it.
    KillLauncher,
    /// Stopped for a moment.
    Pause(Duration),
    /// Stopped until the survivor has given it up.
    Stop,
}

/// A round.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) workload: Workload,
    pub(super) one_host: bool,
    pub(super) victim: Side,
    pub(super) fault: Fault,
    /// Time from the connection, or the start, to the fault.
    pub(super) delay: Duration,
    pub(super) seed: u64,
}

impl Plan {
    pub(super) fn draw(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let workload = WORKLOADS[(seed % WORKLOADS.len() as u64) as usize];
        let by_exchange = matches!(workload, Workload::Exchange(..));
        let shared = matches!(workload, Workload::SharedXrc(_));
        let by_cm = matches!(workload, Workload::Rping | Workload::Ucmatose);
        let fault = match rng.random_range(0..10) {
            0 | 1 if by_exchange || by_cm || shared => {
                Fault::Pause(Duration::from_millis(rng.random_range(1..=200)))
            }
            2 | 3 if by_exchange || shared || workload == Workload::Rping => Fault::Stop,
            4 if by_exchange => Fault::KillLauncher,
            _ => Fault::Kill,
        };
        let one_host = rng.random_bool(0.5);
        // WRITEs and READs go straight into the memory of a process that is stopped, as they would on a device in hardware.
        let direct = matches!(workload, Workload::Exchange("WRITEs" | "READs", _));
        let one_host = one_host && !(direct && fault == Fault::Stop);
        let victim = if rng.random_bool(0.5) { Side::Server } else { Side::Client };
        // No one tells another host that a server was killed, and no one tells the same host that it was stopped. A
        // client that only waits for it never asks.
        let waits =
            by_cm && !matches!(fault, Fault::Pause(_)) && (!one_host || fault == Fault::Stop);
        // Most of ucmatose's work is over sooner.
        let longest = if workload == Workload::Ucmatose { 80_000 } else { 200_000 };
        Plan {
            workload,
            one_host,
            victim: if waits { Side::Client } else { victim },
            fault,
            delay: Duration::from_micros(rng.random_range(0..longest)),
            seed,
        }
    }

    /// The same, with the fault earlier: the victim had ended before it.
    pub(super) fn sooner(&self) -> Self {
        Plan { delay: self.delay / 2, ..self.clone() }
    }

    /// Whether the victim may have ended before the fault because its work was done.
    pub(super) fn ends_by_itself(&self) -> bool {
        let limited = self.workload == Workload::Rping && matches!(self.fault, Fault::Pause(_));
        limited || self.workload == Workload::Ucmatose
    }

    /// The subject of a row of the table.
    pub(super) fn subject(&self) -> String {
        let workload = match self.workload {
            Workload::Exchange(name, _) => name,
            Workload::SetUp => "set-up",
            Workload::Rping => "rping",
            Workload::Ucmatose => "CM handshakes (ucmatose)",
            Workload::SharedXrc(Part::Initiator) => "a shared XRC domain: the initiator",
            Workload::SharedXrc(Part::Holder) => "a shared XRC domain: who has the SRQ",
            Workload::SharedXrc(Part::Target) => "a shared XRC domain: who has the target",
            Workload::SharedXrc(Part::Opener) => "a shared XRC domain: who opened the target",
        };
        let place = if self.one_host { "one host" } else { "two hosts" };
        format!("{workload}, {place}: {}", self.fault_name())
    }

    pub(super) fn fault_name(&self) -> &'static str {
        match self.fault {
            Fault::Kill => "SIGKILL",
            Fault::KillLauncher => "SIGKILL to its launcher",
            Fault::Pause(_) => "SIGSTOP and SIGCONT",
            Fault::Stop => "SIGSTOP",
        }
    }

    pub(super) fn promise(&self) -> &'static str {
        match (self.workload, self.fault, self.victim) {
            (Workload::Exchange(..), Fault::Pause(_), _) => "goes on",
            (Workload::Rping | Workload::Ucmatose, Fault::Pause(_), _) => "both end well",
            (Workload::Exchange(..), ..) => "IBV_WC_RETRY_EXC_ERR in time, then flushes",
            (Workload::SetUp, ..) => "the same, or the end of its TCP connection",
            (Workload::SharedXrc(_), Fault::Pause(_), _)
            | (Workload::SharedXrc(Part::Opener), ..)
            | (Workload::SharedXrc(Part::Target), Fault::Kill, _) => {
                "all go on, every message and addition once"
            }
            (Workload::SharedXrc(Part::Initiator), ..) => "the others stay",
            (Workload::SharedXrc(_), ..) => "IBV_WC_RETRY_EXC_ERR or IBV_WC_REM_ACCESS_ERR in time",
            (Workload::Rping, _, Side::Client) => "serves the next client",
            (Workload::Ucmatose, _, Side::Client) => "can be ended",
            _ => "ends",
        }
    }

    pub(super) fn client_side(&self) -> Side {
        if self.one_host { Side::Server } else { Side::Client }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let victim = match (self.workload, self.victim) {
            (Workload::SharedXrc(_), _) => "",
            (_, Side::Server) => " to the server",
            (_, Side::Client) => " to the client",
        };
        write!(f, "{}{victim} after {} us", self.subject(), self.delay.as_micros())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_run_draws_every_workload_and_fault() {
        let plans: Vec<Plan> = (1..=super::super::ROUNDS).map(Plan::draw).collect();
        for workload in WORKLOADS {
            assert!(plans.iter().any(|plan| plan.workload == workload), "{workload:?}");
        }
        for fault in [Fault::Kill, Fault::KillLauncher, Fault::Stop] {
            assert!(plans.iter().any(|plan| plan.fault == fault), "{fault:?}");
        }
        assert!(plans.iter().any(|plan| matches!(plan.fault, Fault::Pause(_))));
        assert_eq!(Plan::draw(7).to_string(), Plan::draw(7).to_string());
    }

    #[test]
    fn a_whole_run_draws_each_workload_with_each_fault() {
        let plans: Vec<Plan> = (1..=super::super::ALL_ROUNDS).map(Plan::draw).collect();
        for workload in WORKLOADS {
            for one_host in [true, false] {
                for victim in [Side::Server, Side::Client] {
                    let waits = matches!(workload, Workload::Rping | Workload::Ucmatose);
                    let drawn = plans.iter().any(|plan| {
                        (plan.workload, plan.one_host, plan.victim) == (workload, one_host, victim)
                            && plan.fault == Fault::Kill
                    });
                    assert!(
                        drawn || waits && !one_host && victim == Side::Server,
                        "{workload:?} on one host: {one_host}, SIGKILL to the {victim:?}"
                    );
                }
            }
        }
    }
}
