//! Two processes of one host: this test binary starts itself as the peer.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyverbs::*;

use crate::endpoint::*;

const ROLE: &str = "ANYVERBS_TEST_ROLE";
const SIZE: usize = 1 << 20;

/// The peer process.
struct Peer {
    /// One at a time: while processes come and go, datagrams may take a detour, and unreliable ones get lost.
    _turn: MutexGuard<'static, ()>,
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

/// One line that a side says about itself: type, GID, QPN, address and rkey of its buffer.
fn introduce(e: &Endpoint, buffer: &Buffer) -> String {
    let a = e.address();
    format!("@ {} {} {} {}", a.gid, a.qpn.get(), buffer.addr(), buffer.mr.rkey())
}

fn introduced(line: &str) -> (Address, RemoteAddr) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ip: std::net::Ipv6Addr = words[1].parse().unwrap();
    let number = |i: usize| words[i].parse::<u64>().unwrap();
    let address = Address { gid: Gid(ip.octets()), qpn: Qpn::new(number(2) as u32) };
    (address, RemoteAddr { va: number(3), rkey: number(4) as u32 })
}

impl Peer {
    fn spawn(role: &str) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        isolate();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::peer", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { _turn: turn, child, stdin, stdout }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// The next line that is meant for us, among the harness's own.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the peer ended");
            if let Some(at) = line.find('@') {
                return line[at..].trim().to_owned();
            }
        }
    }

    /// Connects `e` with the peer's endpoint.
    fn connect(&mut self, e: &Endpoint, buffer: &Buffer) -> (Address, RemoteAddr) {
        let (address, remote) = introduced(&self.hear());
        e.connect(address);
        self.say(&introduce(e, buffer));
        assert_eq!(self.hear(), "@ connected");
        (address, remote)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_line() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line
}

/// Not a test by itself: the code of the peer process.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let qp_type = match role.split(' ').next() {
        Some("uc") => QpType::Uc,
        Some("ud") => QpType::Ud,
        _ => QpType::Rc,
    };
    let e = Endpoint::new(qp_type);
    let buffer = Buffer::new(&e.pd, SIZE);
    println!("{}", introduce(&e, &buffer));
    let (address, _) = introduced(&read_line());
    e.connect(address);
    if role.ends_with("echo") || role.ends_with("events") {
        let grh = if qp_type == QpType::Ud { 40 } else { 0 };
        let dest = e.dest(address);
        let ud = (qp_type == QpType::Ud).then_some(dest);
        let take = |n| {
            if role.ends_with("events") {
                e.wait(n)
            } else {
                e.poll_for(n, std::time::Duration::from_secs(60))
            }
        };
        e.recv(0, &[buffer.sge(0, SIZE)]);
        println!("@ connected");
        loop {
            let Some(wc) = take(1).into_iter().find(|wc| wc.opcode == WcOpcode::Recv) else {
                continue;
            };
            assert_eq!(wc.status, WcStatus::Success);
            let len = wc.byte_len as usize - grh;
            if len == 0 {
                return;
            }
            e.send_to(1, SendOp::Send, &[buffer.sge(grh, len)], ud);
            let wcs = take(1);
            assert_eq!(
                (wcs.len(), wcs[0].status, wcs[0].opcode),
                (1, WcStatus::Success, WcOpcode::Send)
            );
            e.recv(0, &[buffer.sge(0, SIZE)]);
            println!("@ ready");
        }
    }
    println!("@ connected");
    if role.ends_with("count") {
        let mut got = 0;
        for _ in 0..64 {
            e.recv(0, &[buffer.sge(0, SIZE)]);
        }
        println!("@ posted");
        let begin = std::time::Instant::now();
        while got < 64 && begin.elapsed().as_secs() < 60 {
            let mut wcs = [Wc::default(); 16];
            got += e.cq.poll(&mut wcs).unwrap();
        }
        println!("@ got {got}");
    }
    if role.ends_with("slow") {
        for _ in 0..SLOW_QUEUE {
            e.recv(0, &[buffer.sge(0, 4096)]);
        }
        println!("@ posted");
        let begin = std::time::Instant::now();
        let mut got = 0;
        while got < SLOW_COUNT && begin.elapsed().as_secs() < 60 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let mut wcs = [Wc::default(); SLOW_QUEUE];
            let n = e.cq.poll(&mut wcs).unwrap();
            for wc in &wcs[..n] {
                assert_eq!(wc.status, WcStatus::Success);
                e.recv(0, &[buffer.sge(0, 4096)]);
            }
            got += n;
        }
        println!("@ got {got}");
    }
    // Passive: the worker serves the peers that write and read here.
    read_line();
}

