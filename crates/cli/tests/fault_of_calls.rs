//! `anyverbs fault`: rules about calls come to a program in C that runs, and go.
#![expect(clippy::unwrap_used, reason = "a test")]

mod built_libraries;

use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyverbs_testing::UdpPort;

/// The program, below the device. It is killed when the value is dropped.
struct Works {
    dir: PathBuf,
    port: UdpPort,
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Drop for Works {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn command(dir: &Path, port: &UdpPort) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
    command.current_dir(dir).env("ANYVERBS_LIB_DIR", dir.join("lib"));
    command.env("ANYVERBS_UDP_PORT", port.number().to_string());
    command.env("ANYVERBS_REGISTRY", format!("anyverbs-calls-{}", port.number()));
    command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
    command
}

impl Works {
    fn start(faults: &str) -> Self {
        Self::start_with(&["--faults", faults])
    }

    fn start_with(options: &[&str]) -> Self {
        let port = UdpPort::reserve();
        let name = format!("anyverbs-calls-{}-{}", std::process::id(), port.number());
        let dir = env::temp_dir().join(name);
        built_libraries::link(&dir.join("lib"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/calls.c");
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(dir.join("calls")).arg(source);
        cc.arg("-L").arg(dir.join("lib")).arg("-libverbs");
        assert!(cc.status().unwrap().success());
        let mut run = command(&dir, &port);
        run.arg("run").args(options).args(["--", "./calls"]);
        let mut child = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut works = Self { dir, port, child, stdin, stdout };
        assert_eq!(works.hear(), "ready");
        works
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// How many of ten calls from each function fail.
    fn failed(&mut self) -> String {
        writeln!(self.stdin).unwrap();
        self.hear()
    }

    fn fault(&self, order: &str) -> String {
        let output = command(&self.dir, &self.port).args(["fault", "calls", order]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

#[test]
fn rules_about_calls_come_to_a_program_that_runs_and_go() {
    // The first of all calls is one of the ten of the first function. The script is about calls alone.
    let mut works = Works::start("ibv_reg_mr 1 fails with EIO");
    assert_eq!(works.failed(), "1 0");
    assert_eq!(works.failed(), "0 0");
    let rules = "ibv_reg_mr 1 to 3 fails with ENOMEM\nibv_reg_mr 5 from grow fails with EFAULT\n";
    assert_eq!(works.fault(rules), "rules that were added to this process: 2\n");
    // They count from now on. The first one counts the calls of both functions: 1 and 3 are of `setup`, and 2 is of `grow`.
    assert_eq!(works.failed(), "2 2");
    assert_eq!(works.failed(), "0 0");
    assert!(works.fault("list").ends_with(rules));
    works.fault("ibv_reg_mr from setup fails with EAGAIN; drop packet 100000");
    assert_eq!([works.failed(), works.failed()], ["10 0", "10 0"]);
    assert_eq!(works.fault("clear"), "rules of this process that do not hold any more: 5\n");
    assert_eq!(works.failed(), "0 0");
}

#[test]
fn calls_fail_for_a_time() {
    let mut works = Works::start("seed 1");
    // The first call with a site reads symbols, which takes seconds on a busy machine.
    works.fault("ibv_reg_mr 100000 from setup fails with EIO");
    works.failed();
    let begin = Instant::now();
    works.fault("ibv_reg_mr from setup fails with EAGAIN after 1s for 1s");
    while works.failed() == "0 0" {}
    assert!(begin.elapsed() >= Duration::from_secs(1));
    let patience = Instant::now();
    while works.failed() != "0 0" {
        assert!(patience.elapsed() < Duration::from_secs(60), "they fail for good");
    }
    assert!(begin.elapsed() >= Duration::from_secs(2));
    assert!(works.fault("list").contains(" for 1s # is over"));
}

#[test]
fn a_trace_has_the_faults_of_calls() {
    let rules = "ibv_reg_mr 2 to 3 fails with EAGAIN; ibv_reg_mr 5 pauses the process for 1ms";
    let mut works = Works::start_with(&["--trace", "trace.json", "--faults", rules]);
    works.failed();
    let trace = fs::read_to_string(works.dir.join("trace.json")).unwrap();
    let faults: Vec<_> = trace.lines().filter(|line| line.contains(r#""cat":"fault""#)).collect();
    let wanted = [
        ("call 2 of ibv_reg_mr fails with EAGAIN", "ibv_reg_mr 2 to 3 fails with EAGAIN"),
        ("call 3 of ibv_reg_mr fails with EAGAIN", "ibv_reg_mr 2 to 3 fails with EAGAIN"),
        (
            "call 5 of ibv_reg_mr: the process stands still for 1ms",
            "ibv_reg_mr 5 pauses the process for 1ms",
        ),
    ];
    assert_eq!(faults.len(), wanted.len(), "{faults:?}");
    for (line, (name, rule)) in faults.iter().zip(wanted) {
        assert!(line.contains(&format!("\"name\":\"{name}\"")), "{line}");
        assert!(line.contains(&format!("\"rule\":\"{rule}\"")), "{line}");
    }
}
