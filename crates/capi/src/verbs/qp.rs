//! Queue pairs: create, modify, query, destroy. Posting is in `post.rs` and `wr.rs`.

use std::{
    ffi::{c_int, c_uint, c_void},
    fmt, ptr,
    sync::Arc,
};

use anyverbs::{
    ModifyError, Mtu, Psn, QKey, QpAttr, QpAttrMask, QpCap, QpInitAttr, QpState, QpType, Qpn,
    RateLimit, XrcSendInitAttr, error::ModifyObjectError, limits::bound, persona::Feature,
    raw::RawQp,
};
use anyverbs_sanitizers as sanitizers;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, give, no_value, pointer, say, say_once, value},
    faults,
    object::{self, Object},
    verbs::{
        ATOMIC_OPS, Batch, Context, Pd, RawExtras, Srq, Xrcd, ah_attr, c_ah_attr, context, cq_of,
        create_hash, create_raw, modify_raw, offered, qp_access,
        sanitized::sanitize_sends,
        set_send_ops,
        watched::{activity, ends_in_row, look_at_drops, watch_sends},
    },
};

pub(crate) type Qp = Object<ibv_qp_ex>;

/// The device's queue pair.
pub(crate) enum Device {
    /// A queue pair with a transport: RC, UC, UD, XRC.
    Transport(anyverbs::Qp),
    /// RAW_PACKET.
    Raw(RawQp),
}

impl Device {
    /// The one with a transport; `EINVAL` for a raw one.
    #[inline]
    pub(crate) fn transport(&self) -> Result<&anyverbs::Qp, Errno> {
        match self {
            Self::Transport(qp) => Ok(qp),
            Self::Raw(_) => Err(Errno::invalid("a raw packet queue pair does not have it")),
        }
    }

    pub(crate) fn qpn(&self) -> Qpn {
        match self {
            Self::Transport(qp) => qp.qpn(),
            Self::Raw(qp) => qp.qpn(),
        }
    }

    /// Attributes, sizes and type.
    pub(crate) fn query(&self) -> Result<(QpAttr, QpCap, ibv_qp_type), Errno> {
        Ok(match self {
            Self::Transport(qp) => {
                let (attr, init) = qp.query()?;
                (attr, init.cap, init.qp_type as u32)
            }
            Self::Raw(qp) => {
                let (attr, cap) = qp.query()?;
                (attr, cap, IBV_QPT_RAW_PACKET)
            }
        })
    }

    /// Tells whether it is in SQD and sends still wait. Raw packets never wait.
    fn is_draining(&self) -> Result<bool, Errno> {
        match self {
            Self::Transport(qp) => Ok(qp.is_draining()?),
            Self::Raw(_) => Ok(false),
        }
    }

    pub(crate) fn state(&self) -> Result<QpState, Errno> {
        Ok(self.query()?.0.state)
    }

    fn set_cookie(&self, cookie: u64) {
        match self {
            Self::Transport(qp) => qp.set_cookie(cookie),
            Self::Raw(qp) => qp.set_cookie(cookie),
        }
    }

    pub(crate) fn ack_async_events(&self, n: u32) {
        match self {
            Self::Transport(qp) => qp.ack_async_events(n),
            Self::Raw(qp) => qp.ack_async_events(n),
        }
    }

    fn destroy(&self) -> Result<(), Errno> {
        match self {
            Self::Transport(qp) => Ok(qp.destroy()?),
            Self::Raw(qp) => Ok(qp.destroy()?),
        }
    }
}

/// The device's part of a QP.
pub(crate) struct QpInner {
    pub(crate) device: Device,
    /// None for raw packets.
    pub(crate) qp_type: Option<QpType>,
    /// For `ibv_wr_start` and the calls after it; with `IBV_QP_INIT_ATTR_SEND_OPS_FLAGS` only.
    pub(crate) batch: Option<Batch>,
    created: Created,
    pub(crate) context: Arc<Context>,
}

/// The program's attributes at creation, which `ibv_query_qp` gives back. Pointers are not followed.
#[derive(Clone, Copy)]
struct Created {
    qp_context: usize,
    send_cq: usize,
    recv_cq: usize,
    srq: usize,
    sq_sig_all: c_int,
}

/// The QP behind a program's pointer.
pub(crate) fn qp(pointer: *mut ibv_qp) -> Result<Arc<Qp>, Errno> {
    object::find(pointer.cast())
}

