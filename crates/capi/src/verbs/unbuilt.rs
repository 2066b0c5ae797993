//! The calls of libibverbs that are not built.

use crate::refuse::refuse;
use libc::EOPNOTSUPP;

refuse! {
    // Device, port, context.
    Errno(EOPNOTSUPP): ibv_register_driver;
}
