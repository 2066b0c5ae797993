//! The iterator of a completion queue: `ibv_start_poll` and the calls after it.

use std::ffi::{c_int, c_uint};

use anyverbs::WcEx;

use crate::probes;
use crate::{
    abi::*,
    errno::{Errno, give},
    object::deref,
    session::Session,
    verbs::{Cq, imm},
};

/// The completion that the program looks at, from `ibv_start_poll` to `ibv_end_poll`.
pub(crate) type PollSession = Session<WcEx>;

/// A call with its completion queue, for the log.
#[cold]
pub(super) fn of(call: &str, cq: &Cq) -> String {
    format!("{call} of CQ {}", cq.inner.device.number())
}

/// Fills the function pointers of a CQ. All are there, even those for fields that the program did not ask for. Such a
/// field reads as 0 or as the completion has it.
pub(crate) fn set_iterator(cq: &mut ibv_cq_ex) {
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_byte_len = Some(read_byte_len);
    cq.read_imm_data = Some(read_imm_data);
    cq.read_qp_num = Some(read_qp_num);
    cq.read_src_qp = Some(read_src_qp);
    cq.read_wc_flags = Some(read_wc_flags);
    cq.read_slid = Some(read_slid);
    cq.read_sl = Some(read_sl);
    cq.read_dlid_path_bits = Some(read_dlid_path_bits);
    cq.read_completion_ts = Some(read_completion_ts);
    cq.read_cvlan = Some(read_cvlan);
    cq.read_flow_tag = Some(read_flow_tag);
    cq.read_tm_info = Some(read_tm_info);
    cq.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
}

/// Takes the next completion: 0, `ENOENT` when there is none, or another errno value.
fn advance(call: &str, cq: &Cq) -> c_int {
    let next =
        cq.inner.iterator.with(|current| cq.inner.device.poll_ex(std::slice::from_mut(current)));
    match next {
        Some(Ok(1)) => {}
        Some(Ok(_)) => return libc::ENOENT,
        Some(Err(e)) => return Errno::from(e).refuse(&of(call, cq)),
        None => {
            return Errno::invalid("ibv_start_poll was not called before, by this thread")
                .refuse(call);
        }
    }
    let read = |ex: &mut WcEx| {
        probes::complete(&ex.wc);
        (ex.wc.wr_id, ex.wc.status)
    };
    if let Some((wr_id, status)) = cq.inner.iterator.with(read) {
        let public = cq.public();
        // SAFETY: the CQ is live, and its iterator this thread's.
        unsafe {
            (&raw mut (*public).wr_id).write(wr_id);
            (&raw mut (*public).status).write(status as u32);
        }
    }
    0
}

/// `ibv_start_poll`: 0 with a completion to read; `ENOENT` when there is none. Only after 0 does `ibv_end_poll` follow.
pub(super) unsafe extern "C" fn start_poll(
    cq: *mut ibv_cq_ex,
    attr: *mut ibv_poll_cq_attr,
) -> c_int {
    // SAFETY: NULL or live, by the caller's promise.
    let (cq, attr) = unsafe { (deref(cq), attr.as_ref()) };
    let Some(cq) = cq.filter(|_| attr.is_none_or(|a| a.comp_mask == 0)) else {
        return Errno::invalid("cq is NULL, or comp_mask is not 0").refuse("ibv_start_poll");
    };
    // An inherited iterator may be a thread's that this process does not have.
    if !cq.inner.iterator.begin(|| cq.inner.device.capacity() == 0) {
        return Errno::because(libc::EIO, "the completion queue was inherited across fork")
            .refuse("ibv_start_poll");
    }
    let started = advance("ibv_start_poll", cq);
    if started != 0 {
        cq.inner.iterator.end();
    }
    started
}

/// `ibv_next_poll`: as `ibv_start_poll`; `ibv_end_poll` follows in any case.
pub(super) unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: NULL or live, by the caller's promise.
    unsafe { deref(cq) }
        .map_or_else(|| Errno::NULL.refuse("ibv_next_poll"), |cq| advance("ibv_next_poll", cq))
}

/// `ibv_end_poll`.
pub(super) unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: NULL or live, by the caller's promise.
    if let Some(cq) = unsafe { deref(cq) } {
        cq.inner.iterator.end();
    }
}

/// A field of the present completion; 0 outside of an iteration.
///
/// # Safety
/// `cq` is NULL or live.
unsafe fn read<T: Default>(cq: *mut ibv_cq_ex, field: impl FnOnce(&WcEx) -> T) -> T {
    // SAFETY: the caller's promise.
    unsafe { deref(cq) }.and_then(|cq| cq.inner.iterator.with(|ex| field(ex))).unwrap_or_default()
}

macro_rules! readers {
    ($($name:ident: $type:ty = $field:expr;)*) => { $(
        pub(super) unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: NULL or live, by the caller's promise.
            unsafe { read::<$type>(cq, $field) }
        }
    )* };
}

readers! {
    read_opcode: ibv_wc_opcode = |ex| ex.wc.opcode as u32;
    read_vendor_err: u32 = |ex| ex.wc.vendor_err;
    read_byte_len: u32 = |ex| ex.wc.byte_len;
    read_imm_data: u32 = |ex| imm(&ex.wc);
    read_qp_num: u32 = |ex| ex.wc.qpn.get();
    read_src_qp: u32 = |ex| ex.wc.src_qpn.get();
    read_wc_flags: c_uint = |ex| ex.wc.flags.bits().into();
    read_sl: u8 = |ex| ex.wc.sl;
    read_completion_ts: u64 = |ex| ex.detail.timestamp;
    read_completion_wallclock_ns: u64 = |ex| ex.detail.wallclock;
    // RoCE has no LIDs.
    read_slid: u32 = |_| 0;
    read_dlid_path_bits: u8 = |_| 0;
    // Fields of raw packets.
    read_cvlan: u16 = |ex| ex.wc.cvlan();
    read_flow_tag: u32 = |ex| ex.wc.flow_tag();
}

unsafe extern "C" fn read_tm_info(cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    if !info.is_null() {
        // SAFETY: NULL or live, by the caller's promise.
        let tm = unsafe { read(cq, |ex| ex.detail.tm) };
        // SAFETY: the program gives a writable place.
        unsafe { give(info, ibv_wc_tm_info { tag: tm.tag, r#priv: tm.user_data }) };
    }
}
