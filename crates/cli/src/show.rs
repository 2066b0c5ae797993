//! `anyverbs show`.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use anyverbs::timer_code;
use anyverbs_causes::Cause;
use anyverbs_page::{Counter, QueuePair, Snapshot, address};
use serde_json::json;

use crate::args::{Show, ShowWhat};
use crate::look::{self, Looker, Process, qpn, span};
use crate::{device, top};

/// Prints what is asked for.
pub(crate) fn print(args: &Show) -> anyhow::Result<ExitCode> {
    let processes = Looker::new(&args.settings)?.look(look::longest_wait());
    let text = match args.what {
        None => {
            let devices = device::list(&args.settings)?;
            if args.json {
                let processes: Vec<_> = processes.iter().map(Process::json).collect();
                json_text(&json!({ "devices": devices, "processes": processes }))?
            } else {
                let names = devices.iter().flat_map(|device| {
                    device.numbered().map(|(number, port)| {
                        let address = port.address().map(|gid| gid.address.to_string());
                        format!(
                            "{}  port {number} {}  {}  UDP port {}\n",
                            device.name,
                            device::state(port.state),
                            address.unwrap_or_default(),
                            device.udp_port
                        )
                    })
                });
                let down = processes.iter().filter_map(|process| {
                    let down = &process.page().filter(|page| !page.down.is_empty())?.down;
                    let down = look::cut(&look::printable(&down.join(", ")), 60);
                    Some(format!("process {}  port down  {down}\n", process.pid))
                });
                let (names, down) = (names.collect::<String>(), down.collect::<String>());
                format!("{names}{down}\n{}", top::list(&processes, None, 80))
            }
        }
        Some(ShowWhat::Process { ref process }) => {
            let process = look::find(&processes, process, "show")?;
            if args.json { json_text(&process.json())? } else { describe(process, &processes) }
        }
        Some(ShowWhat::Qp { number }) => {
            let Some(process) = look::owner(&processes, number) else {
                bail!(
                    "no process of yours has a queue pair {}; `anyverbs show` lists those there are",
                    qpn(number)
                );
            };
            let page = process.page().expect("the owner has a page");
            let found = page.queue_pairs.iter().find(|qp| qp.number == number);
            let qp = found.expect("the owner has the queue pair");
            let device = page.port(qp.port);
            if args.json {
                let groups: Vec<_> =
                    page.groups_of(number).map(|gid| address(gid).to_string()).collect();
                let qp = look::named(qp);
                json_text(
                    &json!({ "pid": process.pid, "device": device, "queue_pair": qp, "groups": groups }),
                )?
            } else {
                describe_qp(process, page, (qp, device), &processes)
            }
        }
    };
    crate::write_out(text.as_bytes())
}

fn json_text(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// A line of a name and a value.
fn line(text: &mut String, name: &str, value: impl std::fmt::Display) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "  {name:<14} {value}");
}

