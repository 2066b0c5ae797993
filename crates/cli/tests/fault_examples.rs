//! The example scripts whose rules all act in one run, by the commands that they name.
#![expect(clippy::unwrap_used, reason = "a test")]

mod built_libraries;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
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

    /// A program on one device at the loopback address, with its standard error in a file.
    fn run(&self, options: &[&str], program: &[&str], log: &str) -> Command {
        let number = self.port.number().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command.args(["run", "--devices", "lo"]).args(options).arg("--").args(program);
        command.args(["-p", &number]).env("ANYVERBS_UDP_PORT", &number);
        command.env("ANYVERBS_LIB_DIR", self.dir.join("lib"));
        command.env("ANYVERBS_REGISTRY", format!("anyverbs-examples-{number}"));
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
        command.stdout(Stdio::null()).stderr(fs::File::create(self.dir.join(log)).unwrap());
        command
    }

    fn is_listening(&self) -> bool {
        let port = format!(":{:04X} ", self.port.number());
        ["tcp", "tcp6"].into_iter().any(|of| {
            let sockets = fs::read_to_string(format!("/proc/net/{of}")).unwrap_or_default();
            sockets.lines().any(|line| line.contains(&port) && line.contains(" 0A "))
        })
    }
}

#[test]
fn each_rule_of_an_example_acts() {
    let pingpong = &["ibv_rc_pingpong", "-g", "0", "-n", "300"][..];
    for (example, program) in [
        ("lumina", pingpong),
        ("congestion", pingpong),
        ("nbs", &["ib_write_bw"]),
        ("memory", &["ib_write_bw", "-s", "65536", "-D", "6"]),
    ] {
        let find = format!("command -v {} > /dev/null", program[0]);
        if !Command::new("sh").args(["-c", &find]).status().unwrap().success() {
            return skip(format!("there is no {}", program[0]));
        }
        let scratch = Scratch::new();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/faults");
        let script = script.join(example).with_extension("fault");
        let mut server = scratch.run(&[], program, "server").spawn().unwrap();
        let begin = Instant::now();
        while !scratch.is_listening() {
            assert!(begin.elapsed() < Duration::from_secs(30), "{example}: no server");
            thread::sleep(Duration::from_millis(20));
        }
        let options = ["--faults", script.to_str().unwrap()];
        let client = [program, &["127.0.0.1"]].concat();
        // Some of them fail, as they should.
        let _ = scratch.run(&options, &client, "client").status().unwrap();
        let begin = Instant::now();
        while server.try_wait().unwrap().is_none() && begin.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(20));
        }
        let _ = server.kill();
        let _ = server.wait();
        let log = fs::read_to_string(scratch.dir.join("client")).unwrap();
        assert!(log.contains("injected fault"), "{example}: {log}");
        assert!(!log.contains("never did anything"), "{example}: {log}");
    }
}
