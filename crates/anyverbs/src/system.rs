//! The system's RDMA devices, by `libibverbs.so.1` (feature `system`): hardware, and the kernel's Soft-RoCE.
//!
//! A program that is written for the trait [`Verbs`] runs on a [`Device`] as it runs on a [`Context`](crate::Context). So it can be
//! tested on the device of its process, and moves to hardware unchanged. Under `anyverbs run` the system's devices are this one.
//!
//! The library of rdma-core 32 or later is opened when the first call needs it. A program that makes none runs without it.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use anyverbs::prelude::*;
//! use anyverbs::system::{self, Device};
//!
//! fn own_address(device: &impl Verbs) -> Result<Endpoint, Box<dyn std::error::Error>> {
//!     let (pd, cq) = (device.alloc_pd()?, device.create_default_cq(16)?);
//!     let qp = device.create_default_qp(&pd, &cq, QpType::Rc)?;
//!     Ok(device.endpoint(&qp)?)
//! }
//!
//! let names = system::devices()?;
//! let device = Device::open(names.first().ok_or("the system has no RDMA device")?)?;
//! println!("peers reach us at {}", own_address(&device)?.gid.to_ip());
//! # Ok(())
//! # }
//! ```
//!
//! The example `anywhere` of this crate is a server and a client for any device. It is tested between this device and the Linux
//! kernel's Soft-RoCE.
//!
//! # What a device lacks
//!
//! It speaks RoCEv2 alone, since endpoints have no LIDs. It has what [`Verbs`] has: queue pairs of the types RC, UC and UD on one port, completion queues that are polled, and memory that the
//! device allocates. The operations are SEND, WRITE, READ and the atomics on 8 bytes; queue pairs of type UD have SEND alone. For more there are crates
//! such as `sideway`.
//!
//! A few things differ from the device of the process:
//! - A post of another operation, or of a destination on RC or UC, fails at once. There the request completes with an error, or the
//!   destination is not looked at.
//! - A region has the addresses of its bytes: [`Access::ZERO_BASED`] is refused.
//! - The way to a peer is resolved once in a protection domain. A new link-layer address of the peer needs a new one.
//! - Two calls of [`Device::open`] make two devices, even by the same name. Their objects do not go together.

mod abi;
mod memory;
mod post;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyverbs_objects::error::{CqError, CreateError, ModifyObjectError, OpenError};
use anyverbs_objects::memory::install_guard;
use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpCap, QpState, QpType};
use anyverbs_proto::types::{Gid, Mtu, Psn, QKey, Qpn};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::{AddressVector, UdDest};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use self::abi::*;
pub use self::memory::Slice;
use crate::endpoint::{self, ConnectError, DEFAULT_CAP, Endpoint, HOPS};
use crate::ordinary::{CompletionError, WaitError};
use crate::region::AllocError;
use crate::verbs::{Verbs, now, polled};

/// `IBV_PORT_ACTIVE`.
const ACTIVE: u32 = 4;
/// `IBV_GID_TYPE_ROCE_V2`. The others need LIDs, which an [`Endpoint`] does not carry, or are of Ethernet alone.
const ROCE_V2: u32 = 2;

/// libibverbs, opened once. It stays open: its providers start threads.
fn library() -> Result<&'static Functions, OpenError> {
    static LIBRARY: OnceLock<Result<Functions, String>> = OnceLock::new();
    let opened = LIBRARY.get_or_init(|| {
        // SAFETY: a terminated name. The initialisers of the library are the system's.
        let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: after an error this is a terminated string, of this thread until its next call.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(why.to_string_lossy().into_owned());
        }
        // SAFETY: the names are terminated, and the functions are those of the header.
        let functions =
            unsafe { Functions::load(|name| libc::dlsym(handle, name.as_ptr().cast())) };
        functions.map_err(|name| format!("libibverbs.so.1 has no {name}"))
    });
    opened.as_ref().map_err(|why| OpenError::System {
        what: "open libibverbs.so.1",
        source: io::Error::other(why.clone()),
    })
}

