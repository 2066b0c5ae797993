//! Names that a script takes from C: statuses, error numbers, calls.

use std::fmt;

/// The status of a completion, by its number and its name in C without `IBV_WC_`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// `enum ibv_wc_status`.
    pub number: u8,
    name: &'static str,
}

/// An error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno {
    /// Its value on Linux.
    pub number: i32,
    /// None: a script gave the number.
    name: Option<&'static str>,
}

/// The greatest error number: the kernel tells failures from pointers by it.
const MAX_ERRNO: i32 = 4095;

/// The number of `IBV_WC_WR_FLUSH_ERR`.
const FLUSHED: u8 = 5;

/// The statuses with which a script may end a send.
const STATUSES: [(u8, &str); 16] = [
    (1, "LOC_LEN_ERR"),
    (2, "LOC_QP_OP_ERR"),
    (4, "LOC_PROT_ERR"),
    (FLUSHED, "WR_FLUSH_ERR"),
    (6, "MW_BIND_ERR"),
    (7, "BAD_RESP_ERR"),
    (8, "LOC_ACCESS_ERR"),
    (9, "REM_INV_REQ_ERR"),
    (10, "REM_ACCESS_ERR"),
    (11, "REM_OP_ERR"),
    (12, "RETRY_EXC_ERR"),
    (13, "RNR_RETRY_EXC_ERR"),
    (16, "REM_ABORT_ERR"),
    (19, "FATAL_ERR"),
    (20, "RESP_TIMEOUT_ERR"),
    (21, "GENERAL_ERR"),
];

/// The statuses that a receive may have, each with that of a reliable peer's send.
const OF_RECEIVES: [(u8, u8); 8] =
    [(1, 9), (2, 11), (4, 11), (FLUSHED, 12), (8, 10), (9, 9), (19, 11), (21, 11)];

const OF_DATAGRAMS: &str = "is a status of reliable datagrams, which no device has";
const OF_TAGS: &str = "is a status of tag matching, of an SRQ's receives and not of sends";

/// The other statuses of C, and why no send ends with them.
const OTHERS: [(&str, &str); 8] = [
    (
        "SUCCESS",
        "is no failure, and a send with a status is not executed: write \"completes after\" and a time",
    ),
    ("LOC_EEC_OP_ERR", OF_DATAGRAMS),
    ("LOC_RDD_VIOL_ERR", OF_DATAGRAMS),
    ("REM_INV_RD_REQ_ERR", OF_DATAGRAMS),
    ("INV_EECN_ERR", OF_DATAGRAMS),
    ("INV_EEC_STATE_ERR", OF_DATAGRAMS),
    ("TM_ERR", OF_TAGS),
    ("TM_RNDV_INCOMPLETE", OF_TAGS),
];

const ERRNOS: [(i32, &str); 28] = [
    (1, "EPERM"),
    (2, "ENOENT"),
    (4, "EINTR"),
    (5, "EIO"),
    (9, "EBADF"),
    (11, "EAGAIN"),
    (12, "ENOMEM"),
    (13, "EACCES"),
    (14, "EFAULT"),
    (16, "EBUSY"),
    (19, "ENODEV"),
    (22, "EINVAL"),
    (24, "EMFILE"),
    (28, "ENOSPC"),
    (38, "ENOSYS"),
    (71, "EPROTO"),
    (95, "EOPNOTSUPP"),
    (98, "EADDRINUSE"),
    (99, "EADDRNOTAVAIL"),
    (100, "ENETDOWN"),
    (101, "ENETUNREACH"),
    (104, "ECONNRESET"),
    (105, "ENOBUFS"),
    (107, "ENOTCONN"),
    (110, "ETIMEDOUT"),
    (111, "ECONNREFUSED"),
    (113, "EHOSTUNREACH"),
    (122, "EDQUOT"),
];

/// An event of a port that a fabric has beside its ups and downs. Here nothing changes but that the program hears of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortEvent {
    /// The LID changed.
    LidChange,
    /// The table of P_Keys changed.
    PkeyChange,
    /// Another subnet manager rules.
    SmChange,
    /// The subnet manager asks for what it was told before, such as memberships of groups.
    ClientReregister,
    /// The table of GIDs changed.
    GidChange,
}

/// The events of ports, by their names in C without `IBV_EVENT_`.
const EVENTS: [(PortEvent, &str); 5] = [
    (PortEvent::LidChange, "LID_CHANGE"),
    (PortEvent::PkeyChange, "PKEY_CHANGE"),
    (PortEvent::SmChange, "SM_CHANGE"),
    (PortEvent::ClientReregister, "CLIENT_REREGISTER"),
    (PortEvent::GidChange, "GID_CHANGE"),
];

