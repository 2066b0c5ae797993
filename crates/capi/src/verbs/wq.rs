//! Work queues and their indirection tables. Their queue pairs are in `raw_qp.rs`.

use std::{ffi::c_int, fmt, sync::Arc};

use anyverbs::raw::{self, ReceiveFlags, WqAttr, WqInit, WqState};
use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, pointer, value},
    object::{self, Object, deref},
    verbs::{Context, Pd, context, cq, post_receives, refuse_wr},
};

pub(crate) type Wq = Object<ibv_wq>;
pub(crate) type RwqIndTable = Object<ibv_rwq_ind_table>;

/// The device's part of a work queue.
pub(crate) struct WqInner {
    pub(crate) device: raw::Wq,
    context: Arc<Context>,
}

/// The device's part of an indirection table.
pub(crate) struct RwqIndTableInner {
    pub(crate) device: raw::RwqIndTable,
    pub(crate) context: Arc<Context>,
}

/// The flags of a work queue: `EOPNOTSUPP` for those that the device does not have.
fn receive_flags(flags: u32) -> Result<ReceiveFlags, Errno> {
    if flags >= IBV_WQ_FLAGS_RESERVED {
        return Err(Errno::invalid("a flag is not known here"));
    }
    ReceiveFlags::from_bits(flags).ok_or(Errno::lacks("create_flags or flags asks for IBV_WQ_FLAGS_DELAY_DROP or IBV_WQ_FLAGS_PCI_WRITE_END_PADDING"))
}

const _: () = assert!(ReceiveFlags::CVLAN_STRIPPING.bits() == IBV_WQ_FLAGS_CVLAN_STRIPPING);
const _: () = assert!(ReceiveFlags::SCATTER_FCS.bits() == IBV_WQ_FLAGS_SCATTER_FCS);

/// Slot of `ibv_create_wq`: NULL with `errno` on failure. The actual sizes go to `attr`. `EOPNOTSUPP` for `DELAY_DROP` and
/// `PCI_WRITE_END_PADDING`.
///
/// # Safety
/// `attr` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn create_wq(
    context_: *mut ibv_context,
    attr: *mut ibv_wq_init_attr,
) -> *mut ibv_wq {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_wq");
    sanitizers::initialised(attr);
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_mut() };
    pointer(
        "ibv_create_wq",
        attr.ok_or(Errno::NULL).and_then(|attr| {
            let context = context(context_)?;
            if attr.comp_mask >= IBV_WQ_INIT_ATTR_RESERVED || attr.wq_type != IBV_WQT_RQ {
                return Err(Errno::invalid(
                    "comp_mask has a bit that is not known here, or wq_type is not IBV_WQT_RQ",
                ));
            }
            let has_flags = attr.comp_mask & IBV_WQ_INIT_ATTR_FLAGS != 0;
            let flags = receive_flags(if has_flags { attr.create_flags } else { 0 })?;
            let pd: Arc<Pd> = object::find(attr.pd)?;
            let cq = cq(attr.cq)?;
            if [&pd.inner.context, &cq.inner.context].iter().any(|c| !Arc::ptr_eq(c, &context)) {
                return Err(Errno::OTHER_CONTEXT);
            }
            let device = context.inner.device.create_wq(
                &pd.inner.device,
                &WqInit {
                    cq: &cq.inner.device,
                    max_wr: attr.max_wr,
                    max_sge: attr.max_sge,
                    flags,
                    cookie: 0,
                },
            )?;
            (attr.max_wr, attr.max_sge) = device.sizes();
            let handle = object::new_handle();
            // SAFETY: integers, NULL pointers, an empty slot, and a mutex and condition that zeros initialise.
            let mut public: ibv_wq = unsafe { std::mem::zeroed() };
            public.context = context.pointer();
            public.wq_context = attr.wq_context;
            public.pd = attr.pd;
            public.cq = attr.cq;
            public.wq_num = device.number().get();
            public.handle = handle;
            public.state = IBV_WQS_RESET;
            public.wq_type = attr.wq_type;
            public.post_recv = Some(post_wq_recv);
            let published = object::publish(public, handle, WqInner { device, context });
            object::lookup(published)?.inner.device.set_cookie(published as u64);
            Ok(published)
        }),
    )
}

fn state(code: ibv_wq_state) -> Result<WqState, Errno> {
    [WqState::Reset, WqState::Ready, WqState::Error]
        .into_iter()
        .find(|state| *state as u32 == code)
        .ok_or(Errno::invalid("a state is no state of a work queue"))
}

