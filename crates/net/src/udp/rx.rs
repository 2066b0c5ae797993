//! Datagrams in: `recvmmsg(2)` into reused buffers, each GRO batch split by its segment size.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::cmsg::{self, ControlBuffer};
use crate::fault::{Delivery, Fault};
use crate::sys;

use super::Family;

/// Bytes of one buffer: the largest GRO batch.
const BUFFER_LEN: usize = 65_536;
/// Most buffers of one batch.
const MAX_BUFFERS: usize = 64;

/// One received UDP datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The sender's address and port. IPv6: with scope id where it is link-local.
    pub source: SocketAddr,
    /// The address it was sent to; a group address for multicast.
    pub destination: IpAddr,
    /// Index of the interface that it came in by, 0 when not known.
    pub interface: u32,
    /// IPv4 TOS or IPv6 traffic class: DSCP and, in the low two bits, ECN.
    pub traffic_class: u8,
    /// IPv4 TTL or IPv6 hop limit as received.
    pub hop_limit: u8,
    /// IPv6 flow label (20 bits); 0 for IPv4.
    pub flow_label: u32,
    /// Place inside the GRO batch that the kernel delivered it in, from 0. A hint of the IPv4 ID that the sender's
    /// segmentation gave it, not a proof: batches may have been cut or joined on the way.
    pub segment: u16,
    /// The payload.
    pub bytes: &'a [u8],
}

/// The properties that all datagrams of one received message share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Meta {
    pub(crate) source: SocketAddr,
    pub(crate) destination: IpAddr,
    pub(crate) interface: u32,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) flow_label: u32,
    pub(crate) len: usize,
    pub(crate) segment_size: usize,
}

impl Meta {
    pub(crate) const EMPTY: Self = Self {
        source: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        destination: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        interface: 0,
        traffic_class: 0,
        hop_limit: 0,
        flow_label: 0,
        len: 0,
        segment_size: 0,
    };

    pub(crate) fn datagram<'a>(&self, segment: usize, bytes: &'a [u8]) -> Datagram<'a> {
        Datagram {
            source: self.source,
            destination: self.destination,
            interface: self.interface,
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            flow_label: self.flow_label,
            segment: segment as u16,
            bytes,
        }
    }

    /// The bytes of segment `segment`, if there is one.
    fn slice<'a>(&self, segment: usize, buffer: &'a [u8]) -> Option<&'a [u8]> {
        let start = segment.checked_mul(self.segment_size)?;
        (start < self.len).then(|| &buffer[start..(start + self.segment_size).min(self.len)])
    }
}

/// Reused buffers for [`super::UdpPort::receive`], and the messages of the last call.
pub struct RxBatch {
    memory: Pages,
    names: Box<[libc::sockaddr_storage]>,
    controls: Box<[ControlBuffer]>,
    metas: Box<[Meta]>,
    /// Messages in the batch; those with length 0 were consumed by the port.
    messages: usize,
    fault: Option<Box<Fault>>,
    /// With fault injection: the datagrams to deliver, in this order.
    deliveries: Vec<Delivery>,
    pub(crate) calls: u32,
    pub(crate) prefer_v6: bool,
    /// Messages to ask for. It follows the size of the last batch, since each unused one costs a fifth of a message to
    /// prepare and to try.
    expected: usize,
    /// The last call brought all that was asked for: if the next one does, too, it is no single message.
    was_full: bool,
    /// The last call asked every family.
    pub(crate) asked_all: bool,
}

impl RxBatch {
    /// Room for `buffers` messages (1 to 64) of 64 KiB each. Memory counts only once it has been received into; see
    /// [`RxBatch::release_memory`].
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn new(buffers: usize) -> io::Result<Self> {
        let n = buffers.clamp(1, MAX_BUFFERS);
        // SAFETY: all-zero is a valid sockaddr_storage.
        let name: libc::sockaddr_storage = unsafe { MaybeUninit::zeroed().assume_init() };
        Ok(Self {
            memory: Pages::new(n * BUFFER_LEN)?,
            names: vec![name; n].into(),
            controls: vec![ControlBuffer::new(); n].into(),
            metas: vec![Meta::EMPTY; n].into(),
            messages: 0,
            fault: None,
            deliveries: Vec::new(),
            calls: 0,
            prefer_v6: false,
            expected: 1,
            was_full: false,
            asked_all: false,
        })
    }

