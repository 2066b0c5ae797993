//! A socket of one datagram, for what the network and the peer have to say about it.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use anyverbs_record::capture::Capture;
use socket2::{Domain, SockRef};

use crate::sockopt;
use crate::sys::{self, Descriptor, Uncancelled};

use super::{Destination, capture};

/// A socket with a port of its own. The network reports errors to it, and the peer may answer.
#[derive(Debug)]
pub struct Sounding {
    socket: Descriptor,
    here: SocketAddr,
    capture: Option<Arc<Capture>>,
}

impl Sounding {
    /// A socket at this address, which sends to addresses of its family. What goes and comes is in the capture, if there is one.
    ///
    /// # Errors
    /// Those of socket(2) and bind(2).
    pub fn new(from: SocketAddr, capture: Option<Arc<Capture>>) -> io::Result<Self> {
        let _uncancelled = Uncancelled::new();
        let socket = sys::udp_socket(Domain::for_address(from))?;
        socket.set_nonblocking(true)?;
        let fd = sys::above_standard_streams(OwnedFd::from(socket))?;
        // The first option brings all errors: ip(7). With the second an IPv4 datagram has DF and the ID 0, as those of sending sockets.
        match from {
            SocketAddr::V4(_) => {
                sockopt::set(fd.as_fd(), libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
                let discover = libc::IP_PMTUDISC_DO;
                sockopt::set(fd.as_fd(), libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, discover)?;
            }
            SocketAddr::V6(_) => {
                sockopt::set(fd.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?;
                sockopt::set(fd.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1)?;
            }
        }
        let socket = SockRef::from(&fd);
        socket.bind(&from.into())?;
        let here = socket.local_addr()?.as_socket().unwrap_or(from);
        Ok(Self { socket: fd.into(), here, capture })
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.here.port()
    }

    /// Sends the datagram. From then on only answers of this port come in. `note` stands beside it in a capture.
    ///
    /// # Errors
    /// Those of sendto(2) and connect(2).
    pub fn send(&self, to: SocketAddr, datagram: &[u8], note: &str) -> io::Result<()> {
        let _uncancelled = Uncancelled::new();
        let (socket, address) = (SockRef::from(&self.socket), to.into());
        // A connected socket would count IPv4 IDs.
        socket.send_to(datagram, &address)?;
        if let Some(capture) = &self.capture {
            let to = Destination { source: Some(self.here.ip()), ..Destination::new(to) };
            capture::record_sent(capture, self.port(), &to, 0, (datagram, Some(note)));
        }
        socket.connect(&address)
    }

    /// Whether an error of [`send`](Self::send) says that no way leads from this socket's address to the other. EPERM is the word of a
    /// firewall.
    #[must_use]
    pub fn has_no_way(error: &io::Error) -> bool {
        matches!(error.raw_os_error(), Some(libc::EACCES | libc::EINVAL))
    }

    /// The error that the network has reported since the last call.
    #[must_use]
    pub fn error(&self) -> Option<io::Error> {
        SockRef::from(&self.socket).take_error().ok().flatten()
    }

    /// The next datagram that has come; how many of its bytes `into` holds now.
    pub fn receive(&self, into: &mut [u8]) -> Option<usize> {
        let socket = SockRef::from(&self.socket);
        let len = io::Read::read(&mut &*socket, into).ok()?;
        if let Some(capture) = &self.capture
            && let Some(there) = socket.peer_addr().ok().and_then(|there| there.as_socket())
        {
            capture::record_answer(capture, there, self.here, &into[..len]);
        }
        Some(len)
    }
}

/// A capture has the answers that nobody has waited for as well.
impl Drop for Sounding {
    fn drop(&mut self) {
        if self.capture.is_some() {
            (0..MOST_UNREAD).map_while(|_| self.receive(&mut [0; 64])).for_each(drop);
        }
    }
}

/// Datagrams that are recorded when the socket closes.
const MOST_UNREAD: usize = 16;

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    use super::*;

    fn here() -> SocketAddr {
        "127.0.0.1:0".parse().unwrap()
    }

    fn soon<T>(look: impl Fn() -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "nothing came");
        }
    }

    #[test]
    fn a_port_that_nobody_holds_is_reported_once() {
        let nobody = UdpSocket::bind(here()).unwrap();
        let to = nobody.local_addr().unwrap();
        let quiet = Sounding::new(here(), None).unwrap();
        quiet.send(to, b"a", "").unwrap();
        assert!(quiet.error().is_none());
        drop(nobody);
        let sounding = Sounding::new(here(), None).unwrap();
        sounding.send(to, b"a", "").unwrap();
        assert_eq!(soon(|| sounding.error()).kind(), io::ErrorKind::ConnectionRefused);
        assert!(sounding.error().is_none());
    }

    #[test]
    fn answers_come_from_the_port_that_was_asked_alone() {
        let (peer, other) = (UdpSocket::bind(here()).unwrap(), UdpSocket::bind(here()).unwrap());
        let sounding = Sounding::new(here(), None).unwrap();
        sounding.send(peer.local_addr().unwrap(), b"a", "").unwrap();
        let mut room = [0; 8];
        let (len, from) = peer.recv_from(&mut room).unwrap();
        assert_eq!((&room[..len], from.port()), (&b"a"[..], sounding.port()));
        assert!(other.send_to(b"forged", from).is_ok());
        peer.send_to(b"true", from).unwrap();
        let len = soon(|| sounding.receive(&mut [0; 8])).min(8);
        assert_eq!(len, 4);
        assert_eq!(sounding.receive(&mut room), None);
    }
}
