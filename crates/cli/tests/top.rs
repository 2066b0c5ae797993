//! `anyverbs top` and `anyverbs show`, of real processes: this test program is started again in their roles.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs::endpoint::Endpoint;
use anyverbs::prelude::*;
use anyverbs_net::forward::ForwardBuffer;
use anyverbs_net::{PortOptions, Registry, Slot, UdpPort};
use anyverbs_page::{Counter, QueuePair, Snapshot};
use anyverbs_testing::{in_own_process, isolate};
use serde_json::Value;

const ROLE: &str = "ANYVERBS_TEST_ROLE";
/// A user that has no processes.
const STRANGER: u32 = 12_345;

/// A process in a role. It is killed when the value is dropped.
struct Role {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Role {
    fn start(role: &str) -> Self {
        let mut child = isolate(&mut Command::new(std::env::current_exe().unwrap()))
            .args(["--exact", "in_a_role", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// The rest of its next line that begins with `@`.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "it ended");
            if let Some((_, said)) = line.split_once("@ ") {
                return said.trim().to_owned();
            }
        }
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two processes with a connection. The second sends, and the first never posts a receive.
fn pair() -> [Role; 2] {
    let mut pair = ["receiver", "sender"].map(Role::start);
    let [a, b] = [pair[0].hear(), pair[1].hear()];
    pair[0].say(&b);
    pair[1].say(&a);
    assert_eq!((pair[0].hear(), pair[1].hear()), ("ready".into(), "ready".into()));
    pair
}

fn anyverbs(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
    isolate(command.args(arguments).stdin(Stdio::null()));
    command
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The process as `top --json` shows it.
fn seen(pid: u32) -> Option<Value> {
    let all: Vec<Value> = serde_json::from_str(&output(&mut anyverbs(&["top", "--json"]))).unwrap();
    all.into_iter().find(|process| process["pid"] == pid)
}

/// The same, as soon as `is_it` holds.
fn seen_when(pid: u32, is_it: impl Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let process = seen(pid);
        if let Some(process) = process.as_ref().filter(|process| is_it(process)) {
            return process.clone();
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{process:#?}");
    }
}

#[test]
fn a_queue_pair_says_that_its_peer_must_post_a_receive() {
    let [receiver, sender] = pair();
    let what = |process: &Value| process["page"]["queue_pairs"][0]["waiting"]["what"].clone();
    let waits = seen_when(sender.pid(), |process| what(process) == "peer-receive");
    assert_eq!(
        what(&seen_when(receiver.pid(), |process| what(process) == "own-receive")),
        "own-receive"
    );
    let qp = &waits["page"]["queue_pairs"][0];
    assert_eq!((&qp["sends"]["outstanding"], &qp["receives"]["fill"]), (&1.into(), &0.into()));
    assert!(qp["traffic"]["rnr_naks"].as_u64().unwrap() > 0, "{qp:#}");
    let number = qp["number"].to_string();
    for number in [number.clone(), format!("{:#x}", number.parse::<u32>().unwrap())] {
        let text = output(&mut anyverbs(&["show", "qp", &number]));
        let line = format!(" for process {} (", receiver.pid());
        assert!(text.contains(&line) && text.contains(") to post a receive\n"), "{text}");
        for word in [
            "retry_cnt ",
            "rnr_retry ",
            "max_rd_atomic ",
            "access ",
            "sgid_index ",
            "P_Key  ",
            " posted, ",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(!text.contains("waits          waits"), "{text}");
        let of = output(&mut anyverbs(&["show", "qp", &number, "--json"]));
        let of: Value = serde_json::from_str(&of).unwrap();
        let names = [&of["queue_pair"]["kind_name"], &of["queue_pair"]["state_name"]];
        assert_eq!(names, ["RC", "RTS"], "{of:#}");
    }
    assert_eq!((&qp["kind_name"], &qp["state_name"]), (&"RC".into(), &"RTS".into()), "{qp:#}");
    let text = output(&mut anyverbs(&["top", "--once"]));
    assert!(text.contains("for a receive that this program must post; the peer waits\n"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let text = output(&mut anyverbs(&["show", "process", &sender.pid().to_string()]));
    assert!(text.contains("rcvd_rnr_err") && text.contains("1 region, 4.0KiB"), "{text}");
}

#[test]
fn a_process_says_that_a_call_waits_for_an_acknowledgement() {
    let mut ender = Role::start("ender");
    ender.hear();
    let calls = |process: &Value| process["page"]["calls"].as_array().map_or(0, Vec::len);
    seen_when(ender.pid(), |process| calls(process) == 1);
    for arguments in [&["top", "--once"][..], &["show", "process", &ender.pid().to_string()]] {
        let text = output(&mut anyverbs(arguments));
        assert!(text.contains(" is ending an id") && text.contains("(AV8010)\n"), "{text}");
        let mut lines = text.lines().filter(|line| !line.starts_with("process "));
        assert!(lines.all(|line| line.chars().count() <= 80), "{text}");
    }
}

#[test]
fn a_stopped_process_is_shown_as_such_and_its_peer_waits() {
    let [receiver, mut sender] = pair();
    anyverbs_testing::stop(&receiver.child);
    let stopped = seen_when(receiver.pid(), |process| process["condition"] == "stopped");
    assert!(stopped["page"].is_null(), "nobody looked before");
    sender.say("send");
    let waits = |process: &Value| process["page"]["queue_pairs"][0]["waiting"]["what"] != "nothing";
    seen_when(sender.pid(), waits);
    // SAFETY: a child that was not waited for.
    assert_eq!(unsafe { libc::kill(receiver.pid() as i32, libc::SIGCONT) }, 0);
    seen_when(receiver.pid(), |process| {
        process["condition"] == "fresh" && !process["page"].is_null()
    });
}

#[test]
fn a_process_that_was_killed_disappears() {
    let [receiver, sender] = pair();
    let pid = receiver.pid();
    assert!(seen(pid).is_some());
    drop(receiver);
    assert!(seen(pid).is_none());
    let text = anyverbs(&["show", "process", &pid.to_string()]).output().unwrap();
    assert_eq!(text.status.code(), Some(125));
    assert!(seen(sender.pid()).is_some());
}

#[test]
fn another_user_sees_nothing() {
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let [receiver, _sender] = pair();
    assert!(seen(receiver.pid()).is_some());
    // The other user may not be able to execute what lies in root's directories.
    let copy = std::env::temp_dir().join(format!("anyverbs-stranger-{}", std::process::id()));
    std::fs::copy(env!("CARGO_BIN_EXE_anyverbs"), &copy).unwrap();
    let mut command = Command::new(&copy);
    isolate(command.args(["top", "--once"]).uid(STRANGER).gid(STRANGER));
    let said = command.output();
    std::fs::remove_file(copy).unwrap();
    let said = said.unwrap();
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success() && text.starts_with("0 processes, 0 queue pairs"), "{said:?}");
}

#[test]
fn a_thousand_queue_pairs_are_shown() {
    let mut many = Role::start("many");
    assert_eq!(many.hear(), "ready");
    let process = seen_when(many.pid(), |process| !process["page"].is_null());
    assert_eq!(process["page"]["queue_pairs"].as_array().unwrap().len(), 1000);
    assert_eq!(process["page"]["process"]["left_out"], 0);
    let text = output(&mut anyverbs(&["top", "--once"]));
    assert!(text.starts_with("1 process, 1000 queue pairs\n"), "{}", &text[..80]);
}

#[test]
fn json_names_a_group_by_its_address() {
    let mut member = Role::start("member");
    assert_eq!(member.hear(), "ready");
    let group = "ff0e::ffff:ef01:203";
    let process = seen_when(member.pid(), |process| process["page"]["groups"][0].is_object());
    assert_eq!(process["page"]["groups"][0]["gid"], group);
    let json = |arguments: &[&str]| -> Value {
        serde_json::from_str(&output(&mut anyverbs(arguments))).unwrap()
    };
    let all = json(&["show", "--json"]);
    let is_it = |process: &&Value| process["pid"] == member.pid();
    let shown = all["processes"].as_array().unwrap().iter().find(is_it).unwrap();
    assert_eq!(shown["page"]["groups"], process["page"]["groups"]);
    let number = process["page"]["queue_pairs"][0]["number"].to_string();
    assert_eq!(json(&["show", "qp", &number, "--json"])["groups"][0], group);
}

#[test]
fn a_queue_pair_names_its_device() {
    in_own_process("a_queue_pair_names_its_device", || {
        let devices = "rail0=127.0.0.1,rail1=127.0.0.2";
        for (name, value) in [("ANYVERBS_DEVICES", devices), ("ANYVERBS_INTERFACES", "")] {
            // SAFETY: before the device is opened, and by the only thread that runs a test.
            unsafe { std::env::set_var(name, value) };
        }
        let mut role = Role::start("last");
        assert_eq!(role.hear(), "ready");
        let process =
            seen_when(role.pid(), |process| process["page"]["queue_pairs"][0].is_object());
        assert_eq!(process["page"]["devices"], serde_json::json!(["rail0", "rail1"]));
        let number = process["page"]["queue_pairs"][0]["number"].to_string();
        let text = output(&mut anyverbs(&["show", "qp", &number]));
        let mut lines = text.lines().map(|line| line.split_whitespace());
        assert!(lines.any(|line| line.eq(["device", "rail1"])), "{text}");
    });
}

#[test]
fn a_forked_child_is_shown_with_what_it_opens_itself() {
    let mut parent = Role::start("forks");
    let said = [parent.hear(), parent.hear()];
    let child: u32 = said.iter().find_map(|said| said.parse().ok()).unwrap();
    assert!(said.contains(&"ready".to_owned()));
    let queue_pairs =
        |process: &Value| process["page"]["queue_pairs"].as_array().map_or(0, Vec::len);
    seen_when(parent.pid(), |process| queue_pairs(process) == 2);
    seen_when(child, |process| queue_pairs(process) == 1);
    // The child still has the parent's sockets.
    let pid = parent.pid();
    parent.child.kill().unwrap();
    parent.child.wait().unwrap();
    assert!(seen(pid).is_none());
    seen_when(child, |process| queue_pairs(process) == 1);
    // SAFETY: the child that this test's own child has forked, which lives until then.
    unsafe { libc::kill(child as i32, libc::SIGKILL) };
}

#[test]
fn a_hostile_page_neither_breaks_the_list_nor_moves_the_cursor() {
    let mut hostile = Role::start("hostile");
    assert_eq!(hostile.hear(), "ready");
    for (page, said) in [
        ("nonsense", "the process writes nonsense"),
        ("empty", "the process writes nonsense"),
        ("other", "the process has another version of anyverbs"),
        ("escapes", "\u{fffd}[2J"),
    ] {
        hostile.say(page);
        assert_eq!(hostile.hear(), "written");
        for arguments in [&["top", "--once"][..], &["show", "process", &hostile.pid().to_string()]]
        {
            let text = output(&mut anyverbs(arguments));
            assert!(text.contains(said), "{page}: {text}");
            assert!(
                !text.contains('\u{1b}') && text.lines().all(|line| line.chars().count() <= 300),
                "{text:?}"
            );
        }
        output(&mut anyverbs(&["top", "--json"]));
    }
}

/// A terminal of 80 columns and 24 rows: its end for the test, and that for a program.
fn terminal() -> [OwnedFd; 2] {
    let (mut ours, mut theirs) = (0, 0);
    let mut size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: live values; the name and the attributes are not asked for or given.
    let made = unsafe {
        libc::openpty(
            &raw mut ours,
            &raw mut theirs,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            &raw mut size,
        )
    };
    assert_eq!(made, 0);
    // SAFETY: descriptors that the call has made, and that nobody else has.
    [ours, theirs].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// As after Ctrl-S.
#[test]
fn the_screen_ends_though_its_terminal_takes_no_output() {
    let [ours, theirs] = terminal();
    let mut child =
        anyverbs(&["top"]).stdin(theirs.try_clone().unwrap()).stdout(theirs).spawn().unwrap();
    let mut terminal = std::fs::File::from(ours);
    let mut said = Vec::<u8>::new();
    while !said.windows(3).any(|w| w == b"\x1b[H") {
        let mut bytes = [0; 4096];
        let n = terminal.read(&mut bytes).unwrap();
        said.extend(&bytes[..n]);
    }
    terminal.write_all(b"\x13").unwrap();
    // It writes each second, and waits for room then.
    std::thread::sleep(Duration::from_secs(3));
    // SAFETY: a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > Duration::from_secs(30) {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it waits for the terminal");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The text that goes to a terminal is looked at.
#[test]
fn the_screen_fits_a_terminal_and_is_given_back() {
    let [_receiver, sender] = pair();
    seen_when(sender.pid(), |process| !process["page"].is_null());
    let [ours, theirs] = terminal();
    let mut child =
        anyverbs(&["top"]).stdin(theirs.try_clone().unwrap()).stdout(theirs).spawn().unwrap();
    let mut terminal = std::fs::File::from(ours);
    let mut said = Vec::new();
    let begin = Instant::now();
    let mut quit = false;
    loop {
        let mut bytes = [0; 4096];
        // The other end is closed.
        let Ok(n) = terminal.read(&mut bytes) else { break };
        said.extend(&bytes[..n]);
        // Two pictures, the second with rates.
        if !quit && said.windows(3).filter(|w| w == b"\x1b[H").count() >= 2 {
            terminal.write_all(b"q").unwrap();
            quit = true;
        }
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
    assert!(child.wait().unwrap().success());
    let text = String::from_utf8(said).unwrap();
    assert!(
        text.starts_with("\x1b[?1049h") && text.trim_end().ends_with("\x1b[?25h\x1b[?1049l"),
        "{text:?}"
    );
    assert!(text.contains("to post a receive"), "{text:?}");
    for picture in text.split("\x1b[H").skip(1) {
        let lines: Vec<&str> = picture.split("\r\n").collect();
        assert!(lines.len() <= 24, "{picture:?}");
        for line in &lines[..lines.len() - 1] {
            assert!(line.trim_end_matches("\x1b[K").chars().count() <= 80, "{line:?}");
        }
    }
}

/// Not a test by itself: the code of the other processes.
#[test]
fn in_a_role() {
    match std::env::var(ROLE).as_deref() {
        Ok("receiver") => end_of_a_connection(false),
        Ok("sender") => end_of_a_connection(true),
        Ok("many") => many(),
        Ok("last") => last(),
        Ok("member") => member(),
        Ok("forks") => forks(),
        Ok("ender") => ender(),
        Ok("hostile") => hostile(),
        _ => {}
    }
}

fn read_line() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

fn end_of_a_connection(sends: bool) {
    let context = Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None, 0, 0).unwrap();
    let qp = context.create_default_qp(&pd, &cq, QpType::Rc).unwrap();
    let own = context.endpoint(&qp).unwrap();
    let hex: String = own.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("@ {hex}");
    let line = read_line();
    let byte = |at: usize| u8::from_str_radix(&line[2 * at..2 * at + 2], 16).unwrap();
    let peer = Endpoint::from_bytes(std::array::from_fn(byte)).unwrap();
    context.connect(&qp, &own, &peer).unwrap();
    let memory = pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
    println!("@ ready");
    loop {
        if sends {
            qp.send(1, &memory.slice(..8)).unwrap();
        }
        if read_line().is_empty() {
            break;
        }
    }
}

/// A queue pair of the last device.
fn last() {
    let context = Context::open(&anyverbs::devices().unwrap().last().unwrap().name).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None, 0, 0).unwrap();
    let _qp = context.create_default_qp(&pd, &cq, QpType::Rc).unwrap();
    println!("@ ready");
    read_line();
}

/// A datagram queue pair in a multicast group, whose GID has 128 bits.
fn member() {
    let context = Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None, 0, 0).unwrap();
    let qp = context.create_default_qp(&pd, &cq, QpType::Ud).unwrap();
    let group = std::net::Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0xffff, 0xef01, 0x203);
    qp.attach_mcast(Gid(group.octets()), 0).unwrap();
    println!("@ ready");
    read_line();
}

/// It reads an event of an id, and destroys the id.
fn ender() {
    use anyverbs::cm::*;
    let channel = create_event_channel().unwrap();
    let id = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0).unwrap();
    let event = Event {
        kind: EventKind::User,
        status: 0,
        cookie: 0,
        new_id: None,
        param: EventParam::None,
        join_cookie: 0,
        ece: Ece::default(),
    };
    id.write_event(event).unwrap();
    channel.get_event().unwrap();
    println!("@ ready");
    id.destroy().unwrap();
}

fn many() {
    let context = Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None, 0, 0).unwrap();
    let _all: Vec<_> =
        (0..1000).map(|_| context.create_default_qp(&pd, &cq, QpType::Rc).unwrap()).collect();
    println!("@ ready");
    read_line();
}

fn forks() {
    let open = |n: usize| {
        let context = Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(64, None, 0, 0).unwrap();
        let qps: Vec<_> =
            (0..n).map(|_| context.create_default_qp(&pd, &cq, QpType::Rc).unwrap()).collect();
        (context, pd, cq, qps)
    };
    let _parents = open(2);
    // SAFETY: this process has the thread of the test and the device's, and the child uses nothing of the latter.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let _childs = open(1);
        println!("@ ready");
        std::thread::sleep(Duration::from_secs(120));
        // SAFETY: ends the child, which must not go on with the tests.
        unsafe { libc::_exit(0) };
    }
    println!("@ {pid}");
    read_line();
}

/// A process that shares in the host, and writes into its page what it is told.
fn hostile() {
    let (registry, port) =
        ["ANYVERBS_REGISTRY", "ANYVERBS_UDP_PORT"].map(|name| std::env::var(name).unwrap()).into();
    let number: u16 = port.parse().unwrap();
    let registry = Registry::of_port(&registry, number).unwrap();
    let slot = Arc::new(Slot::claim_in(&registry).unwrap());
    let options =
        PortOptions { slot: Some(Arc::clone(&slot)), steer_offset: 5, ..PortOptions::new(number) };
    let port = UdpPort::open(options).unwrap();
    std::thread::spawn(move || {
        let mut buffer = ForwardBuffer::new();
        loop {
            let _ = port.receive_forwarded(&mut buffer);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    println!("@ ready");
    loop {
        let escapes = "\x1b[2J\n\r\u{202e}".repeat(30);
        let snapshot = Snapshot {
            command: escapes.clone(),
            devices: vec![escapes.clone()],
            counters: vec![Counter { name: escapes, value: u64::MAX }],
            queue_pairs: vec![QueuePair { kind: 255, state: 255, ..QueuePair::default() }; 3],
            ..Snapshot::default()
        };
        let mut page = Vec::new();
        snapshot.encode(&mut page);
        match read_line().as_str() {
            "nonsense" => {
                page =
                    (0..100_000).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
            }
            "empty" => page.clear(),
            "other" => page[8] = 77,
            "escapes" => {}
            _ => return,
        }
        slot.page().write(&page).unwrap();
        println!("@ written");
    }
}
