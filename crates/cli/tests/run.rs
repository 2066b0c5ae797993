//! `anyverbs run` as a parent: statuses, signals, and what it leaves behind.
#![expect(clippy::unwrap_used, reason = "a test")]

mod library_names;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A library directory with the names only, and a place for trees.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("anyverbs-run-{}-{name}", std::process::id()));
        library_names::fill(&dir.join("lib"));
        fs::create_dir_all(dir.join("tmp")).unwrap();
        Scratch(dir)
    }

    fn run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command
            .arg("run")
            .args(arguments)
            .env("ANYVERBS_LIB_DIR", self.0.join("lib"))
            .env("TMPDIR", self.0.join("tmp"));
        // The loader says that it cannot load an empty object and goes on.
        command.env_remove("XDG_RUNTIME_DIR").env_remove("LD_PRELOAD").stderr(Stdio::null());
        command
    }

    fn trees(&self) -> usize {
        fs::read_dir(self.0.join("tmp")).unwrap().count()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_programs_status_is_the_launchers() {
    let scratch = Scratch::new("status");
    let status = |arguments: &[&str]| scratch.run(arguments).status().unwrap();
    assert_eq!(status(&["--", "true"]).code(), Some(0));
    assert_eq!(status(&["--", "sh", "-c", "exit 7"]).code(), Some(7));
    assert_eq!(status(&["--", "/nonexistent"]).code(), Some(127));
    let no_program = scratch.0.join("lib/libibverbs.so");
    assert_eq!(status(&["--", no_program.to_str().unwrap()]).code(), Some(126));
    assert_eq!(status(&["--lib-dir", "/nonexistent", "--", "true"]).code(), Some(125));
    assert_eq!(status(&["--", "sh", "-c", "kill -TERM $$"]).signal(), Some(libc::SIGTERM));
    assert_eq!(status(&["--", "sh", "-c", "kill -SEGV $$"]).signal(), Some(libc::SIGSEGV));
    assert_eq!(scratch.trees(), 0);
}

#[test]
fn the_program_finds_library_and_tree() {
    let scratch = Scratch::new("environment");
    let script = "echo $LD_LIBRARY_PATH; echo $ANYVERBS_LOG; stat -c %a $ANYVERBS_VIEW; ls $ANYVERBS_VIEW/sys/class/infiniband";
    let output = scratch
        .run(&["--log", "debug", "--device", "test7", "--", "sh", "-c", script])
        .env("LD_LIBRARY_PATH", "/before")
        .output()
        .unwrap();
    let lib = scratch.0.join("lib").canonicalize().unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!("{}:/before\ndebug\n700\ntest7\n", lib.display())
    );
    let output = scratch
        .run(&["--no-view", "--", "sh", "-c", "echo $LD_PRELOAD$ANYVERBS_VIEW"])
        .output()
        .unwrap();
    assert_eq!(output.stdout, b"\n");
    let script = "echo $LD_PRELOAD $ANYVERBS_SOCKETS";
    let output = scratch
        .run(&["--no-view", "--sockets=all", "--", "sh", "-c", script])
        .env("LD_PRELOAD", "/old/librspreload.so")
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!("{}/librspreload.so stream,dgram\n", lib.display())
    );
    assert_eq!(scratch.trees(), 0);
}

#[test]
fn a_signal_reaches_the_program_and_the_tree_goes() {
    let scratch = Scratch::new("signal");
    // `wait` makes the shell run its trap at once.
    let script = "trap 'echo got; exit 3' TERM; echo ready; sleep 60 & wait";
    let mut launcher =
        scratch.run(&["--", "sh", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    assert_eq!(scratch.trees(), 1);
    // SAFETY: the launcher has not been waited for.
    unsafe { libc::kill(launcher.id().cast_signed(), libc::SIGTERM) };
    assert_eq!(lines.next().unwrap().unwrap(), "got");
    assert_eq!(launcher.wait().unwrap().code(), Some(3));
    assert_eq!(scratch.trees(), 0);
}

#[test]
fn a_signal_at_any_time_leaves_no_tree() {
    let scratch = Scratch::new("early");
    for microseconds in (0..8000).step_by(200) {
        let mut launcher = scratch.run(&["--", "sleep", "60"]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_micros(microseconds));
        // SAFETY: the launcher has not been waited for.
        unsafe { libc::kill(launcher.id().cast_signed(), libc::SIGTERM) };
        assert_eq!(launcher.wait().unwrap().signal(), Some(libc::SIGTERM));
        assert_eq!(scratch.trees(), 0, "after {microseconds} us");
    }
}

#[test]
fn a_killed_launcher_takes_its_program_along() {
    let scratch = Scratch::new("killed");
    let mut launcher = scratch
        .run(&["--", "sh", "-c", "echo ready; exec sleep 60"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    // The program held the other end: it comes to its end with it.
    assert!(lines.next().is_none());
}

/// Which links there are is seen before a program is run.
#[test]
fn devices_says_which_links_there_are() {
    let links = |variables: &[(&str, &str)]| {
        let registry = format!("anyverbs-links-{}", std::process::id());
        let output = Command::new(env!("CARGO_BIN_EXE_anyverbs"))
            .arg("devices")
            .env("ANYVERBS_REGISTRY", registry)
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find_map(|line| line.trim().strip_prefix("links"));
        line.expect(&text).trim().to_owned()
    };
    assert_eq!(links(&[]), "inproc, shm, udp");
    assert_eq!(links(&[("ANYVERBS_SHM", "0")]), "inproc, udp");
    assert_eq!(links(&[("ANYVERBS_SHM", "0"), ("ANYVERBS_INPROC", "0")]), "udp");
}
