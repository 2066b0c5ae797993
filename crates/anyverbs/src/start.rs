//! The types that programs start from, each with an example. The crates that define them cannot run one: they lie below this crate.

/// Address handle: the way to the peers of datagram queue pairs.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let cq = context.create_default_cq(16)?;
/// let sender = context.create_default_qp(&pd, &cq, QpType::Ud)?;
/// let receiver = context.create_default_qp(&pd, &cq, QpType::Ud)?;
/// context.endpoint(&sender)?; // ready to send
///
/// let peer = context.endpoint(&receiver)?; // bytes of it would come from the peer
/// let memory = pd.alloc(1024, Access::LOCAL_WRITE)?;
/// receiver.recv(1, &memory.slice(..512))?; // 40 bytes of it are for headers
/// let ah: Ah = context.address_of(&pd, &peer)?;
/// sender.send_to(2, &memory.slice(512..520), ah.dest(peer.qpn, peer.qkey))?;
/// for _ in 0..2 {
///     cq.wait(Duration::from_secs(10))?;
/// }
/// # Ok(())
/// # }
/// ```
pub use anyverbs_objects::ah::Ah;

/// Asynchronous event: news of an object or a port that no completion brings.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
/// use anyverbs::{AsyncEventKind, EventElement, SrqInitAttr};
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let srq = pd.create_srq(&SrqInitAttr { max_wr: 8, max_sge: 1, cookie: 7 })?;
/// # let memory = pd.alloc(64, Access::LOCAL_WRITE)?;
/// # let cq = context.create_default_cq(16)?;
/// # let init = anyverbs::QpInitAttr { send_cq: &cq, recv_cq: &cq, srq: Some(&srq), cap: QpCap { max_send_wr: 4, max_send_sge: 1, ..QpCap::default() }, qp_type: QpType::Rc, sq_sig_all: true, cookie: 0 };
/// # let (a, b) = (context.create_qp(&pd, &init)?, context.create_qp(&pd, &init)?);
/// # let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// # context.connect(&a, &of_a, &of_b)?;
/// # context.connect(&b, &of_b, &of_a)?;
/// srq.post_recv(&[RecvWr { wr_id: 1, sges: &[memory.slice(..8).sge()] }]).map_err(|(_, error)| error)?;
/// srq.modify(None, Some(1))?; // tell me once fewer than one receive is left
/// # a.send(2, &memory.slice(8..16))?;
/// // ... a peer's SEND takes the receive ...
/// let event = context.get_async_event()?;
/// assert_eq!(event.kind(), AsyncEventKind::SrqLimitReached);
/// assert_eq!(event.element(), EventElement::Srq { cookie: 7 });
/// drop(event); // acknowledged here: `srq.destroy()` would wait for it
/// # Ok(())
/// # }
/// ```
pub use anyverbs_objects::async_event::AsyncEvent;

/// Completion channel: lets a thread sleep until a completion queue has completions.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let channel = context.create_comp_channel()?;
/// let cq = context.create_cq(16, Some(&channel), 0, 7)?;
/// # let a = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let b = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// # context.connect(&a, &of_a, &of_b)?;
/// # context.connect(&b, &of_b, &of_a)?;
/// # let memory = pd.alloc(64, Access::LOCAL_WRITE)?;
/// # b.recv(1, &memory.slice(..8))?;
/// # a.send(2, &memory.slice(8..16))?;
/// let (mut wc, mut seen) = ([Wc::default(); 4], 0);
/// while seen < 2 {
///     cq.req_notify(false)?;
///     // A completion that came before the request makes no event: poll once more before sleeping.
///     seen += cq.poll(&mut wc)?;
///     if seen < 2 {
///         assert_eq!(channel.get_event()?.cookie(), 7); // sleeps
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub use anyverbs_objects::comp_channel::CompChannel;

