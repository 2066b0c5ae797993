//! The values of the public C enums. A C enum travels as an integer: `type ibv_x = c_uint`, never a Rust `enum`,
//! since a caller may pass any value.

mod cq;
mod device;
mod flow;
mod kernel;
mod memory;
mod qp;
mod rdma;
mod wq;

use std::ffi::{c_int, c_uint};

pub(crate) use {cq::*, device::*, flow::*, kernel::*, memory::*, qp::*, rdma::*, wq::*};
