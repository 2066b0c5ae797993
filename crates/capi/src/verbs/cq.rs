//! Completion queues and `ibv_poll_cq`. The iterator of an extended CQ is in `cq_ex.rs`.

use std::{
    ffi::c_int,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
};

use anyverbs::{CqFields, CqInitAttr, Moderation, Wc, WcFlags};

use crate::probes;
use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, no_value, pointer, value},
    faults,
    object::{self, Object, deref},
    verbs::{
        CompChannel, Context, Pd, PollSession, context,
        cq_ex::of,
        sanitized::sanitize_iterator,
        set_iterator,
        watched::{activity, in_turn, watch_iterator},
    },
};

pub(crate) type Cq = Object<ibv_cq_ex>;

/// The device's part of a CQ.
pub(crate) struct CqInner {
    pub(crate) device: anyverbs::Cq,
    pub(crate) context: Arc<Context>,
    pub(crate) iterator: PollSession,
    ignores_overrun: bool,
    /// The program promised that one thread at a time uses it.
    pub(crate) is_single_threaded: bool,
    /// For the checker: the fields of a completion that the program asked for.
    pub(crate) asked: u64,
    /// For the checker: `ibv_next_poll` has found no completion.
    pub(crate) is_at_end: AtomicBool,
    /// For the checker: datagrams that the device had dropped when it looked last.
    pub(crate) dropped: AtomicU64,
}

/// The CQ behind a program's pointer.
pub(crate) fn cq(pointer: *mut ibv_cq) -> Result<Arc<Cq>, Errno> {
    object::find(pointer.cast())
}

/// The CQ in a field of a queue pair to create.
pub(crate) fn cq_of(field: &str, pointer: *mut ibv_cq) -> Result<Arc<Cq>, Errno> {
    if pointer.is_null() {
        return Err(no_value(&format_args!("{field} is NULL")));
    }
    cq(pointer)
}

/// `ibv_create_cq`: NULL with `errno` on failure.
pub(crate) unsafe extern "C" fn ibv_create_cq(
    context_: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut std::ffi::c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    faults::may_fail!("ibv_create_cq", pointer);
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_cq");
    // A negative number is too large for any device.
    let attr = ibv_cq_init_attr_ex {
        cqe: cqe as u32,
        cq_context,
        channel,
        comp_vector: comp_vector as u32,
        wc_flags: 0,
        comp_mask: 0,
        flags: 0,
        parent_domain: std::ptr::null_mut(),
    };
    pointer("ibv_create_cq", create(context_, &attr)).cast()
}

/// Slot of `ibv_create_cq_ex`: NULL with `errno` on failure, `EOPNOTSUPP` for completion fields that are not known.
/// `SINGLE_THREADED` is a hint that the device does not need. The checker holds the program to it.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context_: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    faults::may_fail!("ibv_create_cq", pointer);
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_cq_ex");
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_create_cq_ex",
        attr.ok_or(Errno::NULL).and_then(|attr| {
            if attr.wc_flags & !u64::from(IBV_CREATE_CQ_SUP_WC_FLAGS) != 0 {
                return Err(Errno::lacks(
                    "wc_flags has a field of completions that is not known here",
                ));
            }
            let flags =
                if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
            let known = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
            if attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0
                || flags & !known != 0
            {
                return Err(Errno::invalid("comp_mask or flags has a bit that is not known here"));
            }
            create(context_, attr)
        }),
    )
}

/// The fields that the CQ has to keep of a completion. All others stand in the completion itself, or are 0 on this
/// device.
fn fields(wc_flags: u64) -> CqFields {
    let mut fields = CqFields::empty();
    for (flag, field) in [
        (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, CqFields::TIMESTAMP),
        (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, CqFields::WALLCLOCK),
        (IBV_WC_EX_WITH_TM_INFO, CqFields::TM_INFO),
    ] {
        fields.set(field, wc_flags & u64::from(flag) != 0);
    }
    fields
}

