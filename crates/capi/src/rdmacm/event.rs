//! The events of an event channel.

use std::{
    ffi::{c_int, c_void},
    io, ptr,
    sync::{Arc, Weak},
};

use anyverbs::cm;
use anyverbs_sanitizers as sanitizers;
use cm::{Address, EventKind, EventParam};

use crate::{
    abi::*,
    cancel, check,
    errno::{Errno, give, say_once},
    faults,
    object::{self, Object},
    rdmacm::{
        Channel, Id,
        id::{self, On},
        sockaddr::address,
        zero,
    },
    verbs,
};

type Event = Object<rdma_cm_event>;

/// The parts of an event that live until it is acknowledged.
pub(crate) struct EventInner {
    /// The bytes that `param` points to.
    _private_data: Box<[u8]>,
    /// The id whose count of unacknowledged events includes it: the listener for a request.
    of: Arc<Id>,
    /// Its type when the program read it.
    kind: u32,
}

/// The id of the request that a channel handed out last, and the context that it had then.
#[derive(Default)]
pub(crate) struct LastRequest(Option<(Weak<Id>, usize)>);

impl LastRequest {
    fn new(id: &Arc<Id>) -> Self {
        Self(Some((Arc::downgrade(id), id::fields(id).context as usize)))
    }

    /// A program that gives an id its context needs no call for that.
    fn look(&mut self) {
        if let Some((id, context)) = self.0.take()
            && let Some(id) = id.upgrade()
            && id::fields(&id).context as usize != context
        {
            id.inner.device.take_up();
        }
    }
}

/// `rdma_get_cm_event`: 0, or -1 with `errno`. Waits for an event unless the program made the descriptor non-blocking
/// (`EAGAIN`).
///
/// A channel that was destroyed is refused with `EINVAL`, but not at once. Programs destroy their channel and end while
/// their event thread is about to come back for the next event (rping, which would then end with an error). Elsewhere
/// tearing down takes so long that the thread waits already, and goes on waiting. The thread is told when such a program
/// has ended.
///
/// # Safety
/// `event` is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    faults::may_fail!("rdma_get_cm_event", zero);
    let found = object::find(channel);
    if found.is_err() && !channel.is_null() {
        std::thread::sleep(anyverbs::AT_EXIT);
    }
    zero(
        "rdma_get_cm_event",
        found.and_then(|channel: Arc<Channel>| {
            if event.is_null() {
                return Err(Errno::NULL);
            }
            let next = cancel::holding(channel, |channel| {
                channel.inner.last_request.lock().look();
                channel.inner.device.get_event_one_by_one(|event| to_c(channel, event))
            })?;
            // SAFETY: the caller's promise.
            unsafe { give(event, next) };
            Ok(())
        }),
    )
}

/// The next event of a synchronous id's channel, with the ids' public fields as it leaves them.
pub(crate) fn next(channel: Arc<Channel>) -> Result<*mut rdma_cm_event, Errno> {
    Ok(cancel::holding(channel, |channel| {
        channel.inner.device.get_event_with(|event| to_c(channel, event))
    })?)
}

/// `None`: of an id that the program does not have yet, or one that it destroyed after it acknowledged more than it read.
fn to_c(channel: &Channel, event: cm::Event) -> Option<*mut rdma_cm_event> {
    let id = object::lookup(event.cookie as *mut rdma_cm_id).ok()?;
    let kind = event.kind;
    let refused = |error: &Errno| {
        let error = io::Error::from_raw_os_error(error.0);
        match kind {
            EventKind::ConnectRequest => anyverbs::say_again!(
                warn,
                0,
                "a connection request is refused, since no id can be made for it: {error}; its sender is told that there are no resources"
            ),
            _ => anyverbs::say_again!(warn, 0, "an event was dropped ({}): {error}", kind.name()),
        }
    };
    accept_event(channel, event, &id).inspect_err(refused).ok()
}

