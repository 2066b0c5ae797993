//! Events that a queue pair reports to its device besides completions.

/// Affiliated asynchronous events of a queue pair (`enum ibv_event_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum QpEvent {
    /// The queue pair can no longer work.
    Fatal,
    /// An invalid request came in.
    ReqErr,
    /// A request violated access rights.
    AccessErr,
    /// The first packet arrived in RTR.
    CommEst,
    /// The send queue has drained in SQD.
    SqDrained,
    /// In ERR, with an SRQ: no more completions of receives follow.
    LastWqeReached,
}
