//! Setting up a stream: bind, listen, accept, connect.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyverbs::QpType;
use anyverbs::cm::{
    Address, ConnEvent, ConnParam, Event, EventChannel, EventKind, EventParam, Id, IdOption,
    PortSpace, create_event_channel,
};
use anyverbs::error::EventError;
use parking_lot::Mutex;

use super::connection::Connection;
use super::iomap::IoMaps;
use super::{Phase, Stream};
use crate::device::device;
use crate::epoll::Epoll;
use crate::errno::{Errno, Result};
use crate::machine::Sizes;
use crate::options::{Options, Value};
use crate::ready::Ready;
use crate::sleep::{Wake, set_nonblocking, wait_readable};
use crate::sleepers::Sleepers;
use crate::wire::ConnData;

/// `AF_IB` of `rdma_cma.h`.
pub(crate) const AF_IB: i32 = 27;

/// With `AF_IB` only the program writes and reads this header of the private data.
const IB_HEADER: usize = 36;

/// The event that an opening socket waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    None,
    Address,
    Route,
    Connect,
    Accept,
}

/// A peer that wants to connect.
#[derive(Debug)]
struct Request {
    id: Id,
    param: ConnEvent,
    data: ConnData,
}

/// The id of a stream and how far it is. Guarded by one lock, which is never held over a wait.
#[derive(Debug)]
pub(super) struct Setup {
    id: Option<Id>,
    channel: EventChannel,
    step: Step,
    /// Requests found while a caller only looked whether there is one.
    requests: VecDeque<Request>,
}

impl Setup {
    fn id(&self) -> Result<&Id> {
        self.id.as_ref().ok_or(Errno(libc::EBADF))
    }

    pub(super) fn local(&self) -> Option<Address> {
        self.id.as_ref()?.info().local
    }

    pub(super) fn peer(&self) -> Option<Address> {
        self.id.as_ref()?.info().peer
    }

    pub(super) fn is_accepting(&self) -> bool {
        self.step == Step::Accept
    }

    pub(super) fn set_option(&self, level: i32, on: bool) -> Result<()> {
        let option =
            if level == libc::SOL_SOCKET { IdOption::ReuseAddr(on) } else { IdOption::AfOnly(on) };
        Ok(self.id()?.set_option(option)?)
    }

    /// Bytes of a full packet.
    pub(super) fn mtu(&self) -> i32 {
        let path = self.id.as_ref().and_then(|id| id.info().path);
        path.map_or(2048, |path| path.mtu.bytes() as i32)
    }

    /// `struct ibv_path_data` of the route; empty where there is none yet.
    pub(super) fn route(&self) -> Result<Value> {
        let Some(info) = self.id.as_ref().map(Id::info) else { return Err(Errno(libc::EBADF)) };
        let Some(path) = info.path else { return Ok(Value::new(&[])) };
        // Flags and a reserved word, then the path record as the subnet administrator has it.
        const EXACTLY: u8 = 2 << 6;
        let mut bytes = [0; 72];
        bytes[16..32].copy_from_slice(&path.dgid.0);
        bytes[32..48].copy_from_slice(&path.sgid.0);
        let flow = (path.flow_label << 8) | u32::from(path.hop_limit);
        bytes[52..56].copy_from_slice(&flow.to_be_bytes());
        bytes[56] = path.traffic_class;
        bytes[57] = 1 << 7 | 1;
        bytes[58..60].copy_from_slice(&path.pkey.0.to_be_bytes());
        bytes[61] = path.sl;
        bytes[62] = path.mtu as u8 | EXACTLY;
        bytes[63] = path.rate | EXACTLY;
        bytes[64] = path.packet_life_time | EXACTLY;
        Ok(Value::new(&bytes))
    }

    /// The connection is over. The peer's manager is told.
    pub(super) fn disconnect(&self) {
        if let Some(id) = &self.id
            && let Err(error) = id.disconnect()
        {
            tracing::debug!("rsocket: disconnecting: {error}");
        }
    }

