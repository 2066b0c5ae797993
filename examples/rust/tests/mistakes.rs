//! Each example says what is wrong with its arguments or its file, and with which status it ends.
//!
//! None of these runs reaches a device. So the programs in C and Python run without a launcher, on the system's libraries.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyverbs_testing::skip;

/// Wrong arguments, a program's name first.
const WRONG: [&[&str]; 29] = [
    &["pingpong", "--help"],
    &["pingpong", "one", "two"],
    &["rpc"],
    &["rpc", "serve"],
    &["rpc", "serve", "many"],
    &["rpc", "serve", "0"],
    &["rpc", "serve", "5x"],
    &["rpc", "serve", "1", "2"],
    &["rpc", "call", "127.0.0.1"],
    &["rpc", "call", "127.0.0.1", "a,b"],
    &["rpc", "call", "127.0.0.1", "1,2", "3,"],
    &["rpc", "call", "127.0.0.1", "4294967296"],
    &["rpc", "call", "127.0.0.1", "0,1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6,7,8,9,0"],
    &["kv"],
    &["kv", "serve", "1"],
    &["kv", "serve", "many", "a=b"],
    &["kv", "serve", "0", "a=b"],
    &["kv", "serve", "5x", "a=b"],
    &["kv", "get", "127.0.0.1"],
    &["filecopy"],
    &["filecopy", "give"],
    &["filecopy", "give", "one", "two"],
    &["filecopy", "take", "127.0.0.1"],
    &["pubsub"],
    &["pubsub", "sub", "239.7.4.1"],
    &["pubsub", "sub", "239.7.4.1", "many"],
    &["pubsub", "sub", "239.7.4.1", "0"],
    &["pubsub", "sub", "239.7.4.1", "5x"],
    &["pubsub", "pub", "239.7.4.1"],
];

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Runs each list of wrong arguments, and two files that cannot be given. `command` makes a program's command.
fn check(command: impl Fn(&str) -> Command) {
    for words in WRONG {
        let output = command(words[0]).args(&words[1..]).output().unwrap();
        let said = message(&output, 2, words);
        let lower = said.to_lowercase();
        // The usage names the program and each way to call it.
        assert!(lower.contains(words[0]), "{words:?}: {said}");
        assert!(lower.contains("host") || lower.contains("group"), "{words:?}: {said}");
    }
    let words = ["filecopy", "give", "no/such/file"];
    let said = message(&command(words[0]).args(&words[1..]).output().unwrap(), 1, &words);
    assert!(said.contains("no/such/file") && said.contains("No such file"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let words = ["kv", "serve", "1", "no-pair"];
    let output = command(words[0]).args(&words[1..]).output().unwrap();
    message(&output, 2, &words);
}

/// The words of a program on standard error. It ended with this status.
fn message(output: &Output, status: i32, words: &[&str]) -> String {
    assert_eq!(output.status.code(), Some(status), "{words:?}: {output:?}");
    assert!(output.stdout.is_empty(), "{words:?}: {output:?}");
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!said.contains("Traceback") && !said.contains("panicked"), "{words:?}: {said}");
    said
}

#[test]
fn in_rust() {
    check(|name| {
        Command::new(match name {
            "pingpong" => env!("CARGO_BIN_EXE_pingpong"),
            "rpc" => env!("CARGO_BIN_EXE_rpc"),
            "kv" => env!("CARGO_BIN_EXE_kv"),
            "filecopy" => env!("CARGO_BIN_EXE_filecopy"),
            "pubsub" => env!("CARGO_BIN_EXE_pubsub"),
            name => panic!("{name}"),
        })
    });
    for words in [&["x", "0.1"][..], &["1"], &[]] {
        let output = Command::new(env!("CARGO_BIN_EXE_simulated_rpc")).args(words).output();
        assert!(message(&output.unwrap(), 2, words).starts_with("usage: "));
    }
}

#[test]
fn in_python() {
    let python = || {
        let mut python = Command::new("/usr/bin/python3");
        python.env("PYTHONDONTWRITEBYTECODE", "1");
        python
    };
    if !python().args(["-c", "import pyverbs.cmid"]).output().is_ok_and(|it| it.status.success()) {
        return skip("no pyverbs here (python3-pyverbs)");
    }
    check(|name| {
        let mut command = python();
        command.arg(examples().join("python").join(name).with_extension("py"));
        command
    });
}

#[test]
fn in_c() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let compile = |name: &str, source: &Path| {
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Wextra", "-Werror", "-o"]).arg(dir.join(name)).arg(source);
        cc.args(["-libverbs", "-lrdmacm"]).output()
    };
    let nothing = dir.join("nothing.c");
    std::fs::write(&nothing, "#include <rdma/rdma_cma.h>\nint main(void) { return 0; }\n").unwrap();
    if !compile("nothing", &nothing).is_ok_and(|it| it.status.success()) {
        return skip("no C compiler or no headers of rdma-core here (librdmacm-dev)");
    }
    for name in ["pingpong", "rpc", "kv", "filecopy", "pubsub"] {
        let output = compile(name, &examples().join("c").join(name).with_extension("c")).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    check(|name| Command::new(dir.join(name)));
}
