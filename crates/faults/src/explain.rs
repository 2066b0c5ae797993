//! Says in words what a script does.

use std::fmt;
use std::mem::discriminant;
use std::time::Duration;

use crate::{
    CallAction, Fault, Limit, PacketAction, PacketKind, Place, ProcessAction, QpFailure, QpName,
    Rule, Script, Site, Span, Which, WorkAction,
};

impl Script {
    /// A sentence for each rule, after the seed's.
    #[must_use]
    pub fn explain(&self, seed: Option<u64>) -> Vec<String> {
        let seed = self.seed_by(seed);
        let mut lines = vec![format!("Random choices begin with the seed {seed}.")];
        if self.rules.is_empty() {
            lines.push(
                "There are no rules yet: `anyverbs fault` adds some while the program runs.".into(),
            );
        }
        let rules = self.rules.iter();
        let rules: Vec<_> = rules
            .map(|rule| format!("Line {}{}: {}", rule.line, rule.part(), rule.explain()))
            .collect();
        if rules.iter().any(|rule| rule.contains("the start")) {
            lines.push("The start is the moment at which the process opens its device.".into());
        }
        lines.extend(rules);
        if self.acts_together() {
            lines.push(
                "Several rules may choose a packet. Rules with different actions act on it together: it waits for a rate first, and by a delay behind that. A rule that loses it is the last. Of rules with the same action the first one acts.".into(),
            );
        }
        lines
    }
}

impl Script {
    /// Whether rules with different actions are about packets of one direction.
    fn acts_together(&self) -> bool {
        let action = |rule: &Rule| match &rule.fault {
            Fault::Packets { action, received, .. } => Some((*received, discriminant(action))),
            _ => None,
        };
        let all: Vec<_> = self.rules.iter().filter_map(action).collect();
        all.iter().any(|one| all.iter().any(|other| one.0 == other.0 && one.1 != other.1))
    }
}

