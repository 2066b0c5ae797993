//! The same seed gives the same faults, of every kind: what the trace, the log and the counter have of them.
#![expect(clippy::unwrap_used, reason = "a test")]

mod built_libraries;

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyverbs_testing::UdpPort;

/// Rules about packets, requests, a queue pair and calls, each of which leaves something to chance but that of the queue pair.
const RULES: &[&str] = &[
    "on qp 1: drop 20% of packets",
    "on qp 1: duplicate 10% of packets",
    "on qp 1: delay 10% of packets by 10us to 900us",
    "on qp 4: corrupt 20% of received packets",
    "on qp 3: 10% of sends complete after 1ms",
    "on qp 5: 5% of sends complete with RETRY_EXC_ERR",
    "on qp 7: fails after 0s",
    "5% of ibv_post_send fails with EAGAIN",
    "10% of ibv_reg_mr from calls fails with ENOMEM",
];

/// The faults of a run. Each list has those of received packets at its end: a packet may arrive while its sender makes the next call, in
/// another thread.
#[derive(Debug, PartialEq, Eq)]
struct Faults {
    /// Those of the trace, in its order: what happened, and the rule.
    trace: Vec<(String, String)>,
    /// The lines of the log, in theirs.
    log: Vec<String>,
    /// The counter.
    injected: u64,
}

/// Numbers of queue pairs differ between runs.
fn without_numbers(text: &str) -> String {
    let mut parts = text.split("0x");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + "0x" + part.trim_start_matches(|c: char| c.is_ascii_hexdigit())
    })
}

/// The script has a seed, and the variable perhaps another one.
fn run(dir: &Path, port: &UdpPort, (seed, variable): (u64, &str)) -> Faults {
    let trace = dir.join("trace.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
    command.args(["run", "--devices", "lo", "--trace"]).arg(&trace);
    command.args(["--faults", &format!("seed {seed}\n{}", RULES.join("\n"))]);
    let count =
        "./chances && cat /sys/class/infiniband/anyverbs0/ports/1/hw_counters/injected_faults";
    command.args(["--", "sh", "-c", count]).current_dir(dir);
    command.env("ANYVERBS_LIB_DIR", dir.join("lib")).env("ANYVERBS_FAULT_SEED", variable);
    command.env("ANYVERBS_UDP_PORT", port.number().to_string());
    command.env("ANYVERBS_REGISTRY", format!("anyverbs-seeds-{}", port.number()));
    command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let text = fs::read_to_string(&trace).unwrap();
    fs::remove_file(trace).unwrap();
    let events = text.lines().filter_map(|line| {
        let event: serde_json::Value = serde_json::from_str(line.strip_suffix(',')?).unwrap();
        let text = |value: &serde_json::Value| without_numbers(value.as_str().unwrap());
        (event["cat"] == "fault").then(|| (text(&event["name"]), text(&event["args"]["rule"])))
    });
    let mut trace: Vec<_> = events.collect();
    trace.sort_by_key(|(what, _)| what.starts_with("received packet "));
    // The thread that meets a fault says what follows from it.
    let log = said.lines().filter(|line| line.contains("anyverbs: injected fault ("));
    let mut log: Vec<_> = log.map(without_numbers).collect();
    log.sort_by_key(|line| line.contains(": received packet "));
    Faults {
        trace,
        log,
        injected: String::from_utf8(output.stdout).unwrap().trim().parse().unwrap(),
    }
}

#[test]
fn one_seed_gives_the_same_faults_of_every_kind_and_another_one_others() {
    let port = UdpPort::reserve();
    let dir = env::temp_dir().join(format!("anyverbs-seeds-{}", std::process::id()));
    built_libraries::link(&dir.join("lib"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/chances.c");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(dir.join("chances")).arg(source);
    cc.arg("-L").arg(dir.join("lib")).arg("-libverbs");
    assert!(cc.status().unwrap().success());
    let [first, again, other, by_variable] =
        [(7, ""), (7, ""), (8, ""), (7, "8")].map(|seed| run(&dir, &port, seed));
    fs::remove_dir_all(&dir).unwrap();
    for rule in RULES {
        let count = first.trace.iter().filter(|(_, of)| of == rule).count();
        let least = if rule.contains('%') { 2 } else { 1 };
        assert!(count >= least, "{rule}: {count} times in {:?}", first.trace);
    }
    assert_eq!(first.injected, first.trace.len() as u64);
    assert_eq!(first, again);
    assert_ne!(first.trace, other.trace);
    assert_ne!(first.log, other.log);
    assert_eq!(other, by_variable, "the variable goes before the script");
}