/// The calls that a script may let fail.
pub const CALLS: [&str; 33] = [
    "ibv_open_device",
    "ibv_query_device",
    "ibv_query_port",
    "ibv_query_gid",
    "ibv_alloc_pd",
    "ibv_open_xrcd",
    "ibv_reg_mr",
    "ibv_dereg_mr",
    "ibv_alloc_mw",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_resize_cq",
    "ibv_destroy_cq",
    "ibv_req_notify_cq",
    "ibv_create_srq",
    "ibv_destroy_srq",
    "ibv_create_qp",
    "ibv_modify_qp",
    "ibv_destroy_qp",
    "ibv_create_ah",
    "ibv_post_send",
    "ibv_post_recv",
    "ibv_post_srq_recv",
    "rdma_create_id",
    "rdma_bind_addr",
    "rdma_listen",
    "rdma_resolve_addr",
    "rdma_resolve_route",
    "rdma_create_qp",
    "rdma_connect",
    "rdma_accept",
    "rdma_disconnect",
    "rdma_get_cm_event",
];

impl Status {
    pub(crate) fn find(word: &str) -> Option<Self> {
        let found = STATUSES.iter().find(|(_, name)| is_status(word, name));
        found.map(|&(number, name)| Self { number, name })
    }

    /// The status with which a reliable peer's send ends when a receive has this one. `None`: it is a status of sends alone.
    #[must_use]
    pub fn of_peer(self) -> Option<Self> {
        let (_, peers) = OF_RECEIVES.into_iter().find(|(number, _)| *number == self.number)?;
        let found = STATUSES.into_iter().find(|(number, _)| *number == peers);
        found.map(|(number, name)| Self { number, name })
    }

    /// Why a send does not end with the status of this name, if there is one.
    pub(crate) fn why_not(word: &str) -> Option<String> {
        let found = OTHERS.iter().find(|(name, _)| is_status(word, name));
        found.map(|(name, reason)| format!("{name} {reason}"))
    }

    /// Whether the send is flushed.
    #[must_use]
    pub fn is_flush(self) -> bool {
        self.number == FLUSHED
    }
}

impl Errno {
    pub(crate) fn find(word: &str) -> Option<Self> {
        let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
        let number = word.parse().ok().filter(|n| is_number && (1..=MAX_ERRNO).contains(n));
        let is_it =
            |known: i32, name: &str| Some(known) == number || name.eq_ignore_ascii_case(word);
        let found = ERRNOS.iter().find(|(number, name)| is_it(*number, name));
        match found {
            Some(&(number, name)) => Some(Self { number, name: Some(name) }),
            None => number.map(|number| Self { number, name: None }),
        }
    }
}

impl PortEvent {
    pub(crate) fn find(word: &str) -> Option<Self> {
        let upper = word.to_ascii_uppercase();
        let wanted = upper.strip_prefix("IBV_EVENT_").unwrap_or(&upper);
        EVENTS.iter().find(|(_, name)| *name == wanted).map(|(event, _)| *event)
    }
}

impl fmt::Display for PortEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = EVENTS.iter().find(|(event, _)| event == self).map_or("", |(_, name)| name);
        write!(f, "IBV_EVENT_{name}")
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IBV_WC_{}", self.name)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "error {}", self.number),
        }
    }
}

fn is_status(word: &str, name: &str) -> bool {
    let upper = word.to_ascii_uppercase();
    upper.strip_prefix("IBV_WC_").unwrap_or(&upper) == name
}

/// The call of this name.
pub(crate) fn call(word: &str) -> Option<&'static str> {
    CALLS.into_iter().find(|call| call.eq_ignore_ascii_case(word))
}

/// The statuses, for a message.
pub(crate) fn statuses() -> String {
    STATUSES.map(|(_, name)| name).join(", ")
}

/// The statuses that a receive may have, for a message.
pub(crate) fn statuses_of_receives() -> String {
    let all = STATUSES.map(|(number, name)| Status { number, name });
    let of_receives = all.into_iter().filter(|status| status.of_peer().is_some());
    of_receives.map(|status| status.name).collect::<Vec<_>>().join(", ")
}

/// The events of ports, for a message.
pub(crate) fn events() -> String {
    EVENTS.map(|(_, name)| name).join(", ")
}

/// The error numbers, for a message.
pub(crate) fn errnos() -> String {
    ERRNOS.map(|(_, name)| name).join(", ")
}