    /// Lets go of the queue pair, and destroys the id with all that waits at it.
    pub(super) fn close(&mut self) {
        for request in self.requests.drain(..) {
            let _ = request.id.reject(&[], false);
        }
        if let Some(id) = self.id.take() {
            if matches!(self.step, Step::None) {
                // This is no error if it was never connected.
                let _ = id.disconnect();
            }
            id.detach_qp();
            let _ = id.destroy();
        }
    }
}

/// A channel that does not wait.
fn channel() -> Result<EventChannel> {
    let channel = create_event_channel()?;
    set_nonblocking(&channel)?;
    Ok(channel)
}

/// Takes an event if one waits.
fn take(channel: &EventChannel) -> Result<Option<Event>> {
    match channel.get_event() {
        Ok(event) => Ok(Some(event)),
        Err(EventError::WouldBlock) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn failure(event: &Event) -> Errno {
    Errno(match (event.kind, event.status) {
        (EventKind::Rejected, _) => libc::ECONNREFUSED,
        (_, status) if status < 0 => status.saturating_neg(),
        (EventKind::Unreachable, _) => libc::ETIMEDOUT,
        (EventKind::AddrError | EventKind::RouteError, _) => libc::EHOSTUNREACH,
        (EventKind::DeviceRemoval, _) => libc::ENODEV,
        _ => libc::ECONNABORTED,
    })
}

impl Stream {
    pub(crate) fn new(family: i32, close_on_exec: bool) -> Result<Self> {
        let channel = channel()?;
        let id = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0)?;
        Self::with(family, close_on_exec, channel, id, Options::new(), Phase::Idle)
    }

    fn with(
        family: i32,
        close_on_exec: bool,
        channel: EventChannel,
        id: Id,
        options: Options,
        phase: Phase,
    ) -> Result<Self> {
        let epoll = Epoll::new(close_on_exec)?;
        epoll.add(channel.as_fd())?;
        let sleepers = Arc::new(Sleepers::new()?);
        epoll.add(sleepers.as_fd())?;
        Ok(Self {
            family,
            nonblocking: AtomicBool::new(false),
            phase: AtomicU8::new(phase as u8),
            error: AtomicI32::new(0),
            told_reset: AtomicBool::new(false),
            options: Mutex::new(options),
            connection: OnceLock::new(),
            setup: Mutex::new(Setup {
                id: Some(id),
                channel,
                step: Step::None,
                requests: VecDeque::new(),
            }),
            maps: Mutex::new(IoMaps::default()),
            keepalive_due: Mutex::new(None),
            sleepers,
            epoll,
        })
    }

    fn check_family(&self, address: &Address) -> Result<()> {
        let family = match address {
            Address::Ip(SocketAddr::V4(_)) => libc::AF_INET,
            Address::Ip(SocketAddr::V6(_)) => libc::AF_INET6,
            Address::Ib(_) => AF_IB,
        };
        if family == self.family { Ok(()) } else { Err(Errno(libc::EAFNOSUPPORT)) }
    }

    fn unspecified(&self) -> Address {
        let ip = if self.family == libc::AF_INET {
            IpAddr::from(Ipv4Addr::UNSPECIFIED)
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        Address::Ip(SocketAddr::new(ip, 0))
    }

    /// `bind(2)`.
    pub(crate) fn bind(&self, address: &Address) -> Result<()> {
        self.check_family(address)?;
        if self.phase() != Phase::Idle {
            return Err(Errno(libc::EINVAL));
        }
        self.setup.lock().id()?.bind_addr(address).map_err(|error| match error.into() {
            // The program of a socket does not look for an RDMA device.
            Errno(libc::ENODEV) => Errno(libc::EADDRNOTAVAIL),
            errno => errno,
        })?;
        self.set_phase(Phase::Bound);
        Ok(())
    }

    /// `listen(2)`.
    pub(crate) fn listen(&self, backlog: i32) -> Result<()> {
        match self.phase() {
            Phase::Listening => return Ok(()),
            Phase::Idle => self.bind(&self.unspecified())?,
            Phase::Bound => {}
            _ => return Err(Errno(libc::EINVAL)),
        }
        // The id's 0 stands for the most.
        let backlog = usize::try_from(backlog).unwrap_or(0).max(1);
        self.setup.lock().id()?.listen(backlog)?;
        self.set_phase(Phase::Listening);
        Ok(())
    }

    fn sizes(options: &Options) -> Sizes {
        Sizes {
            send_queue: options.send_queue,
            recv_queue: options.recv_queue,
            send_buffer: options.send_buffer,
            recv_buffer: options.recv_buffer,
            inline: options.inline.into(),
        }
    }

    /// Makes the queue pair and everything that belongs to it, and attaches it to the id.
    fn make_connection(&self, id: &Id) -> Result<&Connection> {
        let options = self.options.lock();
        let (sizes, iomap_len) = (Self::sizes(&options), options.iomap_len);
        drop(options);
        let connection = Connection::new(&device()?, &self.sleepers, &sizes, iomap_len)?;
        id.attach_qp(&connection.qp)?;
        connection.post_receives()?;
        self.epoll.add(connection.channel.as_fd())?;
        if self.connection.set(connection).is_err() {
            return Err(Errno(libc::EISCONN));
        }
        self.connection.get().ok_or(Errno(libc::EIO))
    }

    /// `accept(2)`. The new socket's own connection may still be on its way; its first call sees to that.
    pub(crate) fn accept(&self, close_on_exec: bool) -> Result<Self> {
        if self.phase() != Phase::Listening {
            return Err(Errno(libc::EINVAL));
        }
        let timeout = self.options.lock().recv_timeout;
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let (asleep, _) = self.begin_sleep();
            let next = self.next_request(&mut self.setup.lock());
            if matches!(next, Ok(None)) && !self.is_nonblocking() {
                let undo = || self.end_sleep(asleep, false);
                let woken = wait_readable(self.epoll.as_fd(), deadline, undo);
                self.end_sleep(asleep, woken == Ok(Wake::Ready));
                if woken? == Wake::TimedOut {
                    return Err(Errno(libc::EAGAIN));
                }
                continue;
            }
            self.end_sleep(asleep, false);
            match self.admit(next?.ok_or(Errno(libc::EAGAIN))?, close_on_exec) {
                // As of a peer that gave up while it waited.
                Err(Errno(errno @ (libc::EINVAL | libc::ECONNABORTED))) => {
                    tracing::debug!(errno, "rsocket: a request came to nothing");
                }
                result => return result,
            }
        }
    }

    /// The oldest request that speaks the protocol.
    fn next_request(&self, setup: &mut Setup) -> Result<Option<Request>> {
        if let Some(request) = setup.requests.pop_front() {
            return Ok(Some(request));
        }
        while let Some(event) = take(&setup.channel)? {
            setup.id()?.ack_events(1);
            let (EventKind::ConnectRequest, Some(id)) = (event.kind, event.new_id) else {
                continue;
            };
            let EventParam::Conn(param) = event.param else { continue };
            let skip = if self.family == AF_IB { IB_HEADER } else { 0 };
            match param.private_data.get(skip..).and_then(ConnData::decode) {
                Some(data) => return Ok(Some(Request { id, param, data })),
                None => {
                    tracing::info!("rsocket: a request of another protocol or version");
                    let _ = id.reject(&[], false);
                }
            }
        }
        Ok(None)
    }

    fn admit(&self, request: Request, close_on_exec: bool) -> Result<Self> {
        let Request { id, param, data } = request;
        let channel = channel()?;
        id.migrate(&channel)?;
        let mut options = self.options.lock().clone();
        let idle = Duration::from_secs(options.keep_idle.unsigned_abs().into());
        let due = options.keepalive.then(|| Instant::now() + idle);
        (options.recv_timeout, options.send_timeout) = (None, None);
        let new = Self::with(self.family, close_on_exec, channel, id, options, Phase::Opening)?;
        *new.keepalive_due.lock() = due;
        {
            let mut setup = new.setup.lock();
            setup.step = Step::Accept;
            let id = setup.id()?;
            let accepted = new.make_connection(id).and_then(|connection| {
                connection.core.lock().connect(&data);
                let answer = ConnParam {
                    private_data: &connection.conn_data().encode(),
                    responder_resources: param.responder_resources,
                    initiator_depth: param.initiator_depth,
                    flow_control: param.flow_control,
                    retry_count: param.retry_count,
                    rnr_retry_count: param.rnr_retry_count,
                    ..ConnParam::default()
                };
                Ok(id.accept(Some(&answer))?)
            });
            if let Err(errno) = accepted {
                let _ = id.reject(&[], false);
                return Err(errno);
            }
        }
        Ok(new)
    }

    pub(super) fn ready_to_accept(&self) -> Ready {
        let mut setup = self.setup.lock();
        let is_known = !setup.requests.is_empty();
        match self.next_request(&mut setup) {
            Ok(None) => Ready::default(),
            Ok(Some(request)) => {
                setup.requests.push_front(request);
                drop(setup);
                if !is_known {
                    // Its event is gone, and other threads wait for one.
                    self.sleepers.wake();
                }
                let events = libc::POLLIN | libc::POLLRDNORM;
                // A caller that wants changes only is told each time, since more requests may have come meanwhile.
                static ARRIVALS: AtomicU64 = AtomicU64::new(1);
                let read_edges = ARRIVALS.fetch_add(1, Ordering::Relaxed);
                Ready { events, read_edges, write_edges: 0 }
            }
            Err(_) => Ready::new(libc::POLLERR),
        }
    }

    /// `connect(2)`.
    pub(crate) fn connect(&self, address: &Address) -> Result<()> {
        self.check_family(address)?;
        let mut address = *address;
        if let Address::Ip(to) = &mut address
            && to.ip().is_unspecified()
        {
            // As a TCP socket does.
            let loopback: IpAddr = match to {
                SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            };
            to.set_ip(loopback);
        }
        {
            let mut setup = self.setup.lock();
            match self.phase() {
                Phase::Idle | Phase::Bound => {}
                Phase::Opening => {
                    drop(setup);
                    self.drive();
                    return match self.phase() {
                        Phase::Opening => Err(Errno(libc::EALREADY)),
                        Phase::Connected => Ok(()),
                        _ => Err(self.connect_error()),
                    };
                }
                Phase::Connected => return Err(Errno(libc::EISCONN)),
                Phase::Listening => return Err(Errno(libc::EINVAL)),
                Phase::Failed => return Err(Errno(libc::ECONNABORTED)),
            }
            setup.step = Step::Address;
            setup.id()?.resolve_addr(None, &address)?;
            self.set_phase(Phase::Opening);
        }
        if self.is_nonblocking() {
            self.drive();
            return match self.phase() {
                Phase::Opening => Err(Errno(libc::EINPROGRESS)),
                Phase::Connected => Ok(()),
                _ => Err(self.connect_error()),
            };
        }
        let timeout = self.options.lock().send_timeout;
        self.wait_opened(timeout.map(|timeout| Instant::now() + timeout), libc::EINPROGRESS)
    }

    /// Waits until the socket is connected, or not.
    pub(super) fn wait_opened(&self, deadline: Option<Instant>, late: i32) -> Result<()> {
        loop {
            let (asleep, _) = self.begin_sleep();
            self.drive();
            let phase = self.phase();
            if phase != Phase::Opening {
                self.end_sleep(asleep, false);
                return if phase == Phase::Connected { Ok(()) } else { Err(self.connect_error()) };
            }
            let undo = || self.end_sleep(asleep, false);
            let woken = wait_readable(self.epoll.as_fd(), deadline, undo);
            self.end_sleep(asleep, woken == Ok(Wake::Ready));
            if woken? == Wake::TimedOut {
                return Err(Errno(late));
            }
        }
    }

    fn connect_error(&self) -> Errno {
        match self.error.swap(0, Ordering::AcqRel) {
            0 => Errno(libc::ECONNABORTED),
            errno => Errno(errno),
        }
    }

    /// The connection, for moving data; waits for one that is being made unless `nonblocking`.
    pub(super) fn established(
        &self,
        nonblocking: bool,
        deadline: Option<Instant>,
    ) -> Result<&Connection> {
        if self.phase() == Phase::Opening {
            if nonblocking {
                self.drive();
            } else {
                self.wait_opened(deadline, libc::EAGAIN)?;
            }
        }
        match self.phase() {
            Phase::Connected => self.connection.get().ok_or(Errno(libc::ENOTCONN)),
            Phase::Opening => Err(Errno(libc::EAGAIN)),
            Phase::Failed => match self.error.swap(0, Ordering::AcqRel) {
                0 => Err(Errno(libc::ENOTCONN)),
                errno => Err(Errno(errno)),
            },
            _ => Err(Errno(libc::ENOTCONN)),
        }
    }

    /// Opens the socket as far as it can be now. Never waits.
    pub(super) fn drive(&self) {
        if self.phase() == Phase::Opening {
            self.take_events();
        }
    }

    /// Handles the waiting events.
    pub(super) fn take_events(&self) {
        let mut setup = self.setup.lock();
        loop {
            match take(&setup.channel) {
                Ok(Some(event)) => {
                    if let Ok(id) = setup.id() {
                        id.ack_events(1);
                    }
                    self.on_event(&mut setup, &event);
                }
                Ok(None) => return,
                Err(errno) => {
                    if self.phase() == Phase::Opening {
                        self.fail(&mut setup, errno);
                    }
                    return;
                }
            }
        }
    }

    fn fail(&self, setup: &mut Setup, errno: Errno) {
        setup.step = Step::None;
        self.error.store(errno.0, Ordering::Release);
        self.set_phase(Phase::Failed);
    }

    fn on_event(&self, setup: &mut Setup, event: &Event) {
        if self.phase() != Phase::Opening {
            if event.kind == EventKind::Disconnected
                && let Some(connection) = self.connection.get()
            {
                // The peer's disconnect message may wait among the completions.
                connection.progress();
                connection.fail(libc::ECONNRESET);
            }
            return;
        }
        match self.step(setup, event) {
            Ok(()) => {}
            Err(errno) => self.fail(setup, errno),
        }
    }

    fn step(&self, setup: &mut Setup, event: &Event) -> Result<()> {
        match (setup.step, event.kind) {
            (Step::Address, EventKind::AddrResolved) => {
                setup.step = Step::Route;
                Ok(setup.id()?.resolve_route()?)
            }
            (Step::Route, EventKind::RouteResolved) => {
                setup.step = Step::Connect;
                let id = setup.id()?;
                let connection = self.make_connection(id)?;
                let mut private_data = [0; IB_HEADER + ConnData::LEN];
                private_data[IB_HEADER..].copy_from_slice(&connection.conn_data().encode());
                let skip = if self.family == AF_IB { 0 } else { IB_HEADER };
                let param = ConnParam {
                    private_data: &private_data[skip..],
                    flow_control: true,
                    retry_count: 7,
                    rnr_retry_count: 7,
                    ..ConnParam::default()
                };
                Ok(id.connect(&param)?)
            }
            (Step::Connect, EventKind::Established) => {
                let data = match &event.param {
                    EventParam::Conn(conn) => ConnData::decode(&conn.private_data),
                    _ => None,
                };
                let data = data.ok_or(Errno(libc::EPROTONOSUPPORT))?;
                let connection = self.connection.get().ok_or(Errno(libc::EIO))?;
                connection.core.lock().connect(&data);
                self.open(setup);
                Ok(())
            }
            (Step::Accept, EventKind::Established) => {
                self.open(setup);
                Ok(())
            }
            (
                _,
                EventKind::AddrError
                | EventKind::RouteError
                | EventKind::ConnectError
                | EventKind::Unreachable
                | EventKind::Rejected
                | EventKind::DeviceRemoval,
            ) => Err(failure(event)),
            (_, EventKind::Disconnected) => Err(Errno(libc::ECONNRESET)),
            _ => Ok(()),
        }
    }

    /// The connection is there, and the peer is granted the second half of the buffer.
    fn open(&self, setup: &mut Setup) {
        setup.step = Step::None;
        self.set_phase(Phase::Connected);
        if let Some(connection) = self.connection.get() {
            connection.grant();
        }
    }
}
