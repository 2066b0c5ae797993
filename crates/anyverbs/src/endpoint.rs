//! The endpoint that two queue pairs tell each other, and one call that connects them.

use std::net::IpAddr;

use anyverbs_objects::ah::{Ah, AhAttr};
use anyverbs_objects::cq::Cq;
use anyverbs_objects::error::{CreateError, ModifyObjectError};
use anyverbs_objects::gid::GidEntry;
use anyverbs_objects::pd::Pd;
use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpCap, QpState, QpType};
use anyverbs_proto::types::{Gid, Mtu, Psn, QKey, Qpn};
use anyverbs_proto::wr::AddressVector;
use anyverbs_transport::qp::{Qp, QpInitAttr};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use thiserror::Error;

use crate::context::Context;

/// The facts that a peer needs to know of a queue pair. The two sides exchange it by any means, for example a TCP connection.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let cq = context.create_cq(16, None, 0, 0)?;
/// let a = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// let b = context.create_default_qp(&pd, &cq, QpType::Rc)?;
///
/// let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// let wire: [u8; Endpoint::LEN] = of_b.to_bytes(); // what b would send to a
/// context.connect(&a, &of_a, &Endpoint::from_bytes(wire)?)?;
/// context.connect(&b, &of_b, &of_a)?;
/// assert_eq!(a.state()?, QpState::Rts);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Type of the queue pair.
    pub qp_type: QpType,
    /// Its number.
    pub qpn: Qpn,
    /// The first PSN that it sends.
    pub psn: Psn,
    /// The address at which it is reached.
    pub gid: Gid,
    /// The largest path MTU that its interface carries.
    pub mtu: Mtu,
    /// READs and atomics of the peer that it can have outstanding.
    pub max_rd_atomic: u8,
    /// Its Q_Key; 0 but for datagrams.
    pub qkey: QKey,
}

/// Bytes that are no [`Endpoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("not an endpoint: {field} is {value:#x}")]
pub struct EndpointError {
    /// The field that has no such value.
    pub field: &'static str,
    /// The value in the bytes.
    pub value: u64,
}

/// Why queue pairs were not connected.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The device has no address that others could use.
    #[error("the device has no address: no interface is up and has one")]
    NoAddress,
    /// The two sides do not fit: a field of an endpoint, and why.
    #[error("{field} of the {side} endpoint: {reason}")]
    Endpoint {
        /// `local` or `remote`.
        side: &'static str,
        /// The field.
        field: &'static str,
        /// The fault of the field.
        reason: String,
    },
    /// The way to the peer was not resolved.
    #[error("cannot resolve the way to {to}: {source}")]
    Resolve {
        /// The peer's address.
        to: Gid,
        /// The reason.
        source: CreateError,
    },
    /// The queue pair was not moved to this state.
    #[error("cannot move the queue pair to {}: {source}", to.name())]
    Modify {
        /// The state.
        to: QpState,
        /// The reason, which names the attribute.
        source: ModifyObjectError,
    },
    /// The device did not answer.
    #[error(transparent)]
    Device(#[from] CreateError),
}

/// The first byte of an endpoint's bytes: the version of their layout.
const VERSION: u8 = 1;
/// The hop limit that Linux gives packets.
pub(crate) const HOPS: u8 = 64;
/// The sizes of a queue pair of [`Context::create_default_qp`].
pub(crate) const DEFAULT_CAP: QpCap = QpCap {
    max_send_wr: 128,
    max_recv_wr: 128,
    max_send_sge: 4,
    max_recv_sge: 4,
    max_inline_data: 64,
};

impl Endpoint {
    /// Bytes of its form on a wire.
    pub const LEN: usize = 32;

    /// For the peer.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let first = [VERSION, self.qp_type as u8, self.mtu as u8, self.max_rd_atomic];
        bytes[..4].copy_from_slice(&first);
        bytes[4..8].copy_from_slice(&self.qpn.get().to_be_bytes());
        bytes[8..12].copy_from_slice(&self.psn.get().to_be_bytes());
        bytes[12..16].copy_from_slice(&self.qkey.0.to_be_bytes());
        bytes[16..].copy_from_slice(&self.gid.0);
        bytes
    }

    /// Reads the bytes that the peer sent.
    ///
    /// # Errors
    /// [`EndpointError`] names the first field that has an impossible value.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Result<Self, EndpointError> {
        let wrong = |field, value: u64| EndpointError { field, value };
        let [version, qp_type, mtu, max_rd_atomic] =
            *bytes.first_chunk().expect("the array has 32 bytes");
        if version != VERSION {
            return Err(wrong("the version", version.into()));
        }
        let types = [QpType::Rc, QpType::Uc, QpType::Ud];
        let [qpn, psn, qkey] = [4, 8, 12].map(|at| {
            u32::from_be_bytes(*bytes[at..].first_chunk().expect("the array has 32 bytes"))
        });
        for (field, value) in [("qpn", qpn), ("psn", psn)] {
            if value >> 24 != 0 {
                return Err(wrong(field, value.into()));
            }
        }
        Ok(Self {
            qp_type: types
                .into_iter()
                .find(|known| *known as u8 == qp_type)
                .ok_or(wrong("qp_type", qp_type.into()))?,
            qpn: Qpn::new(qpn),
            psn: Psn::new(psn),
            gid: Gid(*bytes.last_chunk().expect("the array has 32 bytes")),
            mtu: Mtu::from_code(mtu.into()).ok_or(wrong("mtu", mtu.into()))?,
            max_rd_atomic,
            qkey: QKey(qkey),
        })
    }
}

