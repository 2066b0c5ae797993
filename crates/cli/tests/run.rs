//! `anyverbs run` as a parent: statuses, signals, and remains.
#![expect(clippy::unwrap_used, reason = "a test")]

mod library_names;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
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
fn what_cannot_be_run_is_told_once() {
    let scratch = Scratch::new("directory");
    let directory = scratch.0.to_str().unwrap();
    let output = scratch.run(&["--", directory]).stderr(Stdio::piped()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(126), "{error}");
    assert!(error.contains(&format!("cannot run {directory}: ")), "{error}");
    assert!(!error.contains("it will not find the device"), "{error}");
}

#[test]
fn a_variable_that_is_no_setting_is_told_once() {
    let scratch = Scratch::new("misspelt");
    let mut command = scratch.run(&["--no-preload", "--no-view", "--", "sh", "-c", "exit 7"]);
    command.env("ANYVERBS_DEVCE", "mlx5_0").env("ANYVERBS_DEVICE", "mlx5_0").stderr(Stdio::piped());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    let said = String::from_utf8(output.stderr).unwrap();
    let wanted = "anyverbs: ANYVERBS_DEVCE is set, and is no setting: it has no effect; did you mean ANYVERBS_DEVICE?\n";
    assert_eq!(said, wanted);
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
    let several = ["--devices", "2", "--device", "mlx5_0", "--", "sh", "-c"];
    let script = "ls $ANYVERBS_VIEW/sys/class/infiniband; cat $ANYVERBS_VIEW/sys/class/infiniband/mlx5_1/ports/1/gids/0";
    let output = scratch.run(&[&several[..], &[script]].concat()).output().unwrap();
    let gid = "0000:0000:0000:0000:0000:ffff:7f00:0002";
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("mlx5_0\nmlx5_1\n{gid}\n"));
    let output = scratch
        .run(&["--no-view", "--no-preload", "--", "sh", "-c", "echo $LD_PRELOAD$ANYVERBS_VIEW"])
        .output()
        .unwrap();
    assert_eq!(output.stdout, b"\n");
    let script = "echo $LD_PRELOAD";
    let output = scratch.run(&["--no-view", "--", "sh", "-c", script]).output().unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!("{}/libibverbs.so.1\n", lib.display())
    );
    let script = "echo $ANYVERBS_CHECK $ANYVERBS_CHECK_REPORT";
    for (check, mode) in [("--check", "report"), ("--check=fatal", "fatal")] {
        let found = scratch.0.join("found").to_str().unwrap().to_owned();
        let words = [check, "--check-report", &found, "--no-view", "--", "sh", "-c", script];
        let output = scratch.run(&words).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said, format!("{mode} {found}\n"));
    }
    let script = "echo $LD_PRELOAD $ANYVERBS_SOCKETS";
    let output = scratch
        .run(&["--no-view", "--sockets=all", "--", "sh", "-c", script])
        .env("LD_PRELOAD", "/old/librspreload.so")
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!("{0}/librspreload.so {0}/libibverbs.so.1 stream,dgram\n", lib.display())
    );
    assert_eq!(scratch.trees(), 0);
}

/// The files of a tree while an address of the host comes and goes.
const FOLLOW: &str = r#"
port=$ANYVERBS_VIEW/sys/class/infiniband/anyverbs0/ports/1
soon() {
    n=0
    until eval "$1"; do
        n=$((n + 1))
        if [ $n = 3000 ]; then echo "not: $1"; grep -v ':0000:0000$' $port/gids/*; exit 1; fi
        sleep 0.02
    done
}
show() {
    at=$(grep -l "$1" $port/gids/*) && at=${at##*/}
    echo "$1 $(cat $port/gid_attrs/types/$at), $(cat $port/gid_attrs/ndevs/$at), $(ls $port/gid_attrs/types | wc -l)"
}
lid=$(cat $port/lid)
places=$(ls $port/gids)
ip addr add 10.9.8.7/32 dev lo
soon 'grep -q ffff:0a09:0807 $port/gids/*'
show ffff:0a09:0807
[ "$lid" != "$(cat $port/lid)" ] && echo another LID
ip addr add fd00::5/128 dev lo
soon 'grep -q 0000:0005 $port/gids/*'
ip addr del 10.9.8.7/32 dev lo
soon '! grep -q ffff:0a09:0807 $port/gids/*'
# The other one moves to its place. Last of all its old attributes go.
soon '[ $(ls $port/gid_attrs/ndevs | wc -l) = 1 ]'
show 0000:0005
[ "$places" = "$(ls $port/gids)" ] && echo the same places
cat $port/gids/100
ls -A $port | grep fresh
"#;

