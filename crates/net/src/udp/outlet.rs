//! Where datagrams go, and by which socket.

use std::sync::Arc;

use super::Destination;
use super::connected::Connected;

/// A destination, and the socket that is connected to it, if there is one.
#[derive(Clone, Debug)]
pub struct Outlet {
    to: Destination,
    connected: Option<Arc<Connected>>,
}

impl Outlet {
    pub(super) fn new(to: Destination, connected: Option<Arc<Connected>>) -> Self {
        Self { to, connected }
    }

    /// Where it leads.
    #[must_use]
    pub fn destination(&self) -> &Destination {
        &self.to
    }
}

/// One without a connected socket.
impl From<Destination> for Outlet {
    fn from(to: Destination) -> Self {
        Self::new(to, None)
    }
}

/// A borrowed [`Outlet`]. A [`Destination`] alone stands for one without a connected socket.
#[derive(Clone, Copy, Debug)]
pub struct OutletRef<'a> {
    pub(super) to: &'a Destination,
    pub(super) connected: Option<&'a Arc<Connected>>,
}

impl<'a> From<&'a Outlet> for OutletRef<'a> {
    fn from(Outlet { to, connected }: &'a Outlet) -> Self {
        Self { to, connected: connected.as_ref() }
    }
}

impl<'a> From<&'a Destination> for OutletRef<'a> {
    fn from(to: &'a Destination) -> Self {
        Self { to, connected: None }
    }
}