/// The transport type of an integer from C: `EOPNOTSUPP` for one that the device does not have, or that has no transport.
pub(crate) fn qp_type(qp_type: ibv_qp_type) -> Result<QpType, Errno> {
    match qp_type {
        IBV_QPT_RC => Ok(QpType::Rc),
        IBV_QPT_UC => Ok(QpType::Uc),
        IBV_QPT_UD => Ok(QpType::Ud),
        IBV_QPT_XRC_SEND => Ok(QpType::XrcSend),
        IBV_QPT_XRC_RECV => Ok(QpType::XrcRecv),
        IBV_QPT_RAW_PACKET | IBV_QPT_DRIVER => Err(Errno::lacks(
            "qp_type is IBV_QPT_DRIVER, or IBV_QPT_RAW_PACKET in a call that takes none",
        )),
        _ => {
            let what = format_args!("qp_type is {qp_type}, which is no type of a queue pair");
            Err(no_value(&what))
        }
    }
}

pub(crate) fn cap(cap: &ibv_qp_cap) -> QpCap {
    QpCap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

pub(crate) fn c_cap(cap: &QpCap) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// `ibv_create_qp`: NULL with `errno` on failure. The actual sizes go to `init->cap`.
///
/// # Safety
/// `init` is NULL, or readable and writable.
pub(crate) unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    faults::may_fail!("ibv_create_qp", pointer);
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_qp");
    sanitizers::initialised(init);
    // SAFETY: the caller's promise.
    let init = unsafe { init.as_mut() };
    pointer("ibv_create_qp", init.ok_or(Errno::NULL).and_then(|init| create(pd, init, None)))
}

/// Slot of `ibv_create_qp_ex`: as `ibv_create_qp`, with `PD`, `XRCD`, `SEND_OPS_FLAGS` and, of `CREATE_FLAGS`,
/// `BLOCK_SELF_MCAST_LB` (UD, RAW_PACKET); for RAW_PACKET also `SCATTER_FCS`, `CVLAN_STRIPPING`, `MAX_TSO_HEADER`, and
/// `IND_TABLE` with `RX_HASH`; `EOPNOTSUPP` for other extensions unless they ask for nothing.
///
/// # Safety
/// `attr` is NULL, or readable and writable; its hash key is as long as it says.
pub(crate) unsafe extern "C" fn create_qp_ex(
    context_: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    faults::may_fail!("ibv_create_qp", pointer);
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_qp_ex");
    sanitizers::initialised(attr);
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_mut() };
    pointer("ibv_create_qp_ex", attr.ok_or(Errno::NULL).and_then(|attr| {
        let context = context(context_)?;
        let mask = attr.comp_mask;
        let has = |bit| mask & bit != 0;
        let known = (IBV_QP_INIT_ATTR_SEND_OPS_FLAGS << 1) - 1;
        // A target is made of an XRC domain, all others of a protection domain.
        let target = attr.qp_type == IBV_QPT_XRC_RECV;
        let domain = if target { IBV_QP_INIT_ATTR_XRCD } else { IBV_QP_INIT_ATTR_PD };
        if mask & !known != 0 || !has(domain) || (!target && has(IBV_QP_INIT_ATTR_XRCD)) {
            return Err(Errno::invalid("comp_mask lacks the domain of this type of queue pair, or has a bit that is not known here"));
        }
        if !target {
            let pd: Arc<Pd> = object::find(attr.pd)?;
            if !Arc::ptr_eq(&pd.inner.context, &context) {
                return Err(Errno::OTHER_CONTEXT);
            }
        }
        let flags = if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) { attr.create_flags } else { 0 };
        let spreads = has(IBV_QP_INIT_ATTR_IND_TABLE);
        if attr.qp_type == IBV_QPT_RAW_PACKET {
            let send_ops = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(attr.send_ops_flags);
            if spreads != has(IBV_QP_INIT_ATTR_RX_HASH) {
                return Err(Errno::invalid("IBV_QP_INIT_ATTR_IND_TABLE and IBV_QP_INIT_ATTR_RX_HASH go together"));
            }
            if spreads && send_ops.is_none_or(|ops| ops == 0) {
                // SAFETY: the caller's promise.
                return unsafe { create_hash(&context, attr, flags) };
            }
            if spreads {
                return Err(Errno::lacks("send_ops_flags is set, and a queue pair with an indirection table sends nothing"));
            }
            let mut init = plain(attr);
            let tso = has(IBV_QP_INIT_ATTR_MAX_TSO_HEADER);
            let max_tso_header = if tso { attr.max_tso_header } else { 0 };
            let extras = RawExtras { create_flags: flags, max_tso_header, send_ops };
            let created = create_raw(attr.pd, &mut init, extras)?;
            attr.cap = init.cap;
            return Ok(created);
        }
        let block_own = flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0;
        let asks = flags & !IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0
            || has(IBV_QP_INIT_ATTR_MAX_TSO_HEADER) && attr.max_tso_header != 0;
        if asks || spreads || has(IBV_QP_INIT_ATTR_RX_HASH) {
            return Err(Errno::lacks("create_flags, max_tso_header, rwq_ind_tbl or rx_hash_conf asks for what this type of queue pair does not have"));
        }
        if block_own && attr.qp_type != IBV_QPT_UD {
            return Err(Errno::invalid("IBV_QP_CREATE_BLOCK_SELF_MCAST_LB is for queue pairs of type UD"));
        }
        let ops = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(attr.send_ops_flags);
        if target {
            if ops.is_some_and(|ops| ops != 0) {
                return Err(Errno::lacks("send_ops_flags is set, and a target of XRC sends nothing"));
            }
            let created = create_target(&context, attr)?;
            attr.cap = c_cap(&QpCap::default());
            return Ok(created);
        }
        let mut init = plain(attr);
        let created = create(attr.pd, &mut init, ops)?;
        if block_own {
            qp(created)?.inner.device.transport()?.block_own_multicast();
        }
        attr.cap = init.cap;
        Ok(created)
    }))
}