/// A parent domain of this context; `EINVAL` for a plain protection domain.
fn parent_domain(context: &Arc<Context>, pd: *mut ibv_pd) -> Result<Arc<Pd>, Errno> {
    let pd: Arc<Pd> = object::find(pd)?;
    let fits = pd.inner.device.is_parent_domain() && Arc::ptr_eq(&pd.inner.context, context);
    if fits {
        Ok(pd)
    } else {
        Err(Errno::invalid("parent_domain is no parent domain of this context"))
    }
}

fn create(context_: *mut ibv_context, attr: &ibv_cq_init_attr_ex) -> Result<*mut ibv_cq_ex, Errno> {
    let context = context(context_)?;
    let channel: Option<Arc<CompChannel>> =
        if attr.channel.is_null() { None } else { Some(object::find(attr.channel)?) };
    if channel.as_ref().is_some_and(|c| !Arc::ptr_eq(&c.inner.context, &context)) {
        return Err(Errno::OTHER_CONTEXT);
    }
    let has = |bit| attr.comp_mask & bit != 0;
    let pd = if has(IBV_CQ_INIT_ATTR_MASK_PD) {
        Some(parent_domain(&context, attr.parent_domain)?)
    } else {
        None
    };
    let flags = if has(IBV_CQ_INIT_ATTR_MASK_FLAGS) { attr.flags } else { 0 };
    let ignores_overrun = flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0;
    let device = context.inner.device.create_cq_ex(&CqInitAttr {
        channel: channel.as_ref().map(|c| &c.inner.device),
        comp_vector: attr.comp_vector,
        fields: fields(attr.wc_flags),
        ignore_overrun: ignores_overrun,
        pd: pd.as_ref().map(|pd| &pd.inner.device),
        ..CqInitAttr::new(attr.cqe)
    })?;
    let (handle, number) = (object::new_handle(), device.number());
    // SAFETY: integers, NULL pointers, empty slots, and a mutex and condition that zeros initialise.
    let mut public: ibv_cq_ex = unsafe { std::mem::zeroed() };
    public.context = context.pointer();
    public.channel = attr.channel;
    public.cq_context = attr.cq_context;
    public.handle = handle;
    let capacity = device.capacity();
    public.cqe = capacity as c_int;
    set_iterator(&mut public);
    watch_iterator(&mut public);
    sanitize_iterator(&mut public);
    let iterator = PollSession::default();
    let is_single_threaded = flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0;
    let inner = CqInner {
        device,
        context,
        iterator,
        ignores_overrun,
        is_single_threaded,
        asked: attr.wc_flags,
        is_at_end: AtomicBool::new(false),
        dropped: AtomicU64::new(0),
    };
    let published = object::publish(public, handle, inner);
    // No event of it can have been raised: nothing uses it yet.
    object::lookup(published)?.inner.device.set_cookie(published as u64);
    let domain = if has(IBV_CQ_INIT_ATTR_MASK_PD) { attr.parent_domain as usize } else { 0 };
    check::made_of(published, &[attr.channel as usize, domain]);
    check::numbered(published, number);
    check::sized_cq(published, (!ignores_overrun).then_some(capacity));
    Ok(published)
}

/// `ibv_resize_cq`: 0, or the errno value.
pub(crate) unsafe extern "C" fn ibv_resize_cq(cq_: *mut ibv_cq, cqe: c_int) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_resize_cq", value);
    value(
        "ibv_resize_cq",
        cq(cq_).and_then(|cq| {
            cq.inner.context.answers()?;
            // A negative number is too large for any device.
            let cqe = cqe as u32;
            let resize = || cq.inner.device.resize(cqe);
            // SAFETY: found, hence live.
            unsafe { in_turn(cq.public(), "ibv_resize_cq", resize) }?;
            // SAFETY: the object is live.
            unsafe { (&raw mut (*cq.public()).cqe).write(cq.inner.device.capacity() as c_int) };
            if !cq.inner.ignores_overrun {
                check::sized_cq(cq.public(), Some(cq.inner.device.capacity()));
            }
            Ok(())
        }),
    )
}

