//! Opening a device, and the attributes of the open device.

use std::{
    ffi::c_int,
    mem::size_of,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    ptr,
    sync::Arc,
};

use anyverbs::limits::DeviceAttr;
use anyverbs::persona::{Feature, Features};
use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, give, pointer, value},
    faults,
    object::{self, Object},
    verbs::{DeviceObject, device, extended, firmware, new_context},
};

/// The types of queue pairs that take a rate limit, and what a persona without them lacks.
const PACED: [(ibv_qp_type, Feature); 5] = [
    (IBV_QPT_RC, Feature::Rc),
    (IBV_QPT_UC, Feature::Uc),
    (IBV_QPT_UD, Feature::Ud),
    (IBV_QPT_XRC_SEND, Feature::Xrc),
    (IBV_QPT_RAW_PACKET, Feature::RawPackets),
];

/// An open device; the program's pointer is to the `ibv_context` at its end.
pub(crate) type Context = Object<verbs_context>;

/// The device's part of a context.
pub(crate) struct ContextInner {
    pub(crate) device: anyverbs::Context,
    sys_image_guid: u64,
    /// The descriptor that it was imported from.
    _passed: Option<OwnedFd>,
}

impl Context {
    /// The pointer that C holds.
    pub(crate) fn pointer(&self) -> *mut ibv_context {
        // SAFETY: the object is live; only the field's address is taken.
        unsafe { &raw mut (*self.public()).context }
    }

    /// Refuses a command to a device that has failed for good.
    pub(crate) fn answers(&self) -> Result<(), Errno> {
        Ok(self.inner.device.answers()?)
    }
}

/// The open device behind a program's pointer.
pub(crate) fn context(pointer: *mut ibv_context) -> Result<Arc<Context>, Errno> {
    object::find(extended(pointer))
}

/// The open device behind a program's pointer, for a command to it.
pub(crate) fn answering(pointer: *mut ibv_context) -> Result<Arc<Context>, Errno> {
    let context = context(pointer)?;
    context.answers()?;
    Ok(context)
}

/// `ibv_open_device`: NULL with `errno` on failure.
pub(crate) unsafe extern "C" fn ibv_open_device(device_: *mut ibv_device) -> *mut ibv_context {
    faults::may_fail!("ibv_open_device", pointer);
    let _uncancelled = Uncancelled::new();
    pointer("ibv_open_device", open(device_))
}

fn open(device_: *mut ibv_device) -> Result<*mut ibv_context, Errno> {
    let found = device(device_)?;
    let opened = anyverbs::Context::open(&found.name).map_err(|error| {
        let errno = error.errno();
        let number = u64::from(errno.unsigned_abs());
        anyverbs::say_again!(error, number, "cannot open {}: {error}", found.name);
        Errno::said(errno)
    })?;
    publish_context(found, opened, None)
}

/// Gives an open device to the program, with a descriptor that it is to own beside that of the device.
pub(crate) fn publish_context(
    found: &DeviceObject,
    opened: anyverbs::Context,
    passed: Option<OwnedFd>,
) -> Result<*mut ibv_context, Errno> {
    let mut public = new_context();
    public.context.device = found.pointer();
    let cmd_fd = passed.as_ref().map_or(opened.command_fd(), AsFd::as_fd);
    public.context.cmd_fd = cmd_fd.as_raw_fd();
    public.context.async_fd = opened.async_fd().as_raw_fd();
    public.context.num_comp_vectors = opened.device_attr()?.num_comp_vectors as c_int;
    let inner =
        ContextInner { device: opened, sys_image_guid: found.sys_image_guid, _passed: passed };
    let published = object::publish(public, 0, inner);
    // SAFETY: just published; only the field's address is taken.
    Ok(unsafe { &raw mut (*published).context })
}

/// `ibv_close_device`: 0, or -1 with `errno`. Objects that were not destroyed keep the parts of the context that they
/// need.
pub(crate) unsafe extern "C" fn ibv_close_device(context_: *mut ibv_context) -> c_int {
    let _uncancelled = Uncancelled::new();
    let closed = context(context_).and_then(|c| {
        check::closes(c.public());
        object::retire(&c)
    });
    if closed.is_err() {
        value("ibv_close_device", closed);
        return -1;
    }
    0
}