/// The error number of the library's last call.
fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Calls `take` with the system's devices until it returns something.
fn find<T>(
    library: &Functions,
    mut take: impl FnMut(*mut ibv_device, &str) -> Option<T>,
) -> Result<Option<T>, OpenError> {
    let mut count = 0;
    // SAFETY: the list has `count` live devices until it is freed; an open device outlives it.
    unsafe {
        let list = (library.ibv_get_device_list)(&raw mut count);
        if list.is_null() {
            return Err(OpenError::System {
                what: "list devices",
                source: io::Error::last_os_error(),
            });
        }
        let found = (0..usize::try_from(count).unwrap_or(0)).find_map(|number| {
            let device = *list.add(number);
            let name = CStr::from_ptr((library.ibv_get_device_name)(device));
            take(device, &name.to_string_lossy())
        });
        (library.ibv_free_device_list)(list);
        Ok(found)
    }
}

/// The names of the system's RDMA devices.
///
/// # Errors
/// [`OpenError`] if there is no libibverbs, or it cannot list devices.
pub fn devices() -> Result<Vec<String>, OpenError> {
    let mut names = Vec::new();
    find(library()?, |_, name| {
        names.push(name.to_owned());
        None::<()>
    })?;
    Ok(names)
}

/// A device of the system. A clone is the same. Its calls are those of [`Verbs`].
#[derive(Clone, Debug)]
pub struct Device(Arc<Opened>);

/// An object that the library made.
struct Raw<T>(*mut T);

impl<T> Clone for Raw<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Raw<T> {}

impl<T> fmt::Debug for Raw<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// SAFETY: the calls of libibverbs may be made by any thread, and at the same time.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Raw<T> {}

#[derive(Debug)]
struct Opened {
    library: Library,
    context: Raw<ibv_context>,
    port: Port,
    max_rd_atomic: u8,
    /// Work requests that a queue of a queue pair can have, and elements of each.
    max_wr: u32,
    max_sge: u32,
}

#[derive(Clone, Copy, Debug)]
struct Port {
    number: u8,
    /// Places in its table.
    gids: u32,
    mtu: Mtu,
}

#[derive(Clone, Copy)]
struct Library(&'static Functions);

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("libibverbs.so.1")
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: each object of it holds this, so none is left.
        unsafe { (self.library.0.ibv_close_device)(self.context.0) };
    }
}

