//! Reasons why a port cannot be opened, in words for the reader of the log.

use std::io;

use rustix::process::geteuid;

/// The reason why [`super::UdpPort::open`] failed. `Display` is one clear line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The kernel lets only processes of one user share a port.
    #[error(
        "UDP port {port} is in use by another user (uid {uid}) in this network namespace; all processes that share it must run as one user"
    )]
    OtherUser {
        /// The port.
        port: u16,
        /// The user that has it.
        uid: u32,
    },
    /// A program that did not ask to share the port (`SO_REUSEPORT`) has it.
    #[error("UDP port {port} is in use by a program that does not share it")]
    NotShared {
        /// The port.
        port: u16,
    },
    /// Opening or binding a socket is forbidden: a privileged port, or a sandbox.
    #[error("no permission to open UDP port {port}: {source}")]
    NoPermission {
        /// The port.
        port: u16,
        /// The kernel's error.
        source: io::Error,
    },
    /// Neither IPv4 nor IPv6 sockets exist here.
    #[error("neither IPv4 nor IPv6 is available in this network namespace")]
    NoSocketFamily,
    /// Any other error.
    #[error("cannot {action} for UDP port {port}: {source}")]
    Io {
        /// The port.
        port: u16,
        /// The action that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn new(port: u16, action: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::AddrInUse => match other_owner(port) {
                Some(uid) => Self::OtherUser { port, uid },
                None => Self::NotShared { port },
            },
            io::ErrorKind::PermissionDenied => Self::NoPermission { port, source },
            _ => Self::Io { port, action, source },
        }
    }
}

/// The user other than us that has a socket on `port`, by /proc/net/udp and /proc/net/udp6.
fn other_owner(port: u16) -> Option<u32> {
    let own = geteuid().as_raw();
    ["/proc/thread-self/net/udp", "/proc/self/net/udp6"]
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .find_map(|table| {
            table.lines().skip(1).filter_map(|line| owner(line, port)).find(|&uid| uid != own)
        })
}

/// The owner in one line of /proc/net/udp (proc_net_udp(5)), if the line is about `port`.
fn owner(line: &str, port: u16) -> Option<u32> {
    let mut fields = line.split_ascii_whitespace();
    let (_, hex) = fields.nth(1)?.rsplit_once(':')?;
    (u16::from_str_radix(hex, 16).ok()? == port).then(|| fields.nth(5)?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_is_read_from_the_udp_table() {
        let line = "  573: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 12345 2 0 0";
        assert_eq!(owner(line, 4791), Some(1000));
        assert_eq!(owner(line, 4792), None);
        let line6 = " 1: 00000000000000000000000000000000:12B7 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000 65534 0 1 2 0 0";
        assert_eq!(owner(line6, 4791), Some(65534));
        assert_eq!(owner("", 4791), None);
    }
}
