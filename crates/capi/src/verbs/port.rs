//! The ports, their GID tables and their P_Key tables.

use std::{
    ffi::{c_int, c_uint},
    mem::size_of,
};

use anyverbs::{GidEntry, GidKind, PortAttr, PortState};

use crate::{
    abi::*,
    cancel::Uncancelled,
    errno::{Errno, give, minus_one, value},
    faults,
    verbs::{answering, write_sized},
};

const LINK_LAYER_ETHERNET: u8 = IBV_LINK_LAYER_ETHERNET as u8;
/// `IBV_QPF_GRH_REQUIRED`: every address needs a global route.
const QPF_GRH_REQUIRED: u8 = 1;
const PHYS_STATE_DISABLED: u8 = 3;
const PHYS_STATE_LINK_UP: u8 = 5;

/// One GID type that is not in `enum ibv_gid_type`: sysfs calls it "IB/RoCE v1".
const GID_TYPE_SYSFS_ROCE_V1: c_uint = 0;
const GID_TYPE_SYSFS_ROCE_V2: c_uint = 1;

fn port_attr(port: &PortAttr) -> ibv_port_attr {
    let active = port.state == PortState::Active;
    // SAFETY: integers.
    let mut c: ibv_port_attr = unsafe { std::mem::zeroed() };
    c.state = port.state as u32;
    c.max_mtu = port.max_mtu as u32;
    c.active_mtu = port.active_mtu as u32;
    c.lid = port.lid;
    c.gid_tbl_len = port.gid_tbl_len as c_int;
    c.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
    c.max_msg_sz = port.max_msg_sz;
    c.bad_pkey_cntr = port.bad_pkey_cntr;
    c.qkey_viol_cntr = port.qkey_viol_cntr;
    c.pkey_tbl_len = port.pkey_tbl_len;
    c.max_vl_num = 1;
    c.active_width = port.rate.width;
    c.active_speed = port.rate.speed;
    c.active_speed_ex = port.rate.speed.into();
    c.phys_state = if active { PHYS_STATE_LINK_UP } else { PHYS_STATE_DISABLED };
    c.link_layer = LINK_LAYER_ETHERNET;
    c.flags = QPF_GRH_REQUIRED;
    c
}

/// Slot of the `ibv_query_port` inline, which says how much of the struct the program knows.
///
/// # Safety
/// `attr` is NULL or has `size` writable bytes.
pub(crate) unsafe extern "C" fn query_port(
    context_: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    faults::may_fail!("ibv_query_port", value);
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_query_port",
        answering(context_).and_then(|context| {
            if attr.is_null() || size < COMPAT_PORT_ATTR_SIZE {
                return Err(Errno::invalid("port_attr is NULL, or its size is too small"));
            }
            let queried = port_attr(&context.inner.device.port_attr(port)?);
            // SAFETY: the caller's promise.
            unsafe { write_sized(attr, &queried, size) };
            Ok(())
        }),
    )
}

/// `ibv_query_port`, the exported call: fills the fields that every program's struct has.
///
/// # Safety
/// `attr` is NULL or has [`COMPAT_PORT_ATTR_SIZE`] writable bytes.
pub(crate) unsafe extern "C" fn ibv_query_port(
    context_: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    unsafe { query_port(context_, port, attr.cast(), COMPAT_PORT_ATTR_SIZE) }
}

/// `ibv_query_port_speed`: 0, or the errno value. The speed is in units of 100 Mb/s, and agrees with the width and
/// speed of `ibv_query_port`.
///
/// # Safety
/// `speed` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_query_port_speed(
    context_: *mut ibv_context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_query_port_speed",
        answering(context_).and_then(|context| {
            let port = u8::try_from(port)
                .map_err(|_| Errno::invalid("port_num is no port of the device"))?;
            let rate = context.inner.device.port_attr(port)?.rate;
            if speed.is_null() {
                return Err(Errno::NULL);
            }
            // SAFETY: the caller's promise.
            unsafe { give(speed, u64::from(rate.gbps) * 10) };
            Ok(())
        }),
    )
}

fn c_gid(entry: Option<&GidEntry>) -> ibv_gid {
    ibv_gid { raw: entry.map_or([0; 16], |e| e.gid.0) }
}

/// An index that C gives as an int; too large for any table if negative.
fn index(index: c_int) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

/// `ibv_query_gid`: 0, or -1. An empty entry is a zero GID.
///
/// # Safety
/// `gid` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_query_gid(
    context_: *mut ibv_context,
    port: u8,
    gid_index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_query_gid", minus_one);
    minus_one(
        "ibv_query_gid",
        answering(context_).and_then(|context| {
            let entry = context.inner.device.gid(port, index(gid_index))?;
            if gid.is_null() {
                return Err(Errno::NULL);
            }
            // SAFETY: the caller's promise.
            unsafe { give(gid, c_gid(entry.as_ref())) };
            Ok(0)
        }),
    )
}