impl Device {
    /// Opens a device, and finds its first active port, preferably one with an address for RoCEv2. It also installs a handler of SIGSEGV and SIGBUS, as the device of the process
    /// does: copies of memory that is not mapped fail by it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(name: &str) -> Result<Self, OpenError> {
        // Before a library that has a handler of its own, which then stands in front.
        install_guard();
        Self::open_by(library()?, name)
    }

    fn open_by(library: &'static Functions, name: &str) -> Result<Self, OpenError> {
        let opened = find(library, |device, its_name| {
            (its_name == name).then(|| {
                // SAFETY: a live device of the list.
                let context = unsafe { (library.ibv_open_device)(device) };
                // Now, since the calls that follow may change it.
                if context.is_null() { Err(errno()) } else { Ok(context) }
            })
        })?;
        let refused = |what, errno: i32| OpenError::System {
            what,
            source: io::Error::from_raw_os_error(errno.abs()),
        };
        let opened = opened.ok_or_else(|| OpenError::NoSuchDevice(name.to_owned()))?;
        let context = opened.map_err(|errno| refused("open the device", errno))?;
        // From here on a drop closes it.
        let mut opened = Opened {
            library: Library(library),
            context: Raw(context),
            port: Port { number: 0, gids: 0, mtu: Mtu::Mtu256 },
            max_rd_atomic: 0,
            max_wr: 0,
            max_sge: 0,
        };
        // SAFETY: integers, for which zero is a value.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live context, and room for the attributes.
        match unsafe { (library.ibv_query_device)(context, &raw mut attr) } {
            0 => {}
            errno => return Err(refused("query the device", errno)),
        }
        let reads = attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom);
        opened.max_rd_atomic = u8::try_from(reads.clamp(0, 255)).expect("it was clamped");
        opened.max_wr = attr.max_qp_wr.max(0).unsigned_abs();
        opened.max_sge = attr.max_sge.max(0).unsigned_abs();
        let mut active = None;
        for number in 1..=attr.phys_port_cnt {
            let mut port = ibv_port_attr::default();
            // SAFETY: a live context, and room for the attributes.
            match unsafe { (library.ibv_query_port)(context, number, &raw mut port) } {
                0 if port.state == ACTIVE => {}
                0 => continue,
                errno => return Err(refused("query a port", errno)),
            }
            let gids = port.gid_tbl_len.clamp(0, 256).unsigned_abs();
            let mtu = Mtu::from_code(port.active_mtu).unwrap_or(Mtu::Mtu256);
            opened.port = Port { number, gids, mtu };
            if opened.gids().next().is_some() {
                return Ok(Self(Arc::new(opened)));
            }
            active.get_or_insert(opened.port);
        }
        // One without an address may get one later.
        opened.port = active.ok_or(OpenError::NoInterface)?;
        Ok(Self(Arc::new(opened)))
    }
}

impl Opened {
    /// The completion, or an error. Hardware's own codes are no causes.
    fn checked(&self, wc: Wc) -> Result<Wc, CompletionError> {
        let is_ours = self.library.0.is_ours;
        let own = |error: CompletionError| error.cause.filter(|_| is_ours);
        CompletionError::check(wc).map_err(|error| CompletionError { cause: own(error), ..error })
    }

    /// The GIDs of the port that carry RoCEv2, with their places in its table.
    fn gids(&self) -> impl Iterator<Item = (u8, Gid)> {
        let Self { library, context, port, .. } = self;
        (0..port.gids).filter_map(move |index| {
            let mut entry = ibv_gid_entry::default();
            let (port, size) = (u32::from(port.number), size_of::<ibv_gid_entry>());
            // SAFETY: a live context, and room for an entry of this size. An empty place is an error.
            let failed = unsafe {
                (library.0._ibv_query_gid_ex)(context.0, port, index, &raw mut entry, 0, size)
            };
            let carries = failed == 0 && entry.gid != [0; 16] && entry.gid_type == ROCE_V2;
            carries.then_some((index as u8, Gid(entry.gid)))
        })
    }
}

impl Device {
    /// Whether the other is a clone of this one. The same device that was opened again is not: objects of the two do not go together.
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Refuses an object of another device. The library does not, and providers then mix up memory.
    fn check(&self, of: &Self, what: &'static str) -> Result<(), CreateError> {
        if self.is(of) { Ok(()) } else { Err(CreateError::Foreign(what)) }
    }

    /// The way to a peer, from our address `gid`.
    fn way(&self, gid: Gid, remote: &Endpoint) -> Option<AddressVector> {
        let (sgid_index, sgid) = self.0.gids().find(|(_, own)| *own == gid)?;
        let port = self.0.port.number;
        Some(AddressVector {
            dgid: remote.gid,
            sgid,
            sgid_index,
            hop_limit: HOPS,
            port,
            ..AddressVector::default()
        })
    }

    /// As [`Context::routable_gid`](crate::Context::routable_gid).
    fn routable_gid(&self) -> Result<Gid, ConnectError> {
        let rank = |gid: &Gid| match gid.to_ip() {
            ip if ip.is_loopback() => 2,
            IpAddr::V6(ip) if ip.is_unicast_link_local() => 3,
            IpAddr::V4(_) => 0,
            IpAddr::V6(_) => 1,
        };
        self.0.gids().map(|(_, gid)| gid).min_by_key(rank).ok_or(ConnectError::NoAddress)
    }
}

