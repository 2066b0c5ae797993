//! The sending sockets of a port: one per address family and number, each with its own source port.
//!
//! A receiver's GRO may join datagrams of one address-and-port pair only, and the kernel steers a joined batch once,
//! by its first datagram. So datagrams for different processes of a host go out by different sending sockets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, OnceLock};

use socket2::{Domain, Socket};

use crate::sys::{is_scarcity, udp_socket};
use crate::{random_u64, sockopt};

use super::{Destination, Family};

// include/uapi/linux/in6.h; missing in libc.
const IPV6_FLOWINFO_SEND: libc::c_int = 33;
const IPV6_AUTOFLOWLABEL: libc::c_int = 70;

/// Send buffer to ask for: many batches on their way through a slow device.
const SEND_BUFFER: usize = 4 << 20;

/// One sending socket.
#[derive(Debug)]
pub(crate) struct SendingSocket {
    pub(crate) socket: Arc<Socket>,
    pub(crate) port: u16,
    gso: AtomicBool,
}

impl SendingSocket {
    pub(crate) fn gso(&self) -> bool {
        self.gso.load(Ordering::Relaxed)
    }

    pub(crate) fn disable_gso(&self) {
        self.gso.store(false, Ordering::Relaxed);
    }
}

/// All sending sockets of a port, opened when first used and closed with the port: at most 256 of a family.
///
/// One for which there is no descriptor sends by the receiving socket of its family. It stays so: packets are sealed for
/// their source port before they leave.
#[derive(Debug)]
pub(crate) struct SendingSockets {
    sending: [Box<[OnceLock<SendingSocket>]>; 2],
    receivers: [Option<Arc<Socket>>; 2],
    gso: bool,
    no_checksum6: bool,
    /// It is in the log that there was no descriptor.
    told: Once,
}

impl SendingSockets {
    pub(crate) fn new(receivers: [Option<Arc<Socket>>; 2], gso: bool, no_checksum6: bool) -> Self {
        let family = || (0..256).map(|_| OnceLock::new()).collect();
        Self { sending: [family(), family()], receivers, gso, no_checksum6, told: Once::new() }
    }

    /// The sending socket by which datagrams go to a destination, opened if it is not yet.
    pub(crate) fn of(&self, to: &Destination) -> io::Result<&SendingSocket> {
        self.sending(Family::of(to.address.ip()), to.sending_socket)
    }

    fn sending(&self, family: Family, number: u8) -> io::Result<&SendingSocket> {
        let cell = &self.sending[family as usize][usize::from(number)];
        if let Some(sending) = cell.get() {
            return Ok(sending);
        }
        // Two threads may both open one; the loser's closes again, unused.
        let sending = self.open(family, false)?;
        Ok(cell.get_or_init(|| sending))
    }

    /// Those opened so far.
    pub(crate) fn opened(&self) -> impl Iterator<Item = &SendingSocket> {
        self.sending.iter().flatten().filter_map(OnceLock::get)
    }