/// The bits of `enum ibv_device_cap_flags` that this device has.
const CAP_FLAGS: u32 = IBV_DEVICE_BAD_PKEY_CNTR
    | IBV_DEVICE_BAD_QKEY_CNTR
    | IBV_DEVICE_CURR_QP_STATE_MOD
    | IBV_DEVICE_PORT_ACTIVE_EVENT
    | IBV_DEVICE_SYS_IMAGE_GUID
    | IBV_DEVICE_RC_RNR_NAK_GEN
    | IBV_DEVICE_SRQ_RESIZE
    | IBV_DEVICE_XRC
    | IBV_DEVICE_MEM_WINDOW
    | IBV_DEVICE_MEM_WINDOW_TYPE_2B
    | IBV_DEVICE_MEM_MGT_EXTENSIONS
    | IBV_DEVICE_RAW_IP_CSUM
    | IBV_DEVICE_MANAGED_FLOW_STEERING;

/// The bits that are left where a persona lacks features.
fn cap_flags(lacks: Features) -> u32 {
    let windows = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    let raw = IBV_DEVICE_RAW_IP_CSUM | IBV_DEVICE_MANAGED_FLOW_STEERING;
    [
        (Feature::Srq, IBV_DEVICE_SRQ_RESIZE),
        (Feature::Xrc, IBV_DEVICE_XRC),
        (Feature::MemoryWindows, windows),
        (Feature::RawPackets, raw),
    ]
    .into_iter()
    .filter(|(feature, _)| lacks.has(*feature))
    .fold(CAP_FLAGS, |flags, (_, missing)| flags & !missing)
}

/// The further bits of `ibv_device_attr_ex.device_cap_flags_ex`: the kernel's FLUSH_GLOBAL, FLUSH_PERSISTENT and
/// ATOMIC_WRITE.
const FLUSH: u64 = 1 << 38 | 1 << 39;
const ATOMIC_WRITE: u64 = 1 << 40;

/// On-demand paging: nothing is ever pinned, so every operation may meet memory that is not there yet.
const ODP_DATAGRAM: u32 = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
const ODP_UNRELIABLE: u32 = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE;
const ODP_RELIABLE: u32 = ODP_DATAGRAM
    | IBV_ODP_SUPPORT_WRITE
    | IBV_ODP_SUPPORT_READ
    | IBV_ODP_SUPPORT_ATOMIC
    | IBV_ODP_SUPPORT_FLUSH
    | IBV_ODP_SUPPORT_ATOMIC_WRITE;

/// `_IBV_DEVICE_RAW_SCATTER_FCS`, beyond the enum's 32 bits.
const RAW_SCATTER_FCS: u64 = 1 << 34;

/// Bit of a type of queue pair in masks of such.
const RAW_PACKET: u32 = 1 << IBV_QPT_RAW_PACKET;

/// A count that C has as a signed int.
fn int(n: u32) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}