#[test]
fn the_gids_of_the_tree_follow_the_addresses_of_the_host() {
    if !anyverbs_testing::unshare_or_skip() {
        return;
    }
    let scratch = Scratch::new("follow");
    let within = scratch.run(&["--", "sh", "-c", FOLLOW]);
    let mut command = Command::new("unshare");
    command.args(["-Urn", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"]);
    command.arg(within.get_program()).args(within.get_args());
    for (name, value) in within.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let wanted = "ffff:0a09:0807 RoCE v2, lo, 1\n\
                  another LID\n\
                  0000:0005 RoCE v2, lo, 1\n\
                  the same places\n\
                  0000:0000:0000:0000:0000:0000:0000:0000\n";
    assert_eq!(said, wanted, "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn findings_become_a_sarif_document() {
    let scratch = Scratch::new("sarif");
    let file = scratch.0.join("found.sarif");
    let lines = scratch.0.join("found.sarif.jsonl");
    fs::write(&file, "of an earlier program").unwrap();
    fs::write(&lines, "of a killed one").unwrap();
    let finding = r#"{"check":"leak","process":1,"message":"m","remedy":"r","stacks":[{"title":"","frames":[]}]}"#;
    let script = format!("echo '{finding}' >>$ANYVERBS_CHECK_REPORT; exit 66");
    let name = file.to_str().unwrap();
    let words = ["--check", "--check-report", name, "--no-view", "--", "sh", "-c", &script];
    let output = scratch.run(&words).output().unwrap();
    assert_eq!(output.status.code(), Some(66));
    let document: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let results = document["runs"][0]["results"].as_array().unwrap();
    assert_eq!(results.len(), 1);
    assert_eq!(results[0]["ruleId"], "leak");
    assert!(!lines.exists());

    let words = ["--check", "--check-report", "/nowhere/found.sarif", "--no-view", "--", "true"];
    let (status, said) = said(&mut scratch.run(&words));
    assert_eq!((status, said.len()), (Some(125), 1), "{said:?}");
}

#[test]
fn a_program_that_is_not_there_leaves_a_document_without_findings() {
    let scratch = Scratch::new("sarif-absent");
    let file = scratch.0.join("found.SARIF");
    let report = file.to_str().unwrap();
    let words = ["--check", "--check-report", report, "--no-view", "--", "/nonexistent"];
    assert_eq!(scratch.run(&words).status().unwrap().code(), Some(127));
    let document: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(document["version"], "2.1.0");
    assert!(!scratch.0.join("found.sarif.jsonl").exists());
}

/// As the server and the client of a test do.
#[test]
fn two_launchers_that_run_at_once_share_a_sarif_document() {
    let scratch = Scratch::new("sarif-shared");
    let file = scratch.0.join("found.sarif");
    let lines = scratch.0.join("found.sarif.jsonl");
    let launch = |pid: u32, then: &str| {
        let finding =
            format!(r#"{{"check":"leak","process":{pid},"message":"m","remedy":"r","stacks":[]}}"#);
        let script = format!("echo '{finding}' >>$ANYVERBS_CHECK_REPORT; {then}");
        let name = file.to_str().unwrap();
        let words = ["--check", "--check-report", name, "--no-view", "--", "sh", "-c", &script];
        let mut command = scratch.run(&words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    };
    let found = || -> Vec<u64> {
        let text = fs::read_to_string(&file).unwrap();
        let document: serde_json::Value = serde_json::from_str(&text).unwrap();
        let results = document["runs"][0]["results"].as_array().unwrap();
        results.iter().map(|result| result["properties"]["process"].as_u64().unwrap()).collect()
    };
    for first in [10, 20] {
        let mut server = launch(first, "echo ready; read line; exit 0");
        let mut ready = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        assert_eq!(launch(first + 1, "exit 0").wait().unwrap().code(), Some(0));
        assert_eq!(found(), [first, first + 1].map(u64::from), "without those of earlier runs");
        assert!(lines.exists());
        drop(server.stdin.take());
        assert_eq!(server.wait().unwrap().code(), Some(0));
        assert_eq!(found(), [first, first + 1].map(u64::from));
        assert!(!lines.exists());
    }
}

/// The status says so, unless the program's own does; no part of a document stays.
#[test]
fn a_sarif_document_that_cannot_be_written_fails_the_run() {
    let finding = r#"{"check":"leak","process":1,"message":"m","remedy":"r","stacks":[{"title":"","frames":[]}]}"#;
    for (ended, status, has_finding) in [(0, 125, false), (0, 125, true), (66, 66, true)] {
        let scratch = Scratch::new("sarif-full");
        let file = scratch.0.join("found.sarif");
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        let add = if has_finding { finding } else { "" };
        let script = format!("printf '%s' '{add}' >>$ANYVERBS_CHECK_REPORT; exit {ended}");
        let name = file.to_str().unwrap();
        let words = ["--check", "--check-report", name, "--no-view", "--", "sh", "-c", &script];
        let (code, lines) = said(&mut scratch.run(&words));
        assert!(code == Some(status) && lines.len() == 1, "{code:?} {lines:?}");
        assert!(lines[0].contains("cannot write the report") && lines[0].contains("No space left"));
        assert!(fs::symlink_metadata(&file).is_err());
        assert_eq!(scratch.0.join("found.sarif.jsonl").exists(), has_finding);
    }
}

/// A mistake in these changes the verdict of a run: nothing runs.
#[test]
fn files_of_a_check_are_looked_at_before_the_program_runs() {
    let scratch = Scratch::new("check-files");
    let rules = scratch.0.join("rules");
    let run = |option: &str, file: &str| {
        let words = ["--check", option, file, "--no-view", "--", "sh", "-c", "echo ran >&2"];
        said(&mut scratch.run(&words))
    };
    let file = rules.to_str().unwrap();
    let (status, said) = run("--check-suppressions", file);
    assert!(status == Some(125) && said.len() == 1 && said[0].contains(file), "{said:?}");
    for (text, why) in [
        ("leak:main\nlaek:main\n", "line 2: there is no such check"),
        ("leak\n", "line 1: a rule is CHECK:PART"),
        ("leak:\n", "line 1: there is no part"),
    ] {
        fs::write(&rules, text).unwrap();
        let (status, said) = run("--check-suppressions", file);
        assert!(status == Some(125) && said.len() == 1 && said[0].contains(why), "{said:?}");
    }
    fs::write(&rules, "# why\n\nleak:main # known\n:file.c\n").unwrap();
    assert_eq!(run("--check-suppressions", file), (Some(0), vec!["ran".to_owned()]));
    let (status, said) = run("--check-report", "/nowhere/found.json");
    assert!(status == Some(125) && said.len() == 1 && said[0].contains("/nowhere"), "{said:?}");
    // Nobody reads it, so that opening it would not end.
    for name in ["pipe.json", "pipe.sarif"] {
        let pipe = scratch.0.join(name);
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let (status, said) = run("--check-report", pipe.to_str().unwrap());
        assert!(status == Some(125) && said.len() == 1 && said[0].contains("a pipe"), "{said:?}");
    }
}

/// The lines of a launch on standard error that are not the loader's.
fn said(command: &mut Command) -> (Option<i32>, Vec<String>) {
    let output = command.stderr(Stdio::piped()).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with("ERROR: ld.so: object"));
    (output.status.code(), lines.map(str::to_owned).collect())
}

#[test]
fn a_script_of_faults_is_read_before_the_program_runs() {
    let scratch = Scratch::new("faults");
    let run = |words: &[&str]| said(scratch.run(words).current_dir(&scratch.0));
    let (status, lines) = run(&["--no-view", "--faults", "drop pocket 5", "--", "true"]);
    assert_eq!(status, Some(125));
    let wanted = "anyverbs: faults: line 1, column 6: expected \"packets\"";
    assert!(lines[0].starts_with(wanted), "{lines:?}");
    let (status, lines) = run(&["--no-view", "--faults", "none.fault", "--", "true"]);
    assert_eq!(status, Some(125));
    assert!(lines[0].contains("cannot read the script of faults \"none.fault\""), "{lines:?}");
    let (status, lines) = run(&["--faults", "on device rail9: down", "--", "true"]);
    assert_eq!(status, Some(125));
    let wanted = "faults, line 1: there is no device \"rail9\", but anyverbs0";
    assert!(lines[0].contains(wanted), "{lines:?}");
    // The same file for a program that changes its directory.
    let file = scratch.0.join("it.fault");
    fs::write(&file, "# nothing\ndrop packet 5\n").unwrap();
    for given in ["--faults=it.fault", "--no-preload"] {
        let words = ["--no-view", given, "--", "sh", "-c", "echo $ANYVERBS_FAULTS"];
        let mut command = scratch.run(&words);
        command.current_dir(&scratch.0).env("ANYVERBS_FAULTS", "it.fault");
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), file.to_str().unwrap());
    }
    let explain = |script: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command.args(["faults", "--explain", script]).current_dir(&scratch.0).output().unwrap()
    };
    let output = explain("it.fault");
    let text = String::from_utf8(output.stdout).unwrap();
    let wanted = "Line 2: packet 5 that each queue pair sends is lost.";
    assert_eq!(text.lines().nth(1), Some(wanted));
    let output = explain("down for");
    assert_eq!(output.status.code(), Some(125));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.ends_with("  down for\n          ^\n"), "{text}");
}