fn echo(role: &str, qp_type: QpType, sizes: &[usize], events: bool) {
    let mut peer = Peer::spawn(role);
    let e = Endpoint::new(qp_type);
    let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
    let (address, _) = peer.connect(&e, &src);
    let ud = (qp_type == QpType::Ud).then_some(e.dest(address));
    let grh = if qp_type == QpType::Ud { 40 } else { 0 };
    for (i, &len) in sizes.iter().enumerate() {
        let data = pattern(len, i as u8);
        src.write(0, &data);
        e.recv(1, &[dst.sge(0, SIZE)]);
        e.send_to(2, SendOp::Send, &[src.sge(0, len)], ud);
        let wcs = if events { e.wait(2) } else { e.poll(2) };
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
        assert_eq!(dst.read(grh, len), data, "{len} bytes");
        assert_eq!(peer.hear(), "@ ready");
    }
    e.send_to(3, SendOp::Send, &[], ud);
    e.poll(1);
    peer.child.wait().unwrap();
}

const SIZES: [usize; 9] = [1, 2, 3, 64, 1000, 4096, 4097, 65_536, 1_000_001];

#[test]
fn rc_by_polling() {
    echo("rc echo", QpType::Rc, &SIZES, false);
}

#[test]
fn rc_by_events() {
    echo("rc events", QpType::Rc, &SIZES, true);
}

#[test]
fn uc_by_polling() {
    echo("uc echo", QpType::Uc, &SIZES, false);
}

#[test]
fn ud_by_polling_and_by_events() {
    echo("ud echo", QpType::Ud, &[1, 2, 100, 4096], false);
    echo("ud events", QpType::Ud, &[1, 2, 100, 4096], true);
}

#[test]
fn uc_bursts_do_not_overflow_the_receiver() {
    let mut peer = Peer::spawn("uc count");
    let e = Endpoint::new(QpType::Uc);
    let src = Buffer::new(&e.pd, SIZE);
    peer.connect(&e, &src);
    assert_eq!(peer.hear(), "@ posted");
    let sges = [src.sge(0, 256 << 10)];
    let wr = SendWr {
        wr_id: 0,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        sges: &sges,
        ud: None,
        xrc_srqn: 0,
    };
    e.qp.post_send(&[wr; 64]).unwrap();
    e.poll(64);
    assert_eq!(peer.hear(), "@ got 64");
}

/// Receives of a program that looks after them every 20 ms.
const SLOW_QUEUE: usize = 32;
const SLOW_COUNT: usize = 10 * SLOW_QUEUE;

/// The receiving device would take them all at once: it is the program that must be waited for.
fn to_a_slow_program(role: &str, qp_type: QpType) {
    let mut peer = Peer::spawn(role);
    let e = Endpoint::new(qp_type);
    let src = Buffer::new(&e.pd, SIZE);
    let (address, _) = peer.connect(&e, &src);
    let ud = (qp_type == QpType::Ud).then_some(e.dest(address));
    assert_eq!(peer.hear(), "@ posted");
    for _ in 0..SLOW_COUNT / SLOW_QUEUE {
        for i in 0..SLOW_QUEUE {
            e.send_to(i as u64, SendOp::Send, &[src.sge(0, 100)], ud);
        }
        e.poll(SLOW_QUEUE);
    }
    assert_eq!(peer.hear(), format!("@ got {SLOW_COUNT}"));
}

#[test]
fn a_program_that_is_slow_to_post_receives_loses_nothing() {
    to_a_slow_program("uc slow", QpType::Uc);
    to_a_slow_program("ud slow", QpType::Ud);
}

#[test]
fn one_sided_operations_on_a_passive_process() {
    let mut peer = Peer::spawn("rc passive");
    let e = Endpoint::new(QpType::Rc);
    let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
    let (_, remote) = peer.connect(&e, &src);
    let data = pattern(SIZE, 4);
    src.write(0, &data);
    e.send(1, SendOp::Write(remote), &[src.sge(0, SIZE)]);
    assert_eq!(e.poll(1)[0].status, WcStatus::Success);
    e.send(2, SendOp::Read(remote), &[dst.sge(0, SIZE)]);
    assert_eq!(e.poll(1)[0].status, WcStatus::Success);
    assert_eq!(dst.read(0, SIZE), data);
    e.send(3, SendOp::FetchAdd { at: remote, add: 1 }, &[dst.sge(0, 8)]);
    assert_eq!(e.poll(1)[0].status, WcStatus::Success);
    assert_eq!(dst.read(0, 8), data[..8]);
}

#[test]
fn a_peer_that_is_killed_is_noticed() {
    let mut peer = Peer::spawn("rc passive");
    let e = Endpoint::new(QpType::Rc);
    let src = Buffer::new(&e.pd, SIZE);
    let (_, remote) = peer.connect(&e, &src);
    e.send(1, SendOp::Write(remote), &[src.sge(0, 4096)]);
    assert_eq!(e.poll(1)[0].status, WcStatus::Success);
    peer.child.kill().unwrap();
    peer.child.wait().unwrap();
    e.send(2, SendOp::Write(remote), &[src.sge(0, 4096)]);
    let wc = e.poll(1)[0];
    assert_eq!((wc.wr_id, wc.status), (2, WcStatus::RetryExcErr));
    assert_eq!(e.qp.state().unwrap(), QpState::Err);
}
