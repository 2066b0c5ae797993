//! The calls that need no device, against rdma-core's own library: same answer for every argument that matters,
//! nonsense included. Needs the distribution's libibverbs and librdmacm (Debian: `libibverbs1 librdmacm1`).

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    mem::MaybeUninit,
};

use crate::{
    abi::{kern::*, *},
    rdmacm::*,
    verbs::*,
};

/// A function of the distribution's library. It is loaded by path, so it is never ours, whatever `LD_LIBRARY_PATH`
/// says.
fn original(library: &str, symbol: &str) -> *mut c_void {
    let handle = open(library);
    assert!(
        !handle.is_null(),
        "{library} is not installed (Debian: apt-get install libibverbs1 librdmacm1)"
    );
    let symbol = CString::new(symbol).unwrap();
    // SAFETY: a valid handle and C string.
    let found = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
    assert!(!found.is_null(), "{library} has no {symbol:?}");
    found
}

fn open(library: &str) -> *mut c_void {
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
        .into_iter()
        .map(|dir| CString::new(format!("{dir}/{library}")).unwrap())
        // SAFETY: a valid C string; the library's constructors are rdma-core's.
        .map(|path| unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
        .find(|handle| !handle.is_null())
        .unwrap_or(std::ptr::null_mut())
}

/// `original("lib", fn name: type)` as a typed function pointer.
macro_rules! original {
    ($library:literal, $name:ident: $type:ty) => {
        // SAFETY: the type is that of the C declaration.
        unsafe { std::mem::transmute::<*mut c_void, $type>(original($library, stringify!($name))) }
    };
}

/// Values around a small range, and the ends of the type.
fn arguments(last: i32) -> impl Iterator<Item = i32> {
    (-3..=last + 3).chain([64, 255, 256, 0x1_0000, i32::MIN, i32::MAX])
}

type Name = unsafe extern "C" fn(u32) -> *const c_char;

/// Compares up to `last`, the last value that the oldest supported release knows, and nonsense past `newest`.
fn same_names(ours: Name, theirs: Name, last: i32, newest: i32) {
    for value in arguments(newest).filter(|v| !(last + 1..=newest).contains(v)) {
        // SAFETY: both take any integer and return a static string.
        let (a, b) =
            unsafe { (CStr::from_ptr(ours(value as u32)), CStr::from_ptr(theirs(value as u32))) };
        assert_eq!(a, b, "{value}");
    }
}

#[test]
fn names_are_rdma_cores() {
    same_names(ibv_wc_status_str, original!("libibverbs.so.1", ibv_wc_status_str: Name), 23, 23);
    same_names(ibv_port_state_str, original!("libibverbs.so.1", ibv_port_state_str: Name), 5, 5);
    same_names(ibv_event_type_str, original!("libibverbs.so.1", ibv_event_type_str: Name), 19, 20);
    // SAFETY: `enum ibv_node_type` is signed, with the same size and registers.
    let node_type = unsafe {
        std::mem::transmute::<unsafe extern "C" fn(ibv_node_type) -> *const c_char, Name>(
            ibv_node_type_str,
        )
    };
    same_names(node_type, original!("libibverbs.so.1", ibv_node_type_str: Name), 7, 7);
    same_names(rdma_event_str, original!("librdmacm.so.1", rdma_event_str: Name), 15, 19);
}

/// `enum ibv_rate` travels as an int.
type Convert = unsafe extern "C" fn(c_int) -> c_int;

fn same_conversion(ours: impl Fn(c_int) -> c_int, theirs: Convert) {
    for value in arguments(1_300_000) {
        // SAFETY: takes any integer.
        assert_eq!(ours(value), unsafe { theirs(value) }, "of {value}");
    }
}

#[test]
fn rates_are_rdma_cores() {
    same_conversion(
        // SAFETY: takes any integer, as do the following.
        |v| unsafe { ibv_rate_to_mult(v as u32) },
        original!("libibverbs.so.1", ibv_rate_to_mult: Convert),
    );
    same_conversion(
        // SAFETY: as above.
        |v| unsafe { ibv_rate_to_mbps(v as u32) },
        original!("libibverbs.so.1", ibv_rate_to_mbps: Convert),
    );
    same_conversion(
        // SAFETY: as above.
        |v| unsafe { mult_to_ibv_rate(v) } as c_int,
        original!("libibverbs.so.1", mult_to_ibv_rate: Convert),
    );
    same_conversion(
        // SAFETY: as above.
        |v| unsafe { mbps_to_ibv_rate(v) } as c_int,
        original!("libibverbs.so.1", mbps_to_ibv_rate: Convert),
    );
}

/// Fills `T` with bytes that all differ from their neighbours.
fn pattern<T: Copy>(seed: u8) -> T {
    let mut value = MaybeUninit::<T>::zeroed();
    for i in 0..size_of::<T>() {
        // SAFETY: inside `value`; the types are plain integers.
        unsafe { value.as_mut_ptr().cast::<u8>().add(i).write((i as u8).wrapping_mul(37) ^ seed) };
    }
    // SAFETY: every byte is written and every bit pattern is valid.
    unsafe { value.assume_init() }
}

/// Runs both over the same source onto the same background and compares every byte.
fn same_copy<D: Copy, S: Copy>(
    ours: unsafe extern "C" fn(*mut D, *const S),
    theirs: unsafe extern "C" fn(*mut D, *const S),
) {
    for seed in [0, 0x5a, 0xff] {
        let source: S = pattern(seed);
        let (mut a, mut b): (D, D) = (pattern(0x11), pattern(0x11));
        // SAFETY: valid pointers.
        unsafe {
            ours(&mut a, &source);
            theirs(&mut b, &source);
        }
        let bytes = |v: &D| {
            // SAFETY: plain bytes, all written by `pattern`.
            unsafe {
                std::slice::from_raw_parts(std::ptr::from_ref(v).cast::<u8>(), size_of::<D>())
            }
            .to_vec()
        };
        assert_eq!(bytes(&a), bytes(&b), "seed {seed:#x}");
    }
}

#[test]
fn kernel_forms_are_copied_as_rdma_core_does() {
    type Copy<D, S> = unsafe extern "C" fn(*mut D, *const S);
    same_copy(
        ibv_copy_ah_attr_from_kern,
        original!("libibverbs.so.1", ibv_copy_ah_attr_from_kern: Copy<ibv_ah_attr, ib_uverbs_ah_attr>),
    );
    same_copy(
        ibv_copy_qp_attr_from_kern,
        original!("libibverbs.so.1", ibv_copy_qp_attr_from_kern: Copy<ibv_qp_attr, ib_uverbs_qp_attr>),
    );
    same_copy(
        ibv_copy_path_rec_from_kern,
        original!("libibverbs.so.1", ibv_copy_path_rec_from_kern: Copy<ibv_sa_path_rec, ib_user_path_rec>),
    );
    same_copy(
        ibv_copy_path_rec_to_kern,
        original!("libibverbs.so.1", ibv_copy_path_rec_to_kern: Copy<ib_user_path_rec, ibv_sa_path_rec>),
    );
}