#[test]
fn a_capture_is_begun_by_the_launcher() {
    let scratch = Scratch::new("capture");
    let file = scratch.0.join("it.pcapng");
    let script = "echo $ANYVERBS_CAPTURE; wc -c < $ANYVERBS_CAPTURE";
    let words = ["--no-view", "--capture", "it.pcapng", "--", "sh", "-c", script];
    let output = scratch.run(&words).current_dir(&scratch.0).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().next(), file.to_str(), "for a program that changes its directory");
    assert_ne!(text.lines().nth(1), Some("0"), "the header is there");
    let begin = fs::read(&file).unwrap();
    assert_eq!(begin[..4], [0x0a, 0x0d, 0x0d, 0x0a], "a section header");
    // The printed environment is no reason to begin it anew.
    fs::write(&file, "kept").unwrap();
    scratch
        .run(&["--capture", file.to_str().unwrap(), "--print-env", "--", "true"])
        .output()
        .unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"kept");
}

#[test]
fn a_capture_that_cannot_be_written_is_the_launchers_failure() {
    let scratch = Scratch::new("no-capture");
    let directory = scratch.0.to_str().unwrap();
    for (file, reason) in [
        (directory, "Is a directory"),
        ("/nonexistent/it.pcapng", "No such file or directory"),
        ("/nonexistent/%p.pcapng", "No such file or directory"),
        ("/dev/null", "it is not a regular file"),
    ] {
        for option in ["--capture", "--trace"] {
            let (status, lines) = said(&mut scratch.run(&[option, file, "--", "true"]));
            assert_eq!(status, Some(125), "{lines:?}");
            let found = lines.iter().any(|line| line.contains(file) && line.contains(reason));
            assert!(found, "{lines:?}");
        }
    }
    let (status, lines) = said(&mut scratch.run(&["--capture", "", "--", "true"]));
    assert_eq!((status, lines.len()), (Some(125), 1), "{lines:?}");
    // One file for both; by another name in the second case.
    let (file, link) = (scratch.0.join("both"), scratch.0.join("link"));
    std::os::unix::fs::symlink(&file, &link).unwrap();
    for trace in [&file, &link] {
        let words = ["--capture", file.to_str().unwrap(), "--trace", trace.to_str().unwrap()];
        let (status, lines) = said(&mut scratch.run(&[&words[..], &["--", "true"]].concat()));
        assert_eq!((status, lines.len()), (Some(125), 1), "{lines:?}");
    }
}

