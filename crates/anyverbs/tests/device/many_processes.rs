//! The edges of what the processes of a host share: as many of them as there are slots, and some that cannot see each other.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyverbs::*;
use anyverbs_testing::UdpPort;

use crate::endpoint::*;
use crate::same_host::{Peer, SIZE, turn};

const ROLE: &str = "ANYVERBS_TEST_MANY";
/// Numbers of processes on a host.
const SLOTS: usize = 255;

/// A process that has the device open, until it is dropped.
struct Opened {
    child: Child,
    /// Its slot, or why it has none.
    said: String,
}

impl Opened {
    fn start(port: u16) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "many_processes::one", "--nocapture", "--test-threads=1"])
            .env("ANYVERBS_REGISTRY", format!("anyverbs-many-{}", std::process::id()))
            .env("ANYVERBS_UDP_PORT", port.to_string())
            .env("ANYVERBS_INTERFACES", "lo")
            .env(ROLE, "")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn hear(mut child: Child) -> Self {
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let said = lines.map(Result::unwrap).find_map(|line| Some(line.split_once('@')?.1.into()));
        Self { child, said: said.expect("it ended") }
    }

    fn slot(&self) -> u8 {
        self.said.parse().unwrap_or_else(|_| panic!("{}", self.said))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The code of each process.
#[test]
fn one() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let opened = Context::open(&devices().unwrap()[0].name);
    match &opened {
        Ok(context) => {
            let pd = context.alloc_pd().unwrap();
            let cq = context.create_cq(1, None, 0, 0).unwrap();
            let init = QpInitAttr {
                send_cq: &cq,
                recv_cq: &cq,
                srq: None,
                cap: CAP,
                qp_type: QpType::Rc,
                sq_sig_all: true,
                cookie: 0,
            };
            println!("@{}", context.create_qp(&pd, &init).unwrap().qpn().slot());
        }
        Err(error) => println!("@{error}"),
    }
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn as_many_processes_as_there_are_slots_open_the_device() {
    let _turn = turn();
    let port = UdpPort::reserve();
    let start = || Opened::start(port.number());
    let mut all: Vec<Opened> = Vec::new();
    while all.len() < SLOTS {
        // Some at a time: they start beside each other.
        let some: Vec<_> = (0..(SLOTS - all.len()).min(15)).map(|_| start()).collect();
        all.extend(some.into_iter().map(Opened::hear));
    }
    let slots: BTreeSet<u8> = all.iter().map(Opened::slot).collect();
    assert_eq!(slots.len(), SLOTS, "each has one of its own");
    let refused = Opened::hear(start());
    assert!(refused.said.contains("all 255"), "{}", refused.said);
    // The next one gets the place of one that ends.
    let gone = all.swap_remove(100).slot();
    assert_eq!(Opened::hear(start()).slot(), gone);
}

/// The processes of two containers that share the host's network: neither has a number in the other's PID namespace.
#[test]
fn processes_of_two_pid_namespaces_are_on_one_host() {
    // SAFETY: asks for a number.
    let maps = if unsafe { libc::geteuid() } == 0 { "-pf" } else { "-Urpf" };
    let can = Command::new("unshare").args([maps, "true"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        return anyverbs_testing::skip("no PID namespaces for this user here");
    }
    let _turn = turn();
    for shm in ["1", "0"] {
        let command = ["unshare", maps, "--kill-child"];
        let mut peer = Peer::spawn_by(&command, "rc", &[("ANYVERBS_SHM", shm)]);
        let e = Endpoint::new(QpType::Rc);
        let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
        let (address, remote) = peer.connect(&e, &dst);
        assert_ne!(address.qpn.slot(), e.qp.qpn().slot());
        src.write(0, &pattern(SIZE, 3));
        for (op, sge) in
            [(SendOp::Write(remote), src.sge(0, SIZE)), (SendOp::Read(remote), dst.sge(0, SIZE))]
        {
            e.send(1, op, &[sge]);
            assert_eq!(e.poll(1)[0].status, WcStatus::Success, "{op:?}, shm {shm}");
        }
        assert!(dst.read(0, SIZE) == pattern(SIZE, 3));
    }
}
