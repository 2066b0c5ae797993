//! Multicast groups of an id.

use super::address::Address;
use super::error::CmError;
use super::id::Id;
use super::params::Join;

impl Id {
    /// `rdma_join_multicast_ex(3)`: an event tells the outcome, and an attached queue pair is in the group by then.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn join(&self, join: &Join) -> Result<(), CmError> {
        let _ = join;
        Err(CmError::Unsupported("multicast"))
    }

    /// `rdma_leave_multicast(3)`.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn leave(&self, group: &Address) -> Result<(), CmError> {
        let _ = group;
        Err(CmError::Unsupported("multicast"))
    }
}
