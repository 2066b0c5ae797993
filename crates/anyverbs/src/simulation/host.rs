//! A host of a simulation, and the objects on it.

use std::future::poll_fn;
use std::net::IpAddr;
use std::ops::RangeBounds;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use anyverbs_objects::error::{CqError, CreateError, ModifyObjectError, PostError, RegisterError};
use anyverbs_objects::limits;
use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpCap, QpState, QpType};
use anyverbs_proto::types::{Mtu, Psn, QKey, Qpn};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::{AddressVector, RecvWr, SendWr, Sge, UdDest};
use anyverbs_sim::link::Link;
use anyverbs_sim::{CqId, DeviceId, Mr, QpId, QpOptions, Sim};
use rand::Rng;

use super::{SetLinkError, Wait, World};
use crate::endpoint::{self, ConnectError, Endpoint, HOPS};
use crate::ordinary::{CompletionError, PostFailure, QpExt, WaitError};
use crate::region::{AllocError, RemoteSlice, within};
use crate::verbs::{Memory, Verbs};

/// The most hosts: their addresses end with 1 to 254.
const MOST: usize = 254;

/// READs and atomics that a queue pair can have outstanding.
const READS: u8 = 16;

/// A host in virtual time, with an RDMA device. A clone is the same host. Its calls are those of [`Verbs`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::prelude::*;
/// use anyverbs::simulation::{Link, Simulation};
///
/// let mut simulation = Simulation::new(3);
/// let (a, b) = (simulation.host(), simulation.host());
/// a.set_link_to(&b, Link { delay: Duration::from_millis(20), ..Link::default() })?;
/// assert_eq!(b.ip().to_string(), "10.0.0.2");
///
/// let (pd, cq) = (a.alloc_pd()?, a.create_default_cq(4)?);
/// let (pd_b, cq_b) = (b.alloc_pd()?, b.create_default_cq(4)?);
/// let (qp, qp_b) =
///     (a.create_default_qp(&pd, &cq, QpType::Rc)?, b.create_default_qp(&pd_b, &cq_b, QpType::Rc)?);
/// let (of_a, of_b) = (a.endpoint(&qp)?, b.endpoint(&qp_b)?);
/// a.connect(&qp, &of_a, &of_b)?;
/// b.connect(&qp_b, &of_b, &of_a)?;
///
/// let table = b.alloc(&pd_b, 8, Access::REMOTE_READ)?;
/// table.write(b"a value!");
/// let place = table.remote();
/// simulation.spawn(async move {
///     let memory = a.alloc(&pd, 8, Access::LOCAL_WRITE)?;
///     qp.read(1, &memory, &place)?;
///     a.completion(&cq, Duration::from_secs(1)).await?;
///     assert_eq!(memory.to_vec(), b"a value!");
///     assert_eq!(a.now(), Duration::from_micros(20_005)); // there and back
///     Ok(())
/// });
/// simulation.run()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Host {
    world: Rc<World>,
    id: DeviceId,
}

/// A protection domain of a [`Host`].
#[derive(Debug)]
pub struct Pd {
    host: Host,
    number: u32,
}

/// A completion queue of a [`Host`].
#[derive(Debug)]
pub struct Cq(Rc<Completions>);

/// A completion queue, until no queue pair uses it any more.
#[derive(Debug)]
struct Completions {
    host: Host,
    id: CqId,
}

/// A queue pair of a [`Host`]. It is destroyed when dropped.
#[derive(Debug)]
pub struct Qp {
    host: Host,
    id: QpId,
    /// It uses them.
    _cqs: [Rc<Completions>; 2],
}

/// Registered memory of a [`Host`], or a piece of it, which keeps all of it registered.
#[derive(Clone, Debug)]
pub struct Slice {
    region: Rc<Registered>,
    start: usize,
    len: usize,
}

#[derive(Debug)]
struct Registered {
    host: Host,
    mr: Mr,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.host.at_drop(|sim| {
            sim.deregister(self.mr);
            sim.memory(self.mr.device).free(self.mr.addr);
        });
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.host.at_drop(|sim| sim.destroy(self.id));
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        self.host.at_drop(|sim| sim.destroy_cq(self.id));
    }
}

impl Host {
    pub(super) fn new(world: &Rc<World>) -> Self {
        let mut sim = world.sim.borrow_mut();
        let count = sim.device_count();
        assert!(count < MOST, "a simulation has {MOST} hosts at most");
        Self { id: sim.device(), world: Rc::clone(world) }
    }

