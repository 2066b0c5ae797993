//! `anyverbs fault`: rules come to a process that runs, and go. This test program is started again as that process.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyverbs::prelude::*;
use anyverbs_testing::isolate;

const ROLE: &str = "ANYVERBS_TEST_ROLE";
/// A user that has no processes.
const STRANGER: u32 = 12_345;

/// A process that does what it is told. It is killed when the value is dropped.
struct Works {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Works {
    fn start(faults: &str) -> Self {
        let mut child = isolate(&mut Command::new(std::env::current_exe().unwrap()))
            .args(["--exact", "in_a_role", "--nocapture", "--test-threads=1"])
            .env(ROLE, "works")
            .env("ANYVERBS_FAULTS", faults)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut works = Self { child, stdout };
        assert_eq!(works.hear(), "ready");
        works
    }

    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "it ended");
            if let Some((_, said)) = line.split_once("@ ") {
                return said.trim().to_owned();
            }
        }
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
        self.hear()
    }

    fn wait_for(&mut self, line: &str, wanted: &str) {
        let begin = Instant::now();
        while self.ask(line) != wanted {
            assert!(begin.elapsed() < Duration::from_secs(30), "{line}: no {wanted}");
        }
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    /// The output of `anyverbs fault` for it.
    fn fault(&self, order: &str) -> String {
        let (is_done, said) = fault(&self.pid(), order);
        assert!(is_done, "{said}");
        said
    }

    fn refuses(&self, order: &str) -> String {
        refused(&self.pid(), order)
    }
}

impl Drop for Works {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn fault(process: &str, order: &str) -> (bool, String) {
    told(Command::new(env!("CARGO_BIN_EXE_anyverbs")).args(["fault", process, order]))
}

fn told(command: &mut Command) -> (bool, String) {
    let output = isolate(command).output().unwrap();
    let said = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.success(), String::from_utf8(said).unwrap())
}

/// The one line that says why not.
fn refused(process: &str, order: &str) -> String {
    let (is_done, said) = fault(process, order);
    assert!(!is_done && said.lines().count() == 1, "{said}");
    said.trim().to_owned()
}

#[test]
fn rules_come_to_a_process_and_go() {
    let mut works = Works::start("seed 1");
    assert_eq!(works.ask("write"), "Success");
    assert_eq!(works.fault("list"), "no rules\n");
    let added = works.fault("on qp 1: send 2 never completes; drop received packet 1");
    assert_eq!(added, "rules that were added to this process: 2\n");
    let both = "on qp 1: send 2 never completes\ndrop received packet 1\n";
    assert_eq!(works.fault("list"), both);
    // They are counted from now on.
    works.wait_for("write", "Success");
    assert_eq!(works.ask("write"), "nothing");
    assert_eq!(works.fault("clear"), "rules of this process that do not hold any more: 2\n");
    works.wait_for("poll", "Success");
    assert_eq!(works.ask("write"), "Success");
    assert_eq!(works.fault("list"), "no rules\n");
    // By the name of its program.
    let program = std::env::current_exe().unwrap();
    let program = program.file_name().unwrap().to_str().unwrap();
    let (is_done, said) = fault(program, "on device anyverbs0: down after 0s");
    assert!(is_done, "{said}");
    works.wait_for("port", "Down");
    let (_, shown) = told(Command::new(env!("CARGO_BIN_EXE_anyverbs")).arg("show"));
    let wanted = format!("process {}  port down  anyverbs0\n", works.pid());
    assert!(shown.contains(&wanted), "{shown}");
    assert_eq!(works.ask("write"), "nothing");
    works.fault("clear");
    works.wait_for("port", "Active");
    works.wait_for("poll", "Success");
    works.fault("fatal after 0s");
    works.wait_for("pd", "the device has failed");
    works.fault("clear");
    assert_eq!(works.ask("pd"), "the device has failed");
}

/// Waits until the wait of a queue pair is shown.
fn shows_a_rule(number: &str, script: &str) {
    let begin = Instant::now();
    loop {
        let mut show = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        let (_, shown) = told(show.args(["show", "qp", number]));
        if shown.contains(" for a rule of a script of faults") {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "{script}: {shown}");
    }
}

