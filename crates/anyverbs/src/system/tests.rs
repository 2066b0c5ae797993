//! What a library answers that is hard to get from a real one. Here each function is a stand-in.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::sync::LazyLock;

use anyverbs_objects::memory::copy_guarded;

use super::*;
use crate::verbs::Memory as _;

/// The devices, by the place in the list. That is also the address of a context or an error number, so nothing may follow it.
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

unsafe extern "C" fn poll(_: *mut ibv_cq, _: c_int, _: *mut ibv_wc) -> c_int {
    -1
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
    // SAFETY: it needs nothing.
    unsafe { make() }
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
        ("ibv_destroy_qp\0", destroy as *const () as usize),
        ("ibv_create_ah\0", make as *const () as usize),
        ("ibv_destroy_ah\0", destroy as *const () as usize),
    ]);
    let find = |name: &str| ptr::with_exposed_provenance_mut(functions[name]);
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
fn a_way_has_one_handle() {
    let pd = device().alloc_pd().unwrap();
    let ways = [1, 2].map(|last| AddressVector { dgid: Gid([last; 16]), ..Default::default() });
    let handles = std::thread::scope(|scope| {
        let handles = || ways.map(|way| pd.0.handle(&way).unwrap().0.addr());
        [(); 4].map(|()| scope.spawn(handles)).map(|thread| thread.join().unwrap())
    });
    assert!(handles.iter().all(|of_thread| *of_thread == handles[0]), "{handles:?}");
    assert_ne!(handles[0][0], handles[0][1]);
    assert_eq!(pd.0.ways.lock().unwrap().len(), 2);
}