/// Completion queue: says which work requests are done, and how they ended.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let cq = context.create_cq(16, None, 0, 0)?;
/// # let pd = context.alloc_pd()?;
/// # let a = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let b = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// # context.connect(&a, &of_a, &of_b)?;
/// # context.connect(&b, &of_b, &of_a)?;
/// # let memory = pd.alloc(64, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
/// let mut wcs = [Wc::default(); 8];
/// assert_eq!(cq.poll(&mut wcs)?, 0); // polling never waits
///
/// a.read(7, &memory.slice(..8), &memory.remote(8..16))?;
/// let wc = cq.wait(Duration::from_secs(10))?; // `CqExt` polls until there is one
/// assert_eq!((wc.wr_id, wc.opcode, wc.status), (7, WcOpcode::RdmaRead, WcStatus::Success));
/// # Ok(())
/// # }
/// ```
pub use anyverbs_objects::cq::Cq;

/// Memory region: memory that the device may reach, under a key for us and one for peers.
///
/// [`PdExt::alloc`](crate::PdExt::alloc) needs no `unsafe`. This is for memory that other code owns:
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let memory = Box::into_raw(vec![0u8; 4096].into_boxed_slice());
/// let (start, len) = (memory.cast::<u8>() as u64, memory.len() as u64);
/// // SAFETY: the bytes stay until the region is destroyed, and no reference to them is made before.
/// let mr = unsafe { pd.reg_mr(start, len, start, Access::LOCAL_WRITE | Access::REMOTE_WRITE)? };
/// println!("peers name it by {:#x} at {:#x}", mr.rkey(), mr.start());
/// assert_eq!(mr.sge(64..128), Sge { addr: start + 64, len: 64, lkey: mr.lkey() });
/// mr.destroy()?;
/// // SAFETY: the pointer came from `into_raw`, and the device no longer reaches the bytes.
/// drop(unsafe { Box::from_raw(memory) });
/// # Ok(())
/// # }
/// ```
pub use anyverbs_objects::mr::Mr;

/// Memory window: lends a part of a region to peers, and takes it back without another registration.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::prelude::*;
/// use anyverbs::{BindInfo, WindowType};
///
/// # let context = Context::open(&anyverbs::devices()?[0].name)?;
/// # let pd = context.alloc_pd()?;
/// # let cq = context.create_default_cq(16)?;
/// # let qp = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let peer = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let (ours, theirs) = (context.endpoint(&qp)?, context.endpoint(&peer)?);
/// # context.connect(&qp, &ours, &theirs)?;
/// # context.connect(&peer, &theirs, &ours)?;
/// let region = pd.alloc(4096, Access::LOCAL_WRITE | Access::MW_BIND)?;
/// let window = pd.alloc_mw(WindowType::Type2)?;
/// let addr = region.mr().start() + 1024;
/// let lent = BindInfo { mr: Some(region.mr()), addr, len: 8, access: Access::REMOTE_READ };
/// let (op, rkey) = window.bind(window.rkey().wrapping_add(1), &lent)?;
/// let flags = SendFlags::SIGNALED;
/// qp.post_send_wr(&SendWr { wr_id: 1, op, flags, sges: &[], ud: None, xrc_srqn: 0 })?;
/// cq.wait(Duration::from_secs(10))?;
/// let name = RemoteSlice { va: addr, len: 8, rkey }; // for the peer
/// # peer.read(2, &region.slice(..8), &name)?;
/// # cq.wait(Duration::from_secs(10))?;
/// # Ok(())
/// # }
/// ```
pub use anyverbs_objects::mw::Mw;

/// Protection domain: queue pairs and memory that belong together.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let memory = pd.alloc(4096, Access::LOCAL_WRITE)?;
/// let cq = context.create_default_cq(16)?;
/// let qp = context.create_default_qp(&pd, &cq, QpType::Rc)?; // may use `memory`
///
/// assert!(pd.destroy().is_err()); // EBUSY: they use it
/// drop((qp, memory));
/// pd.destroy()?;
/// # Ok(())
/// # }
/// ```
pub use anyverbs_objects::pd::Pd;