#[test]
fn a_configuration_that_cannot_be_read_is_the_launchers_failure() {
    let scratch = Scratch::new("config");
    let bad = scratch.0.join("bad.toml");
    fs::write(&bad, "nonsense = 1\n").unwrap();
    for file in ["/nonexistent.toml", bad.to_str().unwrap()] {
        for view in [&[][..], &["--no-view"]] {
            let options = [view, &["--config", file, "--", "echo", "ran"]].concat();
            let (code, lines) = said(&mut scratch.run(&options));
            assert_eq!((code, lines.len()), (Some(125), 1), "{lines:?}");
            assert!(lines[0].contains(file), "{lines:?}");
        }
        let (code, _) = said(scratch.run(&["--", "true"]).env("ANYVERBS_CONFIG", file));
        assert_eq!(code, Some(125));
    }
    assert_eq!(scratch.trees(), 0);
}

#[test]
fn an_impossible_option_is_refused_in_one_line() {
    let scratch = Scratch::new("option");
    for (option, value, expected) in [
        ("--config", "", "the name of a file"),
        ("--device", "", "the name of a device"),
        ("--lib-dir", "", "the name of a directory"),
        ("--device", ".", "a name of 1 to 48 bytes"),
        ("--device", "..", "a name of 1 to 48 bytes"),
        ("--device", "a/b", "a name of 1 to 48 bytes"),
        ("--device", "a\nb", "a name of 1 to 48 bytes"),
        ("--device", "a\x1b[7mb", "a name of 1 to 48 bytes"),
        ("--device", "a b", "anyverbs: --device=\"a b\": expected a name of 1 to 48 bytes"),
        ("--devices", "65", "anyverbs: --devices=\"65\": expected a number from 1 to 64"),
        ("--persona", "none.toml", "anyverbs: --persona: persona \"none.toml\": No such file"),
    ] {
        for view in [&[][..], &["--no-view"]] {
            let options = [view, &[option, value, "--", "echo", "ran"]].concat();
            let mut command = scratch.run(&options);
            let (code, lines) = said(command.stdout(Stdio::piped()));
            assert_eq!((code, lines.len()), (Some(125), 1), "{option} {value:?}: {lines:?}");
            assert!(lines[0].contains(expected), "{lines:?}");
            assert!(!lines[0].contains(char::is_control), "{lines:?}");
        }
        let mut devices = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        let (code, lines) = said(devices.args(["devices", option, value]).stdout(Stdio::piped()));
        assert_eq!((code, lines.len()), (Some(125), 1), "{option} {value:?}: {lines:?}");
        assert!(lines[0].contains(expected), "{lines:?}");
    }
    assert_eq!(scratch.trees(), 0);
}