impl Rule {
    /// The effect of the rule, in one or two sentences.
    #[must_use]
    pub fn explain(&self) -> String {
        let place = &self.place;
        match &self.fault {
            Fault::Packets { action, received, kind, which, span } => {
                let direction = if *received { "receives" } else { "sends" };
                let packets = counted(*which, &kind_name(*kind), "packets");
                let peer = place.peer.map_or(String::new(), |ip| match received {
                    true => format!(" from {ip}"),
                    false => format!(" to {ip}"),
                });
                let happens = match action {
                    PacketAction::Drop => "lost".into(),
                    PacketAction::Duplicate if *received => "received twice".into(),
                    PacketAction::Duplicate => "sent twice".into(),
                    PacketAction::Reorder => "overtaken by the next one, if one comes soon".into(),
                    PacketAction::Corrupt => "found corrupt, and dropped".into(),
                    PacketAction::Delay(least, most) if least == most => {
                        format!("late by {}", show(*least))
                    }
                    PacketAction::Delay(least, most) => {
                        format!("late by {} to {}", show(*least), show(*most))
                    }
                    PacketAction::Mark => {
                        "marked as by a congested network (ECN), so the sender slows down".into()
                    }
                    PacketAction::NotReady => {
                        "refused as without a receive, where one is needed: the sender gets an RNR NAK, and tries again".into()
                    }
                    PacketAction::Limit(limit) => {
                        let (who, when) = (senders(place), during(*span));
                        return format!("{packets} that {who}{peer} {}", limited(*limit, &when));
                    }
                };
                let are = if is_one(*which) { "is" } else { "are" };
                format!(
                    "{packets} that {} {direction}{peer} {are} {happens}{}.",
                    queue_pair(place),
                    during(*span)
                )
            }
            Fault::Work { action, receives, which, span } => {
                let thing = if *receives { "receive" } else { "send" };
                let work = counted(*which, "", &format!("{thing}s"));
                let of = match during(*span) {
                    none if none.is_empty() => queue_pair(place),
                    when => format!("{}{when},", queue_pair(place)),
                };
                let (s, it, is) = match is_one(*which) {
                    true => ("s", "it", "is"),
                    false => ("", "them", "are"),
                };
                match action {
                    WorkAction::Never => format!(
                        "{work} of {of} never complete{s}. What is behind {it} in the queue does not complete either, until the queue pair goes to the error state."
                    ),
                    WorkAction::Late(late) => format!(
                        "{work} of {of} complete{s} {} later. What is behind {it} in the queue does not complete before.",
                        show(*late)
                    ),
                    WorkAction::Fails(status, late) => {
                        let late = match *late {
                            Duration::ZERO => String::new(),
                            late if *receives => format!(", {} later", show(late)),
                            late => format!(", {} after posting at the earliest", show(late)),
                        };
                        if let Some(peers) = status.of_peer().filter(|_| *receives) {
                            let fail = if is_one(*which) { "fails" } else { "fail" };
                            return format!(
                                "{work} of {of} {fail} with {status}{late}. The queue pair goes to the error state, and the send of a reliable peer fails with {peers}."
                            );
                        }
                        format!(
                            "{work} of {of} {is} not sent and complete{s} with {status}{late}. The queue pair goes to the error state, or to SQE if it is of UD or UC, as after a failure."
                        )
                    }
                }
            }
            Fault::Call { call, site, which, action, span } => {
                let said = explain_call(&called(call, site.as_ref()), *which, *action);
                format!("{said}{}.", during(*span))
            }
            Fault::Memory { pages, regions, span } => {
                let of = match &place.device {
                    Some(device) => format!(" of {device}"),
                    None => String::new(),
                };
                let regions = counted(*regions, "", "regions");
                let what = match pages {
                    Which::All => "the memory".into(),
                    pages => counted(*pages, "", "pages"),
                };
                format!(
                    "{what} of {regions}{of} {}{}: the device cannot reach this memory, and a request that touches it fails. The program still has it.",
                    if matches!(pages, Which::All) || is_one(*pages) {
                        "vanishes"
                    } else {
                        "vanish"
                    },
                    during(*span)
                )
            }
            Fault::Process(action, after) => {
                format!("{} {action}.", at(*after))
            }
            Fault::Down(Span { after, lasts }) => {
                let ends = match lasts {
                    Some(lasts) => format!(
                        " {} later it is up again, with IBV_EVENT_PORT_ACTIVE.",
                        show(*lasts)
                    ),
                    None => " It stays down.".into(),
                };
                format!(
                    "{} {} goes down, with IBV_EVENT_PORT_ERR: no packet leaves or arrives.{ends}",
                    at(*after),
                    port(place)
                )
            }
            Fault::Gid(index, Span { after, lasts }) => {
                let ends = match lasts {
                    Some(lasts) => format!(" {} later it is there again.", show(*lasts)),
                    None => " It stays away.".into(),
                };
                format!(
                    "{} {} has no GID {index}, with IBV_EVENT_GID_CHANGE: no packet leaves from that address or arrives there, unless another entry of RoCE v2 of the port has the same address.{ends}",
                    at(*after),
                    port(place)
                )
            }
            Fault::Event(event, after) => {
                format!("{} {} has {event}. Nothing else changes.", at(*after), port(place))
            }
            Fault::Fatal(after) => format!(
                "{} {} fails for good, with IBV_EVENT_DEVICE_FATAL: its queue pairs go to the error state, and no packet leaves or arrives.",
                at(*after),
                device(place)
            ),
            Fault::Removed(after) => format!(
                "{} {} is removed, with IBV_EVENT_DEVICE_FATAL: it fails for good, and ibv_get_device_list does not list it.",
                at(*after),
                device(place)
            ),
            Fault::Fails(state, after) => {
                let others = match place.qp {
                    Some(_) => {
                        "If it is not there by then, or in RESET, it fails when it is ready to send."
                    }
                    None => "Those that are made later, or are in RESET at that time, do not.",
                };
                let state = match state {
                    QpFailure::Err => "the error state, with IBV_EVENT_QP_FATAL",
                    QpFailure::Sqe => "SQE, and its sends are flushed, if it is of UD or UC",
                };
                format!("{} {} goes to {state}. {others}", at(*after), queue_pair(place))
            }
        }
    }
}

/// The queue pairs that share a rate.
fn senders(place: &Place) -> String {
    match (place.qp, &place.device) {
        (Some(_), _) => format!("{} sends", queue_pair(place)),
        (None, Some(_)) => format!("the queue pairs of {} send together", part(place)),
        (None, None) => "the queue pairs of each port send together".into(),
    }
}

fn limited(limit: Limit, when: &str) -> String {
    let rate = limit.rate as f64;
    let rate = match limit.rate {
        1_000_000_000.. => format!("{}Gb/s", rate / 1e9),
        1_000_000.. => format!("{}Mb/s", rate / 1e6),
        _ => format!("{}kb/s", rate / 1e3),
    };
    let queue = match limit.queue {
        Some(n) => format!("{n} waiting"),
        None => "1000 of its queue pair waiting".into(),
    };
    format!(
        "leave one behind the other, at {rate} at most{when}. Each waits for its turn; one that finds {queue} is lost."
    )
}