/// A protection domain of a [`Device`].
#[derive(Clone, Debug)]
pub struct Pd(Arc<Domain>);

#[derive(Debug)]
struct Domain {
    device: Device,
    raw: Raw<ibv_pd>,
    /// Among the domains of this process; datagrams name it.
    number: u32,
    /// An address handle for each way to which datagrams go.
    ways: Mutex<HashMap<AddressVector, Raw<ibv_ah>>>,
}

impl Drop for Domain {
    fn drop(&mut self) {
        let library = self.device.0.library.0;
        let ways = self.ways.get_mut().unwrap_or_else(|broken| broken.into_inner());
        // SAFETY: queue pairs and memory hold this, so nothing uses the domain or its handles any more.
        unsafe {
            for (_, handle) in ways.drain() {
                (library.ibv_destroy_ah)(handle.0);
            }
            (library.ibv_dealloc_pd)(self.raw.0);
        }
    }
}

/// A completion queue of a [`Device`].
#[derive(Clone, Debug)]
pub struct Cq(Arc<Completions>);

#[derive(Debug)]
struct Completions {
    device: Device,
    raw: Raw<ibv_cq>,
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold this, so none uses it any more.
        unsafe { (self.device.0.library.0.ibv_destroy_cq)(self.raw.0) };
    }
}

/// A queue pair of a [`Device`]. It is destroyed when dropped.
#[derive(Debug)]
pub struct Qp {
    pd: Arc<Domain>,
    raw: Raw<ibv_qp>,
    qp_type: QpType,
    /// The room that the device gave it.
    cap: ibv_qp_cap,
    /// The data of the inline send that is being posted.
    inline: Mutex<Vec<u8>>,
    /// It has an endpoint.
    is_prepared: AtomicBool,
    /// It uses them.
    _cqs: [Cq; 2],
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        unsafe { (self.pd.device.0.library.0.ibv_destroy_qp)(self.raw.0) };
    }
}

impl Qp {
    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        // SAFETY: a live queue pair, whose number does not change.
        Qpn::new(unsafe { (*self.raw.0).qp_num })
    }

    fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), ModifyObjectError> {
        let mut raw = ibv_qp_attr {
            qp_state: attr.state as u32,
            path_mtu: attr.path_mtu as u32,
            qkey: attr.qkey.0,
            rq_psn: attr.rq_psn.get(),
            sq_psn: attr.sq_psn.get(),
            dest_qp_num: attr.dest_qpn.get(),
            qp_access_flags: attr.access.bits(),
            ah_attr: ah_attr(&attr.av),
            pkey_index: attr.pkey_index,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
            port_num: attr.port,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            ..ibv_qp_attr::default()
        };
        let library = self.pd.device.0.library.0;
        // SAFETY: a live queue pair and attributes.
        match unsafe { (library.ibv_modify_qp)(self.raw.0, &raw mut raw, mask.bits() as c_int) } {
            0 => Ok(()),
            errno => Err(ModifyObjectError::System(errno.abs())),
        }
    }
}

fn ah_attr(av: &AddressVector) -> ibv_ah_attr {
    let grh = ibv_global_route {
        dgid: av.dgid.0,
        flow_label: av.flow_label,
        sgid_index: av.sgid_index,
        hop_limit: av.hop_limit,
        traffic_class: av.traffic_class,
    };
    ibv_ah_attr { grh, sl: av.sl, is_global: 1, port_num: av.port, ..ibv_ah_attr::default() }
}

impl Verbs for Device {
    type Pd = Pd;
    type Cq = Cq;
    type Qp = Qp;
    type Slice = Slice;