#[test]
fn a_program_that_cannot_use_the_device_is_told_so() {
    let scratch = Scratch::new("hindered");
    let program = scratch.0.join("program");
    fs::copy("/bin/true", &program).unwrap();
    let launch = || said(&mut scratch.run(&["--", program.to_str().unwrap()]));
    assert_eq!(launch(), (Some(0), Vec::new()));
    // Nobody gets rights by a file of their own.
    fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    assert_eq!(launch(), (Some(0), Vec::new()));
    let source = scratch.0.join("static.c");
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let built = Command::new("cc").args(["-static", "-o"]).arg(&program).arg(&source).status();
    assert!(built.unwrap().success());
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let (code, lines) = launch();
    assert_eq!((code, lines.len()), (Some(0), 1), "{lines:?}");
    assert!(lines[0].contains("statically linked"), "{lines:?}");
    let script = scratch.0.join("script");
    fs::write(&script, format!("#!{}\n", program.display())).unwrap();
    fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    let (code, lines) = said(&mut scratch.run(&["--", script.to_str().unwrap()]));
    assert_eq!((code, lines.len()), (Some(0), 1), "{lines:?}");
    assert!(lines[0].contains("statically linked"), "{lines:?}");
    if anyverbs_testing::root_or_skip() {
        fs::copy("/bin/true", &program).unwrap();
        std::os::unix::fs::chown(&program, Some(65534), None).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
        let (code, lines) = launch();
        assert_eq!((code, lines.len()), (Some(0), 1), "{lines:?}");
        assert!(lines[0].contains("set-user-ID"), "{lines:?}");
    }
}