#[test]
fn what_a_rule_holds_is_shown() {
    for (script, work, holder) in [
        ("on qp 1: send 1 never completes", "write", "number"),
        ("on qp 1: send 1 completes after 1000s", "write", "number"),
        ("on qp 1: send 1 completes with RETRY_EXC_ERR after 1000s", "write", "number"),
        ("on qp 2: rnr received send packets", "send", "number"),
        // The first queue pair fails soon.
        ("on qp 2: delay packets by 1000s", "write", "number of the peer"),
    ] {
        let mut works = Works::start(script);
        assert_eq!(works.ask(work), "nothing", "{script}");
        shows_a_rule(&works.ask(holder), script);
    }
}

#[test]
fn a_queue_pair_is_named_by_the_number_that_is_shown() {
    let mut works = Works::start("seed 1");
    let number = works.ask("number");
    let rule = format!("on qp {number}: send 1 never completes");
    works.fault(&rule);
    assert_eq!(works.ask("write"), "nothing");
    works.fault("clear");
    works.wait_for("poll", "Success");
    let decimal = u32::from_str_radix(number.strip_prefix("0x").unwrap(), 16).unwrap();
    let said = works.refuses(&rule.replace(&number, &decimal.to_string()));
    assert!(said.ends_with(&format!("not its place in their order: write {number}")), "{said}");
    let said = works.refuses("on qp 0xfffff1: drop packets");
    assert!(said.ends_with("line 1: the process has no queue pair 0xfffff1"), "{said}");
}

#[test]
fn an_address_goes_while_a_program_runs_and_comes_back() {
    let mut works = Works::start("seed 1");
    assert_eq!(works.ask("write"), "Success");
    works.fault("gid 0 removed; on peer 192.0.2.1: drop RC_RDMA_WRITE_ONLY packets");
    works.wait_for("write", "nothing");
    assert!(works.fault("list").starts_with("gid 0 removed\n"));
    works.fault("clear");
    works.wait_for("poll", "Success");
    assert_eq!(works.ask("write"), "Success");
}

#[test]
fn memory_vanishes_while_a_program_runs_and_comes_back() {
    let mut works = Works::start("seed 1");
    assert_eq!(works.ask("write"), "Success");
    // The region is older than the rule, which is cleared before anything touches it.
    works.fault("region 1 vanishes");
    assert_eq!(works.fault("list"), "region 1 vanishes\n");
    works.fault("clear");
    assert_eq!(works.ask("write"), "Success");
    works.fault("page 1 of region 2 vanishes; on device anyverbs0: page 1 of region 1 vanishes");
    assert_eq!(works.ask("write"), "LocProtErr");
}

#[test]
fn a_port_has_an_event_while_a_program_runs() {
    let mut works = Works::start("seed 1");
    works.fault("event IBV_EVENT_CLIENT_REREGISTER after 0s");
    assert_eq!(works.ask("event"), "ClientReregister");
    assert_eq!(works.ask("port"), "Active");
    assert_eq!(works.fault("list"), "event IBV_EVENT_CLIENT_REREGISTER after 0s # is over\n");
}

#[test]
fn a_port_that_is_down_for_a_moment_is_told_down_and_up() {
    let mut works = Works::start("seed 1");
    for _ in 0..5 {
        works.fault("down after 0s");
        works.fault("clear");
        assert_eq!(works.ask("event"), "PortErr");
        assert_eq!(works.ask("event"), "PortActive");
        assert_eq!(works.ask("port"), "Active");
    }
}

#[test]
fn a_send_that_waits_for_its_failure_fails_when_the_rules_are_cleared() {
    let mut works = Works::start("on qp 1: send 1 completes with RETRY_EXC_ERR after 1000s");
    assert_eq!(works.ask("write"), "nothing");
    works.fault("clear");
    works.wait_for("poll", "RetryExcErr");
}

