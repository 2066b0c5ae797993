//! Completions, connection events and asynchronous events as futures for tokio (feature `tokio`).
//!
//! Each future waits for a descriptor in the caller's own runtime, which needs its I/O driver (`enable_io`), and its timer
//! (`enable_time`) for the calls with a timeout. No runtime and no task is started here. Every future may be dropped at any time without the
//! loss of an event: what was not returned is there for the next call.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;
use anyverbs_cm::{Event, EventChannel};
use anyverbs_objects::async_event::AsyncEvent;
use anyverbs_objects::comp_channel::CompChannel;
use anyverbs_objects::cq::Cq;
use anyverbs_objects::error::{CqError, CreateError, EventError};
use anyverbs_proto::wc::Wc;
use thiserror::Error;

use crate::context::Context;

/// Why a wait ended without a result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WaitError {
    /// Nothing came in time.
    #[error("nothing came within {0:?}")]
    Timeout(Duration),
    /// The completion queue cannot be polled.
    #[error(transparent)]
    Cq(#[from] CqError),
    /// The event cannot be read.
    #[error(transparent)]
    Event(#[from] EventError),
    /// The runtime cannot wait for the descriptor.
    #[error("waiting for the descriptor: {0}")]
    Runtime(#[from] io::Error),
}

/// Why an object for futures was not made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NewError {
    /// The device did not make it.
    #[error(transparent)]
    Device(#[from] CreateError),
    /// The runtime did not take the descriptor, or the descriptor not the flag `O_NONBLOCK`.
    #[error("registering the descriptor with the runtime: {0}")]
    Runtime(#[from] io::Error),
}

/// An object with a descriptor.
#[derive(Debug)]
struct Watched<T>(T);

impl<T: AsFd> AsRawFd for Watched<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Watches a descriptor, which does not block from here on.
fn watch<T: AsFd>(object: T) -> io::Result<AsyncFd<Watched<T>>> {
    let fd = object.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and these commands take no pointers.
    let set = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags < 0 { flags } else { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the object owns its descriptor, which is the same and open as long as the object lives.
    let watched = unsafe { AsyncFd::register_with_interest(Watched(object), Interest::READABLE) };
    watched.map_err(|refused| refused.into_parts().1)
}

/// Reads with `read` until it does not say that it would block.
async fn next_of<T: AsFd, E>(
    watched: &AsyncFd<Watched<T>>,
    mut read: impl FnMut(&T) -> Result<E, EventError>,
) -> Result<E, WaitError> {
    loop {
        match read(&watched.get_ref().0) {
            Err(EventError::WouldBlock) => {}
            read => return Ok(read?),
        }
        let mut ready = watched.readable().await?;
        // Another look after the flag is cleared: an event that came in between sets it again.
        ready.clear_ready();
        match read(&watched.get_ref().0) {
            Err(EventError::WouldBlock) => {}
            read => return Ok(read?),
        }
    }
}

async fn within<T>(
    timeout: Duration,
    wait: impl Future<Output = Result<T, WaitError>>,
) -> Result<T, WaitError> {
    match ::tokio::time::timeout(timeout, wait).await {
        Ok(done) => done,
        Err(_) => Err(WaitError::Timeout(timeout)),
    }
}

/// A completion queue with a channel of its own.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::prelude::*;
/// use anyverbs::with_tokio::AsyncCq;
///
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let cq = AsyncCq::new(&context, 64)?;
/// let a = context.create_default_qp(&pd, cq.cq(), QpType::Rc)?;
/// let b = context.create_default_qp(&pd, cq.cq(), QpType::Rc)?;
/// let (of_a, of_b) = (context.endpoint(&a)?, context.endpoint(&b)?);
/// context.connect(&a, &of_a, &of_b)?;
/// context.connect(&b, &of_b, &of_a)?;
///
/// let memory = pd.alloc(4096, Access::LOCAL_WRITE)?;
/// b.recv(1, &memory.slice(..1024))?;
/// a.send(2, &memory.slice(1024..1030))?;
/// for _ in 0..2 {
///     let wc = cq.next_within(Duration::from_secs(10)).await?;
///     assert_eq!(wc.status, WcStatus::Success);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncCq {
    // Before the channel, which a queue uses until it is dropped.
    cq: Cq,
    channel: AsyncFd<Watched<CompChannel>>,
}

impl AsyncCq {
    /// Makes a completion queue for `cqe` completions, and its channel. Call it within a runtime.
    ///
    /// # Errors
    /// [`NewError`].
    ///
    /// # Panics
    /// Outside of a runtime with an I/O driver, as [`AsyncFd::new`] does.
    pub fn new(context: &Context, cqe: u32) -> Result<Self, NewError> {
        let channel = context.create_comp_channel()?;
        let cq = context.create_cq(cqe, Some(&channel), 0, 0)?;
        Ok(Self { cq, channel: watch(channel)? })
    }

    /// The queue, for queue pairs.
    #[must_use]
    pub fn cq(&self) -> &Cq {
        &self.cq
    }

    /// The next completion, whatever its status. Tasks may wait at the same time; each completion goes to one of them.
    ///
    /// # Errors
    /// [`WaitError`], but never a timeout.
    pub async fn next(&self) -> Result<Wc, WaitError> {
        let mut wc = [Wc::default()];
        loop {
            if self.cq.poll(&mut wc)? == 1 {
                return Ok(wc[0]);
            }
            self.cq.req_notify(false)?;
            // One that came before the request makes no event.
            if self.cq.poll(&mut wc)? == 1 {
                return Ok(wc[0]);
            }
            // The event is dropped, which acknowledges it.
            next_of(&self.channel, CompChannel::get_event).await?;
        }
    }

    /// As [`next`](Self::next), for at most this long.
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn next_within(&self, timeout: Duration) -> Result<Wc, WaitError> {
        within(timeout, self.next()).await
    }
}

/// The asynchronous events of a context (`ibv_get_async_event`).
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::Context;
/// use anyverbs::with_tokio::{AsyncEvents, WaitError};
///
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// let events = AsyncEvents::new(Context::open(&anyverbs::devices()?[0].name)?)?;
/// let pd = events.context().alloc_pd()?; // the context makes objects as before
/// match events.next_within(Duration::from_millis(1)).await {
///     Ok(event) => println!("{:?} of {:?}", event.kind(), event.element()),
///     Err(WaitError::Timeout(_)) => println!("nothing has happened"),
///     Err(error) => return Err(error.into()),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncEvents(AsyncFd<Watched<Context>>);

impl AsyncEvents {
    /// Takes the context. Call it within a runtime.
    ///
    /// # Errors
    /// [`NewError::Runtime`].
    ///
    /// # Panics
    /// Outside of a runtime with an I/O driver.
    pub fn new(context: Context) -> Result<Self, NewError> {
        Ok(Self(watch(context)?))
    }

    /// The context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.get_ref().0
    }

    /// The next event, which is acknowledged when dropped.
    ///
    /// # Errors
    /// [`WaitError`], but never a timeout.
    pub async fn next(&self) -> Result<AsyncEvent, WaitError> {
        next_of(&self.0, Context::get_async_event).await
    }

    /// As [`next`](Self::next), for at most this long.
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn next_within(&self, timeout: Duration) -> Result<AsyncEvent, WaitError> {
        within(timeout, self.next()).await
    }
}

/// The events of the connection manager (`rdma_get_cm_event`).
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::net::Ipv4Addr;
/// use anyverbs::cm::*;
/// use anyverbs::QpType;
/// use anyverbs::with_tokio::AsyncEventChannel;
///
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// let events = AsyncEventChannel::new(create_event_channel()?)?;
/// let id = Id::create(events.channel(), PortSpace::Tcp, QpType::Rc, 0)?;
/// id.resolve_addr(None, &Address::Ip((Ipv4Addr::LOCALHOST, 7471).into()))?;
/// assert_eq!(events.next().await?.kind, EventKind::AddrResolved);
/// id.resolve_route()?;
/// assert_eq!(events.next().await?.kind, EventKind::RouteResolved);
/// id.ack_events(2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncEventChannel(AsyncFd<Watched<EventChannel>>);

impl AsyncEventChannel {
    /// Takes a channel ([`create_event_channel`](crate::cm::create_event_channel)). Call it within a runtime.
    ///
    /// # Errors
    /// [`NewError::Runtime`].
    ///
    /// # Panics
    /// Outside of a runtime with an I/O driver.
    pub fn new(channel: EventChannel) -> Result<Self, NewError> {
        Ok(Self(watch(channel)?))
    }

    /// The channel, for ids.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        &self.0.get_ref().0
    }

    /// The next event. Acknowledge it with [`Id::ack_events`](crate::cm::Id::ack_events).
    ///
    /// # Errors
    /// [`WaitError`], but never a timeout.
    pub async fn next(&self) -> Result<Event, WaitError> {
        next_of(&self.0, EventChannel::get_event).await
    }

    /// As [`next`](Self::next), for at most this long.
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn next_within(&self, timeout: Duration) -> Result<Event, WaitError> {
        within(timeout, self.next()).await
    }
}