/// The fields that `ibv_create_qp` has, too.
fn plain(attr: &ibv_qp_init_attr_ex) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    }
}

fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    send_ops: Option<u64>,
) -> Result<*mut ibv_qp, Errno> {
    if init.qp_type == IBV_QPT_RAW_PACKET {
        return create_raw(pd, init, RawExtras { send_ops, ..RawExtras::default() });
    }
    let pd: Arc<Pd> = object::find(pd)?;
    let qp_type = qp_type(init.qp_type)?;
    if qp_type == QpType::XrcRecv {
        // An XRC target is made of an XRC domain.
        return Err(Errno::invalid(
            "a target of XRC is made of an XRC domain, by ibv_create_qp_ex",
        ));
    }
    if !init.srq.is_null() && !matches!(qp_type, QpType::Rc | QpType::Ud) {
        return Err(Errno::invalid("an SRQ goes with queue pairs of type RC and UD alone"));
    }
    // An initiator has no receives: the queue for them is not looked at.
    let receives = qp_type.has_responder();
    let send_cq = cq_of("send_cq", init.send_cq)?;
    let recv_cq = if receives { Some(cq_of("recv_cq", init.recv_cq)?) } else { None };
    let srq: Option<Arc<Srq>> =
        if init.srq.is_null() || !receives { None } else { Some(object::find(init.srq)?) };
    let context = Arc::clone(&pd.inner.context);
    if [&send_cq.inner.context]
        .into_iter()
        .chain(recv_cq.as_ref().map(|cq| &cq.inner.context))
        .chain(srq.as_ref().map(|s| &s.inner.context))
        .any(|c| !Arc::ptr_eq(c, &context))
    {
        return Err(Errno::OTHER_CONTEXT);
    }
    if send_ops.is_some_and(|ops| ops & !offered(qp_type) != 0) {
        return Err(Errno::lacks(
            "send_ops_flags has an operation that this type of queue pair does not have",
        ));
    }
    if send_ops.is_some_and(|ops| ops & ATOMIC_OPS != 0) {
        context.inner.device.offers(Feature::Atomics)?;
    }
    let sq_sig_all = init.sq_sig_all != 0;
    let device = match &recv_cq {
        Some(recv_cq) => context.inner.device.create_qp(
            &pd.inner.device,
            &QpInitAttr {
                send_cq: &send_cq.inner.device,
                recv_cq: &recv_cq.inner.device,
                srq: srq.as_ref().map(|s| &s.inner.device),
                cap: cap(&init.cap),
                qp_type,
                sq_sig_all,
                cookie: 0,
            },
        )?,
        None => context.inner.device.create_xrc_send_qp(
            &pd.inner.device,
            &XrcSendInitAttr {
                send_cq: &send_cq.inner.device,
                cap: cap(&init.cap),
                sq_sig_all,
                cookie: 0,
            },
        )?,
    };
    let actual = device.cap();
    let batch = send_ops.map(|ops| Batch::new(ops, &actual));
    init.cap = c_cap(&actual);
    publish_qp(Device::Transport(device), Some(qp_type), batch, Some(&pd), init, context)
}

