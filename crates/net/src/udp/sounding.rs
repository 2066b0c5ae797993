//! A socket on the way to a peer, to which the network reports errors.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::sockopt;
use crate::sys::{self, Descriptor, Uncancelled};

/// A socket that has sent an empty datagram to the port of a peer. Nobody takes that for anything, but the network answers if
/// it cannot deliver it.
#[derive(Debug)]
pub struct Sounding(Descriptor);

impl Sounding {
    /// Sends the datagram.
    ///
    /// # Errors
    /// Those of socket(2), bind(2), connect(2) and send(2).
    pub fn new(from: SocketAddr, to: SocketAddr) -> io::Result<Self> {
        let _uncancelled = Uncancelled::new();
        let domain = Domain::for_address(to);
        let socket = Socket::new(domain, Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        let fd = sys::above_standard_streams(OwnedFd::from(socket))?;
        // Without this option only an unreachable port is reported (ip(7)).
        match to {
            SocketAddr::V4(_) => sockopt::set(fd.as_fd(), libc::IPPROTO_IP, libc::IP_RECVERR, 1)?,
            SocketAddr::V6(_) => {
                sockopt::set(fd.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?;
            }
        }
        let socket = SockRef::from(&fd);
        socket.bind(&from.into())?;
        socket.connect(&to.into())?;
        socket.send(&[])?;
        Ok(Self(fd.into()))
    }

    /// The error that the network has reported since the last call.
    #[must_use]
    pub fn error(&self) -> Option<io::Error> {
        SockRef::from(&self.0).take_error().ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_port_that_nobody_holds_is_reported_once() {
        let nobody = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = nobody.local_addr().unwrap();
        let from = "127.0.0.1:0".parse().unwrap();
        let quiet = Sounding::new(from, to).unwrap();
        assert!(quiet.error().is_none());
        drop(nobody);
        let sounding = Sounding::new(from, to).unwrap();
        let begin = Instant::now();
        let error = loop {
            if let Some(error) = sounding.error() {
                break error;
            }
            assert!(begin.elapsed() < Duration::from_secs(5), "nothing was reported");
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert!(sounding.error().is_none());
    }
}