fn device_attr(attr: &DeviceAttr, firmware: &str) -> ibv_device_attr {
    // SAFETY: integers and a character array.
    let mut c: ibv_device_attr = unsafe { std::mem::zeroed() };
    for (to, from) in c.fw_ver.iter_mut().zip(firmware.bytes()) {
        *to = from as _;
    }
    c.node_guid = attr.node_guid.to_be();
    c.sys_image_guid = attr.sys_image_guid.to_be();
    c.max_mr_size = attr.max_mr_size;
    c.page_size_cap = attr.page_size_cap;
    c.vendor_id = attr.vendor_id;
    c.vendor_part_id = attr.vendor_part_id;
    c.hw_ver = attr.hw_ver;
    c.max_qp = int(attr.max_qp);
    c.max_qp_wr = int(attr.max_qp_wr);
    c.device_cap_flags = cap_flags(attr.lacks);
    c.max_sge = int(attr.max_sge);
    c.max_sge_rd = int(attr.max_sge_rd);
    c.max_cq = int(attr.max_cq);
    c.max_cqe = int(attr.max_cqe);
    c.max_mr = int(attr.max_mr);
    c.max_mw = int(attr.max_mw);
    c.max_raw_ethy_qp = if attr.lacks.has(Feature::RawPackets) { 0 } else { int(attr.max_qp) };
    c.max_pd = int(attr.max_pd);
    c.max_qp_rd_atom = int(attr.max_qp_rd_atom);
    c.max_qp_init_rd_atom = int(attr.max_qp_rd_atom);
    c.max_res_rd_atom = int(attr.max_res_rd_atom);
    c.atomic_cap = if attr.lacks.has(Feature::Atomics) { IBV_ATOMIC_NONE } else { IBV_ATOMIC_HCA };
    c.max_mcast_grp = int(attr.max_mcast_grp);
    c.max_mcast_qp_attach = int(attr.max_mcast_qp_attach);
    c.max_total_mcast_qp_attach = int(attr.max_total_mcast_qp_attach);
    c.max_ah = int(attr.max_ah);
    c.max_srq = int(attr.max_srq);
    c.max_srq_wr = int(attr.max_srq_wr);
    c.max_srq_sge = int(attr.max_srq_sge);
    c.max_pkeys = attr.max_pkeys;
    c.local_ca_ack_delay = attr.local_ca_ack_delay;
    c.phys_port_cnt = attr.phys_port_cnt;
    c
}

/// Writes the first `size` bytes of `T` that the program's older or newer struct has, zeros where ours ends.
///
/// # Safety
/// `to` has `size` writable bytes.
pub(crate) unsafe fn write_sized<T>(to: *mut T, value: &T, size: usize) {
    let ours = size.min(size_of::<T>());
    // SAFETY: `ours` is within both; the rest is within the program's.
    unsafe {
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), to.cast(), ours);
        ptr::write_bytes(to.cast::<u8>().add(ours), 0, size - ours);
    }
    sanitizers::initialised_bytes(to.cast(), size);
}

/// `ibv_query_device`: 0, or the errno value.
///
/// # Safety
/// `attr` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_query_device(
    context_: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_query_device", value);
    value(
        "ibv_query_device",
        query_device(context_).and_then(|queried| {
            if attr.is_null() {
                return Err(Errno::NULL);
            }
            // SAFETY: the caller's promise.
            unsafe { give(attr, queried) };
            Ok(())
        }),
    )
}

fn query_device(context_: *mut ibv_context) -> Result<ibv_device_attr, Errno> {
    let context = answering(context_)?;
    let firmware = firmware(context.inner.device.persona()?);
    let mut attr = device_attr(&context.inner.device.device_attr()?, firmware);
    attr.sys_image_guid = context.inner.sys_image_guid.to_be();
    Ok(attr)
}

/// Fills the attributes for memory that is paged on demand.
fn odp_attr(lacks: Features, ex: &mut ibv_device_attr_ex) {
    let without = |feature, caps: u32| if lacks.has(feature) { 0 } else { caps };
    let srq = if lacks.has(Feature::Srq) { IBV_ODP_SUPPORT_SRQ_RECV } else { 0 };
    let atomic = if lacks.has(Feature::Atomics) {
        IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_ATOMIC_WRITE
    } else {
        0
    };
    ex.odp_caps.general_caps = u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
    ex.odp_caps.per_transport_caps = ibv_odp_caps_per_transport_caps {
        rc_odp_caps: without(Feature::Rc, ODP_RELIABLE & !srq & !atomic),
        uc_odp_caps: without(Feature::Uc, ODP_UNRELIABLE),
        ud_odp_caps: without(Feature::Ud, ODP_DATAGRAM & !srq),
    };
    ex.xrc_odp_caps = without(Feature::Xrc, ODP_RELIABLE & !srq & !atomic);
}

