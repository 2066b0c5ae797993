//! The kernel's permissions for this thread.

/// `struct __user_cap_header_struct` (capget(2)).
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// `struct __user_cap_data_struct`; version 3 has two, of 32 capabilities each.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const VERSION_3: u32 = 0x2008_0522;
const CAP_NET_RAW: u32 = 13;

/// Whether it has `CAP_NET_RAW`.
pub fn has_net_raw() -> bool {
    let mut header = Header { version: VERSION_3, pid: 0 };
    let mut data = [Data::default(); 2];
    // SAFETY: the kernel writes the version it prefers into the header and, for version 3, two structures to `data`.
    let done = unsafe {
        libc::syscall(libc::SYS_capget, std::ptr::from_mut(&mut header), data.as_mut_ptr())
    };
    done == 0 && data[0].effective & 1 << CAP_NET_RAW != 0
}