/// The Q_Key of datagram queue pairs that [`Context::endpoint`] prepares. Endpoints carry it.
const QKEY: QKey = QKey(0x1111_1111);

impl Context {
    /// The address that peers can use: the first that is neither link-local nor of the loopback interface, or else the
    /// loopback's. It is GID 0 on this device; on others the first one often leads nowhere.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let context = anyverbs::Context::open(&anyverbs::devices()?[0].name)?;
    /// println!("peers reach us at {}", context.routable_gid()?.gid.to_ip());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ConnectError::NoAddress`] if no interface is up, [`ConnectError::Device`].
    pub fn routable_gid(&self) -> Result<GidEntry, ConnectError> {
        let rank = |entry: &GidEntry| match entry.gid.to_ip() {
            ip if ip.is_loopback() => 2,
            IpAddr::V6(ip) if ip.is_unicast_link_local() => 3,
            IpAddr::V4(_) => 0,
            IpAddr::V6(_) => 1,
        };
        self.gids()?
            .into_iter()
            .filter(GidEntry::carries)
            .min_by_key(rank)
            .ok_or(ConnectError::NoAddress)
    }

    /// Makes a queue pair with room for 128 sends and 128 receives of 4 elements each. Sends and receives complete in `cq`, and every
    /// send makes a completion. [`create_qp`](Self::create_qp) has all parameters.
    ///
    /// # Errors
    /// As [`create_qp`](Self::create_qp).
    pub fn create_default_qp(&self, pd: &Pd, cq: &Cq, qp_type: QpType) -> Result<Qp, CreateError> {
        let init = QpInitAttr {
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            cap: DEFAULT_CAP,
            qp_type,
            sq_sig_all: true,
            cookie: 0,
        };
        self.create_qp(pd, &init)
    }

    /// Prepares a new queue pair and says what its peer needs to know.
    ///
    /// One of type RC or UC is in INIT afterwards, so that receives can be posted before [`connect`](Self::connect). One of type UD is in
    /// RTS. Peers have all remote rights; each region has rights of its own.
    ///
    /// # Errors
    /// [`ConnectError`]. A queue pair that is not new, or of type XRC, is refused.
    pub fn endpoint(&self, qp: &Qp) -> Result<Endpoint, ConnectError> {
        let address = self.routable_gid()?;
        let max_rd_atomic = self.device_attr()?.max_qp_rd_atom.try_into().unwrap_or(u8::MAX);
        let psn = Psn::new(StdRng::from_os_rng().random());
        let (attr, init) = qp.query().map_err(refused(QpState::Init))?;
        check_new(attr.state)?;
        let (qpn, gid, mtu) = (qp.qpn(), address.gid, address.mtu);
        let qp_type = init.qp_type;
        let endpoint = Endpoint { qp_type, qpn, psn, gid, mtu, max_rd_atomic, qkey: QKey(0) };
        prepare(endpoint, address.port, |attr, mask| qp.modify(attr, mask))
    }

    /// Connects a queue pair of type RC or UC. `local` is what [`endpoint`](Self::endpoint) said of it, and `remote` what the peer's
    /// side said. Both sides call it, in any order. The ACK timeout is 67 ms, with 7 retries; a receiver that is not ready is
    /// waited for without end.
    ///
    /// # Errors
    /// [`ConnectError`] names the field that does not fit. The queue pair may be in RTR then.
    pub fn connect(
        &self,
        qp: &Qp,
        local: &Endpoint,
        remote: &Endpoint,
    ) -> Result<(), ConnectError> {
        check_ends(qp.qpn(), local, remote)?;
        let Some(source) = self.addresses()?.into_iter().find(|entry| entry.gid == local.gid)
        else {
            return Err(no_address_of_ours(local));
        };
        let av = self
            .resolve(&route(&source, remote.gid))
            .map_err(|source| ConnectError::Resolve { to: remote.gid, source })?;
        connect_by(local, remote, av, |attr, mask| qp.modify(attr, mask))
    }

    /// An address handle for the peer of a datagram queue pair; with [`Ah::dest`] it makes the destination of a send.
    ///
    /// # Errors
    /// [`ConnectError::Resolve`].
    pub fn address_of(&self, pd: &Pd, remote: &Endpoint) -> Result<Ah, ConnectError> {
        let source = self.routable_gid()?;
        pd.create_ah(&route(&source, remote.gid))
            .map_err(|source| ConnectError::Resolve { to: remote.gid, source })
    }
}