fn gid_entry(entry: &GidEntry) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: c_gid(Some(entry)),
        gid_index: entry.index as u32,
        port_num: entry.port.into(),
        gid_type: match entry.kind {
            GidKind::RoceV1 => IBV_GID_TYPE_ROCE_V1,
            GidKind::RoceV2 | GidKind::NoInterface => IBV_GID_TYPE_ROCE_V2,
        },
        ndev_ifindex: entry.interface,
    }
}

/// `ibv_query_gid_ex`: 0, or the errno value; `ENODATA` for an empty entry.
///
/// # Safety
/// `entry` is NULL or has `entry_size` writable bytes.
pub(crate) unsafe extern "C" fn _ibv_query_gid_ex(
    context_: *mut ibv_context,
    port: u32,
    gid_index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_query_gid", value);
    value(
        "ibv_query_gid_ex",
        answering(context_).and_then(|context| {
            if entry.is_null() || flags != 0 || entry_size < size_of::<ibv_gid_entry>() {
                return Err(Errno::invalid("entry is NULL or too small, or flags is not 0"));
            }
            let port = u8::try_from(port)
                .map_err(|_| Errno::invalid("port_num is no port of the device"))?;
            let found = context.inner.device.gid(port, gid_index as usize)?;
            let found = found
                .ok_or(Errno::because(libc::ENODATA, "the entry of the GID table is empty"))?;
            // SAFETY: the caller's promise.
            unsafe { write_sized(entry, &gid_entry(&found), entry_size) };
            Ok(())
        }),
    )
}

/// `ibv_query_gid_table`: how many entries were filled, or the negative errno value; `-EINVAL` also when not all fit.
///
/// # Safety
/// `entries` is NULL or has `max_entries` elements of `entry_size` bytes.
pub(crate) unsafe extern "C" fn _ibv_query_gid_table(
    context_: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let _uncancelled = Uncancelled::new();
    let filled = answering(context_).and_then(|context| {
        let unusable = entries.is_null() && max_entries > 0;
        if unusable || flags != 0 || entry_size < size_of::<ibv_gid_entry>() {
            return Err(Errno::invalid("entries is NULL or too small, or flags is not 0"));
        }
        let found = context.inner.device.gids()?;
        if found.len() > max_entries {
            return Err(Errno::invalid("max_entries is less than the number of entries"));
        }
        for (i, entry) in found.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                write_sized(entries.byte_add(i * entry_size), &gid_entry(entry), entry_size);
            }
        }
        Ok(found.len() as isize)
    });
    filled.unwrap_or_else(|e| -(e.refuse("ibv_query_gid_table") as isize))
}

/// `ibv_query_gid_type` (private; `ibv_devinfo` and pyverbs use it): 0, or -1. An empty entry is of the first type,
/// as where the kernel answers.
///
/// # Safety
/// `gid_type` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_query_gid_type(
    context_: *mut ibv_context,
    port: u8,
    gid_index: c_uint,
    gid_type: *mut c_uint,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    minus_one(
        "ibv_query_gid_type",
        answering(context_).and_then(|context| {
            let entry = context.inner.device.gid(port, gid_index as usize)?;
            if gid_type.is_null() {
                return Err(Errno::NULL);
            }
            let is_v1 = entry.is_none_or(|entry| entry.kind == GidKind::RoceV1);
            let found = if is_v1 { GID_TYPE_SYSFS_ROCE_V1 } else { GID_TYPE_SYSFS_ROCE_V2 };
            // SAFETY: the caller's promise.
            unsafe { give(gid_type, found) };
            Ok(0)
        }),
    )
}

/// `ibv_query_pkey`: 0, or -1. Network byte order.
///
/// # Safety
/// `pkey` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_query_pkey(
    context_: *mut ibv_context,
    port: u8,
    pkey_index: c_int,
    pkey: *mut u16,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    minus_one(
        "ibv_query_pkey",
        answering(context_).and_then(|context| {
            let found = context.inner.device.pkey(port, index(pkey_index))?;
            if pkey.is_null() {
                return Err(Errno::NULL);
            }
            // SAFETY: the caller's promise.
            unsafe { give(pkey, found.0.to_be()) };
            Ok(0)
        }),
    )
}

/// `ibv_get_pkey_index`: where `pkey` (network byte order) stands in the table, or -1.
pub(crate) unsafe extern "C" fn ibv_get_pkey_index(
    context_: *mut ibv_context,
    port: u8,
    pkey: u16,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    minus_one(
        "ibv_get_pkey_index",
        answering(context_).and_then(|context| {
            let mut at = 0;
            loop {
                if context.inner.device.pkey(port, at)?.0.to_be() == pkey {
                    return Ok(at as c_int);
                }
                at += 1;
            }
        }),
    )
}