/// A call, and from where.
fn called(call: &str, site: Option<&Site>) -> String {
    site.map_or_else(|| call.to_owned(), |site| format!("{call} from {site}"))
}

fn explain_call(call: &str, which: Which, action: CallAction) -> String {
    let action = match action {
        CallAction::Fails(errno) => {
            return match which {
                Which::All => format!("each {call} fails with {errno}"),
                Which::Numbers(n, last) if n == last => {
                    format!("call {n} of {call} fails with {errno}")
                }
                Which::Numbers(first, last) => {
                    format!("calls {first} to {last} of {call} fail with {errno}")
                }
                Which::Chance(parts) => {
                    format!("{} of the calls of {call} fail with {errno}", percent(parts))
                }
            };
        }
        CallAction::Process(action) => action,
    };
    let calls = match which {
        Which::All => format!("each {call}"),
        Which::Numbers(n, last) if n == last => format!("call {n} of {call}"),
        Which::Numbers(first, last) => format!("each of the calls {first} to {last} of {call}"),
        Which::Chance(parts) => {
            format!("each call of {call}, with a chance of {},", percent(parts))
        }
    };
    format!("before {calls} {action}")
}

impl fmt::Display for ProcessAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dies => f.write_str("the process is killed"),
            Self::Pauses(time) => write!(f, "the process stands still for {}", show(*time)),
        }
    }
}

fn kind_name(kind: Option<PacketKind>) -> String {
    match kind {
        None => "",
        Some(PacketKind::Request) => "request ",
        Some(PacketKind::Send) => "SEND ",
        Some(PacketKind::Write) => "WRITE ",
        Some(PacketKind::Read) => "READ request ",
        Some(PacketKind::Atomic) => "atomic request ",
        Some(PacketKind::Response) => "response ",
        Some(PacketKind::Ack) => "ACK ",
        Some(PacketKind::Single(opcode)) => return format!("{opcode} "),
    }
    .into()
}

fn counted(which: Which, kind: &str, things: &str) -> String {
    let one = things.trim_end_matches('s');
    match which {
        Which::All => format!("all {kind}{things}"),
        Which::Numbers(n, last) if n == last => format!("{kind}{one} {n}"),
        Which::Numbers(first, last) => format!("{kind}{things} {first} to {last}"),
        Which::Chance(parts) => format!("{} of the {kind}{things}", percent(parts)),
    }
}

/// Whether it is one thing.
fn is_one(which: Which) -> bool {
    matches!(which, Which::Numbers(first, last) if first == last)
}

fn percent(parts: u32) -> String {
    format!("{}%", f64::from(parts) / 10_000.0)
}

fn show(time: Duration) -> String {
    format!("{time:?}").replace('\u{b5}', "u")
}

/// A moment in the life of the process's device.
fn at(after: Duration) -> String {
    match after {
        Duration::ZERO => "at the start".into(),
        after => format!("{} after the start", show(after)),
    }
}

fn during(span: Span) -> String {
    let from = match span.after {
        Duration::ZERO => String::new(),
        after => format!(", from {} after the start on", show(after)),
    };
    let lasts = span.lasts.map_or(String::new(), |lasts| format!(", for {}", show(lasts)));
    from + &lasts
}

fn queue_pair(place: &Place) -> String {
    match (place.qp, &place.device) {
        (Some(QpName::Nth(n)), None) => format!("the process's queue pair {n}"),
        (Some(QpName::Nth(n)), Some(_)) => format!("queue pair {n} of {}", part(place)),
        (Some(QpName::Number(n)), None) => format!("the queue pair of number {n:#08x}"),
        (Some(QpName::Number(n)), Some(_)) => {
            format!("the queue pair of number {n:#08x}, if it is of {},", part(place))
        }
        (None, Some(_)) => format!("each queue pair of {}", part(place)),
        (None, None) => "each queue pair".into(),
    }
}

fn port(place: &Place) -> String {
    if place.port.is_some() { part(place) } else { format!("each port of {}", device(place)) }
}

/// A device, or one of its ports.
fn part(place: &Place) -> String {
    match place.port {
        Some(port) => format!("port {port} of {}", device(place)),
        None => device(place),
    }
}

fn device(place: &Place) -> String {
    place.device.clone().unwrap_or_else(|| "each device".into())
}
