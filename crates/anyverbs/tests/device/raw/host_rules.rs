//! The rules of two processes are as one table.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use super::*;

const NEIGHBOUR: &str = "ANYVERBS_TEST_RAW_NEIGHBOUR";

/// A frame to BOB at this port, whose last byte is `n`.
fn numbered(port: u16, n: u8) -> Vec<u8> {
    udp(BOB, [10, 0, 0, 1], port, &[n])
}

/// One that sends, and one that receives.
struct Pair {
    sender: Port,
    receiver: Port,
}

impl Pair {
    fn new() -> Self {
        let (sender, receiver) = (Port::new(), Port::new());
        (0..16).for_each(|n| receiver.recv(n, n as usize * 2048, 2048));
        Self { sender, receiver }
    }

    fn send(&self, port: u16, n: u8) {
        self.sender.send(&numbered(port, n));
        assert_eq!(self.sender.poll(1)[0].status, WcStatus::Success);
    }

    /// The number of the frame that comes next.
    fn next(&self) -> u8 {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match self.now() {
                Some(n) => return n,
                None => assert!(Instant::now() < deadline, "no frame comes"),
            }
        }
    }

    /// The number of a frame that has come.
    fn now(&self) -> Option<u8> {
        let mut wc = [Wc::default()];
        (self.receiver.cq.poll(&mut wc).unwrap() == 1).then(|| self.taken(&wc[0]))
    }

    fn taken(&self, wc: &Wc) -> u8 {
        assert_eq!(wc.status, WcStatus::Success);
        let at = wc.wr_id as usize * 2048;
        let n = self.receiver.buffer.read(at, wc.byte_len as usize).pop().unwrap();
        self.receiver.recv(wc.wr_id, at, 2048);
        n
    }

    /// Who of this process gets a frame that it sends is decided before the send is done.
    fn sends_to_itself(&self, port: u16, n: u8) -> bool {
        self.send(port, n);
        match self.now() {
            Some(got) => {
                assert_eq!(got, n);
                true
            }
            None => false,
        }
    }

    /// Until no rule of a process that has ended takes it.
    fn waits_for_itself(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.sends_to_itself(9, 0) {
            assert!(Instant::now() < deadline, "it has ended");
        }
    }
}

/// Of the words of a command.
fn described(words: &[&str]) -> FlowAttr {
    let mut attr = rule(&[to_port(9)]);
    attr.priority = words[0].parse().unwrap();
    for word in &words[1..] {
        match *word {
            "any" => attr.specs = rule(&[to(BOB)]).specs,
            "drop" => attr.drop = true,
            "default" => (attr.flow_type, attr.specs) = (FlowType::AllDefault, rule(&[]).specs),
            _ => panic!("{word}"),
        }
    }
    attr
}

/// The other process: does as it is told.
#[test]
fn neighbour() {
    if std::env::var(NEIGHBOUR).is_err() {
        return;
    }
    let pair = Pair::new();
    let mut rules = Vec::new();
    println!("\n@ {}", pair.receiver.qp.qpn().get() >> 16);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        match words[0] {
            "rule" => rules
                .push(pair.receiver.qp.create_flow(described(&words[1..]), None, None).unwrap()),
            "destroy" => rules.pop().unwrap().destroy().unwrap(),
            "send" => pair.send(words[1].parse().unwrap(), words[2].parse().unwrap()),
            "next" => {
                println!("@ {}", pair.next());
                continue;
            }
            _ => panic!("{line}"),
        }
        println!("@ done");
    }
}

struct Neighbour {
    child: Child,
    /// None at its end.
    stdin: Option<ChildStdin>,
    said: Receiver<String>,
    slot: u64,
}

impl Neighbour {
    fn spawn() -> Self {
        Self::spawn_with(&[])
    }