    /// A socket with a port of its own. `is_shared`: a connected one gets the same port.
    pub(super) fn open(&self, family: Family, is_shared: bool) -> io::Result<SendingSocket> {
        let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
        let made = udp_socket(domain);
        let socket = match (made, self.receiver(family)) {
            (Ok(socket), _) => {
                socket.set_nonblocking(true)?;
                if family == Family::V6 {
                    socket.set_only_v6(true)?;
                }
                drop_all(&socket)?;
                bind(&socket, family)?;
                // Behind bind(2), which so finds a port that no other socket has.
                socket.set_reuse_port(is_shared)?;
                Arc::new(socket)
            }
            (Err(error), Some(receiver)) if is_scarcity(&error) && !is_shared => {
                self.told.call_once(|| {
                    tracing::warn!(%error, "no socket to send by: datagrams leave by one that receives");
                });
                receiver
            }
            (Err(error), _) => return Err(error),
        };
        self.configure(socket.as_fd(), family)?;
        let port = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
        let gso =
            self.gso && sockopt::set(socket.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok();
        Ok(SendingSocket { socket, port, gso: AtomicBool::new(gso) })
    }

    fn receiver(&self, family: Family) -> Option<Arc<Socket>> {
        self.receivers[family as usize].clone()
    }

    /// Sets what a socket that sends needs.
    pub(super) fn configure(&self, fd: BorrowedFd<'_>, family: Family) -> io::Result<()> {
        match family {
            Family::V4 => {
                // DF, and with an unconnected socket the IPv4 ID is 0, or the index inside a GSO batch.
                sockopt::set(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
            }
            Family::V6 => {
                sockopt::set(
                    fd,
                    libc::IPPROTO_IPV6,
                    libc::IPV6_MTU_DISCOVER,
                    libc::IPV6_PMTUDISC_DO,
                )?;
                sockopt::set(fd, libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1)?;
                // The flow label is the sender's own, and 0 if it gives none.
                sockopt::set(fd, libc::IPPROTO_IPV6, IPV6_FLOWINFO_SEND, 1)?;
                sockopt::set(fd, libc::IPPROTO_IPV6, IPV6_AUTOFLOWLABEL, 0)?;
                if self.no_checksum6 {
                    sockopt::set(fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1)?;
                }
            }
        }
        let size = SEND_BUFFER as libc::c_int;
        if sockopt::set(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, size).is_err() {
            sockopt::set(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, size)?;
        }
        Ok(())
    }
}

/// Drops datagrams to a socket without a reader, so that they do not pile up.
pub(super) fn drop_all(socket: &Socket) -> io::Result<()> {
    let code = (libc::BPF_RET | libc::BPF_K) as u16;
    let filter = [libc::sock_filter { code, jt: 0, jf: 0, k: 0 }];
    sockopt::attach_bpf(socket.as_fd(), libc::SO_ATTACH_FILTER, &filter)
}

/// Binds to a port of the range that RoCEv2 senders use for flow entropy, else to any.
fn bind(socket: &Socket, family: Family) -> io::Result<()> {
    let any: IpAddr = match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let random = random_u64();
    for i in 0..4 {
        let port = 0xc000 | (random >> (16 * i)) as u16;
        if socket.bind(&SocketAddr::new(any, port).into()).is_ok() {
            return Ok(());
        }
    }
    socket.bind(&SocketAddr::new(any, 0).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::udp::{PortOptions, RxBatch, TxBatch, UdpPort};

    #[test]
    fn a_lane_is_opened_once() {
        let sending = SendingSockets::new([None, None], false, false);
        for _ in 0..2 {
            for number in [0, 7, 255] {
                sending.sending(Family::V4, number).unwrap();
            }
        }
        assert_eq!(sending.opened().count(), 3);
        let [port, again] = [7, 7].map(|number| sending.sending(Family::V4, number).unwrap().port);
        assert_eq!(port, again);
    }

    #[test]
    fn without_a_descriptor_datagrams_leave_by_the_receiving_socket() {
        let name =
            "udp::sending::tests::without_a_descriptor_datagrams_leave_by_the_receiving_socket";
        anyverbs_testing::in_own_process(name, || {
            let number = anyverbs_testing::UdpPort::of_this_process();
            let port = UdpPort::open(PortOptions::new(number)).unwrap();
            let mut received = RxBatch::new(4).unwrap();
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: a live rlimit.
            unsafe {
                assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
                limit.rlim_cur = 0;
                assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            }
            for (ip, family) in [("127.0.0.1", Family::V4), ("::1", Family::V6)] {
                let mut out = TxBatch::new();
                for sending in [3, 4] {
                    let address = SocketAddr::new(ip.parse().unwrap(), number);
                    let to = Destination {
                        sending_socket: sending,
                        flow_label: 0x12345,
                        ..Destination::new(address)
                    };
                    for byte in 0..3 {
                        let (room, _) = out.segment(&port, &to, 100).unwrap();
                        room.fill(byte);
                    }
                    out.flush(&port).unwrap();
                    assert_eq!(port.source_port(&to).unwrap(), number);
                    let mut came = Vec::new();
                    while came.len() < 3 {
                        port.receive(&mut received).unwrap();
                        for datagram in received.datagrams() {
                            assert_eq!(datagram.source.port(), number);
                            let label = if family == Family::V6 { 0x12345 } else { 0 };
                            assert_eq!(datagram.flow_label, label);
                            came.push(datagram.bytes[99]);
                        }
                    }
                    assert_eq!(came, [0, 1, 2]);
                }
            }
        });
    }
}
