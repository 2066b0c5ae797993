//! The little of rtnetlink(7) that this crate needs: dumps of links and addresses, and change notifications.

use std::ffi::c_int;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recvfrom, send, socket_with,
};

/// A `NETLINK_ROUTE` socket, close-on-exec.
pub(crate) fn open(groups: u32, nonblocking: bool) -> io::Result<OwnedFd> {
    let blocks = if nonblocking { SocketFlags::NONBLOCK } else { SocketFlags::empty() };
    let flags = SocketFlags::CLOEXEC | blocks;
    // No protocol is `NETLINK_ROUTE`.
    let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    bind(&fd, &SocketAddrNetlink::new(0, groups))?;
    Ok(fd)
}

/// Receives one message from the kernel into `buffer`. Messages of other senders are passed over.
pub(crate) fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        let (n, from) = match recvfrom(fd, &mut *buffer, RecvFlags::empty()) {
            Ok((n, _, from)) => (n, from),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let from = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
        if from.is_some_and(|from| from.pid() == 0) {
            return Ok(n);
        }
    }
}

/// Takes all notifications of a non-blocking socket. Tells whether there was any. A loss of some for want of buffer counts
/// as one.
pub(crate) fn drain(fd: &OwnedFd) -> io::Result<bool> {
    let mut any = false;
    let mut buffer = [0; 4096];
    loop {
        match receive(fd, &mut buffer) {
            Ok(_) => any = true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(any),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => any = true,
            Err(error) => return Err(error),
        }
    }
}

/// Asks for all objects of a kind (`RTM_GETLINK`, `RTM_GETADDR`) and hands each one's message to `each`: its type and
/// the bytes after the netlink header. Answers false when the kernel changed them meanwhile and the dump must be redone.
pub(crate) fn dump(fd: &OwnedFd, kind: u16, mut each: impl FnMut(u16, &[u8])) -> io::Result<bool> {
    // A zero rtgenmsg, padded.
    request(fd, kind, libc::NLM_F_REQUEST | libc::NLM_F_DUMP, &[0; 4], &mut each)
}

/// Asks for one object, by a message of its type with `body` after the netlink header; hands the answer to `each`.
pub(crate) fn ask(
    fd: &OwnedFd,
    kind: u16,
    body: &[u8],
    mut each: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    // The acknowledgement ends it.
    request(fd, kind, libc::NLM_F_REQUEST | libc::NLM_F_ACK, body, &mut each).map(drop)
}

/// Adds an attribute to the body of a request, padded.
pub(crate) fn add_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn request(
    fd: &OwnedFd,
    kind: u16,
    flags: c_int,
    body: &[u8],
    each: &mut dyn FnMut(u16, &[u8]),
) -> io::Result<bool> {
    // nlmsghdr: length 4, type 2, flags 2, sequence 4, port 4.
    let mut request = vec![0u8; 16];
    request[0..4].copy_from_slice(&(16 + body.len() as u32).to_ne_bytes());
    request[4..6].copy_from_slice(&kind.to_ne_bytes());
    request[6..8].copy_from_slice(&(flags as u16).to_ne_bytes());
    request[8..12].copy_from_slice(&1u32.to_ne_bytes());
    request.extend_from_slice(body);
    send(fd, &request, SendFlags::empty())?;
    let mut buffer = vec![0u8; 64 << 10];
    let mut consistent = true;
    loop {
        let n = receive(fd, &mut buffer)?;
        let mut rest = &buffer[..n];
        while let Some((kind, flags, payload, tail)) = message(rest) {
            rest = tail;
            consistent &= c_int::from(flags) & libc::NLM_F_DUMP_INTR == 0;
            match c_int::from(kind) {
                libc::NLMSG_DONE => return Ok(consistent),
                libc::NLMSG_ERROR => {
                    let code = payload
                        .first_chunk()
                        .map_or(libc::EIO, |&bytes| -i32::from_ne_bytes(bytes));
                    if code == 0 {
                        return Ok(consistent);
                    }
                    return Err(io::Error::from_raw_os_error(code));
                }
                _ => each(kind, payload),
            }
        }
    }
}

/// Splits the first message off: type, flags, payload, rest.
fn message(bytes: &[u8]) -> Option<(u16, u16, &[u8], &[u8])> {
    let header = bytes.first_chunk::<16>()?;
    let len = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
    let payload = bytes.get(16..len)?;
    let tail = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((
        u16::from_ne_bytes([header[4], header[5]]),
        u16::from_ne_bytes([header[6], header[7]]),
        payload,
        tail,
    ))
}

/// The attributes in `bytes`: type and value.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header = bytes.first_chunk::<4>()?;
        let len = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]);
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_split_and_garbage_ends_them() {
        let mut bytes = vec![];
        bytes.extend_from_slice(&6u16.to_ne_bytes());
        bytes.extend_from_slice(&3u16.to_ne_bytes());
        bytes.extend_from_slice(&[1, 2, 0, 0]);
        bytes.extend_from_slice(&4u16.to_ne_bytes());
        bytes.extend_from_slice(&9u16.to_ne_bytes());
        assert_eq!(attributes(&bytes).collect::<Vec<_>>(), [(3, &[1u8, 2][..]), (9, &[][..])]);
        // A length shorter than the header, and one past the end.
        for len in [0u16, 3, 99] {
            bytes[0..2].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(attributes(&bytes).count(), 0, "{len}");
        }
        assert!(message(&[0xff; 15]).is_none());
        assert!(message(&[0xff; 32]).is_none());
        assert!(message(&[0; 32]).is_none());
    }
}
