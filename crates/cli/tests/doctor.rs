//! `anyverbs doctor` on machines that have a problem.
#![expect(clippy::unwrap_used, reason = "a test")]

mod library_names;

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use anyverbs_testing::{isolate, unshare_or_skip};

/// Asks in a network namespace of its own, where not even the loopback interface is up. The directories for temporary files hold
/// nothing: in `/var/tmp` there is room for a directory, and for no file in it.
fn doctor(variables: &[(&str, &str)]) -> Output {
    let place = env::temp_dir().join(format!("anyverbs-doctor-asked-{}", std::process::id()));
    library_names::fill(&place);
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "--mount", "sh", "-c"]).arg(
        "mount -t tmpfs -o nr_inodes=2 tmpfs /var/tmp && mount -t tmpfs -o ro tmpfs /dev/shm || exit
         \"$0\" doctor
         status=$?
         ls -A /var/tmp
         exit $status",
    );
    command.arg(env!("CARGO_BIN_EXE_anyverbs"));
    command.env("ANYVERBS_LIB_DIR", &place).env_remove("XDG_RUNTIME_DIR");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    fs::remove_dir_all(place).unwrap();
    output
}

#[test]
fn each_problem_has_its_cause_and_its_remedy() {
    if !unshare_or_skip() {
        return;
    }
    let output = doctor(&[("TMPDIR", "/nonexistent"), ("ANYVERBS_INPROCS", "0")]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for wanted in [
        "STOP  there is no device: no network interface is up\n      -> bring one up, for instance `ip link set lo up`\n",
        "STOP  no datagram can be sent to 127.0.0.1: Network is unreachable (os error 101)\n      -> ip link set lo up (as root)\n",
        "STOP  there is no place for the files that show the device in /sys and /dev: no directory can hold the view of the device (/nonexistent: No such file or directory (os error 2); /dev/shm: Read-only file system (os error 30); /var/tmp: No space left on device (os error 28))\n      -> set TMPDIR to a directory that you can write to, or use --no-view\n",
        "note  ANYVERBS_INPROCS is set, and is no setting: it has no effect\n      -> did you mean ANYVERBS_INPROC?\n",
    ] {
        assert!(said.contains(wanted), "{wanted}\n{said}");
    }
    let last = said.lines().last().unwrap();
    assert_eq!(
        last,
        "not ready, 3 problems. To do first: bring one up, for instance `ip link set lo up`"
    );
}

/// Asks about a program on this machine, whatever else there is to say.
fn asked(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
    let output = isolate(command.arg("doctor").args(arguments)).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_file_that_nobody_can_execute_stops() {
    let script = env::temp_dir().join(format!("anyverbs-doctor-script-{}", std::process::id()));
    fs::write(&script, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o644)).unwrap();
    for file in [script.to_str().unwrap(), "/etc/passwd"] {
        let said = asked(&["--", file]);
        assert!(said.contains(&format!("STOP  {file} is not executable\n")), "{said}");
        assert!(!said.contains("ready: anyverbs run"), "{said}");
    }
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let said = asked(&["--", script.to_str().unwrap()]);
    fs::remove_file(&script).unwrap();
    assert!(said.contains("is a script, run by /bin/sh\n"), "{said}");
}

/// In a namespace whose loopback interface is up. `eth9` is none.
fn with_a_missing_interface(arguments: &[&str]) -> String {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "sh", "-c"]);
    command.arg("ip link set lo up && exec \"$0\" \"$@\"").arg(env!("CARGO_BIN_EXE_anyverbs"));
    let output = command.args(arguments).args(["--devices", "eth9,lo"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_interface_that_does_not_exist_is_named() {
    if !unshare_or_skip() {
        return;
    }
    let said = with_a_missing_interface(&["devices"]);
    assert!(said.contains("  unusable   there is no interface \"eth9\", but lo\n"), "{said}");
    let said = with_a_missing_interface(&["doctor"]);
    let wanted = "STOP  anyverbs0 has no address: there is no interface \"eth9\", but lo\n";
    assert!(said.contains(wanted) && !said.contains("bring an interface up"), "{said}");
}