fn accept_event(
    channel: &Channel,
    mut event: cm::Event,
    id: &Arc<Id>,
) -> Result<*mut rdma_cm_event, Errno> {
    let mut kind = event.kind;
    let mut status = event.status;
    let mut subject = id.public();
    let mut listener = ptr::null_mut();
    match kind {
        EventKind::ConnectRequest => {
            let new = event.new_id.take().ok_or(Errno::said(libc::EINVAL))?;
            let new = adopt(new, id, channel)?;
            *channel.inner.last_request.lock() = LastRequest::new(&new);
            subject = new.public();
            listener = id.public();
        }
        EventKind::AddrResolved | EventKind::RouteResolved => {
            if let Err(error) = id::refresh(id) {
                status = -error.0;
                kind = match kind {
                    EventKind::AddrResolved => EventKind::AddrError,
                    _ => EventKind::RouteError,
                };
            }
        }
        EventKind::ConnectResponse
        | EventKind::ConnectError
        | EventKind::Unreachable
        | EventKind::Rejected
        | EventKind::Established
        | EventKind::Disconnected => id::refresh_qp_state(id),
        _ => {}
    }
    tell_failure(id, kind, status);
    let (param, private_data) = param(&event);
    let public =
        rdma_cm_event { id: subject, listen_id: listener, event: kind as u32, status, param };
    let inner = EventInner { _private_data: private_data, of: Arc::clone(id), kind: kind as u32 };
    check::read_event(id.public() as usize, kind as u32, kind.name());
    Ok(object::publish(public, 0, inner))
}

/// Says why there is no connection.
fn tell_failure(id: &Id, kind: EventKind, status: c_int) {
    let why = match (kind, status) {
        (EventKind::Rejected, NO_LISTENER) => "no program listens on this port there".to_owned(),
        (EventKind::Rejected, NO_RESOURCES) => {
            "the device there had no resources for it, and its program has not seen it".to_owned()
        }
        (EventKind::Rejected, BY_PROGRAM) => {
            "the program there called rdma_reject, or destroyed the id of the request (rdma_destroy_id)".to_owned()
        }
        (EventKind::Rejected, UNSUPPORTED) if id.inner.state.lock().names_no_qp => {
            "rdma_connect was called for an id without a queue pair, and qp_num of its parameters is 0"
                .to_owned()
        }
        (EventKind::Rejected, _) => format!("the peer's device refused it for reason {status}"),
        (EventKind::Unreachable, ..0) => {
            "nobody answers, though the request was repeated".to_owned()
        }
        (EventKind::Unreachable, _) => format!("the peer answered with status {status}"),
        (EventKind::AddrError | EventKind::RouteError, _) => {
            io::Error::from_raw_os_error(status.saturating_abs()).to_string()
        }
        _ => return,
    };
    let (fields, name) = (id::fields(id), kind.name());
    // SAFETY: the id has room for an address of any family there.
    let to = unsafe { address((&raw const fields.route.addr.dst).cast()) };
    let to = match to {
        Ok(Address::Ip(ip)) => format!(" to {ip}"),
        Ok(Address::Ib(ib)) => format!(" to {}", ib.gid),
        Err(_) => String::new(),
    };
    say_once(&format!("no connection{to}: {why}; see `anyverbs explain {name}`"));
}

/// Reasons of a reject (IBA 12.6.7.2): no resources, an unsupported request, no such service, and the consumer.
const NO_RESOURCES: c_int = 3;
const UNSUPPORTED: c_int = 5;
const NO_LISTENER: c_int = 8;
const BY_PROGRAM: c_int = 28;

/// The id of a request, with the channel on which it was read or, under a synchronous listener, one of its own.
fn adopt(new: cm::Id, listener: &Id, channel: &Channel) -> Result<Arc<Id>, Errno> {
    let from = id::fields(listener);
    let on = if listener.inner.own_channel().is_some() {
        let own = crate::rdmacm::OwnChannel::new().and_then(|own| {
            new.migrate(&own.channel().inner.device)?;
            Ok(own)
        });
        On::Own(own.inspect_err(|_| new.decline())?)
    } else {
        On::Program(channel.public())
    };
    let id = id::publish(new, on, from.context, from.ps, from.qp_type)?;
    if let Err(error) = id::refresh(&id) {
        // The program has not seen it, so it has not refused it.
        id.inner.device.decline();
        let _ = id::destroy(&id);
        return Err(error);
    }
    Ok(id)
}

