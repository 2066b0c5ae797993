//! Frames out.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

use super::EthernetSocket;
use crate::{sockopt, sys};

/// Frames in one system call.
const FRAMES: usize = 32;
/// Bytes after which a batch is full.
const BYTES: usize = 256 << 10;
/// The longest time that one batch waits in all for room in the interface's queue, in milliseconds. An interface of 100 Mbit/s
/// sends a batch in that time. One that takes longer loses frames, as a full queue does
/// (`a_full_interface_is_waited_for_briefly`).
const LONGEST_WAIT_MS: i32 = 20;

/// Frames that wait to be sent together.
#[derive(Debug, Default)]
pub struct FrameBatch {
    bytes: Vec<u8>,
    /// The end of each frame.
    ends: Vec<usize>,
}

impl FrameBatch {
    /// Adds a frame.
    pub fn push(&mut self, frame: &[u8]) {
        self.bytes.extend_from_slice(frame);
        self.ends.push(self.bytes.len());
    }

    /// Whether it should be sent before more are added.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.ends.len() >= FRAMES || self.bytes.len() >= BYTES
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Forgets the frames; the memory stays.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    fn frames(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.bytes[start..*end])
    }
}

impl EthernetSocket {
    /// Sends a batch; how many of its frames were lost: too long for the interface, or it is down, or its queue stays
    /// full.
    #[must_use]
    pub fn send(&self, batch: &FrameBatch) -> usize {
        let mut address = self.address(0);
        let mut envelope = self.envelope;
        let (mut lost, mut left_ms) = (0, LONGEST_WAIT_MS);
        let mut frames = batch.frames().peekable();
        while frames.peek().is_some() {
            // SAFETY: integers and null pointers.
            let mut vectors: [[libc::iovec; 2]; FRAMES] = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            let mut messages: [libc::mmsghdr; FRAMES] = unsafe { std::mem::zeroed() };
            let mut n = 0;
            for ((frame, vector), message) in
                frames.by_ref().take(FRAMES).zip(&mut vectors).zip(&mut messages)
            {
                let vector = match &mut envelope {
                    Some(envelope) => {
                        vector[0].iov_base = envelope.as_mut_ptr().cast();
                        vector[0].iov_len = envelope.len();
                        &mut vector[..]
                    }
                    None => &mut vector[1..],
                };
                let last = vector.len() - 1;
                vector[last].iov_base = frame.as_ptr().cast_mut().cast();
                vector[last].iov_len = frame.len();
                let header = &mut message.msg_hdr;
                header.msg_name = (&raw mut address).cast();
                header.msg_namelen = size_of::<libc::sockaddr_ll>() as u32;
                header.msg_iov = vector.as_mut_ptr();
                header.msg_iovlen = vector.len() as _;
                n += 1;
            }
            lost += self.send_messages(&mut messages[..n], &mut left_ms);
        }
        lost
    }

    fn send_messages(&self, messages: &mut [libc::mmsghdr], left_ms: &mut i32) -> usize {
        let (mut at, mut lost) = (0, 0);
        while at < messages.len() {
            let rest = &mut messages[at..];
            let fd = self.fd.as_raw_fd();
            // SAFETY: headers that point to live addresses and bytes, which the kernel only reads.
            let sent = unsafe { sys::sendmmsg(fd, rest.as_mut_ptr(), rest.len() as u32, 0) };
            if sent > 0 {
                at += sent as usize;
                continue;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN | libc::ENOBUFS) if *left_ms > 0 => {
                    *left_ms -= 1;
                    let _ = sockopt::poll(self.as_fd(), libc::POLLOUT, 1);
                }
                _ => {
                    tracing::debug!(%error, "a frame was not sent");
                    at += 1;
                    lost += 1;
                }
            }
        }
        lost
    }
}
