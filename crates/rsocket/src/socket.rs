//! A socket of either kind.

use std::os::fd::RawFd;
use std::time::Instant;

use anyverbs::cm::Address;

use crate::dgram::Dgram;
use crate::errno::{Errno, Result};
use crate::options::Value;
use crate::ready::Ready;
use crate::ring::Cursor;
use crate::sleepers::Asleep;
use crate::stream::Stream;

/// A socket. All calls may be made from any thread.
#[derive(Debug)]
pub struct Socket {
    pub(crate) kind: Kind,
    /// The process that made it. A forked child inherits the socket, but does no work for it.
    owner: u32,
}

// Far apart in size, and always behind an `Arc`.
#[expect(clippy::large_enum_variant, reason = "never moved")]
#[derive(Debug)]
pub(crate) enum Kind {
    Stream(Stream),
    Dgram(Dgram),
}

/// The result of a receiving call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// Bytes that were stored.
    pub len: usize,
    /// Bytes that the datagram had; of a stream the same as `len`.
    pub full: usize,
    /// The sender. On a stream the peer, if it was asked for.
    pub from: Option<Address>,
}

impl Socket {
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, owner: std::process::id() }
    }

    pub(crate) fn is_inherited(&self) -> bool {
        self.owner != std::process::id()
    }

    /// Its descriptor.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        match &self.kind {
            Kind::Stream(s) => s.fd(),
            Kind::Dgram(d) => d.fd(),
        }
    }

    /// `AF_INET`, `AF_INET6` or `AF_IB`.
    #[must_use]
    pub fn family(&self) -> i32 {
        match &self.kind {
            Kind::Stream(s) => s.family(),
            Kind::Dgram(d) => d.family(),
        }
    }

    /// `SOCK_STREAM`, or else `SOCK_DGRAM`.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        matches!(self.kind, Kind::Stream(_))
    }

    /// Whether calls that would wait fail with `EAGAIN` (`O_NONBLOCK`).
    pub fn set_nonblocking(&self, on: bool) {
        match &self.kind {
            Kind::Stream(s) => s.set_nonblocking(on),
            Kind::Dgram(d) => d.set_nonblocking(on),
        }
    }

    /// See [`Socket::set_nonblocking`].
    #[must_use]
    pub fn is_nonblocking(&self) -> bool {
        match &self.kind {
            Kind::Stream(s) => s.is_nonblocking(),
            Kind::Dgram(d) => d.is_nonblocking(),
        }
    }

    /// `bind(2)`.
    ///
    /// # Errors
    /// As that call's.
    pub fn bind(&self, address: &Address) -> Result<()> {
        match &self.kind {
            Kind::Stream(s) => s.bind(address),
            Kind::Dgram(d) => d.bind(address),
        }
    }

    /// `listen(2)`.
    ///
    /// # Errors
    /// As that call's.
    pub fn listen(&self, backlog: i32) -> Result<()> {
        match &self.kind {
            Kind::Stream(s) => s.listen(backlog),
            Kind::Dgram(_) => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    /// `connect(2)`. A stream that does not block fails with `EINPROGRESS` and becomes writable when it is connected, or
    /// not: `SO_ERROR` tells.
    ///
    /// # Errors
    /// As that call's: `ECONNREFUSED` if there is no listener, `ETIMEDOUT`, `EHOSTUNREACH`, `EISCONN`, `EALREADY`.
    pub fn connect(&self, address: &Address) -> Result<()> {
        match &self.kind {
            Kind::Stream(s) => s.connect(address),
            Kind::Dgram(d) => d.connect(address),
        }
    }

    /// Ends a datagram socket's connection, as `connect(2)` to `AF_UNSPEC` does.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a stream.
    pub fn disconnect(&self) -> Result<()> {
        match &self.kind {
            Kind::Stream(_) => Err(Errno(libc::EOPNOTSUPP)),
            Kind::Dgram(d) => d.disconnect(),
        }
    }

    /// `shutdown(2)`, of one direction or both. Waits until the peer's device has all data sent.
    ///
    /// # Errors
    /// `ENOTCONN`.
    pub fn shutdown(&self, read: bool, write: bool) -> Result<()> {
        match &self.kind {
            Kind::Stream(s) => s.shutdown(read, write),
            Kind::Dgram(d) => d.shutdown(read, write),
        }
    }

    /// `getsockname(2)`; `None` for a stream without an address.
    ///
    /// # Errors
    /// As that call's.
    pub fn local_address(&self) -> Result<Option<Address>> {
        match &self.kind {
            Kind::Stream(s) => Ok(s.local_address()),
            Kind::Dgram(d) => d.local_address().map(Some),
        }
    }

    /// `getpeername(2)`.
    ///
    /// # Errors
    /// `ENOTCONN`.
    pub fn peer_address(&self) -> Result<Address> {
        match &self.kind {
            Kind::Stream(s) => s.peer_address(),
            Kind::Dgram(d) => d.peer_address(),
        }
    }

    /// `setsockopt(2)`.
    ///
    /// # Errors
    /// `ENOPROTOOPT` for an option that is not known, `EINVAL` for a value that is not possible, or not any more.
    pub fn set_option(&self, level: i32, name: i32, value: &[u8]) -> Result<()> {
        match &self.kind {
            Kind::Stream(s) => s.set_option(level, name, value),
            Kind::Dgram(d) => d.set_option(level, name, value),
        }
    }

    /// `getsockopt(2)`.
    ///
    /// # Errors
    /// `ENOPROTOOPT`.
    pub fn option(&self, level: i32, name: i32) -> Result<Value> {
        match &self.kind {
            Kind::Stream(s) => s.option(level, name),
            Kind::Dgram(d) => d.option(level, name),
        }
    }

    /// `send(2)`.
    ///
    /// # Errors
    /// As that call's. `EPIPE` without a signal: raising one is the caller's.
    pub fn send(&self, data: &[u8], flags: i32) -> Result<usize> {
        let buffer = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
        // SAFETY: a live slice, which is only read.
        unsafe { self.send_message(&[buffer], flags, None) }
    }

    /// `recv(2)`.
    ///
    /// # Errors
    /// As that call's.
    pub fn recv(&self, data: &mut [u8], flags: i32) -> Result<usize> {
        let buffer = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() };
        // SAFETY: a live slice, borrowed for writing.
        unsafe { self.recv_message(&[buffer], flags, false) }.map(|received| received.len)
    }

    /// `sendmsg(2)`.
    ///
    /// # Safety
    /// The buffers may be read. Where one is not mapped, the call fails with `EFAULT`.
    ///
    /// # Errors
    /// As that call's.
    pub unsafe fn send_message(
        &self,
        buffers: &[libc::iovec],
        flags: i32,
        to: Option<&Address>,
    ) -> Result<usize> {
        // SAFETY: the caller's promise.
        let from = unsafe { Cursor::new(buffers) }?;
        match &self.kind {
            // As a TCP socket, which ignores an address.
            Kind::Stream(s) => s.send(from, flags),
            Kind::Dgram(d) => d.send(from, flags, to),
        }
    }

    /// `recvmsg(2)`; with `name` it gives the sender.
    ///
    /// # Safety
    /// The buffers may be written, and no other thread uses them meanwhile. If one is not mapped, the call fails with
    /// `EFAULT`.
    ///
    /// # Errors
    /// As that call's.
    pub unsafe fn recv_message(
        &self,
        buffers: &[libc::iovec],
        flags: i32,
        name: bool,
    ) -> Result<Received> {
        // SAFETY: the caller's promise.
        let to = unsafe { Cursor::new(buffers) }?;
        match &self.kind {
            Kind::Stream(s) => {
                let len = s.recv(to, flags)?;
                let from = if name { s.peer_address().ok() } else { None };
                Ok(Received { len, full: len, from })
            }
            Kind::Dgram(d) => Ok(match d.recv(to, flags)? {
                Some(got) => {
                    Received { len: got.len, full: got.full, from: Some(Address::Ip(got.from)) }
                }
                None => Received { len: 0, full: 0, from: None },
            }),
        }
    }

    /// `riomap`: lets the peer write a buffer by [`Socket::write_mapped`], or registers it for ourselves alone. Returns the
    /// offset under which it is mapped: the one that is asked for, or else its address.
    ///
    /// # Safety
    /// Until [`Socket::unmap`], or the socket is closed, the peer writes to the buffer; no Rust reference to it may be used.
    ///
    /// # Errors
    /// `ENOMEM` where the peer takes no more maps (`RDMA_IOMAPSIZE` on its side), `EFAULT`, `ENOTCONN`.
    pub unsafe fn map(
        &self,
        addr: u64,
        len: u64,
        writable: bool,
        offset: Option<u64>,
    ) -> Result<u64> {
        match &self.kind {
            // SAFETY: the caller's promise.
            Kind::Stream(s) => unsafe { s.map(addr, len, writable, offset) },
            Kind::Dgram(_) => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    /// `riounmap`, of exactly the mapped range.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn unmap(&self, addr: u64, len: u64) -> Result<()> {
        match &self.kind {
            Kind::Stream(s) => s.unmap(addr, len),
            Kind::Dgram(_) => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    /// `riowrite`: writes into the peer's mapped memory. Returns the length: less where the map ends, 0 where there is
    /// none.
    ///
    /// # Safety
    /// As for [`Socket::send_message`].
    ///
    /// # Errors
    /// As `send(2)`.
    pub unsafe fn write_mapped(
        &self,
        buffers: &[libc::iovec],
        offset: u64,
        flags: i32,
    ) -> Result<usize> {
        // SAFETY: the caller's promise.
        let from = unsafe { Cursor::new(buffers) }?;
        match &self.kind {
            Kind::Stream(s) => s.write_mapped(from, offset, flags),
            Kind::Dgram(_) => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    pub(crate) fn ready(&self) -> Ready {
        match &self.kind {
            Kind::Stream(s) => s.ready(),
            Kind::Dgram(d) => d.ready(),
        }
    }

    pub(crate) fn begin_sleep(&self) -> (Asleep, Option<Instant>) {
        match &self.kind {
            Kind::Stream(s) => s.begin_sleep(),
            Kind::Dgram(d) => d.begin_sleep(),
        }
    }

    pub(crate) fn end_sleep(&self, asleep: Asleep, woken: bool) {
        match &self.kind {
            Kind::Stream(s) => s.end_sleep(asleep, woken),
            Kind::Dgram(d) => d.end_sleep(asleep, woken),
        }
    }

    pub(crate) fn close(&self) {
        match &self.kind {
            Kind::Stream(s) => s.close(),
            Kind::Dgram(d) => d.close(),
        }
    }

    pub(crate) fn close_by(&self, deadline: Instant) {
        if let Kind::Stream(s) = &self.kind {
            s.close_by(deadline);
        }
    }
}
