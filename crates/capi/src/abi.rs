//! The C types of `infiniband/verbs.h`, `infiniband/sa.h` and `rdma/rdma_cma.h`, newest layout, field by field.
//!
//! Names are those of C. Sizes, alignments, offsets and enum values are checked at compile time against
//! `abi/layouts.65.txt`. The checks are generated, so a field of the table that is missing here does not build.
//! Anonymous unions have a name here: see `ANONYMOUS` in `build/layouts.rs`.

#![allow(non_camel_case_types, non_snake_case)]
// A complete header. The library itself needs only a part of it. From Rust 1.96 on, an import of a module that nothing needs counts
// as unused.
#![allow(dead_code, unused_imports)]

mod context;
mod counters;
mod cq;
mod device;
mod enums;
mod flow;
pub(crate) mod kern;
mod memory;
mod qp;
mod rdma;
mod sa;
mod wq;
mod wr;

use std::ffi::{c_char, c_int, c_uint, c_void};

pub(crate) use {
    context::*, counters::*, cq::*, device::*, enums::*, flow::*, memory::*, qp::*, rdma::*, sa::*,
    wq::*, wr::*,
};

/// Types that programs only see by pointer.
macro_rules! opaque {
    ($($name:ident)*) => { $(
        #[repr(C)]
        pub(crate) struct $name {
            _private: [u8; 0],
        }
    )* };
}

opaque!(ibv_buf verbs_ex_private);

/// `ibv_port_attr` as it was before it grew: the part that the `query_port` slot of `ibv_context_ops` fills.
pub(crate) const COMPAT_PORT_ATTR_SIZE: usize = 48;
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct _compat_ibv_port_attr {
    pub(crate) bytes: [u32; COMPAT_PORT_ATTR_SIZE / 4],
}

/// Kept apart so that names which only the checks need do not spread.
// The table is x86-64's: `pthread_mutex_t`, which objects embed, is larger on aarch64.
#[cfg(target_arch = "x86_64")]
mod asserts {
    use super::*;
    use std::mem::{MaybeUninit, align_of, offset_of, size_of};

    const fn pointee_size<T>(_: *const T) -> usize {
        size_of::<T>()
    }

    include!(concat!(env!("OUT_DIR"), "/layout_asserts.rs"));
}