fn describe(process: &Process, processes: &[Process]) -> String {
    let mut text = format!("process {}  {}\n", process.pid, process.command);
    if let Some(trouble) = process.trouble() {
        line(&mut text, "condition", trouble);
    }
    let Some(page) = process.page() else { return text };
    let objects = &page.process.objects;
    line(&mut text, "device", look::cut(&look::printable(&page.devices.join(", ")), 60));
    if !page.down.is_empty() {
        line(&mut text, "port down", look::cut(&look::printable(&page.down.join(", ")), 60));
    }
    line(
        &mut text,
        "slot",
        format_args!("{} (queue pairs {:#04x}....)", page.process.slot, page.process.slot),
    );
    line(
        &mut text,
        "objects",
        format_args!(
            "{} QP, {} CQ, {} SRQ, {} PD, {} AH, {} MW",
            objects.queue_pairs,
            objects.completion_queues,
            objects.shared_receive_queues,
            objects.protection_domains,
            objects.address_handles,
            objects.windows
        ),
    );
    line(
        &mut text,
        "memory",
        format_args!(
            "{} {}, {}B",
            objects.regions,
            if objects.regions == 1 { "region" } else { "regions" },
            look::bytes(objects.region_bytes)
        ),
    );
    for call in look::calls(page) {
        let (call, missing) = call.split_once("; ").unwrap_or((&call, ""));
        line(&mut text, "waits", call);
        line(&mut text, "", missing);
    }
    text.push_str("\ncompletion queues\n  CQ      completions   depth   events to acknowledge\n");
    for cq in &page.completion_queues {
        let unpolled = Duration::from_nanos(cq.unpolled_ns);
        let note = match (cq.overrun, unpolled >= Duration::from_secs(1)) {
            (true, _) => "  overrun".into(),
            (false, true) => format!("  not polled for {}", span(unpolled)),
            (false, false) => String::new(),
        };
        let _ = writeln!(
            text,
            "  {:<7} {:>11} {:>7}   {:>21}{note}",
            cq.number, cq.fill, cq.depth, cq.unacknowledged
        );
    }
    text.push_str("\nqueue pairs\n");
    text.push_str(&top::queue_pairs(process, processes, None, 80));
    text.push_str("\ncounters that are not zero\n");
    counters(&mut text, &page.counters);
    for (counted, device) in page.counters_of.iter().zip(0..).filter(|(of, _)| !of.is_empty()) {
        let name = look::printable(page.port(device));
        let _ = writeln!(text, "\ncounters of {} that are not zero", look::cut(&name, 48));
        counters(&mut text, counted);
    }
    text
}

fn counters(text: &mut String, counters: &[Counter]) {
    for counter in counters.iter().filter(|counter| counter.value > 0) {
        let name = look::printable(&counter.name);
        let _ = writeln!(text, "  {:<30} {}", look::cut(&name, 30), counter.value);
    }
}

/// `655 ms`, `4.19 ms` or `0.01 ms`: three digits, and more only of whole milliseconds.
fn ms(time: Duration) -> String {
    let ms = time.as_nanos() as f64 / 1e6;
    let digits = (2.0 - ms.log10().floor()).clamp(0.0, 6.0) as usize;
    let text = format!("{ms:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} ms")
}

/// The attributes of `ibv_modify_qp`, and what the codes stand for.
fn attributes(text: &mut String, qp: &QueuePair) {
    let of = &qp.attributes;
    let is_ud = look::kind(qp.kind) == "UD";
    if !is_ud {
        let timeout = match timer_code::ack(of.timeout) {
            None => "0 (none)".to_owned(),
            Some(time) => format!("{} ({})", of.timeout, ms(time)),
        };
        line(
            text,
            "retries of it",
            format_args!(
                "timeout {timeout}, retry_cnt {}, rnr_retry {}{}, min_rnr_timer {} ({})",
                of.retry_cnt,
                of.rnr_retry,
                if of.rnr_retry == 7 { " (for ever)" } else { "" },
                of.min_rnr_timer,
                ms(timer_code::rnr(of.min_rnr_timer))
            ),
        );
        line(
            text,
            "READs, atomics",
            format_args!(
                "max_rd_atomic {}, max_dest_rd_atomic {}",
                of.max_rd_atomic, of.max_dest_rd_atomic
            ),
        );
        line(text, "access", of.rights());
        line(text, "sgid_index", of.sgid_index);
    }
    line(text, "P_Key", format_args!("{:#06x}", of.pkey));
    if is_ud {
        line(text, "Q_Key", format_args!("{:#010x}", of.qkey));
    }
}

