//! Shared receive queues.

use std::{ffi::c_int, sync::Arc};

use anyverbs::{SrqInitAttr, TmSrqInitAttr};
use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, give, no_value, pointer, value},
    faults,
    object::{self, Object},
    verbs::{Context, Cq, Pd, Xrcd, context, cq, watched::activity},
};

pub(crate) type Srq = Object<ibv_srq>;

/// The device's part of an SRQ.
pub(crate) struct SrqInner {
    pub(crate) device: anyverbs::Srq,
    pub(crate) context: Arc<Context>,
}

/// `ibv_create_srq`: NULL with `errno` on failure. The actual sizes go to `init->attr`.
///
/// # Safety
/// `init` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn ibv_create_srq(
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    faults::may_fail!("ibv_create_srq", pointer);
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_srq");
    sanitizers::initialised(init);
    // SAFETY: the caller's promise.
    let init = unsafe { init.as_mut() };
    pointer(
        "ibv_create_srq",
        init.ok_or(Errno::NULL).and_then(|init| create(pd, init, &Kind::Basic)),
    )
}

/// Slot of `ibv_create_srq_ex`: NULL with `errno` on failure.
///
/// # Safety
/// `attr` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn create_srq_ex(
    context_: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    faults::may_fail!("ibv_create_srq", pointer);
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_srq_ex");
    sanitizers::initialised(attr);
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_mut() };
    pointer(
        "ibv_create_srq_ex",
        attr.ok_or(Errno::NULL).and_then(|attr| {
            context(context_)?;
            let has = |bit| attr.comp_mask & bit != 0;
            let srq_type = if has(IBV_SRQ_INIT_ATTR_TYPE) { attr.srq_type } else { IBV_SRQT_BASIC };
            if attr.comp_mask >= IBV_SRQ_INIT_ATTR_RESERVED || srq_type > IBV_SRQT_TM {
                return Err(Errno::invalid(
                    "comp_mask has a bit that is not known here, or srq_type is no type",
                ));
            }
            let mut needs = IBV_SRQ_INIT_ATTR_PD;
            match srq_type {
                IBV_SRQT_BASIC => {}
                IBV_SRQT_XRC => needs |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
                _ => needs |= IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
            }
            if attr.comp_mask & !IBV_SRQ_INIT_ATTR_TYPE != needs {
                return Err(Errno::invalid(
                    "comp_mask does not have the bits that this type of SRQ needs",
                ));
            }
            let kind = match srq_type {
                IBV_SRQT_BASIC => Kind::Basic,
                IBV_SRQT_XRC => Kind::Xrc(object::find(attr.xrcd)?, cq(attr.cq)?),
                _ => Kind::Tm(attr.tm_cap, cq(attr.cq)?),
            };
            let mut init = ibv_srq_init_attr { srq_context: attr.srq_context, attr: attr.attr };
            let created = create(attr.pd, &mut init, &kind)?;
            attr.attr = init.attr;
            Ok(created)
        }),
    )
}

/// The parts of an SRQ beside its receives.
enum Kind {
    Basic,
    Xrc(Arc<Xrcd>, Arc<Cq>),
    Tm(ibv_tm_cap, Arc<Cq>),
}

fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_srq_init_attr,
    kind: &Kind,
) -> Result<*mut ibv_srq, Errno> {
    let pd: Arc<Pd> = object::find(pd)?;
    let sizes = SrqInitAttr { max_wr: init.attr.max_wr, max_sge: init.attr.max_sge, cookie: 0 };
    let own = |context| {
        if Arc::ptr_eq(context, &pd.inner.context) { Ok(()) } else { Err(Errno::OTHER_CONTEXT) }
    };
    let device = match kind {
        Kind::Basic => pd.inner.device.create_srq(&sizes)?,
        Kind::Xrc(xrcd, cq) => {
            own(&xrcd.inner.context)?;
            own(&cq.inner.context)?;
            xrcd.inner.device.create_srq(&pd.inner.device, &cq.inner.device, &sizes)?
        }
        Kind::Tm(cap, cq) => {
            own(&cq.inner.context)?;
            pd.inner.device.create_tm_srq(&TmSrqInitAttr {
                srq: sizes,
                cq: &cq.inner.device,
                max_num_tags: cap.max_num_tags,
                max_ops: cap.max_ops,
            })?
        }
    };
    let actual = device.attr();
    let handle = object::new_handle();
    let context = Arc::clone(&pd.inner.context);
    // SAFETY: integers, NULL pointers, and a mutex and condition that zeros initialise.
    let mut public: ibv_srq = unsafe { std::mem::zeroed() };
    public.context = context.pointer();
    public.srq_context = init.srq_context;
    public.pd = pd.public();
    public.handle = handle;
    let published = object::publish(public, handle, SrqInner { device, context });
    object::lookup(published)?.inner.device.set_cookie(published as u64);
    let (queue, domain) = match kind {
        Kind::Basic => (0, 0),
        Kind::Xrc(xrcd, cq) => (cq.public() as usize, xrcd.public() as usize),
        Kind::Tm(_, cq) => (cq.public() as usize, 0),
    };
    check::made_of(published, &[pd.public() as usize, queue, domain]);
    if queue != 0 {
        check::unwatch(published);
    }
    init.attr.max_wr = actual.max_wr;
    init.attr.max_sge = actual.max_sge;
    Ok(published)
}

/// `ibv_modify_srq`: 0, or the errno value; after a failure nothing is changed.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    value(
        "ibv_modify_srq",
        object::find(srq).and_then(|srq: Arc<Srq>| {
            srq.inner.context.answers()?;
            let attr = attr.ok_or(Errno::NULL)?;
            let mask = mask as u32;
            let unknown = mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT);
            if unknown != 0 {
                return Err(no_value(&format_args!(
                    "srq_attr_mask is {mask:#x}, and no attribute has the bits {unknown:#x}"
                )));
            }
            let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
            let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
            Ok(srq.inner.device.modify(max_wr, limit)?)
        }),
    )
}

/// `ibv_query_srq`: 0, or the errno value.
///
/// # Safety
/// `attr` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_query_srq",
        object::find(srq).and_then(|srq: Arc<Srq>| {
            srq.inner.context.answers()?;
            if attr.is_null() {
                return Err(Errno::NULL);
            }
            let now = srq.inner.device.attr();
            let c = ibv_srq_attr { max_wr: now.max_wr, max_sge: now.max_sge, srq_limit: now.limit };
            // SAFETY: the caller's promise.
            unsafe { give(attr, c) };
            Ok(())
        }),
    )
}

/// Slot of `ibv_get_srq_num`: 0, or the errno value; `EOPNOTSUPP` unless the SRQ is of type XRC.
///
/// # Safety
/// `num` is NULL or writable.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, num: *mut u32) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_get_srq_num",
        object::find(srq).and_then(|srq: Arc<Srq>| {
            let number =
                srq.inner.device.number().ok_or(Errno::lacks("the SRQ is not of type XRC"))?;
            if num.is_null() {
                return Err(Errno::NULL);
            }
            // SAFETY: the caller's promise.
            unsafe { give(num, number) };
            Ok(())
        }),
    )
}

/// `ibv_destroy_srq`: 0, or the errno value; `EBUSY` while a QP uses it. Waits while events of it were read and not
/// acknowledged.
pub(crate) unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_destroy_srq", value);
    value(
        "ibv_destroy_srq",
        object::find(srq).and_then(|srq: Arc<Srq>| {
            check::ending(srq.public(), activity, || Ok(srq.inner.device.destroy()?))?;
            object::retire(&srq)
        }),
    )
}