    /// Injects faults into datagrams received from now on, or stops with `None`.
    pub fn set_fault(&mut self, fault: Option<Fault>) {
        self.fault = fault.map(Box::new);
        self.deliveries.clear();
        // A batch of 64 KiB holds at most 64 segments of a sender like ours, but a foreign one may send more.
        self.deliveries.reserve(if self.fault.is_some() { 1024 } else { 0 });
    }

    /// The fault injector at work, if there is one.
    #[must_use]
    pub fn fault(&self) -> Option<&Fault> {
        self.fault.as_deref()
    }

    /// Tells whether the last call asked every family: then it brought all that was there.
    #[must_use]
    pub fn asked_all(&self) -> bool {
        self.asked_all
    }

    /// The datagrams of the last [`super::UdpPort::receive`]. Empty ones are not delivered.
    #[must_use]
    pub fn datagrams(&self) -> Datagrams<'_> {
        Datagrams { batch: self, message: 0, segment: 0, delivery: 0 }
    }

    /// Gives the memory behind the buffers back to the system; forgets the last received datagrams.
    pub fn release_memory(&mut self) {
        self.messages = 0;
        self.deliveries.clear();
        self.memory.release();
    }

    pub(crate) fn capacity(&self) -> usize {
        self.metas.len()
    }

    pub(crate) fn clear(&mut self) {
        self.messages = 0;
        self.deliveries.clear();
    }

    /// Appends messages of `fd`, as far as there is room, without waiting. Returns their number.
    pub(crate) fn fill(&mut self, fd: BorrowedFd<'_>, family: Family) -> io::Result<usize> {
        let first = self.messages;
        let room = (self.capacity() - first).min(self.expected);
        if room == 0 {
            return Ok(0);
        }
        let mut iovecs = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_BUFFERS];
        let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; MAX_BUFFERS];
        for i in 0..room {
            let at = first + i;
            let iovec = iovecs[i].write(libc::iovec {
                iov_base: self.memory.buffer_mut(at).as_mut_ptr().cast(),
                iov_len: BUFFER_LEN,
            });
            // SAFETY: all-zero is a valid mmsghdr (null pointers, zero lengths).
            let mut header: libc::mmsghdr = unsafe { MaybeUninit::zeroed().assume_init() };
            header.msg_hdr.msg_name = (&raw mut self.names[at]).cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_hdr.msg_iov = iovec;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = (&raw mut self.controls[at]).cast();
            header.msg_hdr.msg_controllen = cmsg::CONTROL_LEN as _;
            headers[i].write(header);
        }
        // SAFETY: `room` initialised headers. Their name, iovec and control buffer are live, of the given sizes, and
        // not referenced elsewhere during the call (`&mut self`).
        let n = unsafe {
            let all: *mut libc::mmsghdr = headers.as_mut_ptr().cast();
            if room == 1 {
                // Cheaper by a tenth where there is nothing.
                let len = sys::recvmsg(fd.as_raw_fd(), &raw mut (*all).msg_hdr, libc::MSG_DONTWAIT);
                (*all).msg_len = len.max(0) as libc::c_uint;
                if len < 0 { -1 } else { 1 }
            } else {
                sys::recvmmsg(fd.as_raw_fd(), all, room as libc::c_uint, libc::MSG_DONTWAIT as _)
            }
        };
        if n < 0 {
            self.expected = (self.expected / 2).max(1);
            self.was_full = false;
            return Err(io::Error::last_os_error());
        }
        let n = n as usize;
        let full = n == room;
        self.expected = match (full, self.was_full) {
            (true, true) => room * 2,
            (true, false) => room,
            (false, _) => n.max(1),
        };
        self.was_full = full;
        for (i, header) in headers.iter().enumerate().take(n) {
            // SAFETY: the first `room` headers were initialised above, and n <= room.
            let header = unsafe { header.assume_init_ref() };
            let at = first + i;
            self.metas[at] = parse(
                family,
                &self.names[at],
                &self.controls[at],
                header.msg_hdr.msg_controllen,
                header.msg_len as usize,
            );
        }
        self.messages += n;
        Ok(n)
    }

    /// Whether the last `n` messages are empty. Then they are dropped.
    #[inline]
    pub(crate) fn drops_empty(&mut self, n: usize) -> bool {
        let first = self.messages - n;
        let are_empty = n > 0 && self.metas[first..self.messages].iter().all(|meta| meta.len == 0);
        if are_empty {
            self.messages = first;
        }
        are_empty
    }

    /// Lets the port take messages for itself: those for which `take` answers true are not delivered. It sees the
    /// message's meta data and each of its segments.
    pub(crate) fn retain(&mut self, first: usize, mut take: impl FnMut(&Meta, &[u8]) -> bool) {
        for at in first..self.messages {
            let meta = self.metas[at];
            let buffer = self.memory.buffer(at);
            let mut taken = false;
            let mut segment = 0;
            while let Some(bytes) = meta.slice(segment, buffer) {
                taken |= take(&meta, bytes);
                segment += 1;
                if !taken {
                    break;
                }
            }
            if taken {
                self.metas[at].len = 0;
            }
        }
    }

    /// Applies the fault policy, if there is one, to everything received.
    pub(crate) fn inject_faults(&mut self) {
        let Some(fault) = &mut self.fault else { return };
        self.deliveries.clear();
        for at in 0..self.messages {
            let meta = self.metas[at];
            let mut segment = 0;
            while let Some(bytes) = meta.slice(segment, self.memory.buffer(at)) {
                let range = segment * meta.segment_size..segment * meta.segment_size + bytes.len();
                let delivery = Delivery { message: at as u16, segment: segment as u16 };
                fault.apply(delivery, &mut self.memory.buffer_mut(at)[range], &mut self.deliveries);
                segment += 1;
            }
        }
        fault.finish(&mut self.deliveries);
    }

    fn at(&self, message: usize, segment: usize) -> Option<Datagram<'_>> {
        let meta = &self.metas[message];
        let bytes = meta.slice(segment, self.memory.buffer(message))?;
        Some(meta.datagram(segment, bytes))
    }
}