#[test]
fn files_named_like_a_view_stay_and_stop_no_launch() {
    let scratch = Scratch::new("notes");
    let notes = scratch.0.join("tmp/anyverbs-view-notes");
    fs::create_dir_all(&notes).unwrap();
    fs::write(notes.join("precious"), "").unwrap();
    // As another user might, for every process that may be the launcher.
    let taken = scratch.0.join("tmp/anyverbs-view-");
    let script = format!("mkdir {}$$-0; exec \"$@\"", taken.display());
    let launch = scratch.run(&["--", "true"]);
    let mut below = Command::new("sh");
    below.args(["-c", &script, "sh"]).arg(launch.get_program()).args(launch.get_args());
    below.envs(launch.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let (code, lines) = said(below.env_remove("XDG_RUNTIME_DIR"));
    assert_eq!((code, lines), (Some(0), Vec::new()));
    assert!(notes.join("precious").exists());
    assert_eq!(scratch.trees(), 2);
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

/// The links are shown before a program is run.
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

#[test]
fn a_configuration_is_found_from_any_directory() {
    let scratch = Scratch::new("relative");
    fs::write(scratch.0.join("good.toml"), "device = \"other0\"\n").unwrap();
    let seen = |command: &mut Command| {
        let output = command.current_dir(&scratch.0).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let expected = format!("{}\n", scratch.0.join("good.toml").display());
    let program = ["--", "sh", "-c", "cd / && echo $ANYVERBS_CONFIG"];
    let option = [&["--config", "good.toml"], program.as_slice()].concat();
    assert_eq!(seen(&mut scratch.run(&option)), expected);
    let variable = ("ANYVERBS_CONFIG", "good.toml");
    assert_eq!(seen(scratch.run(&program).env(variable.0, variable.1)), expected);
}

#[test]
fn a_configuration_that_is_a_pipe_is_refused() {
    let scratch = Scratch::new("pipe");
    let pipe = scratch.0.join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let wanted = format!("cannot read the configuration file {pipe:?}: it is a pipe");
    for (words, status) in
        [(&["run", "--", "true"][..], 125), (&["devices"], 125), (&["doctor"], 1)]
    {
        // It would wait for a writer.
        let mut command = Command::new("timeout");
        command.args(["60", env!("CARGO_BIN_EXE_anyverbs")]).args(words);
        let output = command.env("ANYVERBS_CONFIG", &pipe).output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {said}");
        assert!(said.contains(&wanted), "{words:?}: {said}");
    }
}