    /// Its address.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.world.sim.borrow().gid(self.id).to_ip()
    }

    /// Sets the way from this host to another, from now on. The way back is another one.
    ///
    /// # Errors
    /// [`SetLinkError`]; nothing is changed.
    pub fn set_link_to(&self, to: &Self, link: Link) -> Result<(), SetLinkError> {
        if !self.is_with(to) {
            return Err(SetLinkError::Foreign);
        }
        link.check()?;
        self.world.sim.borrow_mut().net.set_link(self.id, to.id, link);
        Ok(())
    }

    /// Cuts it off for good: packets that it sends from now on are lost, and those to it, also on the way. Those that it has sent
    /// before arrive.
    pub fn cut_off(&self) {
        self.world.sim.borrow_mut().net.kill(self.id);
    }

    /// Whether the other host is of the same simulation.
    fn is_with(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.world, &other.world)
    }

    fn is(&self, other: &Self) -> bool {
        self.is_with(other) && self.id == other.id
    }

    /// Refuses an object of another host or another simulation.
    fn check(&self, of: &Self, what: &'static str) -> Result<(), CreateError> {
        if self.is(of) { Ok(()) } else { Err(CreateError::Foreign(what)) }
    }

    /// Changes the simulation when an object is dropped. While a panic unwinds nothing is changed: it may have come out of the
    /// simulation in the middle of a change.
    fn at_drop(&self, change: impl FnOnce(&mut Sim)) {
        if std::thread::panicking() {
            return;
        }
        if let Ok(mut sim) = self.world.sim.try_borrow_mut() {
            change(&mut sim);
        }
    }

    /// Refuses a queue pair of another host, as a number that is not ours.
    fn own(&self, qp: &Qp, local: &Endpoint) -> Result<(), ConnectError> {
        let is_own = self.is(&qp.host) && local.gid == self.world.sim.borrow().gid(self.id);
        if is_own { Ok(()) } else { Err(endpoint::no_address_of_ours(local)) }
    }
}

impl Verbs for Host {
    type Pd = Pd;
    type Cq = Cq;
    type Qp = Qp;
    type Slice = Slice;

    fn alloc_pd(&self) -> Result<Pd, CreateError> {
        Ok(Pd { host: self.clone(), number: self.world.sim.borrow_mut().pd(self.id) })
    }

    fn alloc(&self, pd: &Pd, len: usize, access: Access) -> Result<Slice, AllocError> {
        let memory = |source| AllocError::Memory { len, source };
        self.check(&pd.host, "protection domain").map_err(memory)?;
        if len == 0 {
            return Err(memory(CreateError::Invalid("length of a region")));
        }
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if access.intersects(writes) && !access.contains(Access::LOCAL_WRITE) {
            return Err(AllocError::Register { len, access, source: RegisterError::Access });
        }
        let mut sim = self.world.sim.borrow_mut();
        let addr = sim.memory(self.id).alloc(len);
        let addr = addr.ok_or(memory(CreateError::Exhausted("memory")))?;
        let Some(mr) = sim.try_register(self.id, pd.number, addr, len, access) else {
            sim.memory(self.id).free(addr);
            return Err(AllocError::Register { len, access, source: RegisterError::Exhausted });
        };
        let region = Registered { host: self.clone(), mr };
        Ok(Slice { region: Rc::new(region), start: 0, len })
    }

    fn create_default_cq(&self, cqe: u32) -> Result<Cq, CreateError> {
        // C's number has a sign.
        if cqe.cast_signed() <= 0 {
            let (value, most) = (cqe, limits::DEFAULT.max_cqe);
            return Err(CreateError::OutOfRange { what: "cqe", value, least: 1, most });
        }
        CreateError::check("cqe", cqe, limits::DEFAULT.max_cqe)?;
        let id = self.world.sim.borrow_mut().cq(self.id, cqe);
        Ok(Cq(Rc::new(Completions { host: self.clone(), id })))
    }

    fn create_sized_qp(
        &self,
        pd: &Pd,
        send_cq: &Cq,
        recv_cq: &Cq,
        cap: QpCap,
        qp_type: QpType,
    ) -> Result<Qp, CreateError> {
        self.check(&pd.host, "protection domain")?;
        self.check(&send_cq.0.host, "completion queue")?;
        self.check(&recv_cq.0.host, "completion queue")?;
        if matches!(qp_type, QpType::XrcSend | QpType::XrcRecv) {
            return Err(CreateError::Unsupported("XRC in a simulation"));
        }
        let most = limits::DEFAULT;
        CreateError::check("max_send_wr", cap.max_send_wr, most.max_qp_wr)?;
        CreateError::check("max_recv_wr", cap.max_recv_wr, most.max_qp_wr)?;
        CreateError::check("max_send_sge", cap.max_send_sge, most.max_sge)?;
        CreateError::check("max_recv_sge", cap.max_recv_sge, most.max_sge)?;
        CreateError::check("max_inline_data", cap.max_inline_data, most.max_inline_data)?;
        let options = QpOptions { qp_type, cap, sq_sig_all: true, ..QpOptions::udp() };
        let mut sim = self.world.sim.borrow_mut();
        if sim.qp_count(self.id) >= most.max_qp as usize {
            return Err(CreateError::Exhausted("queue pairs"));
        }
        let id = sim.qp(pd.number, send_cq.0.id, recv_cq.0.id, None, &options);
        let cqs = [send_cq, recv_cq].map(|cq| Rc::clone(&cq.0));
        Ok(Qp { host: self.clone(), id, _cqs: cqs })
    }

