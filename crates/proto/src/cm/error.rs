//! Refusals of calls.

use thiserror::Error;

use super::message::private_data::PrivateData;

/// The reason why a call was refused; nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum CmError {
    /// `EINVAL`: there is no such connection, request or listener.
    #[error("no such id")]
    UnknownId,
    /// `EINVAL`: not possible in the present state.
    #[error("not possible in the present state")]
    State,
    /// `EINVAL`: a value out of range.
    #[error("a value is out of range")]
    Value,
    /// `EINVAL`: more private data than the message has room for.
    #[error("{len} bytes of private data, and there is room for {room}")]
    PrivateDataTooLong {
        /// Bytes.
        len: usize,
        /// The most that the message has room for.
        room: usize,
    },
    /// `EADDRINUSE`: a listener is there already.
    #[error("address in use")]
    InUse,
    /// `ENOMEM`: no more connections.
    #[error("too many connections")]
    Full,
}

/// Private data for a message.
pub(super) fn private_data<const N: usize>(bytes: &[u8]) -> Result<PrivateData<N>, CmError> {
    PrivateData::new(bytes).ok_or(CmError::PrivateDataTooLong { len: bytes.len(), room: N })
}
