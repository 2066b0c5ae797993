//! What objects hold of the context that they were made through.

use crate::async_event::AsyncQueue;
use crate::command::CommandFile;

#[derive(Debug)]
pub(crate) struct ContextCell {
    pub(crate) events: AsyncQueue,
    /// What stands behind its descriptor.
    pub(crate) command: CommandFile,
}