    fn spawn_with(variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "raw::host_rules::neighbour", "--nocapture", "--test-threads=1"])
            .env(NEIGHBOUR, "1")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (says, said) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(word) = line.strip_prefix("@ ") {
                    let _ = says.send(word.trim().to_owned());
                }
            }
        });
        let mut this = Self { child, stdin, said, slot: 0 };
        this.slot = this.hear().parse().unwrap();
        this
    }

    fn hear(&mut self) -> String {
        self.said.recv_timeout(Duration::from_secs(30)).expect("it has ended, or says nothing")
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.stdin.as_ref().unwrap(), "{command}").unwrap();
    }

    fn say(&mut self, command: &str) {
        self.tell(command);
        assert_eq!(self.hear(), "done");
    }

    /// The number of the frame that comes next there.
    fn next(&mut self) -> u8 {
        self.tell("next");
        self.hear().parse().unwrap()
    }

    /// Has it end without a word.
    fn end(&mut self) {
        self.signal(libc::SIGKILL);
        self.child.wait().unwrap();
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a process that was started here and is not waited for yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for Neighbour {
    /// Has it destroy its rules, which the tests behind this one would meet for a while.
    fn drop(&mut self) {
        drop(self.stdin.take());
        let deadline = Instant::now() + Duration::from_secs(10);
        while !std::thread::panicking()
            && Instant::now() < deadline
            && matches!(self.child.try_wait(), Ok(None))
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_lower_priority_number_in_another_process_takes_the_frame() {
    let Some(_alone) = alone() else { return };
    let (here, mut there) = (Pair::new(), Neighbour::spawn());
    let counters = here.receiver.context.create_counters().unwrap();
    counters.attach(CounterKind::Packets, 0).unwrap();
    let flow = here.receiver.qp.create_flow(described(&["5"]), Some(&counters), None).unwrap();
    assert!(here.sends_to_itself(9, 1));
    there.say("rule 1 any");
    assert!(!here.sends_to_itself(9, 2));
    assert_eq!(there.next(), 2);
    // What another process sends, in the order in which it comes.
    let marker = rule(&[to_port(11)]);
    let _marker = here.receiver.qp.create_flow(marker, None, None).unwrap();
    there.say("send 9 3");
    there.say("send 11 33");
    assert_eq!((there.next(), here.next()), (3, 33));
    there.say("destroy");
    there.say("send 9 4");
    assert_eq!(here.next(), 4);
    assert!(here.sends_to_itself(9, 5));
    // A rule counts what it takes.
    let mut counted = [0];
    counters.read(&mut counted).unwrap();
    assert_eq!(counted, [3]);
    // One of a higher number comes behind.
    there.say("rule 6 any");
    assert!(here.sends_to_itself(9, 6));
    here.send(10, 7);
    assert_eq!(there.next(), 7, "and gets what is left alone");
    flow.destroy().unwrap();
    here.send(9, 8);
    assert_eq!(there.next(), 8);
}

#[test]
fn of_one_priority_the_older_rule_takes_the_frame_and_the_same_rules_a_copy_each() {
    let Some(_alone) = alone() else { return };
    let (here, mut there) = (Pair::new(), Neighbour::spawn());
    let older = here.receiver.qp.create_flow(described(&["5"]), None, None).unwrap();
    there.say("rule 5 any");
    assert!(here.sends_to_itself(9, 1));
    let again = here.receiver.qp.create_flow(described(&["5", "any"]), None, None).unwrap();
    here.send(10, 2);
    assert_eq!((there.next(), here.now()), (2, Some(2)), "each a copy");
    older.destroy().unwrap();
    again.destroy().unwrap();
    let _younger = here.receiver.qp.create_flow(described(&["5"]), None, None).unwrap();
    assert!(!here.sends_to_itself(9, 3));
    assert_eq!(there.next(), 3);
    let marker = FlowAttr { specs: rule(&[to_port(11)]).specs, ..described(&["0"]) };
    let _marker = here.receiver.qp.create_flow(marker, None, None).unwrap();
    there.say("send 9 4");
    there.say("send 11 44");
    assert_eq!((there.next(), here.next()), (4, 44));
    there.say("destroy");
    there.say("rule 5");
    there.say("send 9 5");
    assert_eq!((there.next(), here.next()), (5, 5), "each a copy");
    assert!(here.sends_to_itself(9, 6));
    assert_eq!(there.next(), 6);
}

#[test]
fn another_process_drops_and_sniffers_see_it() {
    let Some(_alone) = alone() else { return };
    let (here, sniffer, mut there) = (Pair::new(), Pair::new(), Neighbour::spawn());
    let _flow = here.receiver.qp.create_flow(described(&["5"]), None, None).unwrap();
    let sniffs = FlowAttr { flow_type: FlowType::Sniffer, ..rule(&[]) };
    let _sniffs = sniffer.receiver.qp.create_flow(sniffs, None, None).unwrap();
    there.say("rule 2 drop");
    assert!(!here.sends_to_itself(9, 1));
    assert_eq!(sniffer.now(), Some(1));
    there.say("send 9 2");
    assert_eq!((sniffer.next(), here.now()), (2, None));
    there.say("destroy");
    // A default rule comes after every other.
    there.say("rule 0 default");
    assert!(here.sends_to_itself(9, 3));
    here.send(10, 4);
    assert_eq!(there.next(), 4);
    assert_eq!((sniffer.now(), sniffer.now()), (Some(3), Some(4)));
    assert_eq!(here.now(), None);
}

#[test]
fn the_rules_of_a_process_end_with_it_and_not_while_it_is_stopped() {
    let Some(_alone) = alone() else { return };
    let (here, mut there) = (Pair::new(), Neighbour::spawn());
    let _flow = here.receiver.qp.create_flow(described(&["5"]), None, None).unwrap();
    there.say("rule 1 any");
    anyverbs_testing::stop(&there.child);
    for n in 0..3 {
        assert!(!here.sends_to_itself(9, n));
        // Longer than it is believed to live without a look.
        std::thread::sleep(Duration::from_millis(6));
    }
    there.signal(libc::SIGCONT);
    assert_eq!([there.next(), there.next(), there.next()], [0, 1, 2]);
    there.end();
    here.waits_for_itself();
    // From then on none is missed, and who comes next ranks again.
    assert!((4..50).all(|n| here.sends_to_itself(9, n)));
    let mut next = Neighbour::spawn();
    assert!(here.sends_to_itself(9, 50));
    next.say("rule 1 any");
    assert!(!here.sends_to_itself(9, 51));
    assert_eq!(next.next(), 51);
}

#[test]
fn the_rules_of_processes_that_ended_together_end_soon() {
    let Some(_alone) = alone() else { return };
    let (here, mut others) = (Pair::new(), [(); 3].map(|()| Neighbour::spawn()));
    let _flow = here.receiver.qp.create_flow(described(&["5"]), None, None).unwrap();
    for (n, there) in others.iter_mut().enumerate() {
        there.say(&format!("rule {n} any"));
    }
    assert!(!here.sends_to_itself(9, 1));
    assert_eq!(others[0].next(), 1);
    others.iter_mut().for_each(Neighbour::end);
    // The first frame that comes here has found out about all of them.
    here.waits_for_itself();
    assert!((2..50).all(|n| here.sends_to_itself(9, n)));
}

/// Who could not join the table of the host does so later, with the rules that he has by then.
#[test]
fn rules_that_others_could_not_be_told_of_are_told_later() {
    anyverbs_testing::in_own_process(
        "raw::host_rules::rules_that_others_could_not_be_told_of_are_told_later",
        || {
            let Some(_alone) = alone() else { return };
            let (here, mut there) = (Pair::new(), Neighbour::spawn());
            let limit = |bytes| {
                let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
                // SAFETY: a limit to read.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            };
            there.say("rule 2 any");
            limit(4096);
            let first = here.receiver.qp.create_flow(described(&["3"]), None, None).unwrap();
            let _second = here.receiver.qp.create_flow(described(&["1"]), None, None).unwrap();
            assert!(here.sends_to_itself(9, 1));
            assert_eq!(there.next(), 1, "nobody knows of the other");
            limit(libc::RLIM_INFINITY);
            let deadline = Instant::now() + Duration::from_secs(10);
            let marker = loop {
                let specs = rule(&[to_port(11)]).specs;
                let marker = FlowAttr { specs, ..described(&["3"]) };
                let marker = here.receiver.qp.create_flow(marker, None, None).unwrap();
                // It ranks with the other's as soon as they know of each other.
                if !here.sends_to_itself(11, 2) {
                    assert_eq!(there.next(), 2);
                    break marker;
                }
                assert_eq!(there.next(), 2);
                assert!(Instant::now() < deadline, "it is not joined again");
                marker.destroy().unwrap();
                std::thread::sleep(Duration::from_millis(100));
            };
            assert!(here.sends_to_itself(9, 3));
            here.send(10, 4);
            assert_eq!(there.next(), 4, "and not the one before");
            assert_eq!(here.now(), None);
            marker.destroy().unwrap();
            first.destroy().unwrap();
            there.say("destroy");
            assert!(here.sends_to_itself(9, 5));
        },
    );
}

/// The table of the host as it is found in the registry.
fn table_of_the_host() -> std::fs::File {
    let registry = std::env::var("ANYVERBS_REGISTRY").unwrap();
    let names = std::fs::read_to_string("/proc/net/unix").unwrap();
    let place = names
        .lines()
        .filter(|line| line.contains(&format!("@{registry}/")))
        .find_map(|line| line.split_once("/flows/"))
        .map(|(_, place)| place)
        .unwrap();
    let parts: Vec<_> = place.split('/').collect();
    let path = format!("/proc/{}/fd/{}", parts[2], parts[3]);
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// The others of this process do not share the table.
#[test]
fn nonsense_of_another_process_is_ignored() {
    anyverbs_testing::in_own_process(
        "raw::host_rules::nonsense_of_another_process_is_ignored",
        nonsense,
    );
}

fn nonsense() {
    let Some(_alone) = alone() else { return };
    let (here, mut there) = (Pair::new(), Neighbour::spawn());
    let _flow = here.receiver.qp.create_flow(described(&["5", "any"]), None, None).unwrap();
    there.say("rule 1 any");
    there.say("rule 2");
    assert!(!here.sends_to_itself(9, 1));
    // See `net::shared_table`.
    let (entry, section) = (320, 8192 + there.slot * 16_384 * 320);
    let header = 4096 + there.slot * 16;
    let table = table_of_the_host();
    let change = |at: u64, with: &dyn Fn(u64) -> u64| {
        let mut word = [0; 8];
        table.read_exact_at(&mut word, at).unwrap();
        table.write_all_at(&with(u64::from_le_bytes(word)).to_le_bytes(), at).unwrap();
    };
    let changed = || {
        change(header, &|version| version + 2);
        change(0, &|generation| generation + 1);
    };
    let mut first = [0; 320];
    table.read_exact_at(&mut first, section).unwrap();
    assert_eq!(first[..2], [1, 1], "a record, of a normal rule");
    // The first rule is none; the second one, to one port, is in force.
    table.write_all_at(&[1, 77], section).unwrap();
    changed();
    assert!(here.sends_to_itself(10, 2));
    assert!(!here.sends_to_itself(9, 2));
    for n in 0..2 {
        table.write_all_at(&[0xff; 320], section + n * entry).unwrap();
    }
    changed();
    assert!(here.sends_to_itself(9, 3));
    for (fill, n) in [(0xff, 4), (1, 5), (0x80, 6)] {
        table.write_all_at(&[fill; 64 * 320], section).unwrap();
        (0..64).for_each(|n| table.write_all_at(&[1], section + n * entry).unwrap());
        change(header + 8, &|_| u64::MAX);
        changed();
        assert!(here.sends_to_itself(9, n));
    }
    // Every word of every other section.
    for slot in (1..256).filter(|slot| *slot != u64::from(here.receiver.qp.qpn().get() >> 16)) {
        table.write_all_at(&[0xff; 16], 4096 + slot * 16).unwrap();
    }
    change(0, &|_| u64::MAX);
    assert!(here.sends_to_itself(9, 7));
    // As it was.
    table.write_all_at(&first, section).unwrap();
    changed_from_all_ones(&table, header);
    assert!(!here.sends_to_itself(9, 8));
    // Its section says that it was never written, and it has ended.
    change(header, &|_| 1002);
    change(0, &|generation| generation + 1);
    there.end();
    change(header, &|_| 0);
    here.waits_for_itself();
    assert!((9..50).all(|n| here.sends_to_itself(9, n)));
}

fn changed_from_all_ones(table: &std::fs::File, header: u64) {
    table.write_all_at(&1000u64.to_le_bytes(), header).unwrap();
    table.write_all_at(&1000u64.to_le_bytes(), 0).unwrap();
}

const ON_INTERFACE: &str = "ANYVERBS_TEST_RAW_ON_INTERFACE";

/// In a network namespace of its own.
#[test]
fn only_who_gets_the_frames_of_an_interface_takes_them_from_others() {
    if std::env::var(ON_INTERFACE).is_ok() {
        return on_interface();
    }
    if !anyverbs_testing::unshare_or_skip() {
        return;
    }
    isolate();
    let output = Command::new("unshare")
        .arg("-Urn")
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "raw::host_rules::only_who_gets_the_frames_of_an_interface_takes_them_from_others",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(ON_INTERFACE, "1")
        .env("ANYVERBS_RAW_INTERFACE", "va")
        .output()
        .unwrap();
    crate::host::succeeds(&output);
}

fn on_interface() {
    use anyverbs_net::ethernet::{EthernetSocket, FrameBatch};

    crate::host::ip("link set lo up");
    crate::host::ip("link add va type veth peer name vb");
    for interface in ["va", "vb"] {
        crate::host::ip(&format!("link set {interface} up"));
    }
    let far = EthernetSocket::on_interface("vb").unwrap();
    let from_far = |port, n| {
        let mut batch = FrameBatch::default();
        batch.push(&numbered(port, n));
        far.send(&batch) == 0
    };
    let here = Pair::new();
    let _flow = here.receiver.qp.create_flow(described(&["5"]), None, None).unwrap();
    let marker = here.receiver.qp.create_flow(rule(&[to_port(11)]), None, None).unwrap();
    // An interface that is up may take a while to carry anything.
    let deadline = Instant::now() + Duration::from_secs(10);
    while !from_far(11, 0) || here.now().is_none() {
        assert!(Instant::now() < deadline, "the interface carries nothing");
    }
    marker.destroy().unwrap();
    from_far(9, 1);
    while here.next() != 1 {}
    let _marker = here.receiver.qp.create_flow(rule(&[to_port(11)]), None, None).unwrap();
    // It gets frames of the host alone.
    let mut apart = Neighbour::spawn_with(&[("ANYVERBS_RAW_INTERFACE", "")]);
    apart.say("rule 2 any");
    from_far(9, 2);
    assert_eq!(here.next(), 2);
    assert!(!here.sends_to_itself(9, 3));
    assert_eq!(apart.next(), 3);
    // And this one of the interface as well.
    let mut there = Neighbour::spawn();
    there.say("rule 1 any");
    from_far(9, 4);
    from_far(11, 44);
    assert_eq!((there.next(), here.next()), (4, 44));
    there.say("destroy");
    from_far(9, 5);
    assert_eq!(here.next(), 5);
    assert!(!here.sends_to_itself(9, 6));
    assert_eq!(apart.next(), 6);
}
