//! A host on two links, with the same link-local addresses on both. The peer on one link and a stranger on the other cannot be
//! told apart by their addresses.

use std::net::{IpAddr, Ipv6Addr, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::opcode::Operation;
use anyverbs_proto::wire::packet::{Headers, Packet};
use anyverbs_proto::wire::reth::Reth;

use crate::endpoint::*;
use crate::forged::forged;
use crate::host::{ip, succeeds};

const ROLE: &str = "ANYVERBS_TEST_TWO_LINKS";
const HERE: &str = "fe80::77:1";
/// Another address of the host on the peer's link.
const ALSO_HERE: &str = "fe80::77:9";
const THERE: &str = "fe80::77:2";

#[test]
fn a_stranger_with_the_peers_link_local_address_is_refused() {
    if anyverbs_testing::unshare_or_skip() {
        let output = Command::new("unshare")
            .arg("-Urn")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "two_links::here", "--nocapture", "--test-threads=1"])
            .env(ROLE, "here")
            .envs([
                ("ANYVERBS_REGISTRY", "two-links"),
                ("ANYVERBS_INTERFACES", ""),
                ("ANYVERBS_UDP_PORT", "4791"),
            ])
            .output()
            .unwrap();
        succeeds(&output);
    }
}

/// The other host: a namespace that lives as long as its process.
pub(crate) struct There(Child);

impl There {
    pub(crate) fn new() -> Self {
        let mut child = Command::new("unshare")
            .args(["-n", "sh", "-c", "echo; exec sleep 1000"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It says a line when it is in its namespace.
        let mut line = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        Self(child)
    }

    pub(crate) fn pid(&self) -> String {
        self.0.id().to_string()
    }

    pub(crate) fn ip(&self, arguments: &str) {
        let pid = self.pid();
        let done = Command::new("nsenter")
            .args(["-n", "-t", &pid, "ip"])
            .args(arguments.split(' '))
            .status();
        assert!(done.unwrap().success(), "{arguments}");
    }

    /// A socket of that host, at its address on this link.
    fn socket(&self, link: &str) -> (UdpSocket, u32) {
        let path = format!("/proc/{}/ns/net", self.0.id());
        let name = std::ffi::CString::new(link).unwrap();
        let open = move || {
            let namespace = std::fs::File::open(path).unwrap();
            // SAFETY: moves this thread alone, which ends after it has made the socket; and a string that ends with a zero.
            let index = unsafe {
                assert_eq!(libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET), 0);
                libc::if_nametoindex(name.as_ptr())
            };
            let at = SocketAddrV6::new(THERE.parse().unwrap(), 0, 0, index);
            (UdpSocket::bind(at).unwrap(), index)
        };
        std::thread::spawn(open).join().unwrap()
    }
}

impl Drop for There {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a packet with a right ICRC.
fn send((socket, link): &(UdpSocket, u32), to: &str, headers: Headers, payload: &[u8]) {
    let to: Ipv6Addr = to.parse().unwrap();
    let from = socket.local_addr().unwrap();
    let packet = Packet::new(headers, payload);
    let mut bytes = vec![0; packet.len()];
    packet.emit(&mut bytes);
    let flow = Flow::new(from.ip(), IpAddr::V6(to), from.port(), 4791);
    bytes.extend(flow.compute(0, &bytes).to_le_bytes());
    socket.send_to(&bytes, SocketAddrV6::new(to, 4791, 0, *link)).unwrap();
}

/// The body of the test, on a host of its own.
#[test]
fn here() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let there = There::new();
    let pid = there.pid();
    ip("link set lo up");
    for link in ["a", "b"] {
        ip(&format!("link add {link}0 type veth peer name {link}1 netns {pid}"));
        // No link-local address of the kernel's making.
        ip(&format!("link set {link}0 addrgenmode none"));
        there.ip(&format!("link set {link}1 addrgenmode none"));
        ip(&format!("addr add {HERE}/64 dev {link}0 nodad"));
        there.ip(&format!("addr add {THERE}/64 dev {link}1 nodad"));
        there.ip(&format!("link set {link}1 up"));
        ip(&format!("link set {link}0 up"));
    }
    ip(&format!("addr add {ALSO_HERE}/64 dev a0 nodad"));
    ip("addr add 10.77.0.1/24 dev a0");

    let e = Endpoint::new(QpType::Rc);
    let gid = |ip: &str| Gid::from(IpAddr::V6(ip.parse().unwrap()));
    let entries = (0..16).filter_map(|index| e.context.gid(1, index).unwrap());
    let ours = entries.filter(|entry| entry.gid == gid(HERE) && entry.interface_name == "a0");
    let ours = ours.map(|entry| entry.index).collect::<Vec<_>>();
    let [index] = ours[..] else { panic!("entries {ours:?} of the peer's link") };
    e.to_init();
    let to = AhAttr {
        dgid: gid(THERE),
        sgid_index: index as u8,
        hop_limit: 64,
        is_global: true,
        port: 1,
        ..AhAttr::default()
    };
    let attr = QpAttr {
        state: QpState::Rtr,
        av: e.context.resolve(&to).unwrap(),
        path_mtu: Mtu::Mtu1024,
        dest_qpn: Qpn::new(0x01_0100),
        rq_psn: Psn::new(100),
        max_dest_rd_atomic: 1,
        min_rnr_timer: 1,
        ..QpAttr::default()
    };
    use QpAttrMask as M;
    let mask = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
    e.qp.modify(&attr, mask | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER).unwrap();

    let memory = Buffer::new(&e.pd, 64);
    let mut write = forged(Operation::WriteOnly, &e, Psn::new(100));
    write.reth = Some(Reth { va: memory.addr(), rkey: memory.mr.rkey(), len: 64 });
    let counters = e.context.counters().unwrap();
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !done() {
            e.cq.poll(&mut [Wc::default(); 4]).unwrap();
            assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        }
    };
    let (peer, stranger) = (there.socket("a1"), there.socket("b1"));
    for (what, from, to) in [
        ("by another link, to the same address", &stranger, HERE),
        ("by the peer's link, to another address", &peer, ALSO_HERE),
    ] {
        let before = counters.read(Counter::DropForeign);
        send(from, to, write, &[9; 64]);
        wait(what, &|| counters.read(Counter::DropForeign) > before);
        assert_eq!(counters.read(Counter::DropForeign), before + 1, "{what}");
        assert_eq!(memory.read(0, 64), [0; 64], "{what}");
    }
    // The peer itself is heard, so the packets above would have been.
    send(&peer, HERE, write, &[1; 64]);
    wait("the peer", &|| memory.read(0, 64) == [1; 64]);
}
