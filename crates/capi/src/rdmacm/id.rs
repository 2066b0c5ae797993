//! Communication identifiers: create, migrate, destroy, and their public fields.

use std::{
    cell::UnsafeCell,
    ffi::{c_int, c_void},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyverbs::{QpType, cm};
use anyverbs_sanitizers as sanitizers;
use cm::PortSpace;
use parking_lot::Mutex;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, give},
    faults, log,
    object::{self, Object},
    rdmacm::{
        Channel, OwnChannel, SharedDevice, first_device, release_event, shared_device, storage,
        zero,
    },
    verbs::{self, Qp, qp},
};

pub(crate) type Id = Object<rdma_cm_id>;

/// The device's part of an id.
pub(crate) struct IdInner {
    pub(crate) device: cm::Id,
    pub(crate) state: Mutex<State>,
    /// The `id->qp` that the device's id knows. This is only an address: the object may be gone.
    attached: AtomicUsize,
    /// The record that `route.path_rec` points to.
    path: PathRecord,
}

/// The state that librdmacm keeps of an id beside the public fields. It is never locked across a call that waits.
#[derive(Default)]
pub(crate) struct State {
    /// The channel of an id in synchronous mode.
    own_channel: Option<OwnChannel>,
    /// Precedes the program's private data (`rdma_addrinfo.ai_connect`).
    pub(crate) connect: Vec<u8>,
    /// The template for queue pairs of a listener's requests (`rdma_create_ep`).
    pub(crate) requests_qp: Option<QpTemplate>,
    /// `rdma_connect` was called without a queue pair, and with none in its parameters.
    pub(crate) names_no_qp: bool,
    /// The result of `rdma_resolve_addrinfo`.
    pub(crate) resolved: Option<crate::rdmacm::AddrInfo>,
}

/// Attributes that were given to `rdma_create_ep`. The pointers in it are looked up when they are used.
pub(crate) struct QpTemplate(pub(crate) ibv_qp_init_attr);

// SAFETY: the pointers are not followed without being looked up.
unsafe impl Send for QpTemplate {}

/// A record that C reads whenever it likes: reached by raw pointer only.
struct PathRecord(UnsafeCell<ibv_sa_path_rec>);

// SAFETY: as above.
unsafe impl Sync for PathRecord {}

impl IdInner {
    /// The channel on which a synchronous id waits; `None` for an id on a program's channel.
    pub(crate) fn own_channel(&self) -> Option<Arc<Channel>> {
        self.state.lock().own_channel.as_ref().map(|own| Arc::clone(own.channel()))
    }
}

/// The id behind a pointer that the program calls with.
pub(crate) fn find(id: *mut rdma_cm_id) -> Result<Arc<Id>, Errno> {
    let id: Arc<Id> = object::find(id)?;
    id.inner.device.take_up();
    Ok(id)
}

/// The channel on which an id reports its events.
pub(crate) enum On {
    /// A channel of the program's.
    Program(*mut rdma_event_channel),
    /// A channel of its own: synchronous mode.
    Own(OwnChannel),
}

/// Gives an id to the program.
pub(crate) fn publish(
    device: cm::Id,
    on: On,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: ibv_qp_type,
) -> Result<Arc<Id>, Errno> {
    // SAFETY: integers and NULL pointers.
    let mut public: rdma_cm_id = unsafe { std::mem::zeroed() };
    let (channel, own_channel) = match on {
        On::Program(channel) => (channel, None),
        On::Own(own) => (own.channel().public(), Some(own)),
    };
    public.channel = channel;
    public.context = context;
    public.ps = ps;
    public.qp_type = qp_type;
    let state = Mutex::new(State { own_channel, ..State::default() });
    // SAFETY: integers and GIDs.
    let path = PathRecord(UnsafeCell::new(unsafe { std::mem::zeroed() }));
    let pointer =
        object::publish(public, 0, IdInner { device, state, attached: AtomicUsize::new(0), path });
    let id = object::lookup(pointer)?;
    let found: &Arc<Id> = &id;
    found.inner.device.set_cookie(pointer as u64);
    check::made_of(pointer, &[channel as usize]);
    Ok(id)
}