fn route(source: &GidEntry, dgid: Gid) -> AhAttr {
    let sgid_index = u8::try_from(source.index).expect("the table is shorter than 256");
    AhAttr {
        dgid,
        sgid_index,
        hop_limit: HOPS,
        is_global: true,
        port: source.port,
        ..AhAttr::default()
    }
}

fn refused(to: QpState) -> impl Fn(ModifyObjectError) -> ConnectError {
    move |source| ConnectError::Modify { to, source }
}

fn move_to(
    attr: &QpAttr,
    to: QpState,
    mask: QpAttrMask,
    modify: &mut impl FnMut(&QpAttr, QpAttrMask) -> Result<(), ModifyObjectError>,
) -> Result<(), ConnectError> {
    let attr = QpAttr { state: to, ..*attr };
    modify(&attr, mask | QpAttrMask::STATE).map_err(refused(to))
}

fn no(side: &'static str, field: &'static str, reason: String) -> ConnectError {
    ConnectError::Endpoint { side, field, reason }
}

/// A second endpoint of a queue pair would have another PSN, which the peer does not know.
pub(crate) fn check_new(state: QpState) -> Result<(), ConnectError> {
    if state == QpState::Reset {
        return Ok(());
    }
    Err(no("local", "state", format!("the queue pair is not new, but in {}", state.name())))
}

pub(crate) fn no_address_of_ours(local: &Endpoint) -> ConnectError {
    no("local", "gid", format!("{} is no address of this device", local.gid))
}

/// Prepares a new queue pair of any device by its `modify`; see [`Context::endpoint`].
pub(crate) fn prepare(
    endpoint: Endpoint,
    port: u8,
    mut modify: impl FnMut(&QpAttr, QpAttrMask) -> Result<(), ModifyObjectError>,
) -> Result<Endpoint, ConnectError> {
    let qp_type = endpoint.qp_type;
    let mut attr = QpAttr { port, sq_psn: endpoint.psn, ..QpAttr::default() };
    let mut mask = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    match qp_type {
        QpType::Rc | QpType::Uc => {
            attr.access = Access::REMOTE_WRITE;
            if qp_type == QpType::Rc {
                attr.access |= Access::REMOTE_READ | Access::REMOTE_ATOMIC;
            }
            mask |= QpAttrMask::ACCESS_FLAGS;
        }
        QpType::Ud => {
            attr.qkey = QKEY;
            mask |= QpAttrMask::QKEY;
        }
        QpType::XrcSend | QpType::XrcRecv => {
            let reason = format!("{qp_type:?} has no endpoint; use `Qp::modify`");
            return Err(no("local", "qp_type", reason));
        }
    }
    move_to(&attr, QpState::Init, mask, &mut modify)?;
    if qp_type == QpType::Ud {
        move_to(&attr, QpState::Rtr, QpAttrMask::empty(), &mut modify)?;
        move_to(&attr, QpState::Rts, QpAttrMask::SQ_PSN, &mut modify)?;
    }
    Ok(Endpoint { qkey: attr.qkey, ..endpoint })
}

/// Refuses endpoints that cannot be connected, or not by the queue pair `qpn`.
pub(crate) fn check_ends(
    qpn: Qpn,
    local: &Endpoint,
    remote: &Endpoint,
) -> Result<(), ConnectError> {
    if local.qpn != qpn {
        let reason = format!("{} is another queue pair than {qpn}", local.qpn);
        return Err(no("local", "qpn", reason));
    }
    if local.qp_type == QpType::Ud {
        let reason = "datagrams need no connection; see `Context::address_of`".into();
        return Err(no("local", "qp_type", reason));
    }
    if remote.qp_type != local.qp_type {
        let reason = format!("{:?}, and ours is {:?}", remote.qp_type, local.qp_type);
        return Err(no("remote", "qp_type", reason));
    }
    Ok(())
}

/// Connects a queue pair of any device by its `modify`; see [`Context::connect`].
pub(crate) fn connect_by(
    local: &Endpoint,
    remote: &Endpoint,
    av: AddressVector,
    mut modify: impl FnMut(&QpAttr, QpAttrMask) -> Result<(), ModifyObjectError>,
) -> Result<(), ConnectError> {
    let reads = local.max_rd_atomic.min(remote.max_rd_atomic);
    let attr = QpAttr {
        av,
        path_mtu: local.mtu.min(remote.mtu),
        dest_qpn: remote.qpn,
        rq_psn: remote.psn,
        sq_psn: local.psn,
        max_dest_rd_atomic: reads,
        max_rd_atomic: reads,
        min_rnr_timer: 12,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttr::default()
    };
    let mut rtr = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    let mut rts = QpAttrMask::SQ_PSN;
    if local.qp_type == QpType::Rc {
        rtr |= QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
        rts |= QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::MAX_QP_RD_ATOMIC;
    }
    move_to(&attr, QpState::Rtr, rtr, &mut modify)?;
    move_to(&attr, QpState::Rts, rts, &mut modify)
}