/// Slot of `ibv_modify_cq`: 0, or the errno value. A count or a period of 0 is no limit of its kind.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn modify_cq(
    cq_: *mut ibv_cq,
    attr: *mut ibv_modify_cq_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    value(
        "ibv_modify_cq",
        cq(cq_).and_then(|cq| {
            cq.inner.context.answers()?;
            let attr = attr.filter(|a| a.attr_mask < IBV_CQ_ATTR_RESERVED).ok_or(
                Errno::invalid("attr is NULL, or attr_mask has a bit that is no attribute"),
            )?;
            if attr.attr_mask & IBV_CQ_ATTR_MODERATE != 0 {
                let ibv_moderate_cq { cq_count: count, cq_period: period } = attr.moderate;
                cq.inner.device.moderate(Moderation { count, period })?;
            }
            Ok(())
        }),
    )
}

/// `ibv_destroy_cq`: 0, or the errno value; `EBUSY` while a QP uses it. Waits while events of it were read and not
/// acknowledged.
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq_: *mut ibv_cq) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_destroy_cq", value);
    value(
        "ibv_destroy_cq",
        cq(cq_).and_then(|cq| {
            if check::is_on() && cq.inner.device.is_overrun() {
                check::overrun(cq.public());
            }
            check::ending(cq_, activity, || Ok(cq.inner.device.destroy()?))?;
            if cq.inner.iterator.is_begun() {
                check::is_out_of_order(
                    cq_,
                    "ibv_destroy_cq is called between ibv_start_poll and ibv_end_poll",
                );
            }
            object::retire(&cq)
        }),
    )
}

/// Slot of `ibv_poll_cq`: how many completions there were, or -1.
///
/// # Safety
/// `cq` is NULL or live; `wc` has room for `entries`.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { poll_each(cq, entries, wc, |_| {}) }
}

/// As [`poll_cq`]. `see` gets each completion as the device has it.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn poll_each(
    cq: *mut ibv_cq,
    entries: c_int,
    wc: *mut ibv_wc,
    mut see: impl FnMut(&Wc),
) -> c_int {
    // SAFETY: the caller's promise.
    let cq = unsafe { deref::<ibv_cq_ex>(cq.cast()) };
    let Some((cq, entries)) =
        cq.zip(usize::try_from(entries).ok()).filter(|(_, n)| *n == 0 || !wc.is_null())
    else {
        Errno::invalid("cq or wc is NULL, or num_entries is negative").refuse("ibv_poll_cq");
        return -1;
    };
    let mut to = wc;
    let polled = cq.inner.device.poll_each(entries, |wc| {
        probes::complete(wc);
        see(wc);
        // SAFETY: the caller's promise; it is called for each of up to `entries`.
        unsafe {
            to.write(c_wc(wc));
            to = to.add(1);
        }
    });
    match polled {
        Ok(n) => n as c_int,
        Err(e) => {
            Errno::from(e).refuse(&of("ibv_poll_cq", cq));
            -1
        }
    }
}

#[inline]
fn c_wc(wc: &Wc) -> ibv_wc {
    ibv_wc {
        wr_id: wc.wr_id,
        status: wc.status as u32,
        opcode: wc.opcode as u32,
        vendor_err: wc.vendor_err,
        byte_len: wc.byte_len,
        data: ibv_wc_data { imm_data: imm(wc) },
        qp_num: wc.qpn.get(),
        src_qp: wc.src_qpn.get(),
        wc_flags: wc.flags.bits().into(),
        pkey_index: 0,
        slid: 0,
        sl: wc.sl,
        dlid_path_bits: 0,
    }
}

/// Immediate data is in network byte order; an invalidated key, in the same place, is a number of this host.
pub(crate) fn imm(wc: &Wc) -> u32 {
    if wc.flags.contains(WcFlags::WITH_INV) { wc.imm } else { wc.imm.to_be() }
}

/// Slot of `ibv_req_notify_cq`: 0, or the errno value; `EINVAL` without a completion channel.
///
/// # Safety
/// `cq` is NULL or live.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let cq = unsafe { deref::<ibv_cq_ex>(cq.cast()) };
    let Some(cq) = cq else { return Errno::NULL.refuse("ibv_req_notify_cq") };
    match cq.inner.device.req_notify(solicited_only != 0) {
        Ok(()) => 0,
        Err(e) => Errno::from(e).refuse(&of("ibv_req_notify_cq", cq)),
    }
}