/// A new id; without a channel in synchronous mode.
pub(crate) fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: ibv_qp_type,
) -> Result<Arc<Id>, Errno> {
    log::init();
    let space = PortSpace::from_code(ps).ok_or(Errno::invalid("ps is no port space"))?;
    let transport = verbs::qp_type(qp_type)?;
    let (found, on): (Arc<Channel>, On) = if channel.is_null() {
        let own = OwnChannel::new()?;
        (Arc::clone(own.channel()), On::Own(own))
    } else {
        (object::find(channel)?, On::Program(channel))
    };
    let device = cm::Id::create(&found.inner.device, space, transport, 0)?;
    publish(device, on, context, ps, qp_type)
}

/// `rdma_create_id`: 0, or -1 with `errno`; `EINVAL` for a port space that there is none of.
///
/// # Safety
/// `id` is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    faults::may_fail!("rdma_create_id", zero);
    let _uncancelled = Uncancelled::new();
    let datagrams = ps == RDMA_PS_UDP || ps == RDMA_PS_IPOIB;
    let qp_type = if datagrams { QpType::Ud } else { QpType::Rc } as ibv_qp_type;
    zero(
        "rdma_create_id",
        if id.is_null() {
            Err(Errno::NULL)
        } else {
            create(channel, context, ps, qp_type).map(|created| {
                // SAFETY: the caller's promise.
                unsafe { give(id, created.public()) };
            })
        },
    )
}

/// Ends the id. Its queue pair, if it has one, is the program's from here on.
pub(crate) fn destroy(id: &Arc<Id>) -> Result<(), Errno> {
    // The event of a synchronous id is never acknowledged by the program.
    release_event(id);
    check::ending(id.public(), verbs::activity, || Ok(id.inner.device.destroy()?))?;
    object::retire(id)?;
    // Another call on it may still run, and must not keep the channel.
    let own = id.inner.state.lock().own_channel.take();
    drop(own);
    Ok(())
}

/// `rdma_destroy_id`: 0, or -1 with `errno`. Waits while events of it were read and not acknowledged. A queue pair that the program
/// did not free before, as it should, stays.
pub(crate) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    let _uncancelled = Uncancelled::new();
    anyverbs_check::ends_in_child(id as usize);
    zero("rdma_destroy_id", find(id).and_then(|id| destroy(&id)))
}

/// `rdma_migrate_id`: 0, or -1 with `errno`; `EINVAL` for a synchronous id that is to become one. Waits while events were read and
/// not acknowledged.
pub(crate) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero("rdma_migrate_id", find(id).and_then(|id| migrate(&id, channel)))
}

fn migrate(id: &Arc<Id>, channel: *mut rdma_event_channel) -> Result<(), Errno> {
    let synchronous = id.inner.own_channel().is_some();
    let (to, own): (Arc<Channel>, _) = if channel.is_null() {
        if synchronous {
            return Err(Errno::invalid("a synchronous id has no channel to give up"));
        }
        let own = OwnChannel::new()?;
        (Arc::clone(own.channel()), Some(own))
    } else {
        (object::find(channel)?, None)
    };
    if synchronous {
        release_event(id);
    }
    // Before the wait for events that were read: others are read on the new channel meanwhile.
    // SAFETY: the object is live.
    let shown = unsafe { &raw mut (*id.public()).channel };
    // SAFETY: as above.
    let before = unsafe { shown.replace(to.public()) };
    id.inner.device.migrate(&to.inner.device).inspect_err(|_| {
        // SAFETY: as above.
        unsafe { shown.write(before) }
    })?;
    check::made_of(id.public(), &[to.public() as usize]);
    let old = std::mem::replace(&mut id.inner.state.lock().own_channel, own);
    drop(old);
    Ok(())
}

