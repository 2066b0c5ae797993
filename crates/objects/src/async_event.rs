//! Asynchronous events (`ibv_get_async_event`).

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyverbs_proto::event::QpEvent;
use anyverbs_proto::types::Qpn;

use crate::error::EventError;
use crate::event_queue::{Acks, EventQueue};

/// `enum ibv_event_type`, with its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum AsyncEventKind {
    /// A CQ overran.
    CqErr = 0,
    /// A queue pair can no longer work.
    QpFatal = 1,
    /// An invalid request came in.
    QpReqErr = 2,
    /// A request violated access rights.
    QpAccessErr = 3,
    /// The first packet arrived in RTR.
    CommEst = 4,
    /// The send queue has drained in SQD.
    SqDrained = 5,
    /// The device cannot go on.
    DeviceFatal = 8,
    /// An address is there.
    PortActive = 9,
    /// No address is left.
    PortErr = 10,
    /// The LID changed.
    LidChange = 11,
    /// The table of P_Keys changed.
    PkeyChange = 12,
    /// Another subnet manager rules.
    SmChange = 13,
    /// An SRQ cannot go on.
    SrqErr = 14,
    /// An SRQ fell below its limit.
    SrqLimitReached = 15,
    /// In ERR, with an SRQ: no more completions of receives follow.
    QpLastWqeReached = 16,
    /// The subnet manager asks for what it was told before.
    ClientReregister = 17,
    /// The GID table changed.
    GidChange = 18,
    /// A work queue cannot go on.
    WqFatal = 19,
}

impl AsyncEventKind {
    /// Its name in C.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CqErr => "IBV_EVENT_CQ_ERR",
            Self::QpFatal => "IBV_EVENT_QP_FATAL",
            Self::QpReqErr => "IBV_EVENT_QP_REQ_ERR",
            Self::QpAccessErr => "IBV_EVENT_QP_ACCESS_ERR",
            Self::CommEst => "IBV_EVENT_COMM_EST",
            Self::SqDrained => "IBV_EVENT_SQ_DRAINED",
            Self::DeviceFatal => "IBV_EVENT_DEVICE_FATAL",
            Self::PortActive => "IBV_EVENT_PORT_ACTIVE",
            Self::PortErr => "IBV_EVENT_PORT_ERR",
            Self::LidChange => "IBV_EVENT_LID_CHANGE",
            Self::PkeyChange => "IBV_EVENT_PKEY_CHANGE",
            Self::SmChange => "IBV_EVENT_SM_CHANGE",
            Self::SrqErr => "IBV_EVENT_SRQ_ERR",
            Self::SrqLimitReached => "IBV_EVENT_SRQ_LIMIT_REACHED",
            Self::QpLastWqeReached => "IBV_EVENT_QP_LAST_WQE_REACHED",
            Self::ClientReregister => "IBV_EVENT_CLIENT_REREGISTER",
            Self::GidChange => "IBV_EVENT_GID_CHANGE",
            Self::WqFatal => "IBV_EVENT_WQ_FATAL",
        }
    }
}

impl From<QpEvent> for AsyncEventKind {
    fn from(event: QpEvent) -> Self {
        match event {
            QpEvent::Fatal => Self::QpFatal,
            QpEvent::ReqErr => Self::QpReqErr,
            QpEvent::AccessErr => Self::QpAccessErr,
            QpEvent::CommEst => Self::CommEst,
            QpEvent::SqDrained => Self::SqDrained,
            QpEvent::LastWqeReached => Self::QpLastWqeReached,
        }
    }
}

/// The subject of an event. The program gave `cookie` at the object's creation or by `set_cookie`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventElement {
    /// A queue pair.
    Qp {
        /// Its number.
        qpn: Qpn,
        /// The program's.
        cookie: u64,
    },
    /// A completion queue.
    Cq {
        /// The program's.
        cookie: u64,
    },
    /// A shared receive queue.
    Srq {
        /// The program's.
        cookie: u64,
    },
    /// A work queue.
    Wq {
        /// The program's.
        cookie: u64,
    },
    /// A port, from 1.
    Port(u8),
}

/// An event that was read. It is acknowledged when dropped: destroying the object waits for that (S1.6).
///
/// So a thread drops the event before it destroys its object. In the head of a `match` or an `if let` the event lives until the end of that.
#[derive(Debug)]
pub struct AsyncEvent(Raised);

/// An event, and the account of its object.
#[derive(Debug)]
struct Raised {
    kind: AsyncEventKind,
    element: EventElement,
    acks: Option<Arc<Acks>>,
}

impl AsyncEvent {
    /// The event's kind.
    #[must_use]
    pub fn kind(&self) -> AsyncEventKind {
        self.0.kind
    }

    /// The object or port that it is about.
    #[must_use]
    pub fn element(&self) -> EventElement {
        self.0.element
    }

    /// Leaves it unacknowledged. The object cannot be destroyed before its `ack_async_events` has counted it.
    pub fn leave_unacknowledged(mut self) {
        self.0.acks = None;
    }
}

impl Drop for AsyncEvent {
    fn drop(&mut self) {
        if let Some(acks) = &self.0.acks {
            acks.acknowledge(1);
        }
    }
}

/// Events of a context that wait for the program before those of ports push out older ones.
const MOST_WAITING: usize = 512;

/// The asynchronous events of one context.
#[derive(Debug)]
pub struct AsyncQueue(EventQueue<Raised>);

impl AsyncQueue {
    /// No events.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(EventQueue::new()?))
    }

    /// Readable while an event waits.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// Raises an event; `acks` is the account of the object that it is about. If [`MOST_WAITING`] wait, one of a port takes the
    /// place of the oldest of a port: a program that never reads them would gather them for ever.
    pub fn raise(&self, kind: AsyncEventKind, element: EventElement, acks: Option<&Arc<Acks>>) {
        tracing::debug!(?kind, ?element, "asynchronous event");
        let event = Raised { kind, element, acks: acks.cloned() };
        match element {
            EventElement::Port(_) => {
                let is_of_port = |e: &Raised| matches!(e.element, EventElement::Port(_));
                self.0.push_among(event, MOST_WAITING, is_of_port);
            }
            _ => self.0.push(event),
        }
    }

    /// Takes the oldest event; waits for one unless the descriptor is `O_NONBLOCK`.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn pop(&self) -> Result<AsyncEvent, EventError> {
        self.0.pop_with(|event| {
            if let Some(acks) = &event.acks {
                acks.read(event.kind.name());
            }
            Some(AsyncEvent(event))
        })
    }

    /// Forgets the unread events of an object that is being destroyed.
    pub fn withdraw(&self, acks: &Arc<Acks>) {
        self.0.withdraw(|event| event.acks.as_ref().is_some_and(|a| Arc::ptr_eq(a, acks)));
    }
}
