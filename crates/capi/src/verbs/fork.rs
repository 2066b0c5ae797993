//! `ibv_fork_init` and its kin. No page is pinned and none is shared with hardware, so a fork needs no preparation.

use std::ffi::{c_int, c_void};

use crate::abi::*;

/// `ibv_fork_init`: nothing to do.
pub(crate) unsafe extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `ibv_is_fork_initialized`: fork is safe without initialisation.
pub(crate) unsafe extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// `ibv_dontfork_range`: nothing to do.
pub(crate) unsafe extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// `ibv_dofork_range`: nothing to do.
pub(crate) unsafe extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