    fn endpoint(&self, qp: &Qp) -> Result<Endpoint, ConnectError> {
        self.check(&qp.host, "queue pair")?;
        endpoint::check_new(qp.state())?;
        let endpoint = Endpoint {
            qp_type: qp.qp_type(),
            qpn: qp.qpn(),
            psn: Psn::new(self.world.rng.borrow_mut().random()),
            gid: self.world.sim.borrow().gid(self.id),
            mtu: Mtu::Mtu1024,
            max_rd_atomic: READS,
            qkey: QKey(0),
        };
        endpoint::prepare(endpoint, 1, |attr, mask| qp.modify(attr, mask))
    }

    fn connect(&self, qp: &Qp, local: &Endpoint, remote: &Endpoint) -> Result<(), ConnectError> {
        endpoint::check_ends(qp.qpn(), local, remote)?;
        self.own(qp, local)?;
        endpoint::connect_by(local, remote, way(local, remote), |attr, mask| qp.modify(attr, mask))
    }

    fn destination(&self, pd: &Pd, remote: &Endpoint) -> Result<UdDest, ConnectError> {
        self.check(&pd.host, "protection domain")?;
        let own = self.world.sim.borrow().gid(self.id);
        let av = way(&Endpoint { gid: own, ..*remote }, remote);
        Ok(UdDest::new(pd.number, av, remote.qpn, remote.qkey))
    }

    async fn completion(&self, cq: &Cq, timeout: Duration) -> Result<Wc, WaitError> {
        if !self.is_with(&cq.0.host) {
            return Err(CqError::Foreign.into());
        }
        let wait = Wait::new(&self.world, timeout);
        poll_fn(|task| {
            let polled = self.world.sim.borrow_mut().poll_some(cq.0.id, 1).pop();
            if let Some(wc) = polled {
                return Poll::Ready(CompletionError::check(wc).map_err(WaitError::from));
            }
            if wait.is_over(task.waker()) {
                return Poll::Ready(Err(WaitError::Timeout(timeout)));
            }
            wait.also_for(cq.0.id, task.waker());
            Poll::Pending
        })
        .await
    }

    async fn sleep(&self, time: Duration) {
        let wait = Wait::new(&self.world, time);
        poll_fn(|task| if wait.is_over(task.waker()) { Poll::Ready(()) } else { Poll::Pending })
            .await;
    }

    fn now(&self) -> Duration {
        self.world.look();
        self.world.time().since(self.world.start)
    }
}

fn way(local: &Endpoint, remote: &Endpoint) -> AddressVector {
    AddressVector {
        dgid: remote.gid,
        sgid: local.gid,
        hop_limit: HOPS,
        port: 1,
        ..AddressVector::default()
    }
}

impl Qp {
    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.host.world.sim.borrow().get(self.id).qpn()
    }

    /// Its state.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.host.world.look();
        self.host.world.sim.borrow().get(self.id).state()
    }

    fn qp_type(&self) -> QpType {
        self.host.world.sim.borrow().get(self.id).init().qp_type
    }

    fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), ModifyObjectError> {
        Ok(self.host.world.sim.borrow_mut().modify(self.id, attr, mask)?)
    }
}

impl QpExt<Slice> for Qp {
    fn post_send_wr(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let mut sim = self.host.world.sim.borrow_mut();
        let own = sim.gid(self.host.id);
        if wr.ud.is_some_and(|to| to.av.sgid != own) {
            return Err(PostError::Foreign);
        }
        Ok(sim.post_send(self.id, wr).inspect_err(|_| self.host.world.look())?)
    }

    fn post_recv_wr(&self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let posted = self.host.world.sim.borrow_mut().post_recv(self.id, wr);
        Ok(posted.inspect_err(|_| self.host.world.look())?)
    }

    fn sge_of(&self, slice: &Slice) -> Result<Sge, PostError> {
        let is_ours = self.host.is_with(&slice.region.host);
        is_ours.then(|| slice.sge()).ok_or(PostError::Foreign)
    }

    fn post_send_list(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailure> {
        let mut wrs = wrs.iter().enumerate();
        wrs.try_for_each(|(index, wr)| self.post_send_wr(wr).map_err(|e| (index, e).into()))
    }

    fn post_recv_list(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailure> {
        let mut wrs = wrs.iter().enumerate();
        wrs.try_for_each(|(index, wr)| self.post_recv_wr(wr).map_err(|e| (index, e).into()))
    }
}

impl Memory for Slice {
    fn len(&self) -> usize {
        self.len
    }

    fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let (start, len) = within(&range, self.len);
        Self { region: Rc::clone(&self.region), start: self.start + start, len }
    }

    fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "the slice and the bytes have one length");
        self.region.host.world.sim.borrow().write(self.region.mr, self.start, bytes);
    }

    fn to_vec(&self) -> Vec<u8> {
        self.region.host.world.look();
        self.region.host.world.sim.borrow().bytes(self.region.mr, self.start, self.len)
    }

    fn sge(&self) -> Sge {
        self.region.mr.sge(self.start, self.len)
    }

    fn remote(&self) -> RemoteSlice {
        let at = self.region.mr.remote(self.start);
        RemoteSlice { va: at.va, len: self.len as u64, rkey: at.rkey }
    }
}
