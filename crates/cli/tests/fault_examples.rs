//! Each rule of each example script acts in a run of the programs that the scripts and their page name.
#![expect(clippy::unwrap_used, reason = "a test")]

mod built_libraries;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyverbs_testing::{UdpPort, skip};

/// A library directory, and a port that no other test has.
struct Scratch {
    dir: PathBuf,
    port: UdpPort,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Scratch {
    fn new() -> Self {
        let port = UdpPort::reserve();
        let name = format!("anyverbs-examples-{}-{}", std::process::id(), port.number());
        let dir = env::temp_dir().join(name);
        built_libraries::link(&dir.join("lib"));
        Self { dir, port }
    }

    /// A program below the device, with its output in a file.
    fn run(&self, options: &[&str], program: &[&str], log: &str) -> Command {
        let number = self.port.number().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command.arg("run").args(options).arg("--").args(program);
        command.env("ANYVERBS_UDP_PORT", &number);
        command.env("ANYVERBS_LIB_DIR", self.dir.join("lib"));
        command.env("ANYVERBS_REGISTRY", format!("anyverbs-examples-{number}"));
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
        let log = fs::File::create(self.dir.join(log)).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        command
    }

    /// A program of this crate's tests.
    fn built(&self, name: &str) -> String {
        let program = self.dir.join(name).to_str().unwrap().to_owned();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Wextra", "-Werror", "-O1", "-o", &program]);
        cc.arg(source.with_extension("c")).arg("-L").arg(self.dir.join("lib")).arg("-libverbs");
        assert!(cc.status().unwrap().success());
        program
    }

    /// The output of a client with a script, while a server without one runs. Both have these options and words.
    fn client_says(&self, options: &[&str], words: &[&str], script: &str) -> String {
        let port = self.port.number().to_string();
        let words = [words, &["-p", &port]].concat();
        let mut server = Server(self.run(options, &words, "server").spawn().unwrap());
        wait(&format!("a server of {script}"), || self.is_listening().then_some(()));
        let says = self.says(
            &[options, &["--faults", script]].concat(),
            &[&words, &["127.0.0.1"][..]].concat(),
        );
        // It may wait for a client that has failed.
        let _ = server.0.kill();
        says
    }

    /// The output of a program. Some programs fail, as they should.
    fn says(&self, options: &[&str], words: &[&str]) -> String {
        let mut child = Server(self.run(options, words, "log").spawn().unwrap());
        wait(&format!("the end of {words:?}"), || child.0.try_wait().unwrap());
        fs::read_to_string(self.dir.join("log")).unwrap()
    }

    fn is_listening(&self) -> bool {
        let port = format!(":{:04X} ", self.port.number());
        ["tcp", "tcp6"].into_iter().any(|of| {
            let sockets = fs::read_to_string(format!("/proc/net/{of}")).unwrap_or_default();
            sockets.lines().any(|line| line.contains(&port) && line.contains(" 0A "))
        })
    }
}

/// A program that runs until the value is dropped, if not for a shorter time.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "in a minute there was not {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The first of these programs that is not there, as the reason of a skipped test.
fn lacks(programs: &[&str]) -> bool {
    let is_there = |program: &str| {
        let find = format!("command -v {program} > /dev/null");
        Command::new("sh").args(["-c", &find]).status().unwrap().success()
    };
    let missing = programs.iter().find(|program| !is_there(program));
    missing.inspect(|program| skip(format!("there is no {program}"))).is_some()
}

fn script(example: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/faults");
    dir.join(example).with_extension("fault")
}

/// The rules of an example, with the numbers of their lines.
fn rules(example: &str) -> Vec<(usize, String)> {
    let text = fs::read_to_string(script(example)).unwrap();
    let is_rule = |line: &str| !["#", "seed "].iter().any(|other| line.starts_with(other));
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.to_owned()));
    lines.filter(|(_, line)| !line.is_empty() && is_rule(line)).collect()
}

/// The lines of the rules that acted, as the log names them.
fn acted(log: &str) -> BTreeSet<usize> {
    let named = log.split("injected fault (line ").skip(1);
    let number = |rest: &str| rest.split_once(" of the script): ")?.0.parse().ok();
    named.filter_map(number).collect()
}

