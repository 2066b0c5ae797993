//! Tests on a stand-in for libibverbs: it gives answers that are hard to get from a real one.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::slice;
use std::sync::LazyLock;

use anyverbs_objects::error::PostError;
use anyverbs_objects::memory::copy_guarded;
use anyverbs_proto::qp::PostSendError;
use anyverbs_proto::wr::{RemoteAddr, SendFlags, SendOp, SendWr, Sge};

use super::*;
use crate::ordinary::QpExt as _;
use crate::verbs::Memory as _;

/// The devices. The pointer to one is its place in the list and 1, so nothing follows it.
const NAMES: [&CStr; 4] = [c"two-ports", c"closed", c"mute", c"down"];
const CLOSED: usize = 1;
const MUTE: usize = 2;
const DOWN: usize = 3;

fn place(device: *mut ibv_device) -> usize {
    device.addr() - 1
}

unsafe extern "C" fn list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices = (1..=NAMES.len()).map(ptr::without_provenance_mut).collect::<Box<_>>();
    // SAFETY: the caller's room.
    unsafe { *count = devices.len() as c_int };
    Box::leak(devices).as_mut_ptr()
}

unsafe extern "C" fn free(list: *mut *mut ibv_device) {
    // SAFETY: from `list`, and an error number of this thread.
    unsafe {
        drop(Box::from_raw(ptr::slice_from_raw_parts_mut(list, NAMES.len())));
        *libc::__errno_location() = libc::ENOENT;
    }
}

unsafe extern "C" fn name(device: *mut ibv_device) -> *const std::ffi::c_char {
    NAMES[place(device)].as_ptr()
}

thread_local! {
    /// The completions to poll. Without one the poll fails.
    static COMPLETED: RefCell<Vec<ibv_wc>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn poll(_: *mut ibv_cq, _: c_int, room: *mut ibv_wc) -> c_int {
    let Some(wc) = COMPLETED.with_borrow_mut(Vec::pop) else { return -1 };
    // SAFETY: the caller's room.
    unsafe { *room = wc };
    1
}

/// A context that also knows its device.
#[repr(C)]
struct Fake {
    context: ibv_context,
    place: usize,
}

unsafe extern "C" fn open(device: *mut ibv_device) -> *mut ibv_context {
    if place(device) == CLOSED {
        // SAFETY: this thread's.
        unsafe { *libc::__errno_location() = libc::EMFILE };
        return ptr::null_mut();
    }
    // SAFETY: pointers and a number, for which zero is a value.
    let mut fake: Fake = unsafe { zeroed() };
    fake.context.poll_cq = Some(poll);
    fake.place = place(device);
    Box::into_raw(Box::new(fake)).cast()
}

unsafe extern "C" fn close(context: *mut ibv_context) -> c_int {
    // SAFETY: from `open`.
    drop(unsafe { Box::from_raw(context.cast::<Fake>()) });
    0
}

unsafe extern "C" fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: from `open`, and the caller's room.
    unsafe {
        if (*context.cast::<Fake>()).place == MUTE {
            return libc::ETIMEDOUT;
        }
        (*attr).phys_port_cnt = 2;
        (*attr).max_qp_wr = 100;
        (*attr).max_sge = 3;
    }
    0
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    number: u8,
    port: *mut ibv_port_attr,
) -> c_int {
    assert!(number <= 2, "the device has two ports");
    // SAFETY: from `open`, and the caller's room.
    unsafe {
        let is_down = (*context.cast::<Fake>()).place == DOWN;
        (*port).state = if is_down { 1 } else { ACTIVE };
        (*port).gid_tbl_len = 4;
    }
    0
}

/// The second port alone speaks RoCEv2.
unsafe extern "C" fn query_gid(
    _: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _: u32,
    _: usize,
) -> c_int {
    let gid_type = if port == 2 && index == 3 { ROCE_V2 } else { 1 };
    // SAFETY: the caller's room.
    unsafe { *entry = ibv_gid_entry { gid: [7; 16], gid_type, ..ibv_gid_entry::default() } };
    0
}

/// Any object.
unsafe extern "C" fn make() -> *mut c_void {
    Box::into_raw(Box::new([0u64; 16])).cast()
}

unsafe extern "C" fn destroy(object: *mut c_void) -> c_int {
    // SAFETY: from `make`.
    drop(unsafe { Box::from_raw(object.cast::<[u64; 16]>()) });
    0
}