/// Slot of `ibv_modify_wq`: 0, or the errno value; after a failure nothing is changed.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn modify_wq(wq: *mut ibv_wq, attr: *mut ibv_wq_attr) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    value(
        "ibv_modify_wq",
        object::find(wq).and_then(|wq: Arc<Wq>| {
            wq.inner.context.answers()?;
            let attr = attr.ok_or(Errno::NULL)?;
            let mask = attr.attr_mask;
            if mask == 0 || mask >= IBV_WQ_ATTR_RESERVED {
                return Err(Errno::invalid("attr_mask is 0, or has a bit that is no attribute"));
            }
            let has = |bit| mask & bit != 0;
            let to = if has(IBV_WQ_ATTR_STATE) { Some(state(attr.wq_state)?) } else { None };
            let current =
                if has(IBV_WQ_ATTR_CURR_STATE) { Some(state(attr.curr_wq_state)?) } else { None };
            let flags = if has(IBV_WQ_ATTR_FLAGS) {
                let which = receive_flags(attr.flags_mask)?;
                Some((receive_flags(attr.flags & attr.flags_mask)?, which))
            } else {
                None
            };
            wq.inner.device.modify(&WqAttr { state: to, current, flags })?;
            let now = wq.inner.device.state()?;
            // SAFETY: the object is live.
            unsafe { (&raw mut (*wq.public()).state).write(now as u32) };
            Ok(())
        }),
    )
}

/// Slot of `ibv_destroy_wq`: 0, or the errno value; `EBUSY` while an indirection table has it. Waits while events of it were
/// read and not acknowledged.
pub(crate) unsafe extern "C" fn destroy_wq(wq: *mut ibv_wq) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_destroy_wq",
        object::find(wq).and_then(|wq: Arc<Wq>| {
            wq.inner.device.destroy()?;
            object::retire(&wq)
        }),
    )
}

/// `ibv_post_wq_recv`: 0, or the errno value with `*bad_wr` the first request that was not posted.
///
/// # Safety
/// As for `post_recv`.
unsafe extern "C" fn post_wq_recv(
    wq: *mut ibv_wq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    unsafe {
        let Some(wq) = deref(wq) else {
            return refuse_wr(bad_wr, wr, Errno::NULL.explained(&"ibv_post_wq_recv"));
        };
        let device = &wq.inner.device;
        let to = format_args!("ibv_post_wq_recv to work queue {:#08x}", device.number().get());
        let limits = || (device.sizes().1, device.sizes().0);
        let queue: (&dyn fmt::Display, _) = (&to, limits);
        post_receives(wr, bad_wr, queue, |r| Ok(device.recv(r)?))
    }
}

/// Slot of `ibv_create_rwq_ind_table`: NULL with `errno` on failure.
///
/// # Safety
/// `attr` is NULL or readable, with the number of WQs that it gives.
pub(crate) unsafe extern "C" fn create_rwq_ind_table(
    context_: *mut ibv_context,
    attr: *mut ibv_rwq_ind_table_init_attr,
) -> *mut ibv_rwq_ind_table {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_rwq_ind_table");
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_create_rwq_ind_table",
        attr.ok_or(Errno::NULL).and_then(|attr| {
            let context = context(context_)?;
            let most = context.inner.device.device_attr()?.max_rwq_ind_table_size;
            if attr.comp_mask >= IBV_CREATE_IND_TABLE_RESERVED
                || attr.ind_tbl.is_null()
                || attr.log_ind_tbl_size > most.ilog2()
            {
                return Err(Errno::invalid("comp_mask, ind_tbl or log_ind_tbl_size is wrong"));
            }
            let wqs = (0..1usize << attr.log_ind_tbl_size)
                .map(|i| {
                    // SAFETY: the caller's promise.
                    let wq: Arc<Wq> = object::find(unsafe { attr.ind_tbl.add(i).read() })?;
                    if Arc::ptr_eq(&wq.inner.context, &context) {
                        Ok(wq)
                    } else {
                        Err(Errno::OTHER_CONTEXT)
                    }
                })
                .collect::<Result<Vec<_>, _>>()?;
            let devices: Vec<_> = wqs.iter().map(|wq| &wq.inner.device).collect();
            let device = context.inner.device.create_rwq_ind_table(&devices)?;
            let handle = object::new_handle().cast_signed();
            let public = ibv_rwq_ind_table {
                context: context.pointer(),
                ind_tbl_handle: handle,
                ind_tbl_num: handle,
                comp_mask: 0,
            };
            let inner = RwqIndTableInner { device, context };
            Ok(object::publish(public, handle.cast_unsigned(), inner))
        }),
    )
}

/// Slot of `ibv_destroy_rwq_ind_table`: 0, or the errno value; `EBUSY` while a QP uses it.
pub(crate) unsafe extern "C" fn destroy_rwq_ind_table(table: *mut ibv_rwq_ind_table) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_destroy_rwq_ind_table",
        object::find(table).and_then(|table: Arc<RwqIndTable>| {
            table.inner.device.destroy()?;
            object::retire(&table)
        }),
    )
}