/// Makes a target of an extended reliable connection. It has no protection domain and no queues of its own.
fn create_target(context: &Arc<Context>, attr: &ibv_qp_init_attr_ex) -> Result<*mut ibv_qp, Errno> {
    let xrcd = xrcd(context, attr.xrcd)?;
    let device = xrcd.inner.device.create_qp(0)?;
    publish_target(device, attr.qp_context, context, attr.xrcd)
}

/// An XRC domain of this context.
fn xrcd(context: &Arc<Context>, xrcd: *mut ibv_xrcd) -> Result<Arc<Xrcd>, Errno> {
    let xrcd: Arc<Xrcd> = object::find(xrcd)?;
    if Arc::ptr_eq(&xrcd.inner.context, context) { Ok(xrcd) } else { Err(Errno::OTHER_CONTEXT) }
}

/// Slot of `ibv_open_qp`: NULL with `errno` on failure. `EINVAL` unless the domain has a target of that number, in whichever
/// process, `ETIMEDOUT` if that process does not answer.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn open_qp(
    context_: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_open_qp");
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_open_qp",
        context(context_).and_then(|context| {
            let attr = attr.ok_or(Errno::NULL)?;
            if attr.comp_mask >= IBV_QP_OPEN_ATTR_RESERVED {
                return Err(Errno::lacks("comp_mask has a bit that is not known here"));
            }
            let has = |bits| attr.comp_mask & bits == bits;
            let needs = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
            if !has(needs) || attr.qp_type != IBV_QPT_XRC_RECV || attr.qp_num > 0xff_ffff {
                return Err(Errno::invalid(
                    "comp_mask, qp_type or qp_num does not name a target of XRC",
                ));
            }
            let device =
                xrcd(&context, attr.xrcd)?.inner.device.open_qp(Qpn::new(attr.qp_num), None)?;
            let cookie = has(IBV_QP_OPEN_ATTR_CONTEXT).then_some(attr.qp_context);
            publish_target(device, cookie.unwrap_or(ptr::null_mut()), &context, attr.xrcd)
        }),
    )
}

fn publish_target(
    device: anyverbs::Qp,
    qp_context: *mut c_void,
    context: &Arc<Context>,
    xrcd: *const ibv_xrcd,
) -> Result<*mut ibv_qp, Errno> {
    let init = ibv_qp_init_attr {
        qp_context,
        send_cq: ptr::null_mut(),
        recv_cq: ptr::null_mut(),
        srq: ptr::null_mut(),
        cap: c_cap(&QpCap::default()),
        qp_type: IBV_QPT_XRC_RECV,
        sq_sig_all: 0,
    };
    let device = Device::Transport(device);
    let context = Arc::clone(context);
    let target = publish_qp(device, Some(QpType::XrcRecv), None, None, &init, context)?;
    check::made_of(target, &[xrcd as usize]);
    Ok(target)
}

/// Gives a queue pair to the program.
pub(crate) fn publish_qp(
    device: Device,
    qp_type: Option<QpType>,
    batch: Option<Batch>,
    pd: Option<&Pd>,
    init: &ibv_qp_init_attr,
    context: Arc<Context>,
) -> Result<*mut ibv_qp, Errno> {
    let handle = object::new_handle();
    // SAFETY: integers, NULL pointers, empty slots, and a mutex and condition that zeros initialise.
    let mut public: ibv_qp_ex = unsafe { std::mem::zeroed() };
    public.qp_base.context = context.pointer();
    public.qp_base.qp_context = init.qp_context;
    public.qp_base.pd = pd.map_or(ptr::null_mut(), Pd::public);
    public.qp_base.send_cq = init.send_cq;
    public.qp_base.recv_cq = init.recv_cq;
    public.qp_base.srq = init.srq;
    public.qp_base.handle = handle;
    public.qp_base.qp_num = device.qpn().get();
    public.qp_base.state = device.state()? as u32;
    public.qp_base.qp_type = init.qp_type;
    set_send_ops(&mut public);
    watch_sends(&mut public);
    sanitize_sends(&mut public);
    let created = Created {
        qp_context: init.qp_context as usize,
        send_cq: init.send_cq as usize,
        recv_cq: init.recv_cq as usize,
        srq: init.srq as usize,
        sq_sig_all: init.sq_sig_all,
    };
    let published =
        object::publish(public, handle, QpInner { device, qp_type, batch, created, context });
    let device = &object::lookup(published)?.inner.device;
    device.set_cookie(published as u64);
    check::made_qp(
        published.cast(),
        pd.map_or(ptr::null(), |pd| pd.public().cast_const()),
        init,
        device.qpn().get(),
    );
    Ok(published.cast())
}