unsafe extern "C" fn create_qp(_: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut c_void {
    // SAFETY: the caller's.
    let cap = unsafe { (*init).cap };
    let wr = cap.max_send_wr.max(cap.max_recv_wr);
    let sge = cap.max_send_sge.max(cap.max_recv_sge);
    if wr > 100 || sge > 3 {
        return ptr::null_mut();
    }
    // SAFETY: pointers and numbers, for which zero is a value.
    let (mut context, mut qp): (ibv_context, ibv_qp) = unsafe { (zeroed(), zeroed()) };
    context.post_send = Some(post_send);
    qp.context = Box::into_raw(Box::new(context));
    Box::into_raw(Box::new(qp)).cast()
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: from `create_qp`.
    let qp = unsafe { Box::from_raw(qp) };
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(qp.context) });
    0
}

thread_local! {
    /// The elements of the requests that reached the library, with the bytes there.
    static POSTED: RefCell<Vec<(u64, Vec<u8>)>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn post_send(
    _: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's request and its elements.
    let sges = unsafe { slice::from_raw_parts((*wr).sg_list, (*wr).num_sge as usize) };
    for sge in sges {
        // SAFETY: as a provider does for inline data.
        let bytes = unsafe { slice::from_raw_parts(sge.addr as *const u8, sge.length as usize) };
        POSTED.with_borrow_mut(|posted| posted.push((sge.addr, bytes.to_vec())));
    }
    0
}

/// Calls that make a handle for the way to `SLOW`, and handles that were destroyed.
static SLOW_CALLS: AtomicU32 = AtomicU32::new(0);
static DESTROYED: AtomicU32 = AtomicU32::new(0);
const SLOW: Gid = Gid([9; 16]);

/// For the way to `SLOW` it waits until a second call is there.
unsafe extern "C" fn create_ah(_: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut c_void {
    // SAFETY: the caller's.
    if unsafe { (*attr).grh.dgid } == SLOW.0 {
        SLOW_CALLS.fetch_add(1, Ordering::SeqCst);
        let started = Instant::now();
        while SLOW_CALLS.load(Ordering::SeqCst) < 2 && started.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
    }
    // SAFETY: it needs nothing.
    unsafe { make() }
}

unsafe extern "C" fn destroy_ah(handle: *mut c_void) -> c_int {
    DESTROYED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: from `create_ah`.
    unsafe { destroy(handle) }
}

unsafe extern "C" fn busy() -> c_int {
    libc::EBUSY
}

static LIBRARY: LazyLock<Functions> = LazyLock::new(|| {
    let functions: HashMap<&str, usize> = HashMap::from([
        ("ibv_get_device_list\0", list as *const () as usize),
        ("ibv_free_device_list\0", free as *const () as usize),
        ("ibv_get_device_name\0", name as *const () as usize),
        ("ibv_open_device\0", open as *const () as usize),
        ("ibv_close_device\0", close as *const () as usize),
        ("ibv_query_device\0", query_device as *const () as usize),
        ("ibv_query_port\0", query_port as *const () as usize),
        ("_ibv_query_gid_ex\0", query_gid as *const () as usize),
        ("ibv_alloc_pd\0", make as *const () as usize),
        ("ibv_dealloc_pd\0", destroy as *const () as usize),
        ("ibv_reg_mr\0", make as *const () as usize),
        ("ibv_dereg_mr\0", busy as *const () as usize),
        ("ibv_create_cq\0", make as *const () as usize),
        ("ibv_destroy_cq\0", destroy as *const () as usize),
        ("ibv_create_qp\0", create_qp as *const () as usize),
        ("ibv_modify_qp\0", busy as *const () as usize),
        ("ibv_destroy_qp\0", destroy_qp as *const () as usize),
        ("ibv_create_ah\0", create_ah as *const () as usize),
        ("ibv_destroy_ah\0", destroy_ah as *const () as usize),
    ]);
    let find = |name: &str| {
        functions.get(name).map_or(ptr::null_mut(), |at| ptr::with_exposed_provenance_mut(*at))
    };
    // SAFETY: the stand-ins have the arguments of the functions, or look at fewer.
    unsafe { Functions::load(find) }.unwrap()
});

fn device() -> Device {
    install_guard();
    Device::open_by(&LIBRARY, "two-ports").unwrap()
}

#[test]
fn a_port_with_an_address_for_roce_v2_is_preferred() {
    let device = device();
    assert_eq!((device.0.port.number, device.0.port.gids), (2, 4));
    assert_eq!(device.0.gids().collect::<Vec<_>>(), [(3, Gid([7; 16]))]);
}

#[test]
fn refusals_have_the_error_number_of_their_call() {
    let refused = |name| Device::open_by(&LIBRARY, name).unwrap_err();
    assert_eq!(refused("closed").errno(), libc::EMFILE);
    assert_eq!(refused("mute").errno(), libc::ETIMEDOUT);
    assert!(matches!(refused("down"), OpenError::NoInterface));
    let cq = device().create_default_cq(1).unwrap();
    assert_eq!(cq.poll(), Err(CqError::System(libc::EIO)));
}

/// Codes of hardware mean something else, also where the number is that of a cause.
#[test]
fn a_failure_of_another_device_has_no_cause() {
    let device = device();
    let cq = device.create_default_cq(1).unwrap();
    let failed = |vendor_err| {
        let wc = ibv_wc { wr_id: 7, status: 10, vendor_err, qp_num: 17, ..ibv_wc::default() };
        COMPLETED.with_borrow_mut(|completed| completed.push(wc));
        let wc = cq.poll().unwrap().unwrap();
        device.0.checked(wc).unwrap_err()
    };
    let error = failed(1001);
    assert_eq!((error.cause(), error.vendor_err), (None, 1001));
    let text = "work request 0x7 of queue pair 0x000011 failed: RemAccessErr";
    assert_eq!(error.to_string(), format!("{text} (vendor error 0x3e9)"));
    assert_eq!(failed(0).to_string(), text);
}

#[test]
fn a_default_queue_pair_has_no_more_room_than_the_device() {
    let device = device();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_default_cq(1).unwrap());
    let qp = device.create_default_qp(&pd, &cq, QpType::Rc).unwrap();
    let ibv_qp_cap { max_send_wr, max_recv_sge, .. } = qp.cap;
    assert_eq!((max_send_wr, max_recv_sge), (100, 3));
}

/// Whether memory is mapped at an address.
fn is_mapped(at: u64) -> bool {
    let mut byte = 0;
    // SAFETY: a byte of ours; the other side may be unmapped.
    unsafe { copy_guarded(&raw mut byte, at as *const u8, 1) }.is_ok()
}

#[test]
fn memory_that_stays_registered_stays_allocated() {
    let device = device();
    let memory = device.alloc(&device.alloc_pd().unwrap(), 64, Access::LOCAL_WRITE).unwrap();
    let at = memory.sge().addr;
    drop(memory);
    assert!(is_mapped(at));
}

#[test]
fn two_threads_resolve_a_way_together_and_keep_one_handle() {
    let pd = device().alloc_pd().unwrap();
    let way = AddressVector { dgid: SLOW, ..Default::default() };
    let handle = || pd.0.handle(&way).unwrap().0.addr();
    let [a, b] = std::thread::scope(|scope| {
        [(); 2].map(|()| scope.spawn(handle)).map(|thread| thread.join().unwrap())
    });
    assert_eq!((a, handle()), (b, b));
    assert_eq!(SLOW_CALLS.load(Ordering::SeqCst), 2, "neither waits for the other");
    assert_eq!(DESTROYED.load(Ordering::SeqCst), 1, "the handle of the second");
    let other = AddressVector { dgid: Gid([8; 16]), ..way };
    assert_ne!(pd.0.handle(&other).unwrap().0.addr(), a);
    drop(pd);
    assert_eq!(DESTROYED.load(Ordering::SeqCst), 3);
}

#[test]
fn the_library_never_sees_an_address_that_it_would_follow() {
    let device = device();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_default_cq(1).unwrap());
    let post = |qp_type, op, flags, sges: &[Sge]| {
        let qp = device.create_default_qp(&pd, &cq, qp_type).unwrap();
        qp.post_send_wr(&SendWr { wr_id: 1, op, flags, sges, ud: None, xrc_srqn: 0 })
    };
    let (none, inline) = (SendFlags::empty(), SendFlags::INLINE);
    let at = RemoteAddr { va: 0x1000, rkey: 0 };
    for op in [SendOp::Send, SendOp::Write(at), SendOp::FetchAdd { at, add: 1 }] {
        let refused = Err(PostError::Send(PostSendError::NoDestination));
        assert_eq!(post(QpType::Ud, op, none, &[]), refused);
    }
    let unmapped = [Sge { addr: 0x1000, len: 8, lkey: 0 }];
    let refused = Err(PostError::Send(PostSendError::Fault));
    assert_eq!(post(QpType::Rc, SendOp::Send, inline, &unmapped), refused);
    assert!(POSTED.take().is_empty());

    let bytes = *b"hello";
    let own = Sge { addr: bytes.as_ptr() as u64, len: 5, lkey: 0 };
    post(QpType::Rc, SendOp::Send, inline, &[own, own]).unwrap();
    let posted = POSTED.take();
    assert!(posted.len() == 1 && posted[0].0 != own.addr, "{posted:?}");
    assert_eq!(posted[0].1, b"hellohello");
}