impl std::fmt::Debug for RxBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RxBatch")
            .field("capacity", &self.capacity())
            .field("messages", &self.messages)
            .finish()
    }
}

/// Iterator over the datagrams of an [`RxBatch`].
#[derive(Clone, Debug)]
pub struct Datagrams<'a> {
    batch: &'a RxBatch,
    message: usize,
    segment: usize,
    delivery: usize,
}

impl<'a> Datagrams<'a> {
    /// The last datagram and those behind it in its buffer that have its length, one behind the other.
    #[must_use]
    pub fn equal(&self) -> &'a [u8] {
        if self.batch.fault.is_some() || self.message == self.batch.messages {
            return &[];
        }
        let meta = &self.batch.metas[self.message];
        let bytes = &self.batch.memory.buffer(self.message)[..meta.len];
        let first = self.segment.saturating_sub(1);
        let all = bytes.len() / meta.segment_size.max(1);
        &bytes[first.min(all) * meta.segment_size..all * meta.segment_size]
    }

    /// Passes over `n` datagrams that [`equal`](Self::equal) has shown.
    pub fn pass(&mut self, n: usize) {
        self.segment += n;
    }
}

impl<'a> Iterator for Datagrams<'a> {
    type Item = Datagram<'a>;

    #[inline]
    fn next(&mut self) -> Option<Datagram<'a>> {
        if self.batch.fault.is_some() {
            let delivery = self.batch.deliveries.get(self.delivery)?;
            self.delivery += 1;
            return self.batch.at(delivery.message.into(), delivery.segment.into());
        }
        while self.message < self.batch.messages {
            if let Some(datagram) = self.batch.at(self.message, self.segment) {
                self.segment += 1;
                return Some(datagram);
            }
            self.message += 1;
            self.segment = 0;
        }
        None
    }
}