    fn alloc_pd(&self) -> Result<Pd, CreateError> {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        // SAFETY: a live context.
        let raw = unsafe { (self.0.library.0.ibv_alloc_pd)(self.0.context.0) };
        if raw.is_null() {
            return Err(CreateError::System(errno()));
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let domain = Domain { device: self.clone(), raw: Raw(raw), number, ways: Mutex::default() };
        Ok(Pd(Arc::new(domain)))
    }

    fn alloc(&self, pd: &Pd, len: usize, access: Access) -> Result<Slice, AllocError> {
        self.check(&pd.0.device, "protection domain")
            .map_err(|source| AllocError::Memory { len, source })?;
        Slice::alloc(&pd.0, len, access)
    }

    fn create_default_cq(&self, cqe: u32) -> Result<Cq, CreateError> {
        let cqe = c_int::try_from(cqe).map_err(|_| CreateError::Invalid("cqe"))?;
        let none = ptr::null_mut();
        // SAFETY: a live context; the queue has neither a cookie nor a channel.
        let raw = unsafe { (self.0.library.0.ibv_create_cq)(self.0.context.0, cqe, none, none, 0) };
        if raw.is_null() {
            return Err(CreateError::System(errno()));
        }
        Ok(Cq(Arc::new(Completions { device: self.clone(), raw: Raw(raw) })))
    }

    fn create_sized_qp(
        &self,
        pd: &Pd,
        send_cq: &Cq,
        recv_cq: &Cq,
        cap: QpCap,
        qp_type: QpType,
    ) -> Result<Qp, CreateError> {
        self.check(&pd.0.device, "protection domain")?;
        for cq in [send_cq, recv_cq] {
            self.check(&cq.0.device, "completion queue")?;
        }
        if matches!(qp_type, QpType::XrcSend | QpType::XrcRecv) {
            return Err(CreateError::Unsupported("XRC by the trait `Verbs`"));
        }
        let mut init = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: send_cq.0.raw.0,
            recv_cq: recv_cq.0.raw.0,
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: cap.max_send_wr,
                max_recv_wr: cap.max_recv_wr,
                max_send_sge: cap.max_send_sge,
                max_recv_sge: cap.max_recv_sge,
                max_inline_data: cap.max_inline_data,
            },
            qp_type: qp_type as u32,
            sq_sig_all: 1,
        };
        // SAFETY: live objects of one device, which the queue pair holds.
        let raw = unsafe { (self.0.library.0.ibv_create_qp)(pd.0.raw.0, &raw mut init) };
        if raw.is_null() {
            return Err(CreateError::System(errno()));
        }
        let cqs = [send_cq.clone(), recv_cq.clone()];
        Ok(Qp {
            pd: Arc::clone(&pd.0),
            raw: Raw(raw),
            qp_type,
            cap: init.cap,
            inline: Mutex::default(),
            is_prepared: AtomicBool::new(false),
            _cqs: cqs,
        })
    }

    /// As the trait says, but with no more room than the device has.
    fn create_default_qp(&self, pd: &Pd, cq: &Cq, qp_type: QpType) -> Result<Qp, CreateError> {
        let Opened { max_wr, max_sge, .. } = *self.0;
        let cap = QpCap {
            max_send_wr: DEFAULT_CAP.max_send_wr.min(max_wr),
            max_recv_wr: DEFAULT_CAP.max_recv_wr.min(max_wr),
            max_send_sge: DEFAULT_CAP.max_send_sge.min(max_sge),
            max_recv_sge: DEFAULT_CAP.max_recv_sge.min(max_sge),
            ..DEFAULT_CAP
        };
        self.create_sized_qp(pd, cq, cq, cap, qp_type)
    }

    fn endpoint(&self, qp: &Qp) -> Result<Endpoint, ConnectError> {
        self.check(&qp.pd.device, "queue pair")?;
        if qp.is_prepared.swap(true, Ordering::Relaxed) {
            endpoint::check_new(QpState::Init)?;
        }
        let endpoint = Endpoint {
            qp_type: qp.qp_type,
            qpn: qp.qpn(),
            psn: Psn::new(StdRng::from_os_rng().random()),
            gid: self.routable_gid()?,
            mtu: self.0.port.mtu,
            max_rd_atomic: self.0.max_rd_atomic,
            qkey: QKey(0),
        };
        endpoint::prepare(endpoint, self.0.port.number, |attr, mask| qp.modify(attr, mask))
    }

    fn connect(&self, qp: &Qp, local: &Endpoint, remote: &Endpoint) -> Result<(), ConnectError> {
        self.check(&qp.pd.device, "queue pair")?;
        endpoint::check_ends(qp.qpn(), local, remote)?;
        let way = self.way(local.gid, remote);
        let way = way.ok_or_else(|| endpoint::no_address_of_ours(local))?;
        endpoint::connect_by(local, remote, way, |attr, mask| qp.modify(attr, mask))
    }

    fn destination(&self, pd: &Pd, remote: &Endpoint) -> Result<UdDest, ConnectError> {
        self.check(&pd.0.device, "protection domain")?;
        let av = self.way(self.routable_gid()?, remote).ok_or(ConnectError::NoAddress)?;
        pd.0.handle(&av).map_err(|source| ConnectError::Resolve { to: remote.gid, source })?;
        Ok(UdDest::new(pd.0.number, av, remote.qpn, remote.qkey))
    }

    async fn completion(&self, cq: &Cq, timeout: Duration) -> Result<Wc, WaitError> {
        if !self.is(&cq.0.device) {
            return Err(CqError::Foreign.into());
        }
        let started = Instant::now();
        polled(|| match cq.poll() {
            Ok(None) if started.elapsed() >= timeout => Some(Err(WaitError::Timeout(timeout))),
            Ok(None) => None,
            Ok(Some(wc)) => Some(self.0.checked(wc).map_err(WaitError::from)),
            Err(error) => Some(Err(error.into())),
        })
        .await
    }

    async fn sleep(&self, time: Duration) {
        let started = Instant::now();
        polled(|| (started.elapsed() >= time).then_some(())).await;
    }

    fn now(&self) -> Duration {
        now()
    }
}