fn describe_qp(
    process: &Process,
    page: &Snapshot,
    (qp, device): (&QueuePair, &str),
    processes: &[Process],
) -> String {
    let mut text = format!("queue pair {} ({})\n", qpn(qp.number), qp.number);
    line(&mut text, "process", format_args!("{}  {}", process.pid, process.command));
    if let Some(trouble) = process.trouble() {
        line(&mut text, "condition", trouble);
    }
    line(&mut text, "device", look::cut(&look::printable(device), 60));
    line(&mut text, "type", look::kind(qp.kind));
    if qp.busy {
        line(&mut text, "busy", "a thread keeps it locked; nothing else is known now");
        return text;
    }
    line(&mut text, "state", look::state(qp.state));
    let waits = look::waits(processes, qp).unwrap_or_else(|| "for nothing".into());
    line(&mut text, "waits", waits.strip_prefix("waits ").unwrap_or(&waits));
    if let Some(cause) = Cause::from_number(qp.waiting.cause) {
        line(
            &mut text,
            "first cause",
            format_args!("{} (`anyverbs explain {cause}`)", cause.text()),
        );
    }
    line(&mut text, "way", qp.way.text());
    let (peer, psns) = (&qp.peer, &qp.peer.psns);
    if peer.gid != 0 {
        let owner = look::owner(processes, peer.number).filter(|_| peer.number != 0);
        let owner = owner.map_or(String::new(), |process| format!(", process {}", process.pid));
        line(
            &mut text,
            "peer",
            format_args!("{} at {}{owner}", qpn(peer.number), address(peer.gid)),
        );
        line(&mut text, "own address", address(peer.source));
        line(&mut text, "path MTU", peer.mtu);
        line(
            &mut text,
            "PSNs",
            format_args!(
                "next {:#08x}, oldest without an ACK {:#08x}, expected {:#08x}",
                psns.next, psns.unanswered, psns.expected
            ),
        );
    }
    attributes(&mut text, qp);
    let (sends, receives, traffic) = (&qp.sends, &qp.receives, &qp.traffic);
    line(
        &mut text,
        "send queue",
        format_args!(
            "{} of {} slots taken, {} requests outstanding, {} of these not sent; CQ {}",
            sends.taken, sends.depth, sends.outstanding, sends.unsent, sends.completion_queue
        ),
    );
    let shared = if receives.shared { " in the shared receive queue" } else { "" };
    let depth = if receives.shared { String::new() } else { format!(" of {}", receives.depth) };
    line(
        &mut text,
        "receive queue",
        format_args!(
            "{}{depth} receives wait{shared}; CQ {}",
            receives.fill, receives.completion_queue
        ),
    );
    // One in hand, whose message has begun, is neither complete nor waits.
    if !receives.shared {
        line(
            &mut text,
            "",
            format_args!("{} posted, {} completed", receives.posted, receives.completed),
        );
    }
    line(
        &mut text,
        "sent",
        format_args!("{} messages, {}B", traffic.sent, look::bytes(traffic.sent_bytes)),
    );
    line(
        &mut text,
        "received",
        format_args!("{} messages, {}B", traffic.received, look::bytes(traffic.received_bytes)),
    );
    line(&mut text, "retries", traffic.retries);
    line(&mut text, "RNR NAKs", traffic.rnr_naks);
    line(&mut text, "events", format_args!("{} read and not acknowledged", qp.unacknowledged));
    // As the log names it: the highest bits are those of the process.
    line(&mut text, "PD", qp.protection_domain & 0xff_ffff);
    for (n, gid) in page.groups_of(qp.number).enumerate() {
        line(&mut text, if n == 0 { "groups" } else { "" }, address(gid));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_codes_have_three_digits() {
        let timeout = |code| ms(timer_code::ack(code).unwrap());
        assert_eq!([1, 10, 14, 18].map(timeout), ["0.00819 ms", "4.19 ms", "67.1 ms", "1074 ms"]);
        let rnr = |code| ms(timer_code::rnr(code));
        assert_eq!([0, 1, 5, 31].map(rnr), ["655 ms", "0.01 ms", "0.06 ms", "492 ms"]);
        assert_eq!(ms(Duration::from_millis(100)), "100 ms");
    }
}
