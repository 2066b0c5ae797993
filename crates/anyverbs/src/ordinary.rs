//! Ordinary use in one call each: regions, single requests, waiting for completions, errors that say where.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use anyverbs_causes::Cause;
use anyverbs_objects::cq::Cq;
use anyverbs_objects::error::{CqError, PostError};
use anyverbs_objects::pd::Pd;
use anyverbs_proto::mr::Access;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wr::{RecvWr, SendFlags, SendOp, SendWr, Sge, UdDest};
use anyverbs_transport::qp::Qp;
use thiserror::Error;

use crate::region::{AllocError, Region, RemoteSlice, Slice};
use crate::verbs::Memory;

/// Why a list of work requests was not posted as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("work request {index} of the list: {source}")]
pub struct PostFailure {
    /// The place in the list of the request that was refused. Those before it are posted.
    pub index: usize,
    /// The reason.
    pub source: PostError,
}

/// From the error of [`Qp::post_send`] and [`Qp::post_recv`].
impl From<(usize, PostError)> for PostFailure {
    fn from((index, source): (usize, PostError)) -> Self {
        Self { index, source }
    }
}

/// A work request that completed with an error.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::time::Duration;
/// use anyverbs::prelude::*;
/// use anyverbs::{Cause, WaitError};
///
/// # let context = Context::open(&anyverbs::devices()?[0].name)?;
/// # let pd = context.alloc_pd()?;
/// # let cq = context.create_default_cq(16)?;
/// # let a = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let b = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// # context.connect(&a, &of_a, &of_b)?;
/// # context.connect(&b, &of_b, &of_a)?;
/// # let memory = pd.alloc(64, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
/// let behind = RemoteSlice { va: 1 << 60, ..memory.remote(..8) };
/// a.read(1, &memory.slice(8..16), &behind)?;
/// let Err(WaitError::Failed(failure)) = cq.wait(Duration::from_secs(10)) else { panic!() };
/// assert_eq!((failure.status, failure.cause()), (WcStatus::RemAccessErr, Some(Cause::RkeyRange)));
/// let text = "failed: RemAccessErr (AV1005: the range is not within the region)";
/// assert!(failure.to_string().ends_with(text)); // `anyverbs explain AV1005` tells more
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub struct CompletionError {
    /// The request's ID.
    pub wr_id: u64,
    /// The status.
    pub status: WcStatus,
    /// The device's own code. On this device it is the number of the [`cause`](Self::cause), or 0.
    pub vendor_err: u32,
    /// The queue pair.
    pub qpn: Qpn,
    pub(crate) cause: Option<Cause>,
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wr_id, status, vendor_err, qpn, cause } = self;
        write!(f, "work request {wr_id:#x} of queue pair {qpn} failed: {status:?}")?;
        match cause {
            Some(cause) => write!(f, " ({cause}: {})", cause.text()),
            None if *vendor_err != 0 => write!(f, " (vendor error {vendor_err:#x})"),
            None => Ok(()),
        }
    }
}

impl CompletionError {
    /// The completion, or an error if that has one.
    ///
    /// # Errors
    /// Every status but [`WcStatus::Success`].
    pub fn check(wc: Wc) -> Result<Wc, Self> {
        let Wc { wr_id, status, vendor_err, qpn, .. } = wc;
        if status == WcStatus::Success {
            Ok(wc)
        } else {
            let cause = u16::try_from(vendor_err).ok().and_then(Cause::from_number);
            Err(Self { wr_id, status, vendor_err, qpn, cause })
        }
    }

    /// Why it failed. A request that was flushed has the cause of the failure that came first. There is none for a failure of another
    /// device, whose `vendor_err` has a meaning of its own.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        self.cause
    }
}