/// Fills the attributes for raw packets.
fn raw_packet_attr(attr: &DeviceAttr, ex: &mut ibv_device_attr_ex) {
    ex.tso_caps = ibv_tso_caps { max_tso: attr.max_tso, supported_qpts: RAW_PACKET };
    ex.rss_caps = ibv_rss_caps {
        supported_qpts: RAW_PACKET,
        max_rwq_indirection_tables: attr.max_rwq_ind_tables,
        max_rwq_indirection_table_size: attr.max_rwq_ind_table_size,
        rx_hash_fields_mask: anyverbs::raw::HashFields::all().bits(),
        rx_hash_function: IBV_RX_HASH_FUNC_TOEPLITZ as u8,
    };
    ex.max_wq_type_rq = attr.max_wq;
    ex.raw_packet_caps = IBV_RAW_PACKET_CAP_CVLAN_STRIPPING
        | IBV_RAW_PACKET_CAP_SCATTER_FCS
        | IBV_RAW_PACKET_CAP_IP_CSUM;
}

/// Slot of `ibv_query_device_ex`: fills at most `attr_size` bytes.
///
/// # Safety
/// `input` is NULL or readable; `attr` has `attr_size` writable bytes.
pub(crate) unsafe extern "C" fn query_device_ex(
    context_: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_query_device", value);
    value(
        "ibv_query_device_ex",
        query_device(context_).and_then(|queried| {
            // SAFETY: the caller's promise.
            let extended = !input.is_null() && unsafe { (*input).comp_mask } != 0;
            if attr.is_null() || extended || attr_size < size_of::<ibv_device_attr>() {
                return Err(Errno::invalid(
                    "attr is NULL or too small, or comp_mask of input is not 0",
                ));
            }
            // SAFETY: integers and a character array.
            let mut ex: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
            ex.orig_attr = queried;
            let device = context(context_)?.inner.device.device_attr()?;
            let lacks = |feature| device.lacks.has(feature);
            ex.device_cap_flags_ex = u64::from(queried.device_cap_flags)
                | if lacks(Feature::Atomics) { FLUSH } else { FLUSH | ATOMIC_WRITE }
                | if lacks(Feature::RawPackets) { 0 } else { RAW_SCATTER_FCS };
            ex.completion_timestamp_mask = u64::MAX;
            ex.hca_core_clock = device.clock_khz;
            ex.cq_mod_caps = ibv_cq_moderation_caps {
                max_cq_count: device.max_cq_count,
                max_cq_period: device.max_cq_period,
            };
            ex.packet_pacing_caps = ibv_packet_pacing_caps {
                qp_rate_limit_min: 1,
                qp_rate_limit_max: device.max_rate_limit,
                supported_qpts: PACED
                    .into_iter()
                    .filter(|(_, feature)| !lacks(*feature))
                    .fold(0, |mask, (qp_type, _)| mask | 1 << qp_type),
            };
            if device.max_num_tags > 0 {
                ex.tm_caps = ibv_tm_caps {
                    max_rndv_hdr_size: device.max_rndv_hdr_size,
                    max_num_tags: device.max_num_tags.into(),
                    flags: IBV_TM_CAP_RC,
                    max_ops: device.max_tag_ops,
                    max_sge: anyverbs::MAX_TAG_SGE as u32,
                };
            }
            if !lacks(Feature::Odp) {
                odp_attr(device.lacks, &mut ex);
            }
            ex.max_dm_size = device.max_dm_size;
            if !lacks(Feature::RawPackets) {
                raw_packet_attr(&device, &mut ex);
            }
            ex.phys_port_cnt_ex = queried.phys_port_cnt.into();
            // SAFETY: the caller's promise.
            unsafe { write_sized(attr, &ex, attr_size) };
            Ok(())
        }),
    )
}

/// Slot of `ibv_query_rt_values_ex`: 0, or the errno value. The clock's value stands in `tv_nsec` alone, as where devices
/// count cycles.
///
/// # Safety
/// `values` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn query_rt_values(
    context_: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let values = unsafe { values.as_mut() };
    value(
        "ibv_query_rt_values",
        context(context_).and_then(|context| {
            let values = values.ok_or(Errno::NULL)?;
            let asked = values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK;
            if asked != 0 {
                let ticks = context.inner.device.raw_clock();
                values.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: ticks as _ };
            }
            values.comp_mask = asked;
            sanitizers::initialised(ptr::from_ref(values));
            Ok(())
        }),
    )
}