/// `ibv_qp_to_qp_ex`: NULL unless the QP was created with send operations.
pub(crate) unsafe extern "C" fn ibv_qp_to_qp_ex(qp_: *mut ibv_qp) -> *mut ibv_qp_ex {
    let _uncancelled = Uncancelled::new();
    pointer(
        "ibv_qp_to_qp_ex",
        qp(qp_).and_then(|qp| {
            if qp.inner.batch.is_some() {
                Ok(qp.public())
            } else {
                Err(Errno::invalid(
                    "the queue pair was made without IBV_QP_INIT_ATTR_SEND_OPS_FLAGS",
                ))
            }
        }),
    )
}

/// `ibv_destroy_qp`: 0, or the errno value. Waits while events of it were read and not acknowledged.
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp_: *mut ibv_qp) -> c_int {
    let _uncancelled = Uncancelled::new();
    faults::may_fail!("ibv_destroy_qp", value);
    destroy_qp(qp_)
}

/// The same for librdmacm, which a program does not see to call it.
pub(crate) fn destroy_qp(qp_: *mut ibv_qp) -> c_int {
    value(
        "ibv_destroy_qp",
        qp(qp_).and_then(|qp| {
            look_at_drops(&qp);
            check::ending(qp_, activity, || qp.inner.device.destroy())?;
            ends_in_row(&qp);
            object::retire(&qp)
        }),
    )
}

/// The attributes that `mask` names, each checked.
fn qp_attr(context: &Context, attr: &ibv_qp_attr, mask: QpAttrMask) -> Result<QpAttr, Errno> {
    let has = |bit| mask.contains(bit);
    let state = |code| {
        QpState::from_code(code).ok_or_else(|| {
            no_attribute(&format_args!("a state of the queue pair is {}", code.cast_signed()))
        })
    };
    let mut to = QpAttr {
        en_sqd_async_notify: attr.en_sqd_async_notify != 0,
        pkey_index: attr.pkey_index,
        port: attr.port_num,
        qkey: QKey(attr.qkey),
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        rq_psn: Psn::new(attr.rq_psn),
        max_rd_atomic: attr.max_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        sq_psn: Psn::new(attr.sq_psn),
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        rate_limit: attr.rate_limit,
        ..QpAttr::default()
    };
    if has(QpAttrMask::STATE) {
        to.state = state(attr.qp_state)?;
    }
    if has(QpAttrMask::CUR_STATE) {
        to.cur_state = state(attr.cur_qp_state)?;
    }
    if has(QpAttrMask::PATH_MTU) {
        to.path_mtu = Mtu::from_code(attr.path_mtu)
            .ok_or_else(|| no_attribute(&format_args!("path_mtu is {}", attr.path_mtu)))?;
    }
    if has(QpAttrMask::ACCESS_FLAGS) {
        let flags = attr.qp_access_flags;
        let refused = |_| no_attribute(&format_args!("qp_access_flags is {flags:#x}"));
        to.access = qp_access(flags).map_err(refused)?;
    }
    if has(QpAttrMask::DEST_QPN) {
        let number = attr.dest_qp_num;
        if number > 0xff_ffff {
            let what =
                format_args!("dest_qp_num is {number:#x}, and a queue pair number has 24 bits");
            return Err(no_value(&what));
        }
        to.dest_qpn = Qpn::new(number);
    }
    if has(QpAttrMask::AV) {
        to.av = context.inner.device.resolve(&ah_attr(&attr.ah_attr))?;
    }
    Ok(to)
}