/// Why no good completion came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WaitError {
    /// None came in time.
    #[error("no completion came within {0:?}")]
    Timeout(Duration),
    /// The completion queue cannot be polled.
    #[error(transparent)]
    Cq(#[from] CqError),
    /// A request failed.
    #[error(transparent)]
    Failed(#[from] CompletionError),
}

/// One call for memory.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let table = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
/// let offer = table.remote(..64).to_bytes(); // for a peer, which READs the first 64 bytes
///
/// let bytes = b"bytes that the program has".to_vec();
/// let given = pd.adopt(bytes.into(), Access::REMOTE_READ)?;
/// assert_eq!(given.slice(..5).to_vec(), b"bytes");
/// # assert_eq!(offer.len(), RemoteSlice::LEN);
/// # Ok(())
/// # }
/// ```
pub trait PdExt {
    /// Allocates `len` bytes, all zero, and registers them ([`Region`]).
    ///
    /// # Errors
    /// [`AllocError`].
    fn alloc(&self, len: usize, access: Access) -> Result<Region, AllocError>;

    /// Registers bytes that the program gives away, as `vec.into()`, without a copy ([`Region`]).
    /// [`Region::into_bytes`] gives them back. Peers on the same host map memory of [`alloc`](Self::alloc) alone.
    ///
    /// # Errors
    /// [`AllocError`]. The bytes are lost then.
    fn adopt(&self, bytes: Box<[u8]>, access: Access) -> Result<Region, AllocError>;
}

impl PdExt for Pd {
    fn alloc(&self, len: usize, access: Access) -> Result<Region, AllocError> {
        Region::alloc(self, len, access)
    }

    fn adopt(&self, bytes: Box<[u8]>, access: Access) -> Result<Region, AllocError> {
        Region::adopt(self, bytes, access)
    }
}

/// One call for a single work request. Each makes a completion. None needs `unsafe` or allocates.
///
/// A request names memory by address and key. So the slice may be dropped at once if its region lives on elsewhere. If it does not, a
/// request that still needs it completes with an error.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let (cq_a, cq_b) = (context.create_cq(16, None, 0, 0)?, context.create_cq(16, None, 0, 0)?);
/// let a = context.create_default_qp(&pd, &cq_a, QpType::Rc)?;
/// let b = context.create_default_qp(&pd, &cq_b, QpType::Rc)?;
/// let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// context.connect(&a, &of_a, &of_b)?;
/// context.connect(&b, &of_b, &of_a)?;
///
/// let memory = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
/// b.recv(1, &memory.slice(..1024))?;
/// memory.write(2048, b"hello");
/// a.send(2, &memory.slice(2048..2053))?;
/// cq_a.wait(Duration::from_secs(10))?;
/// let received = cq_b.wait(Duration::from_secs(10))?;
/// assert_eq!(memory.slice(..received.byte_len as usize).to_vec(), b"hello");
///
/// a.read(3, &memory.slice(1024..1029), &memory.remote(..5))?; // one-sided
/// cq_a.wait(Duration::from_secs(10))?;
/// assert_eq!(memory.slice(1024..1029).to_vec(), b"hello");
///
/// let counter = pd.alloc(8, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC)?;
/// a.fetch_add(4, &memory.slice(..8), &counter.remote(..), 5)?;
/// cq_a.wait(Duration::from_secs(10))?;
/// assert_eq!(counter.slice(..).to_vec(), 5u64.to_ne_bytes());
/// # Ok(())
/// # }
/// ```
///
/// `S` is the memory of the queue pair's device: [`Slice`], or that of a simulated one.
pub trait QpExt<S: Memory = Slice> {
    /// Posts one work request.
    ///
    /// # Errors
    /// [`PostError`].
    fn post_send_wr(&self, wr: &SendWr<'_>) -> Result<(), PostError>;

    /// Posts one receive request.
    ///
    /// # Errors
    /// [`PostError`].
    fn post_recv_wr(&self, wr: &RecvWr<'_>) -> Result<(), PostError>;

    /// As [`Qp::post_send`], with an error that is a [`std::error::Error`].
    ///
    /// # Errors
    /// [`PostFailure`].
    fn post_send_list(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailure>;

    /// As [`Qp::post_recv`], with an error that is a [`std::error::Error`].
    ///
    /// # Errors
    /// [`PostFailure`].
    fn post_recv_list(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailure>;

    /// The element of a slice. Simulated queue pairs refuse one of another simulation, whose keys mean something else here.
    ///
    /// # Errors
    /// [`PostError::Foreign`].
    fn sge_of(&self, slice: &S) -> Result<Sge, PostError> {
        Ok(slice.sge())
    }

    /// Posts a SEND of a slice.
    ///
    /// # Errors
    /// [`PostError`].
    fn send(&self, wr_id: u64, from: &S) -> Result<(), PostError> {
        self.post_send_wr(&signaled(wr_id, SendOp::Send, &[self.sge_of(from)?], None))
    }

    /// Posts a SEND of a slice as a datagram. [`Ah::dest`](crate::Ah::dest) makes the destination.
    ///
    /// # Errors
    /// [`PostError`].
    fn send_to(&self, wr_id: u64, from: &S, to: UdDest) -> Result<(), PostError> {
        self.post_send_wr(&signaled(wr_id, SendOp::Send, &[self.sge_of(from)?], Some(to)))
    }

    /// Posts a receive into a slice. One for datagrams has 40 bytes more, for their headers.
    ///
    /// # Errors
    /// [`PostError`].
    fn recv(&self, wr_id: u64, into: &S) -> Result<(), PostError> {
        self.post_recv_wr(&RecvWr { wr_id, sges: &[self.sge_of(into)?] })
    }

    /// Posts a WRITE of a slice to memory of the peer. As many bytes are written as the slice has; the peer's may have more.
    ///
    /// # Errors
    /// [`PostError`]; [`PostError::Longer`] if the peer's has fewer.
    fn write(&self, wr_id: u64, from: &S, to: &RemoteSlice) -> Result<(), PostError> {
        check_lengths(from, to)?;
        self.post_send_wr(&signaled(wr_id, SendOp::Write(to.addr()), &[self.sge_of(from)?], None))
    }

    /// Posts a READ of memory of the peer into a slice. As many bytes are read as the slice has; the peer's may have more.
    ///
    /// # Errors
    /// [`PostError`]; [`PostError::Longer`] if the peer's has fewer.
    fn read(&self, wr_id: u64, into: &S, from: &RemoteSlice) -> Result<(), PostError> {
        check_lengths(into, from)?;
        self.post_send_wr(&signaled(wr_id, SendOp::Read(from.addr()), &[self.sge_of(into)?], None))
    }

    /// Posts an atomic addition to a word of the peer, 8 bytes in its order of bytes. The slice, of 8 bytes, gets the word as it was.
    ///
    /// # Errors
    /// [`PostError`].
    fn fetch_add(&self, wr_id: u64, into: &S, at: &RemoteSlice, add: u64) -> Result<(), PostError> {
        let op = SendOp::FetchAdd { at: at.addr(), add };
        self.post_send_wr(&signaled(wr_id, op, &[self.sge_of(into)?], None))
    }

    /// Posts an atomic exchange: a word of the peer becomes `swap` if it is `compare`. Otherwise as [`fetch_add`](Self::fetch_add).
    ///
    /// # Errors
    /// [`PostError`].
    fn compare_swap(
        &self,
        wr_id: u64,
        into: &S,
        at: &RemoteSlice,
        compare: u64,
        swap: u64,
    ) -> Result<(), PostError> {
        let op = SendOp::CompareSwap { at: at.addr(), compare, swap };
        self.post_send_wr(&signaled(wr_id, op, &[self.sge_of(into)?], None))
    }
}

/// The peer named no more than its slice: what lies behind is not for the request.
fn check_lengths(own: &impl Memory, peer: &RemoteSlice) -> Result<(), PostError> {
    let (local, remote) = (own.len() as u64, peer.len);
    if local > remote { Err(PostError::Longer { local, remote }) } else { Ok(()) }
}

impl QpExt for Qp {
    fn post_send_wr(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.post()?.send(wr)
    }

    fn post_recv_wr(&self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.post()?.recv(wr)
    }

    fn post_send_list(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailure> {
        Ok(self.post_send(wrs)?)
    }

    fn post_recv_list(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailure> {
        Ok(self.post_recv(wrs)?)
    }
}

fn signaled(wr_id: u64, op: SendOp, sges: &[Sge], ud: Option<UdDest>) -> SendWr<'_> {
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges, ud, xrc_srqn: 0 }
}

/// One call to wait for a completion.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::prelude::*;
/// use anyverbs::WaitError;
///
/// # let context = Context::open(&anyverbs::devices()?[0].name)?;
/// # let pd = context.alloc_pd()?;
/// let cq = context.create_default_cq(16)?;
/// # let a = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let b = context.create_default_qp(&pd, &cq, QpType::Rc)?;
/// # let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// # context.connect(&a, &of_a, &of_b)?;
/// # context.connect(&b, &of_b, &of_a)?;
/// # let memory = pd.alloc(64, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
/// # let table = RemoteSlice { rkey: !memory.mr().rkey(), ..memory.remote(..8) };
/// assert!(matches!(cq.wait(Duration::ZERO), Err(WaitError::Timeout(_))));
/// a.read(1, &memory.slice(8..16), &table)?; // with a key that the peer does not know
/// match cq.wait(Duration::from_secs(10)) {
///     Err(WaitError::Failed(failure)) => assert_eq!(failure.status, WcStatus::RemAccessErr),
///     other => panic!("{other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
pub trait CqExt {
    /// The next completion, waited for by polling. A completion with an error is an error. For a wait without polling see
    /// [`CompChannel`](crate::CompChannel) and, with the feature `tokio`, `anyverbs::with_tokio`.
    ///
    /// # Errors
    /// [`WaitError`].
    fn wait(&self, timeout: Duration) -> Result<Wc, WaitError>;
}

impl CqExt for Cq {
    fn wait(&self, timeout: Duration) -> Result<Wc, WaitError> {
        let started = Instant::now();
        let mut wc = [Wc::default()];
        loop {
            if self.poll(&mut wc)? == 1 {
                return Ok(CompletionError::check(wc[0])?);
            }
            if started.elapsed() >= timeout {
                return Err(WaitError::Timeout(timeout));
            }
            // The peer may need this processor.
            thread::yield_now();
        }
    }
}