/// The event's parameters, and the private data that they point to.
fn param(event: &cm::Event) -> (rdma_cm_event_param, Box<[u8]>) {
    // SAFETY: integers, NULL pointers and a GID.
    let mut param: rdma_cm_event_param = unsafe { std::mem::zeroed() };
    let point = |data: &[u8]| -> (*const c_void, u8) {
        let pointer = if data.is_empty() { ptr::null() } else { data.as_ptr().cast() };
        sanitizers::initialised_bytes(pointer, data.len());
        // No message of the CM carries more.
        (pointer, u8::try_from(data.len()).unwrap_or(u8::MAX))
    };
    let private_data = match &event.param {
        EventParam::None => Box::default(),
        EventParam::Conn(conn) => {
            let owned = conn.private_data.clone();
            let (pointer, len) = point(&owned);
            param.conn = rdma_conn_param {
                private_data: pointer,
                private_data_len: len,
                responder_resources: conn.responder_resources,
                initiator_depth: conn.initiator_depth,
                flow_control: conn.flow_control.into(),
                retry_count: conn.retry_count,
                rnr_retry_count: conn.rnr_retry_count,
                srq: conn.srq.into(),
                qp_num: conn.qpn.get(),
            };
            owned
        }
        EventParam::Ud(ud) => {
            let owned = ud.private_data.clone();
            let (pointer, len) = point(&owned);
            param.ud = rdma_ud_param {
                private_data: pointer,
                private_data_len: len,
                ah_attr: verbs::c_ah_attr_of(&ud.ah),
                qp_num: ud.qpn.get(),
                qkey: ud.qkey.0,
            };
            owned
        }
        EventParam::Arg(arg) => {
            param.arg = *arg;
            Box::default()
        }
    };
    if matches!(event.kind, EventKind::MulticastJoin | EventKind::MulticastError) {
        // The program's context of the join stands in the place of private data.
        param.ud.private_data = event.join_cookie as *const c_void;
    }
    (param, private_data)
}

/// `rdma_ack_cm_event`: 0, or -1 with `EINVAL` for a pointer that is no event, or was acknowledged before.
pub(crate) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    zero("rdma_ack_cm_event", acknowledge(event))
}

pub(crate) fn acknowledge(event: *mut rdma_cm_event) -> Result<(), Errno> {
    let event: Arc<Event> = object::find(event)?;
    object::retire(&event)?;
    check::acknowledged(event.inner.of.public() as usize, event.inner.kind, 1);
    event.inner.of.inner.device.ack_events(1);
    Ok(())
}

/// `rdma_write_cm_event`: 0, or -1 with `errno`; `EINVAL` unless `event` is `RDMA_CM_EVENT_USER`.
pub(crate) unsafe extern "C" fn rdma_write_cm_event(
    id: *mut rdma_cm_id,
    event: rdma_cm_event_type,
    status: c_int,
    arg: u64,
) -> c_int {
    zero(
        "rdma_write_cm_event",
        id::find(id).and_then(|id| {
            if event != RDMA_CM_EVENT_USER {
                return Err(Errno::invalid("event is not RDMA_CM_EVENT_USER"));
            }
            write(&id, EventKind::User, status, EventParam::Arg(arg))
        }),
    )
}

/// Puts an event on the id's channel.
pub(crate) fn write(
    id: &Id,
    kind: EventKind,
    status: c_int,
    param: EventParam,
) -> Result<(), Errno> {
    Ok(id.inner.device.write_event(cm::Event {
        kind,
        status,
        cookie: id.public() as u64,
        new_id: None,
        param,
        join_cookie: 0,
        ece: cm::Ece::default(),
    })?)
}

// The kinds carry the values of C.
const _: () = assert!(EventKind::AddrResolved as u32 == RDMA_CM_EVENT_ADDR_RESOLVED);
const _: () = assert!(EventKind::TimewaitExit as u32 == RDMA_CM_EVENT_TIMEWAIT_EXIT);
const _: () = assert!(EventKind::Internal as u32 == RDMA_CM_EVENT_INTERNAL);
