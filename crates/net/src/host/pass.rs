//! Passes the store, or a process's page, from one process to another: one message each way over a connection between two processes that know
//! each other's user.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use socket2::Socket;

use crate::cmsg::{self, ControlBuffer};
use crate::sys;

/// The first byte of a message that asks for the store. Other messages are forwarded datagrams.
pub(super) const ASK: u8 = 0xf3;

/// The first byte of a message that asks for the page of the process ([`super::page`]), and that it be kept fresh.
pub(super) const LOOK: u8 = 0xf4;

/// The first byte of a message that tells the process something ([`super::orders`]).
pub(super) const TELL: u8 = 0xf5;

/// The owner of a descriptor's open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    /// An open file of its own.
    Own = 1,
    /// The open file of the giver.
    Shared = 2,
}

const FLAGS: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

pub(super) fn ask(socket: &Socket) -> io::Result<()> {
    socket.send_with_flags(&[ASK], FLAGS).map(drop)
}

pub(super) fn look(socket: &Socket) -> io::Result<()> {
    socket.send_with_flags(&[LOOK], FLAGS).map(drop)
}

pub(super) fn tell(socket: &Socket, message: &[u8]) -> io::Result<()> {
    let whole = [&[TELL], message].concat();
    socket.send_with_flags(&whole, FLAGS).map(drop)
}

/// Answers what a process was told. One that does not wait for it loses it.
pub(super) fn answer(socket: &Socket, message: &[u8]) {
    let _ = socket.send_with_flags(message, FLAGS);
}

/// The answer that has come. The end of the connection is an error.
pub(super) fn answer_of(socket: &Socket, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(most);
    let n = socket.recv_with_flags(bytes.spare_capacity_mut(), libc::MSG_DONTWAIT)?;
    if n == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // SAFETY: so many bytes were written.
    unsafe { bytes.set_len(n) };
    Ok(bytes)
}

/// Gives the store, or says that there is none to give.
pub(super) fn give(socket: &Socket, store: Option<(OwnedFd, Given)>) {
    let mut control = ControlBuffer::new();
    let mut writer = cmsg::Writer::new(&mut control);
    if let Some((fd, _)) = &store {
        writer.push(libc::SOL_SOCKET, libc::SCM_RIGHTS, fd.as_raw_fd());
    }
    let control_len = writer.len();
    let byte = [store.as_ref().map_or(0, |(_, given)| *given as u8)];
    let mut iov = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut iov, 1);
    if control_len > 0 {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control_len as _;
    }
    // The process that asked tries others.
    // SAFETY: the header describes live buffers, which the kernel only reads.
    let _ = unsafe { sys::sendmsg(socket.as_raw_fd(), &raw const message, FLAGS) };
}

/// The store that was given, if any.
pub(super) fn take(socket: &Socket) -> Option<(File, Given)> {
    let mut byte = [0];
    let mut control = ControlBuffer::new();
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut iov, 1);
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header describes live buffers with their sizes.
    let n = unsafe { sys::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if n < 0 {
        return None;
    }
    let mut fds = cmsg::messages(&control, message.msg_controllen)
        .filter(|m| (m.level, m.kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS))
        .flat_map(|m| m.integers().collect::<Vec<_>>())
        // SAFETY: the kernel made these descriptors for us, and they are named only here.
        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let first = fds.next()?;
    // Further ones are closed.
    fds.for_each(drop);
    let given = match (n, byte[0]) {
        (1, 1) => Given::Own,
        (1, 2) => Given::Shared,
        _ => return None,
    };
    Some((File::from(sys::above_standard_streams(first).ok()?), given))
}
