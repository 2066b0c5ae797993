//! `ibv_*_str`: names of enum values, word for word as rdma-core has them, since programs and suites compare them.

use std::ffi::{CStr, c_char, c_uint};

use crate::abi::*;

const UNKNOWN: &CStr = c"unknown";

fn name(names: &[&'static CStr], value: c_uint) -> *const c_char {
    usize::try_from(value).ok().and_then(|v| names.get(v)).unwrap_or(&UNKNOWN).as_ptr()
}

/// `ibv_wc_status_str`.
pub(crate) unsafe extern "C" fn ibv_wc_status_str(status: ibv_wc_status) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory management operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"TM error",
        c"TM software rendezvous",
    ];
    name(NAMES, status)
}

/// `ibv_node_type_str`.
pub(crate) unsafe extern "C" fn ibv_node_type_str(node_type: ibv_node_type) -> *const c_char {
    const NAMES: &[&CStr] = &[
        UNKNOWN,
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    c_uint::try_from(node_type).map_or(UNKNOWN.as_ptr(), |v| name(NAMES, v))
}

/// `ibv_port_state_str`.
pub(crate) unsafe extern "C" fn ibv_port_state_str(state: ibv_port_state) -> *const c_char {
    name(&[c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"], state)
}

/// `ibv_event_type_str`.
pub(crate) unsafe extern "C" fn ibv_event_type_str(event: ibv_event_type) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
    ];
    name(NAMES, event)
}

/// `ibv_wr_opcode_str` (rdma-core's private node; it answers the two unassigned numbers below 16 with NULL).
pub(crate) unsafe extern "C" fn ibv_wr_opcode_str(opcode: ibv_wr_opcode) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"rdma-write",
        c"rdma-write-with-imm",
        c"send",
        c"send-with-imm",
        c"rdma-read",
        c"atomic-cmp-and-swp",
        c"atomic-fetch-and-add",
        c"local-inv",
        c"bind-mw",
        c"send-with-inv",
        c"tso",
        c"driver1",
        UNKNOWN,
        UNKNOWN,
        c"flush",
        c"atomic-write",
    ];
    name(NAMES, opcode)
}
