//! Frames in.

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;

use super::{ENVELOPE_LEN, EthernetSocket, MAX_FRAME, PACKET_AUXDATA, SOL_PACKET};
use crate::cmsg::{self, CONTROL_LEN, ControlBuffer};
use crate::sys;

/// Frames in one system call.
const FRAMES: usize = 16;
/// Before each frame, for a VLAN tag that the kernel has taken out.
const HEADROOM: usize = 4;
const BUFFER: usize = HEADROOM + ENVELOPE_LEN + MAX_FRAME;

// linux/if_packet.h
const TP_STATUS_CSUMNOTREADY: u32 = 1 << 3;
const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
const TP_STATUS_VLAN_TPID_VALID: u32 = 1 << 6;
const PACKET_OUTGOING: u8 = 4;
const ETHER_CVLAN: u16 = 0x8100;

/// `struct tpacket_auxdata`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Auxdata {
    status: u32,
    len: u32,
    snaplen: u32,
    mac: u16,
    net: u16,
    vlan_tci: u16,
    vlan_tpid: u16,
}

/// A frame that came in.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedFrame<'a> {
    /// Without the frame check sequence.
    pub bytes: &'a [u8],
    /// Its sender, on this machine, left the transport's checksum to the network card.
    pub checksum_pending: bool,
}

/// Room for frames that are received together. Memory is touched as it is used.
#[derive(Debug)]
pub struct FrameBuffers {
    bytes: Box<[u8]>,
    control: Box<[ControlBuffer; FRAMES]>,
    found: Vec<Found>,
}

/// The place of a frame.
#[derive(Clone, Copy, Debug)]
struct Found {
    start: usize,
    end: usize,
    checksum_pending: bool,
}

impl Default for FrameBuffers {
    fn default() -> Self {
        Self {
            bytes: vec![0; BUFFER * FRAMES].into(),
            control: Box::new([const { ControlBuffer::new() }; FRAMES]),
            found: Vec::with_capacity(FRAMES),
        }
    }
}

impl std::fmt::Debug for ControlBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlBuffer").finish_non_exhaustive()
    }
}

impl FrameBuffers {
    /// The frames that the last [`EthernetSocket::receive`] found.
    pub fn frames(&self) -> impl Iterator<Item = ReceivedFrame<'_>> {
        self.found.iter().map(|f| ReceivedFrame {
            bytes: &self.bytes[f.start..f.end],
            checksum_pending: f.checksum_pending,
        })
    }
}

impl EthernetSocket {
    /// Receives up to 16 frames that are there, and returns their number. Does not wait.
    ///
    /// # Errors
    /// Those of the system calls. An empty queue is not an error.
    pub fn receive(&self, buffers: &mut FrameBuffers) -> io::Result<usize> {
        let FrameBuffers { bytes, control, found } = buffers;
        found.clear();
        // SAFETY: integers and null pointers.
        let mut vectors: [libc::iovec; FRAMES] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; FRAMES] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut sources: [libc::sockaddr_ll; FRAMES] = unsafe { std::mem::zeroed() };
        for (i, buffer) in bytes.chunks_exact_mut(BUFFER).enumerate() {
            vectors[i].iov_base = buffer[HEADROOM..].as_mut_ptr().cast();
            vectors[i].iov_len = BUFFER - HEADROOM;
            let header = &mut messages[i].msg_hdr;
            header.msg_iov = &raw mut vectors[i];
            header.msg_iovlen = 1;
            header.msg_control = control[i].0.as_mut_ptr().cast();
            header.msg_controllen = CONTROL_LEN as _;
            header.msg_name = (&raw mut sources[i]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_ll>() as u32;
        }
        // SAFETY: headers that point to live memory of the sizes that they say.
        let n = unsafe {
            sys::recvmmsg(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr(),
                FRAMES as u32,
                libc::MSG_DONTWAIT,
            )
        };
        if n < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
                // The interface went down; it comes back by itself.
                io::ErrorKind::NetworkDown => Ok(0),
                _ => Err(error),
            };
        }
        for (i, message) in messages.iter().take(n as usize).enumerate() {
            let header = &message.msg_hdr;
            let len = message.msg_len as usize;
            let cut = header.msg_flags & libc::MSG_TRUNC != 0;
            if cut || sources[i].sll_pkttype == PACKET_OUTGOING {
                continue;
            }
            let start = i * BUFFER + HEADROOM;
            let aux = cmsg::messages(&control[i], header.msg_controllen)
                .find(|m| m.level == SOL_PACKET && m.kind == PACKET_AUXDATA)
                // SAFETY: integers.
                .and_then(|m| unsafe { m.value::<Auxdata>() });
            let mut frame = Found { start, end: start + len, checksum_pending: false };
            if let Some(aux) = aux {
                frame.checksum_pending = aux.status & TP_STATUS_CSUMNOTREADY != 0;
                if aux.status & TP_STATUS_VLAN_VALID != 0 && len >= 12 {
                    let has_tpid = aux.status & TP_STATUS_VLAN_TPID_VALID != 0;
                    let tpid = if has_tpid { aux.vlan_tpid } else { ETHER_CVLAN };
                    frame.start -= HEADROOM;
                    bytes.copy_within(start..start + 12, frame.start);
                    bytes[start + 8..start + 10].copy_from_slice(&tpid.to_be_bytes());
                    bytes[start + 10..start + 12].copy_from_slice(&aux.vlan_tci.to_be_bytes());
                }
            }
            if self.envelope.is_some() {
                frame.start += ENVELOPE_LEN;
            }
            if frame.start < frame.end {
                found.push(frame);
            }
        }
        Ok(n as usize)
    }
}