/// Reads addresses and control messages of one received message.
fn parse(
    family: Family,
    name: &libc::sockaddr_storage,
    control: &ControlBuffer,
    control_len: usize,
    len: usize,
) -> Meta {
    let mut meta = Meta { len, segment_size: len, ..Meta::EMPTY };
    meta.source = socket_address(family, name);
    for message in cmsg::messages(control, control_len) {
        match (message.level, message.kind) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                // The kernel sends an int here.
                if let Some(size) = message.integer().and_then(|size| usize::try_from(size).ok())
                    && size > 0
                {
                    meta.segment_size = size.min(len);
                }
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // SAFETY: in_pktinfo consists of integers.
                if let Some(info) = unsafe { message.value::<libc::in_pktinfo>() } {
                    meta.destination =
                        IpAddr::V4(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()));
                    meta.interface = info.ipi_ifindex as u32;
                }
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // SAFETY: in6_pktinfo consists of integers.
                if let Some(info) = unsafe { message.value::<libc::in6_pktinfo>() } {
                    meta.destination = IpAddr::V6(Ipv6Addr::from(info.ipi6_addr.s6_addr));
                    meta.interface = info.ipi6_ifindex;
                }
            }
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                meta.traffic_class = message.integer().unwrap_or(0) as u8;
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                meta.hop_limit = message.integer().unwrap_or(0) as u8;
            }
            (libc::IPPROTO_IPV6, super::port::IPV6_FLOWINFO) => {
                meta.flow_label = u32::from_be(message.integer().unwrap_or(0) as u32) & 0xf_ffff;
            }
            _ => {}
        }
    }
    meta
}

/// The sender's address, from the kernel's form.
pub(crate) fn socket_address(family: Family, name: &libc::sockaddr_storage) -> SocketAddr {
    match family {
        Family::V4 => {
            // SAFETY: sockaddr_storage is large enough and aligned for sockaddr_in, which consists of integers.
            let a = unsafe { &*ptr::from_ref(name).cast::<libc::sockaddr_in>() };
            SocketAddr::new(
                Ipv4Addr::from(a.sin_addr.s_addr.to_ne_bytes()).into(),
                u16::from_be(a.sin_port),
            )
        }
        Family::V6 => {
            // SAFETY: sockaddr_storage is large enough and aligned for sockaddr_in6, which consists of integers.
            let a = unsafe { &*ptr::from_ref(name).cast::<libc::sockaddr_in6>() };
            SocketAddrV6::new(
                Ipv6Addr::from(a.sin6_addr.s6_addr),
                u16::from_be(a.sin6_port),
                0,
                a.sin6_scope_id,
            )
            .into()
        }
    }
}

/// Anonymous memory that counts only where it has been touched.
struct Pages {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: `Pages` owns its mapping, plain bytes without thread affinity; shared access only reads.
unsafe impl Send for Pages {}
// SAFETY: as above; writing needs `&mut`.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(len: usize) -> io::Result<Self> {
        // SAFETY: a new private anonymous mapping touches no existing memory.
        let base = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE | MapFlags::NORESERVE)
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    fn buffer(&self, at: usize) -> &[u8] {
        assert!(
            (at + 1) * BUFFER_LEN <= self.len,
            "the batch maps BUFFER_LEN bytes for each of its messages"
        );
        // SAFETY: inside the mapping (checked), which is zero-initialised and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at * BUFFER_LEN), BUFFER_LEN) }
    }

    fn buffer_mut(&mut self, at: usize) -> &mut [u8] {
        assert!(
            (at + 1) * BUFFER_LEN <= self.len,
            "the batch maps BUFFER_LEN bytes for each of its messages"
        );
        // SAFETY: as in `buffer`; `&mut self` makes it exclusive.
        unsafe {
            std::slice::from_raw_parts_mut(self.base.as_ptr().add(at * BUFFER_LEN), BUFFER_LEN)
        }
    }

    fn release(&mut self) {
        // SAFETY: our own private mapping; afterwards its bytes read as zeros, which is as valid as before.
        let done = unsafe { madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxDontNeed) };
        debug_assert_eq!(done, Ok(()), "MADV_DONTNEED on our own private mapping");
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, which nothing borrows any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
