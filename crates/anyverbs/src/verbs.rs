//! Programs for the device of this process and for simulated ones.

use std::future::{Future, poll_fn};
use std::ops::RangeBounds;
use std::sync::OnceLock;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use anyverbs_objects::cq::Cq;
use anyverbs_objects::error::CreateError;
use anyverbs_objects::pd::Pd;
use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::{QpCap, QpType};
use anyverbs_proto::wc::Wc;
use anyverbs_proto::wr::{Sge, UdDest};
use anyverbs_transport::qp::{Qp, QpInitAttr};

use crate::context::Context;
use crate::endpoint::{ConnectError, DEFAULT_CAP, Endpoint};
use crate::ordinary::{CompletionError, PdExt, QpExt, WaitError};
use crate::region::{AllocError, RemoteSlice, Slice};

/// A device, for programs that do not say which one: [`Context`] is the device of this process. With the feature `simulation`,
/// `anyverbs::simulation::Host` is one in virtual time, on a network that loses packets by a seed. With the feature `system`,
/// `anyverbs::system::Device` is one of the system's libibverbs, such as hardware.
///
/// The calls have the names that they have elsewhere in this crate. A wait is a future, since a simulation has one thread.
/// The futures of `Context` need no certain runtime: whenever one is asked, it polls the queue, and it asks to be
/// asked again. A program that should sleep meanwhile uses `anyverbs::with_tokio`.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::error::Error;
/// use std::time::Duration;
/// use anyverbs::prelude::*;
///
/// /// Sends a greeting from one queue pair to another of the same device.
/// async fn greet<V: Verbs>(device: &V) -> Result<Vec<u8>, Box<dyn Error>> {
///     let pd = device.alloc_pd()?;
///     let (sends, receives) = (device.create_default_cq(4)?, device.create_default_cq(4)?);
///     let a = device.create_default_qp(&pd, &sends, QpType::Rc)?;
///     let b = device.create_default_qp(&pd, &receives, QpType::Rc)?;
///     let (of_a, of_b) = (device.endpoint(&a)?, device.endpoint(&b)?);
///     device.connect(&a, &of_a, &of_b)?;
///     device.connect(&b, &of_b, &of_a)?;
///
///     let memory = device.alloc(&pd, 64, Access::LOCAL_WRITE)?;
///     b.recv(1, &memory.slice(..32))?;
///     memory.slice(32..37).write(b"hello");
///     a.send(2, &memory.slice(32..37))?;
///     let wc = device.completion(&receives, Duration::from_secs(10)).await?;
///     Ok(memory.slice(..wc.byte_len as usize).to_vec())
/// }
///
/// // On the device of this process. Any runtime would do.
/// # let runtime = tokio::runtime::Builder::new_current_thread().build()?;
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// assert_eq!(runtime.block_on(greet(&context))?, b"hello");
///
/// // In virtual time, with loss.
/// # #[cfg(feature = "simulation")] {
/// use anyverbs::simulation::{Link, Simulation};
///
/// let mut simulation = Simulation::new(7);
/// simulation.set_link(Link { loss: 0.3, ..Link::default() })?;
/// let host = simulation.host();
/// simulation.spawn(async move { Ok(assert_eq!(greet(&host).await?, b"hello")) });
/// simulation.run()?;
/// # }
/// # Ok(())
/// # }
/// ```
pub trait Verbs {
    /// A protection domain.
    type Pd;
    /// A completion queue.
    type Cq;
    /// A queue pair.
    type Qp: QpExt<Self::Slice>;
    /// Registered memory, or a piece of it.
    type Slice: Memory;

    /// Makes a protection domain.
    ///
    /// # Errors
    /// [`CreateError`].
    fn alloc_pd(&self) -> Result<Self::Pd, CreateError>;

    /// Allocates `len` bytes, all zero, and registers them. They live as long as a piece of them.
    ///
    /// # Errors
    /// [`AllocError`], as [`PdExt::alloc`].
    fn alloc(&self, pd: &Self::Pd, len: usize, access: Access) -> Result<Self::Slice, AllocError>;

    /// Makes a completion queue for `cqe` completions, without a channel.
    ///
    /// # Errors
    /// [`CreateError`].
    fn create_default_cq(&self, cqe: u32) -> Result<Self::Cq, CreateError>;

    /// Makes a queue pair with queues of these sizes. Sends and receives complete in queues of their own, or in the same one. Every
    /// send makes a completion.
    ///
    /// # Errors
    /// [`CreateError`].
    fn create_sized_qp(
        &self,
        pd: &Self::Pd,
        send_cq: &Self::Cq,
        recv_cq: &Self::Cq,
        cap: QpCap,
        qp_type: QpType,
    ) -> Result<Self::Qp, CreateError>;

    /// Makes a queue pair, as [`Context::create_default_qp`].
    ///
    /// # Errors
    /// [`CreateError`].
    fn create_default_qp(
        &self,
        pd: &Self::Pd,
        cq: &Self::Cq,
        qp_type: QpType,
    ) -> Result<Self::Qp, CreateError> {
        self.create_sized_qp(pd, cq, cq, DEFAULT_CAP, qp_type)
    }

    /// Prepares a new queue pair and says what its peer needs to know, as [`Context::endpoint`].
    ///
    /// # Errors
    /// [`ConnectError`].
    fn endpoint(&self, qp: &Self::Qp) -> Result<Endpoint, ConnectError>;

