//! RDMA communication manager: connections by address (`rdma_cm(7)`).
//!
//! An [`Id`] is what a socket is for TCP. Each call that takes time ends with an [`Event`] on the id's [`EventChannel`].
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::net::Ipv4Addr;
//! use anyverbs::cm::*;
//! use anyverbs::prelude::*;
//!
//! # let context = Context::open(&anyverbs::devices()?[0].name)?;
//! # let pd = context.alloc_pd()?;
//! # let cq = context.create_default_cq(16)?;
//! # let (a, b) = (context.create_default_qp(&pd, &cq, QpType::Rc)?, context.create_default_qp(&pd, &cq, QpType::Rc)?);
//! let (server, client) = (create_event_channel()?, create_event_channel()?);
//! let listener = Id::create(&server, PortSpace::Tcp, QpType::Rc, 0)?;
//! listener.bind_addr(&Address::Ip((Ipv4Addr::LOCALHOST, 0).into()))?;
//! listener.listen(0)?;
//! let address = listener.info().local.expect("it is bound");
//!
//! let id = Id::create(&client, PortSpace::Tcp, QpType::Rc, 0)?;
//! id.resolve_addr(None, &address)?;
//! assert_eq!(client.get_event()?.kind, EventKind::AddrResolved);
//! id.resolve_route()?;
//! assert_eq!(client.get_event()?.kind, EventKind::RouteResolved);
//! id.attach_qp(&a)?;
//! id.connect(&ConnParam::default())?;
//!
//! let request = server.get_event()?.new_id.expect("a request has an id");
//! request.attach_qp(&b)?;
//! request.accept(None)?;
//! assert_eq!(client.get_event()?.kind, EventKind::Established);
//! # Ok(())
//! # }
//! ```

pub use anyverbs_cm::{
    Address, CmError, ConnEvent, ConnParam, Ece, Event, EventKind, EventParam, IbAddress, IdInfo,
    IdOption, Join, Path, PortSpace, UdEvent,
};

/// Event channel: where the events of ids are read.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::net::Ipv4Addr;
/// use anyverbs::cm::*;
/// use anyverbs::QpType;
///
/// let channel = create_event_channel()?;
/// let id = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 7)?;
/// id.resolve_addr(None, &Address::Ip((Ipv4Addr::LOCALHOST, 7471).into()))?;
/// let event = channel.get_event()?; // sleeps until there is one
/// assert_eq!((event.kind, event.cookie), (EventKind::AddrResolved, 7));
/// id.ack_events(1);
/// id.destroy()?; // would wait for an event that is not acknowledged
/// # Ok(())
/// # }
/// ```
pub use anyverbs_cm::EventChannel;

/// Communication identifier: an end of a connection, or a listener.
///
/// The example of [this module](self) connects two of them.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::net::Ipv4Addr;
/// use anyverbs::cm::*;
/// use anyverbs::QpType;
///
/// let channel = create_event_channel()?;
/// let listener = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0)?;
/// listener.bind_addr(&Address::Ip((Ipv4Addr::LOCALHOST, 0).into()))?; // a port of the system's choice
/// listener.listen(0)?;
/// let Some(Address::Ip(address)) = listener.info().local else { panic!("it is bound") };
/// println!("clients connect to {address}");
/// # assert_ne!(address.port(), 0);
/// # Ok(())
/// # }
/// ```
pub use anyverbs_cm::Id;

pub use crate::device::create_event_channel;