/// Every rule of an example acted in one of the runs with these logs.
fn all_acted(example: &str, logs: &[String]) {
    let acted: BTreeSet<usize> = logs.iter().flat_map(|log| acted(log)).collect();
    let wanted: BTreeSet<usize> = rules(example).into_iter().map(|(line, _)| line).collect();
    assert_eq!(acted, wanted, "{example}: {}", logs.join("\n----\n"));
}

const LO: &[&str] = &["--devices", "lo"];
const PINGPONG: &[&str] = &["ibv_rc_pingpong", "-g", "0", "-n", "300"];

/// Those whose rules all act in one run of the client.
#[test]
fn each_rule_of_an_example_acts() {
    for (example, words) in [
        ("lumina", PINGPONG),
        ("congestion", PINGPONG),
        ("nbs", &["ib_write_bw"]),
        ("memory", &["ib_write_bw", "-s", "65536", "-D", "6"]),
    ] {
        if lacks(&words[..1]) {
            return;
        }
        let log = Scratch::new().client_says(LO, words, script(example).to_str().unwrap());
        let seed = if example == "nbs" { 42 } else { 1 };
        assert!(log.contains(&format!("faults are injected: seed {seed}, rules: ")), "{log}");
        assert!(!log.contains("never did anything"), "{example}: {log}");
        all_acted(example, &[log]);
    }
}

/// The program uses the rail whose request hangs. It outlasts the rail that is down.
#[test]
fn a_rail_flaps_and_a_request_hangs_as_mooncake_asks() {
    if lacks(&["ib_write_bw"]) {
        return;
    }
    let rails = ["--devices", "8", "--device", "mlx5_0"];
    let program = ["ib_write_bw", "-d", "mlx5_5", "-D", "5"];
    let log = Scratch::new().client_says(&rails, &program, script("mooncake").to_str().unwrap());
    for said in ["the port of mlx5_3 is down", "the port of mlx5_3 is up again", "): send 12 "] {
        assert!(log.contains(said), "no {said:?} in {log}");
    }
    all_acted("mooncake", &[log]);
}

#[test]
fn a_queue_pair_is_slow_and_fails_as_rccl_asks() {
    if lacks(&["ib_write_bw", "ibv_rc_pingpong"]) {
        return;
    }
    let scratch = Scratch::new();
    let script = script("rccl");
    let script = script.to_str().unwrap();
    let slow = scratch.client_says(LO, &["ib_write_bw"], script);
    let refused = scratch.client_says(LO, &["ibv_rc_pingpong", "-g", "0", "-r", "600"], script);
    assert!(refused.contains("Couldn't post receive"), "{refused}");
    let idle = scratch.built("connects");
    let idle = scratch.says(&[LO, &["--faults", script]].concat(), &[&idle, "idle"]);
    assert!(
        idle.contains("local work queue catastrophic error, state 6, nothing to flush"),
        "{idle}"
    );
    all_acted("rccl", &[slow, refused, idle]);
}

/// Each rule alone, with a program that makes the call twice.
#[test]
fn each_call_fails_once_as_rpma_asks() {
    if lacks(&["ucmatose", "ib_write_bw"]) {
        return;
    }
    let scratch = Scratch::new();
    for (_, rule) in rules("rpma") {
        let log = match rule.starts_with("ibv_modify_qp ") {
            true => scratch.client_says(LO, &["ib_write_bw"], &rule),
            // Nobody listens: both connections fail, and all these calls come before that.
            false => {
                let words = ["ucmatose", "-s", "127.0.0.1", "-c", "2"];
                scratch.says(&[LO, &["--faults", &rule]].concat(), &words)
            }
        };
        let (call, fails) = rule.split_once(" 2 ").unwrap();
        let line = format!("injected fault (line 1 of the script): call 2 of {call} {fails}");
        assert_eq!(log.matches(&line).count(), 1, "{rule}: {log}");
        assert_eq!(log.matches("injected fault").count(), 1, "{rule}: {log}");
    }
}

#[test]
fn a_call_fails_at_one_site_as_rpma_asks() {
    if lacks(&["ib_write_bw"]) {
        return;
    }
    let scratch = Scratch::new();
    let script = script("sites");
    let script = script.to_str().unwrap();
    let object = scratch.client_says(LO, &["ib_write_bw"], script);
    let connects = scratch.built("connects");
    let function = scratch.says(&[LO, &["--faults", script]].concat(), &[&connects]);
    assert!(function.contains("RTR: Connection timed out"), "{function}");
    all_acted("sites", &[object, function]);
}
