//! Packets that no device has sent.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, Packet};
use socket2::SockRef;

use crate::endpoint::*;

/// The address that they are sent to.
pub(crate) const VICTIM: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// For tests that count exactly. The counters are those of the process, which may run the tests of two files at a time.
pub(crate) fn counting_alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn forged(operation: Operation, to: &Endpoint, psn: Psn) -> Headers {
    let opcode = Opcode::new(Service::Rc, operation);
    Headers::new(Bth::new(opcode, to.qp.qpn(), psn))
}

/// A packet with a right ICRC from an address of the loopback interface.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forged {
    pub(crate) from: Ipv4Addr,
    pub(crate) to: Ipv4Addr,
    /// The ID of the IPv4 header that makes the ICRC right; that of the header is 0.
    pub(crate) id: u16,
    /// IPv4 TOS, as it arrives: DSCP and ECN.
    pub(crate) tos: u8,
}

impl Forged {
    pub(crate) fn from(from: Ipv4Addr) -> Self {
        Self { from, to: VICTIM, id: 0, tos: 0 }
    }

    /// Sends one, from a port of its own. An answer comes to this socket.
    pub(crate) fn send(self, headers: Headers, payload: &[u8]) -> UdpSocket {
        let socket = UdpSocket::bind((self.from, 0)).unwrap();
        self.send_by(&socket, headers, payload);
        socket
    }

    /// Sends one by a socket that is bound to its address.
    pub(crate) fn send_by(self, socket: &UdpSocket, headers: Headers, payload: &[u8]) {
        let port = std::env::var("ANYVERBS_UDP_PORT").unwrap().parse().unwrap();
        SockRef::from(socket).set_tos_v4(self.tos.into()).unwrap();
        socket.send_to(&self.bytes(socket, port, headers, payload), (self.to, port)).unwrap();
    }

    /// Sends packets of one length in one batch of the kernel. Their IDs count up. `damaged` has a wrong byte.
    pub(crate) fn send_batch(mut self, packets: &[(Headers, [u8; 64])], damaged: Option<usize>) {
        let port = std::env::var("ANYVERBS_UDP_PORT").unwrap().parse().unwrap();
        let socket = UdpSocket::bind((self.from, 0)).unwrap();
        let (mut all, mut len) = (Vec::new(), 0);
        for (i, (headers, payload)) in packets.iter().enumerate() {
            let mut bytes = self.bytes(&socket, port, *headers, payload);
            bytes[40] ^= u8::from(damaged == Some(i));
            (self.id, len) = (self.id + 1, bytes.len() as libc::c_int);
            all.extend(bytes);
        }
        let option = (libc::SOL_UDP, libc::UDP_SEGMENT);
        // SAFETY: a live integer of that size.
        let set = unsafe {
            let value = (&raw const len).cast();
            libc::setsockopt(socket.as_raw_fd(), option.0, option.1, value, 4)
        };
        assert_eq!(set, 0);
        socket.send_to(&all, (self.to, port)).unwrap();
    }

    fn bytes(self, socket: &UdpSocket, port: u16, headers: Headers, payload: &[u8]) -> Vec<u8> {
        let from = socket.local_addr().unwrap().port();
        let packet = Packet::new(headers, payload);
        let mut bytes = vec![0; packet.len()];
        packet.emit(&mut bytes);
        let flow = Flow::new(IpAddr::V4(self.from), IpAddr::V4(self.to), from, port);
        bytes.extend(flow.compute(self.id, &bytes).to_le_bytes());
        bytes
    }
}

/// Polls until a counter has grown by one.
pub(crate) fn counted(e: &Endpoint, counter: Counter, before: u64) {
    let begin = Instant::now();
    let counters = e.context.counters().unwrap();
    while counters.read(counter) == before {
        e.cq.poll(&mut [Wc::default(); 4]).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "{counter:?} does not grow");
    }
    assert_eq!(counters.read(counter), before + 1);
}