#[test]
fn what_cannot_be_is_refused_in_one_line() {
    let works = Works::start("seed 1");
    let pid = works.pid();
    let wanted = format!("anyverbs: process {pid}: the seed stays that of the start, 1");
    assert_eq!(works.refuses("seed 2; drop packets"), wanted);
    // The file of the start may come again.
    let added = "rules that were added to this process: 1\n";
    assert_eq!(works.fault("seed 1; drop packet 100000"), added);
    works.fault("clear");
    let said = works.refuses("on device rail9: drop packets");
    assert!(said.ends_with("line 1: there is no device \"rail9\", but anyverbs0"), "{said}");
    assert!(works.refuses("ibv_reg_mr 2 fails with EIO").contains("makes no calls of C"));
    assert_eq!(works.fault("list"), "no rules\n");
    let (is_done, said) = fault(&pid, "drop pocket 5");
    assert!(!is_done && said.contains("line 1, column 6: expected"), "{said}");
    let others = Works::start("seed 2");
    let program = std::env::current_exe().unwrap();
    let program = program.file_name().unwrap().to_str().unwrap();
    assert!(refused(program, "list").starts_with("anyverbs: several processes run"));
    drop(others);
    let own = std::process::id().to_string();
    let wanted = format!(
        "anyverbs: process {own} does not run with this device; `anyverbs show` lists those that do"
    );
    assert_eq!(refused(&own, "list"), wanted);
    assert_eq!(refused("999999999", "list"), "anyverbs: there is no process 999999999");
    assert!(refused("no_such_program", "list").contains("no process of yours"));
    let plain = Works::start("");
    assert!(plain.refuses("drop packets").contains("it runs without a script of faults"));
    anyverbs_testing::stop(&works.child);
    let said = works.refuses("list");
    assert!(said.starts_with(&format!("anyverbs: process {pid} does not answer: ")), "{said}");
}

#[test]
fn a_process_of_another_network_namespace_is_said_to_be_there() {
    if !anyverbs_testing::unshare_or_skip() {
        return;
    }
    let mut there = Command::new("unshare");
    there.args(["-rn", "sh", "-c", "echo there; exec cat"]);
    let mut there = there.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(there.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let pid = there.id();
    let said = refused(&pid.to_string(), "list");
    there.kill().unwrap();
    there.wait().unwrap();
    let wanted = format!("anyverbs: process {pid} is in another network namespace; run this there");
    assert!(line == "there\n" && said.starts_with(&wanted), "{said}");
}

#[test]
fn another_user_changes_nothing() {
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let works = Works::start("seed 1");
    // The other user may not be able to execute what lies in root's directories.
    let copy = std::env::temp_dir().join(format!("anyverbs-fault-{}", std::process::id()));
    std::fs::copy(env!("CARGO_BIN_EXE_anyverbs"), &copy).unwrap();
    let pid = works.pid();
    let mut command = Command::new(&copy);
    command.args(["fault", &pid, "drop packets"]).uid(STRANGER).gid(STRANGER);
    let said = told(&mut command);
    std::fs::remove_file(copy).unwrap();
    assert_eq!(said, (false, format!("anyverbs: process {pid} is another user's\n")));
    assert_eq!(works.fault("list"), "no rules\n");
}

/// Not a test by itself: the process of the tests above.
#[test]
fn in_a_role() {
    if std::env::var(ROLE).as_deref() != Ok("works") {
        return;
    }
    let context = Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None, 0, 0).unwrap();
    let [a, b] = [(); 2].map(|()| context.create_default_qp(&pd, &cq, QpType::Rc).unwrap());
    let (of_a, of_b) = (context.endpoint(&a).unwrap(), context.endpoint(&b).unwrap());
    context.connect(&a, &of_a, &of_b).unwrap();
    context.connect(&b, &of_b, &of_a).unwrap();
    let memory = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    println!("@ ready");
    let poll = || {
        let begin = Instant::now();
        let mut wcs = [Wc::default()];
        while begin.elapsed() < Duration::from_millis(300) {
            if cq.poll(&mut wcs).unwrap() == 1 {
                return format!("{:?}", wcs[0].status);
            }
        }
        "nothing".into()
    };
    for line in std::io::stdin().lines() {
        let answer = match line.unwrap().as_str() {
            "write" => {
                a.write(1, &memory.slice(..8), &memory.remote(2048..)).unwrap();
                poll()
            }
            "send" => {
                b.recv(2, &memory.slice(1024..)).unwrap();
                a.send(1, &memory.slice(..8)).unwrap();
                poll()
            }
            "number" => format!("{:#08x}", a.qpn().get()),
            "number of the peer" => format!("{:#08x}", b.qpn().get()),
            "poll" => poll(),
            "port" => format!("{:?}", context.port_attr(1).unwrap().state),
            "event" => format!("{:?}", context.get_async_event().unwrap().kind()),
            "pd" => context.alloc_pd().map_or_else(|error| error.to_string(), |_| "made".into()),
            line => panic!("{line}"),
        };
        println!("@ {answer}");
    }
}