/// Attributes that programs give to either end of an extended reliable connection as they would to a reliable one.
/// Linux' user verbs ignore those that the end has no use for.
fn pointless(qp_type: Option<QpType>) -> QpAttrMask {
    match qp_type {
        Some(QpType::XrcSend) => QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER,
        Some(QpType::XrcRecv) => {
            QpAttrMask::MAX_QP_RD_ATOMIC | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY
        }
        _ => QpAttrMask::empty(),
    }
}

/// `ibv_modify_qp`: 0, or the errno value; after a failure nothing is changed.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_modify_qp(
    qp_: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    faults::may_fail!("ibv_modify_qp", value);
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_modify_qp");
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    value(
        "ibv_modify_qp",
        qp(qp_).and_then(|qp| {
            let attr = attr.ok_or(Errno::NULL)?;
            let mask = attr_mask(mask as c_uint)?;
            let mask = mask.difference(pointless(qp.inner.qp_type));
            if mask.contains(QpAttrMask::STATE) && attr.qp_state == IBV_QPS_RESET {
                look_at_drops(&qp);
            }
            match &qp.inner.device {
                Device::Transport(device) => {
                    let attr = qp_attr(&qp.inner.context, attr, mask)?;
                    let refused = |error| refused(&qp.inner.context, device.qpn(), &attr, error);
                    device.modify(&attr, mask).map_err(refused)?;
                }
                Device::Raw(device) => modify_raw(device, attr, mask)?,
            }
            if mask.contains(QpAttrMask::STATE) {
                set_state(
                    &qp,
                    QpState::from_code(attr.qp_state)
                        .ok_or(Errno::invalid("qp_state is no state"))?,
                );
                if attr.qp_state == IBV_QPS_RESET {
                    check::reset(qp_);
                }
            }
            if mask.contains(QpAttrMask::DEST_QPN) {
                check::connected(qp_, attr.dest_qp_num);
            }
            Ok(())
        }),
    )
}

/// The bits of a mask; `EINVAL` if one is of no attribute.
fn attr_mask(bits: c_uint) -> Result<QpAttrMask, Errno> {
    let unknown = bits & !QpAttrMask::all().bits();
    QpAttrMask::from_bits(bits).ok_or_else(|| {
        let what =
            format_args!("attr_mask is {bits:#x}, and no attribute has the bits {unknown:#x}");
        no_value(&what)
    })
}

/// Says that an attribute has no such value.
#[cold]
fn no_attribute(what: &dyn fmt::Display) -> Errno {
    no_value(&format_args!("{what}, which is no value of it"))
}

/// The source of the largest path MTU of a path.
#[cold]
fn largest_mtu(context: &Context, attr: &QpAttr) -> String {
    let device = &context.inner.device;
    let number = attr.av.port;
    let most = device.port_attr(number).map(|port| port.max_mtu);
    match most.ok().filter(|most| attr.path_mtu > *most) {
        None => "the interface takes".to_owned(),
        Some(most) => format!(
            "mtu = {} of port {number} of device {} in the configuration file",
            most.bytes(),
            device.name().unwrap_or_default()
        ),
    }
}

/// Says why a modify was refused.
#[cold]
fn refused(context: &Context, qpn: Qpn, attr: &QpAttr, error: ModifyObjectError) -> Errno {
    let mut values = String::new();
    if let ModifyObjectError::Qp(ModifyError::Value(bits)) = error {
        values = format!(" ({})", attr.values(bits, &largest_mtu(context, attr)));
        for (bit, what, value) in [
            (QpAttrMask::MAX_QP_RD_ATOMIC, "max_rd_atomic", attr.max_rd_atomic),
            (QpAttrMask::MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", attr.max_dest_rd_atomic),
        ] {
            let within = context.inner.device.within(what, value.into(), bound!(max_qp_rd_atom));
            let Err(beyond) = within else { continue };
            if bits.contains(bit) {
                values = values.replace(&format!("{what} {value}"), &beyond.to_string());
                if let Some(lacks) = beyond.lacks() {
                    check::refused_by_persona(lacks, &beyond);
                }
            }
        }
    }
    let what = format!("ibv_modify_qp of queue pair {:#08x}: ", qpn.get());
    if error.cause().is_none() && error.errno() == libc::EOPNOTSUPP {
        say_once(&format!("refused: {what}{error}{values}; see `anyverbs explain EOPNOTSUPP`"));
    } else {
        say(&what, &format_args!("{error}{values}"), error.cause());
    }
    Errno::said(error.errno())
}

/// Slot of `ibv_modify_qp_rate_limit`: 0, or the errno value. A rate of 0 ends the limit.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn modify_qp_rate_limit(
    qp_: *mut ibv_qp,
    attr: *mut ibv_qp_rate_limit_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    value(
        "ibv_modify_qp_rate_limit",
        qp(qp_).and_then(|qp| {
            qp.inner.context.answers()?;
            let attr = attr
                .filter(|a| a.comp_mask == 0)
                .ok_or(Errno::invalid("attr is NULL, or comp_mask is not 0"))?;
            let limit = RateLimit {
                kbps: attr.rate_limit,
                max_burst: attr.max_burst_sz,
                typical_packet: attr.typical_pkt_sz,
            };
            match &qp.inner.device {
                Device::Transport(qp) => qp.limit_rate(&limit)?,
                Device::Raw(qp) => qp.limit_rate(&limit)?,
            }
            Ok(())
        }),
    )
}