/// Updates the public fields from the device's id.
pub(crate) fn refresh(id: &Id) -> Result<(), Errno> {
    let info = id.inner.device.info();
    let public = id.public();
    // SAFETY: the object is live; C reads the fields, and they are written by raw pointer.
    unsafe {
        let addr = &raw mut (*public).route.addr;
        if let Some(local) = &info.local {
            (&raw mut (*addr).src.src_storage).write(storage(local));
        }
        if let Some(peer) = &info.peer {
            (&raw mut (*addr).dst.dst_storage).write(storage(peer));
        }
    }
    let Some(number) = info.device else { return Ok(()) };
    let shared = shared_device(number)?;
    // SAFETY: as above.
    unsafe {
        let ibaddr = &raw mut (*public).route.addr.addr.ibaddr;
        ibaddr.write(rdma_ib_addr {
            sgid: ibv_gid { raw: info.sgid.0 },
            dgid: ibv_gid { raw: info.dgid.0 },
            pkey: info.pkey.0.to_be(),
        });
        if (&raw const (*public).verbs).read().is_null() {
            (&raw mut (*public).port_num).write(info.port);
            // A listener's was given with `rdma_create_ep`.
            if (&raw const (*public).pd).read().is_null() {
                (&raw mut (*public).pd).write(shared.pd);
            }
            (&raw mut (*public).verbs).write(shared.context);
        }
        if let Some(path) = &info.path {
            id.inner.path.0.get().write(path_record(path));
            (&raw mut (*public).route.path_rec).write(id.inner.path.0.get());
            (&raw mut (*public).route.num_paths).write(1);
            sanitizers::initialised(id.inner.path.0.get());
        }
    }
    sanitizers::initialised(public);
    Ok(())
}

/// The device of an id; the first that works, if it has none yet.
pub(crate) fn device_of(id: &Id) -> Result<&'static SharedDevice, Errno> {
    id.inner.device.info().device.map_or_else(first_device, shared_device)
}

/// "Exactly", of a value in a path record.
const EXACTLY: u8 = 2;

fn path_record(path: &cm::Path) -> ibv_sa_path_rec {
    ibv_sa_path_rec {
        dgid: ibv_gid { raw: path.dgid.0 },
        sgid: ibv_gid { raw: path.sgid.0 },
        dlid: 0,
        slid: 0,
        raw_traffic: 0,
        flow_label: path.flow_label.to_be(),
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        reversible: 1,
        numb_path: 1,
        pkey: path.pkey.0.to_be(),
        sl: path.sl,
        mtu_selector: EXACTLY,
        mtu: path.mtu as u8,
        rate_selector: EXACTLY,
        rate: path.rate,
        packet_life_time_selector: EXACTLY,
        packet_life_time: path.packet_life_time,
        preference: 0,
    }
}

/// The id's queue pair, as the program sees it; `None` if there is none, or if the program destroyed it behind the id's back.
pub(crate) fn queue_pair(id: &Id) -> Option<Arc<Qp>> {
    qp(fields(id).qp).ok()
}

/// Gives the device's id the queue pair that it moves from here on.
pub(crate) fn attach_qp(id: &Id, qp: &Qp) -> Result<(), Errno> {
    id.inner.device.attach_qp(qp.inner.device.transport()?)?;
    id.inner.attached.store(qp.public() as usize, Ordering::Relaxed);
    Ok(())
}

/// Takes it back.
pub(crate) fn detach_qp(id: &Id) {
    id.inner.attached.store(0, Ordering::Relaxed);
    id.inner.device.detach_qp();
}

/// Programs may put a queue pair of their own into `id->qp`, or take the id's away. When the id connects or accepts, it
/// moves the queue pair that the field shows then. A queue pair for datagrams need not be moved.
pub(crate) fn attach_shown_qp(id: &Id) -> Result<(), Errno> {
    let shown = fields(id).qp;
    if shown as usize == id.inner.attached.load(Ordering::Relaxed) {
        return Ok(());
    }
    detach_qp(id);
    if shown.is_null() || fields(id).qp_type == IBV_QPT_UD {
        return Ok(());
    }
    attach_qp(id, &*qp(shown)?)
}

/// `id->qp->state` after the device may have moved the queue pair.
pub(crate) fn refresh_qp_state(id: &Id) {
    if let Some(qp) = queue_pair(id)
        && let Ok((attr, ..)) = qp.inner.device.query()
    {
        verbs::set_state(&qp, attr.state);
    }
}

/// The public fields as they are now.
pub(crate) fn fields(id: &Id) -> rdma_cm_id {
    // SAFETY: the object is live; any bytes are a value of its integers, pointers and unions of bytes.
    unsafe { id.public().read() }
}