    /// Connects a queue pair of type RC or UC, as [`Context::connect`].
    ///
    /// # Errors
    /// [`ConnectError`].
    fn connect(
        &self,
        qp: &Self::Qp,
        local: &Endpoint,
        remote: &Endpoint,
    ) -> Result<(), ConnectError>;

    /// The destination of datagrams to a peer, for [`QpExt::send_to`].
    ///
    /// # Errors
    /// [`ConnectError`].
    fn destination(&self, pd: &Self::Pd, remote: &Endpoint) -> Result<UdDest, ConnectError>;

    /// The next completion, as [`CqExt::wait`](crate::CqExt::wait): one with an error is an error.
    ///
    /// # Errors
    /// [`WaitError`].
    fn completion(
        &self,
        cq: &Self::Cq,
        timeout: Duration,
    ) -> impl Future<Output = Result<Wc, WaitError>>;

    /// Waits for a time.
    fn sleep(&self, time: Duration) -> impl Future<Output = ()>;

    /// The time since some moment that stays the same.
    fn now(&self) -> Duration;
}

/// Registered memory, or a piece of it, of any device. [`Slice`] is that of the device of this process.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// fn fill(memory: &impl Memory) -> RemoteSlice {
///     memory.slice(..5).write(b"hello");
///     memory.slice(..5).remote()
/// }
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let region = context.alloc_pd()?.alloc(64, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
/// assert_eq!(fill(&region.slice(..)).len, 5);
/// assert_eq!(region.slice(..5).to_vec(), b"hello");
/// # Ok(())
/// # }
/// ```
#[expect(clippy::len_without_is_empty, reason = "its length is known to who made it")]
pub trait Memory: Clone {
    /// Bytes.
    fn len(&self) -> usize;

    /// A piece of it, which keeps all of it alive.
    ///
    /// # Panics
    /// If the range does not lie within it.
    #[must_use]
    fn slice(&self, range: impl RangeBounds<usize>) -> Self;

    /// Copies `bytes` into it.
    ///
    /// # Panics
    /// If the lengths differ.
    fn write(&self, bytes: &[u8]);

    /// A copy of its bytes.
    fn to_vec(&self) -> Vec<u8>;

    /// Its scatter/gather element.
    fn sge(&self) -> Sge;

    /// Its name for a peer.
    fn remote(&self) -> RemoteSlice;
}

impl Memory for Slice {
    fn len(&self) -> usize {
        self.len()
    }

    fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        self.slice(range)
    }

    fn write(&self, bytes: &[u8]) {
        self.write(bytes);
    }

    fn to_vec(&self) -> Vec<u8> {
        self.to_vec()
    }

    fn sge(&self) -> Sge {
        self.sge()
    }

    fn remote(&self) -> RemoteSlice {
        self.remote()
    }
}

impl Verbs for Context {
    type Pd = Pd;
    type Cq = Cq;
    type Qp = Qp;
    type Slice = Slice;

    fn alloc_pd(&self) -> Result<Pd, CreateError> {
        self.alloc_pd()
    }

    fn alloc(&self, pd: &Pd, len: usize, access: Access) -> Result<Slice, AllocError> {
        Ok(pd.alloc(len, access)?.slice(..))
    }

    fn create_default_cq(&self, cqe: u32) -> Result<Cq, CreateError> {
        self.create_cq(cqe, None, 0, 0)
    }

    fn create_sized_qp(
        &self,
        pd: &Pd,
        send_cq: &Cq,
        recv_cq: &Cq,
        cap: QpCap,
        qp_type: QpType,
    ) -> Result<Qp, CreateError> {
        let init =
            QpInitAttr { send_cq, recv_cq, srq: None, cap, qp_type, sq_sig_all: true, cookie: 0 };
        self.create_qp(pd, &init)
    }

    fn endpoint(&self, qp: &Qp) -> Result<Endpoint, ConnectError> {
        self.endpoint(qp)
    }

    fn connect(&self, qp: &Qp, local: &Endpoint, remote: &Endpoint) -> Result<(), ConnectError> {
        self.connect(qp, local, remote)
    }

    fn destination(&self, pd: &Pd, remote: &Endpoint) -> Result<UdDest, ConnectError> {
        Ok(self.address_of(pd, remote)?.dest(remote.qpn, remote.qkey))
    }

    async fn completion(&self, cq: &Cq, timeout: Duration) -> Result<Wc, WaitError> {
        let started = Instant::now();
        polled(|| {
            let mut wc = [Wc::default()];
            match cq.poll(&mut wc) {
                Ok(0) if started.elapsed() >= timeout => Some(Err(WaitError::Timeout(timeout))),
                Ok(0) => None,
                Ok(_) => Some(CompletionError::check(wc[0]).map_err(WaitError::from)),
                Err(error) => Some(Err(error.into())),
            }
        })
        .await
    }

    async fn sleep(&self, time: Duration) {
        let started = Instant::now();
        polled(|| (started.elapsed() >= time).then_some(())).await;
    }

    fn now(&self) -> Duration {
        now()
    }
}

/// The time since the first call.
pub(crate) fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// Asks again and again, and lets others run in between: other tasks of the runtime, and other threads.
pub(crate) fn polled<T>(mut ask: impl FnMut() -> Option<T>) -> impl Future<Output = T> {
    poll_fn(move |task| match ask() {
        Some(answer) => Poll::Ready(answer),
        None => {
            task.waker().wake_by_ref();
            thread::yield_now();
            Poll::Pending
        }
    })
}
