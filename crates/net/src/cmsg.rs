//! Control messages of `sendmsg(2)` and `recvmsg(2)`: a writer and a reader, cmsg(3).

use std::ffi::c_int;
use std::mem::size_of;
use std::ptr;

/// Room for every control message that this crate sends or asks for.
pub(crate) const CONTROL_LEN: usize = 256;

/// A control buffer with the alignment of `cmsghdr`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct ControlBuffer(pub(crate) [u8; CONTROL_LEN]);

impl ControlBuffer {
    pub(crate) const fn new() -> Self {
        Self([0; CONTROL_LEN])
    }
}

/// Appends control messages to a buffer.
pub(crate) struct Writer<'a> {
    buffer: &'a mut ControlBuffer,
    len: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(buffer: &'a mut ControlBuffer) -> Self {
        Self { buffer, len: 0 }
    }

    /// Appends one message. `T` must be a plain C value, free of padding that matters.
    ///
    /// # Panics
    /// When the buffer is full. This crate writes fixed messages, and [`CONTROL_LEN`] is chosen for them.
    pub(crate) fn push<T: Copy>(&mut self, level: c_int, kind: c_int, value: T) {
        // SAFETY: CMSG_SPACE and CMSG_LEN only compute sizes.
        let (space, len) = unsafe {
            (
                libc::CMSG_SPACE(size_of::<T>() as u32) as usize,
                libc::CMSG_LEN(size_of::<T>() as u32),
            )
        };
        assert!(
            self.len + space <= CONTROL_LEN,
            "the control buffer has room for all control messages of this crate"
        );
        // SAFETY: `space` bytes from `self.len` on lie inside the buffer (checked), which is aligned for cmsghdr, and
        // CMSG_SPACE keeps that alignment for the next one; the data follows the header within `space`.
        unsafe {
            let header = self.buffer.0.as_mut_ptr().add(self.len).cast::<libc::cmsghdr>();
            (*header).cmsg_len = len as _;
            (*header).cmsg_level = level;
            (*header).cmsg_type = kind;
            ptr::write_unaligned(libc::CMSG_DATA(header).cast::<T>(), value);
        }
        self.len += space;
    }

    /// Bytes written: the `msg_controllen`.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// One received control message.
pub(crate) struct Message<'a> {
    pub(crate) level: c_int,
    pub(crate) kind: c_int,
    data: &'a [u8],
}

impl Message<'_> {
    /// The value, when the message is long enough for it.
    ///
    /// # Safety
    /// Every bit pattern must be a valid `T`.
    pub(crate) unsafe fn value<T: Copy>(&self) -> Option<T> {
        if self.data.len() < size_of::<T>() {
            return None;
        }
        // SAFETY: the data is long enough and the caller vouches for the bit pattern.
        Some(unsafe { ptr::read_unaligned(self.data.as_ptr().cast::<T>()) })
    }

    /// All integers of an array, such as the descriptors of `SCM_RIGHTS`.
    pub(crate) fn integers(&self) -> impl Iterator<Item = c_int> {
        self.data.as_chunks().0.iter().map(|&bytes| c_int::from_ne_bytes(bytes))
    }

    /// An integer, which the kernel sends as one byte (`IP_TOS`) or as an int.
    pub(crate) fn integer(&self) -> Option<c_int> {
        match self.data {
            [byte] => Some(c_int::from(*byte)),
            // SAFETY: every bit pattern is a c_int.
            _ => unsafe { self.value::<c_int>() },
        }
    }
}

/// Iterates over the first `len` bytes that the kernel wrote.
pub(crate) fn messages(buffer: &ControlBuffer, len: usize) -> impl Iterator<Item = Message<'_>> {
    let mut rest = &buffer.0[..len.min(CONTROL_LEN)];
    std::iter::from_fn(move || {
        let header_len = size_of::<libc::cmsghdr>();
        if rest.len() < header_len {
            return None;
        }
        // SAFETY: `rest` holds a whole cmsghdr, of plain integers.
        let header = unsafe { ptr::read_unaligned(rest.as_ptr().cast::<libc::cmsghdr>()) };
        // SAFETY: only computes a size.
        let data_at = unsafe { libc::CMSG_LEN(0) } as usize;
        let end = header.cmsg_len as usize;
        if end < data_at || end > rest.len() {
            return None;
        }
        let data = &rest[data_at..end];
        // SAFETY: only computes a size.
        let space = unsafe { libc::CMSG_SPACE((end - data_at) as u32) } as usize;
        rest = &rest[space.min(rest.len())..];
        Some(Message { level: header.cmsg_level, kind: header.cmsg_type, data })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_messages_are_read_back() {
        let mut buffer = ControlBuffer::new();
        let mut writer = Writer::new(&mut buffer);
        writer.push(libc::IPPROTO_IP, libc::IP_TOS, 7u8);
        writer.push(libc::IPPROTO_IP, libc::IP_TTL, 300 as c_int);
        writer.push(libc::SOL_UDP, libc::UDP_SEGMENT, 1024u16);
        let len = writer.len();
        let read: Vec<_> =
            messages(&buffer, len).map(|m| (m.kind, m.data.len(), m.integer())).collect();
        assert_eq!(
            read,
            [
                (libc::IP_TOS, 1, Some(7)),
                (libc::IP_TTL, 4, Some(300)),
                (libc::UDP_SEGMENT, 2, None)
            ]
        );
    }

    #[test]
    fn a_truncated_message_ends_the_iteration() {
        let mut buffer = ControlBuffer::new();
        let mut writer = Writer::new(&mut buffer);
        writer.push(libc::IPPROTO_IP, libc::IP_TTL, 1 as c_int);
        assert_eq!(messages(&buffer, 18).count(), 0);
        assert_eq!(messages(&buffer, 0).count(), 0);
    }
}