impl Domain {
    /// The handle of a way, which is made at its first use.
    fn handle(&self, av: &AddressVector) -> Result<Raw<ibv_ah>, CreateError> {
        let ways = || self.ways.lock().unwrap_or_else(|broken| broken.into_inner());
        let known = ways().get(av).copied();
        if let Some(handle) = known {
            return Ok(handle);
        }
        // Without the lock: the call may wait until a neighbour answers.
        let library = self.device.0.library.0;
        let mut attr = ah_attr(av);
        // SAFETY: a live domain and attributes.
        let made = unsafe { (library.ibv_create_ah)(self.raw.0, &raw mut attr) };
        if made.is_null() {
            return Err(CreateError::System(errno()));
        }
        let kept = *ways().entry(*av).or_insert(Raw(made));
        if kept.0 != made {
            // SAFETY: ours, and another thread was first, so nobody uses it.
            unsafe { (library.ibv_destroy_ah)(made) };
        }
        Ok(kept)
    }
}

impl Cq {
    fn poll(&self) -> Result<Option<Wc>, CqError> {
        let mut wc = ibv_wc::default();
        // SAFETY: a live queue, the function of its context, and room for one completion.
        let polled = unsafe {
            let poll = (*self.0.device.0.context.0).poll_cq.ok_or(CqError::System(libc::ENOSYS))?;
            poll(self.0.raw.0, 1, &raw mut wc)
        };
        match polled {
            0 => Ok(None),
            1 => Ok(Some(post::completion(&wc))),
            // A negative number, which is no error number.
            _ => Err(CqError::System(libc::EIO)),
        }
    }
}