pub(crate) fn set_state(qp: &Qp, state: QpState) {
    // SAFETY: the object is live.
    unsafe { (&raw mut (*qp.public()).qp_base.state).write(state as u32) };
}

/// `ibv_query_qp`: 0, or the errno value. All attributes are given, for any mask.
///
/// # Safety
/// `attr` and `init` are NULL or writable.
pub(crate) unsafe extern "C" fn ibv_query_qp(
    qp_: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_query_qp",
        qp(qp_).and_then(|qp| {
            qp.inner.context.answers()?;
            if attr.is_null() || init.is_null() {
                return Err(Errno::NULL);
            }
            let (now, cap, qp_type) = qp.inner.device.query()?;
            let is_draining = qp.inner.device.is_draining()?;
            let created = &qp.inner.created;
            let cap = c_cap(&cap);
            set_state(&qp, now.state);
            // SAFETY: the caller's promise.
            unsafe {
                give(attr, ibv_qp_attr { sq_draining: is_draining.into(), ..c_qp_attr(&now, cap) });
                give(
                    init,
                    ibv_qp_init_attr {
                        qp_context: ptr::with_exposed_provenance_mut(created.qp_context),
                        send_cq: ptr::with_exposed_provenance_mut(created.send_cq),
                        recv_cq: ptr::with_exposed_provenance_mut(created.recv_cq),
                        srq: ptr::with_exposed_provenance_mut(created.srq),
                        cap,
                        qp_type,
                        sq_sig_all: created.sq_sig_all,
                    },
                );
            }
            Ok(())
        }),
    )
}

pub(crate) fn c_qp_attr(attr: &QpAttr, cap: ibv_qp_cap) -> ibv_qp_attr {
    // SAFETY: integers and GIDs; fields without a meaning here (alternate path) stay 0.
    let mut c: ibv_qp_attr = unsafe { std::mem::zeroed() };
    c.qp_state = attr.state as u32;
    c.cur_qp_state = attr.cur_state as u32;
    c.path_mtu = attr.path_mtu as u32;
    c.path_mig_state = IBV_MIG_MIGRATED;
    c.qkey = attr.qkey.0;
    c.rq_psn = attr.rq_psn.get();
    c.sq_psn = attr.sq_psn.get();
    c.dest_qp_num = attr.dest_qpn.get();
    c.qp_access_flags = attr.access.bits();
    c.cap = cap;
    c.ah_attr = c_ah_attr(&attr.av);
    c.pkey_index = attr.pkey_index;
    c.en_sqd_async_notify = attr.en_sqd_async_notify.into();
    c.max_rd_atomic = attr.max_rd_atomic;
    c.max_dest_rd_atomic = attr.max_dest_rd_atomic;
    c.min_rnr_timer = attr.min_rnr_timer;
    c.port_num = attr.port;
    c.timeout = attr.timeout;
    c.retry_cnt = attr.retry_cnt;
    c.rnr_retry = attr.rnr_retry;
    c.rate_limit = attr.rate_limit;
    c
}

/// `ibv_query_qp_data_in_order`: 0, no promise. A retransmission may overwrite data that already lies in a buffer.
pub(crate) unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _op: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    0
}
