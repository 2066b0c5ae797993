//! `anyverbs doctor` on machines that have a problem.
#![expect(clippy::unwrap_used, reason = "a test")]

mod library_names;

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
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

/// Asks what stops a program, in a namespace of its own. `prepare` is a script.
fn stops(prepare: &str, arguments: &[&str]) -> String {
    let place = env::temp_dir().join(format!("anyverbs-doctor-shown-{}", std::process::id()));
    library_names::fill(&place);
    let mut command = Command::new("unshare");
    let script = format!("{prepare}; exec \"$0\" doctor \"$@\"");
    command.args(["--user", "--map-root-user", "--net", "sh", "-c", &script]);
    command.arg(env!("CARGO_BIN_EXE_anyverbs")).args(arguments).env("ANYVERBS_LIB_DIR", &place);
    let output = command.output().unwrap();
    fs::remove_dir_all(place).unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = said.lines().collect();
    let mut shown = String::new();
    for (n, line) in lines.iter().enumerate() {
        let is_remedy = line.starts_with("      -> ") && lines[n - 1].starts_with("STOP");
        if line.starts_with("STOP") || is_remedy || n + 1 == lines.len() {
            shown += &format!("{line}\n");
        }
    }
    shown
}

/// The page of the book shows why there is no device.
#[test]
fn the_book_shows_why_there_is_no_device() {
    if !unshare_or_skip() {
        return;
    }
    let directory = env::temp_dir().join(format!("anyverbs-doctor-static-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let (source, program) = (directory.join("program.c"), directory.join("program"));
    fs::write(&source, "int main(void) { return 0; }").unwrap();
    let built = Command::new("cc").arg("-static").arg(&source).arg("-o").arg(&program).output();
    if !built.unwrap().status.success() {
        return anyverbs_testing::skip("no program can be linked statically here");
    }
    let there = format!("ip link set lo up; cd {}", directory.display());
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/troubleshooting/examples.md");
    let mut wanted = fs::read_to_string(&page).unwrap();
    let mut seen = wanted.clone();
    for (name, prepare, arguments) in [
        ("no-interface", ":", &[][..]),
        ("missing-interface", "ip link set lo up", &["--devices", "eth9"]),
        ("static-program", &there, &["--", "./program"]),
    ] {
        let begin = format!("<!-- doctor {name} -->\n```text\n");
        let at = seen.find(&begin).unwrap() + begin.len();
        let end = at + seen[at..].find("```").unwrap();
        seen.replace_range(at..end, &stops(prepare, arguments));
    }
    fs::remove_dir_all(directory).unwrap();
    if env::var_os("UPDATE_EXAMPLES").is_some() {
        fs::write(&page, &seen).unwrap();
        wanted.clone_from(&seen);
    }
    assert_eq!(
        seen, wanted,
        "write it anew: UPDATE_EXAMPLES=1 cargo test -p anyverbs-cli --test doctor"
    );
}

/// Two addresses, and a network behind one of them.
#[test]
fn each_gid_says_whether_a_route_leads_to_the_peer() {
    if !unshare_or_skip() {
        return;
    }
    let ask = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c"]).arg(
            "ip link set lo up && ip link add lan type veth peer name far && ip link set far up && ip addr add 10.1.0.1/24 dev lan && ip link set lan up && \
             exec \"$0\" devices \"$@\"",
        );
        command.arg(env!("CARGO_BIN_EXE_anyverbs")).args(["--devices", "lan,lo"]).args(arguments);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let line = |said: &str, address: &str| {
        let is_of = |line: &&str| line.split_whitespace().nth(1) == Some(address);
        said.lines().find(is_of).unwrap_or(said).to_owned()
    };
    let plain = ask(&[]);
    assert!(!plain.contains("route"), "{plain}");
    let near = ask(&["--to", "10.1.0.2"]);
    assert!(line(&near, "10.1.0.1").ends_with("lan  a route leads to 10.1.0.2"), "{near}");
    let why = "lo  no route to 10.1.0.2: a loopback address reaches this host alone";
    assert!(line(&near, "127.0.0.1").ends_with(why), "{near}");
    let far = ask(&["--to", "10.2.0.2"]);
    let why = "lan  no route to 10.2.0.2: Network is unreachable (os error 101)";
    assert!(line(&far, "10.1.0.1").ends_with(why), "{far}");
    let other = ask(&["--to", "fd00::1"]);
    let why = "lan  no route to fd00::1: the two addresses are of different families";
    assert!(line(&other, "10.1.0.1").ends_with(why), "{other}");
    let json: serde_json::Value =
        serde_json::from_str(&ask(&["--to", "10.2.0.2", "--json"])).unwrap();
    for (device, why) in [
        (0, "Network is unreachable (os error 101)"),
        (1, "a loopback address reaches this host alone"),
    ] {
        let route = &json[device]["port"]["gids"][0]["route"];
        assert_eq!(*route, serde_json::json!({ "to": "10.2.0.2", "obstacle": why }), "{json:#}");
    }
}