/// Shared receive queue: receives that several queue pairs take from.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::prelude::*;
/// use anyverbs::SrqInitAttr;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let (sends, receives) = (context.create_default_cq(16)?, context.create_default_cq(16)?);
/// let srq = pd.create_srq(&SrqInitAttr { max_wr: 64, max_sge: 1, cookie: 0 })?;
/// let cap = QpCap { max_send_wr: 16, max_send_sge: 1, ..QpCap::default() };
/// let init = QpInitAttr { send_cq: &sends, recv_cq: &receives, srq: Some(&srq), cap, qp_type: QpType::Rc, sq_sig_all: true, cookie: 0 };
/// let (a, b) = (context.create_qp(&pd, &init)?, context.create_qp(&pd, &init)?);
/// # let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// # context.connect(&a, &of_a, &of_b)?;
/// # context.connect(&b, &of_b, &of_a)?;
/// # let memory = pd.alloc(64, Access::LOCAL_WRITE)?;
/// // ... `a` and `b` are connected to peers ...
/// srq.post()?.recv(&RecvWr { wr_id: 1, sges: &[memory.slice(..32).sge()] })?;
/// # a.send(2, &memory.slice(32..40))?;
/// let wc = receives.wait(Duration::from_secs(10))?;
/// assert_eq!((wc.wr_id, wc.qpn), (1, b.qpn())); // whose message it was
/// # Ok(())
/// # }
/// ```
pub use anyverbs_objects::srq::Srq;

/// Posts work requests one after another, without an allocation: [`Qp::post`] makes it.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::time::Duration;
/// use anyverbs::prelude::*;
///
/// # let context = Context::open(&anyverbs::devices()?[0].name)?;
/// # let pd = context.alloc_pd()?;
/// # let cq = context.create_default_cq(16)?;
/// # let qp = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let peer = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let (ours, theirs) = (context.endpoint(&qp)?, context.endpoint(&peer)?);
/// # context.connect(&qp, &ours, &theirs)?;
/// # context.connect(&peer, &theirs, &ours)?;
/// # let memory = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
/// # let table = memory.remote(2048..);
/// let mut poster = qp.post()?; // holds the queue pair's lock
/// for part in 0..4u64 {
///     let at = part as usize * 64;
///     let op = SendOp::Write(table.slice(at..).addr());
///     let sges = [memory.slice(at..at + 64).sge()];
///     poster.send(&SendWr { wr_id: part, op, flags: SendFlags::SIGNALED, sges: &sges, ud: None, xrc_srqn: 0 })?;
/// }
/// drop(poster); // all four start by now
/// # for _ in 0..4 {
/// #     cq.wait(Duration::from_secs(10))?;
/// # }
/// # Ok(())
/// # }
/// ```
pub use anyverbs_transport::qp::Poster;

/// Queue pair: sends and receives, here with all parameters. [`Context::create_default_qp`](crate::Context::create_default_qp) chooses
/// them.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let cq = context.create_default_cq(64)?;
/// let qp = context.create_qp(
///     &pd,
///     &QpInitAttr {
///         send_cq: &cq,
///         recv_cq: &cq,
///         srq: None,
///         cap: QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 64 },
///         qp_type: QpType::Rc,
///         sq_sig_all: false, // a send completes if it has `SendFlags::SIGNALED`
///         cookie: 0,
///     },
/// )?;
/// assert_eq!(qp.state()?, QpState::Reset);
/// let for_the_peer = context.endpoint(&qp)?.to_bytes(); // see `Context::connect`
/// assert_eq!(qp.state()?, QpState::Init);
/// # assert_eq!(for_the_peer.len(), Endpoint::LEN);
/// # Ok(())
/// # }
/// ```
pub use anyverbs_transport::qp::Qp;
