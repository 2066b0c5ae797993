//! The durations by which links wait, each with its reason and the test that fails without it.

use std::time::Duration;

/// Probe timeout for a peer on another host. It is longer than the time to wake a process, and than the kernel's tick.
/// A nearer timer is programmed whenever the worker sleeps, which costs an event 8 us.
pub(crate) const PROBE_AFTER: Duration = Duration::from_millis(8);

/// Interval of credit probes of a sender that waits: probes and answers may be lost, and receives be posted. Test:
/// `pace::tests::a_sender_without_receives_asks_again_and_gives_up`.
pub(crate) const RETRY: Duration = Duration::from_millis(10);

/// Longest wait for credit of a peer that has never answered: it may be another make of device, which never will. Test:
/// `pace::tests::a_stranger_is_left_alone_for_a_while`.
pub(crate) const STRANGER: Duration = Duration::from_millis(30);

/// Longest wait for another program that lives and does not take what comes. It may wait for the processor, but one that never
/// reads must not stop its sender. Tests: `pace::tests::a_sender_without_receives_asks_again_and_gives_up`, and in
/// `anyverbs-transport` `handing::tests::a_process_that_does_not_read_is_waited_for_once_in_a_while`.
pub const NOT_READING: Duration = Duration::from_millis(200);

/// Longest wait for a device of this make that has become silent: an answer to a credit probe, or room in a full ring.
/// Other processes may keep it from the processor for that long. Tests: `pace::tests::a_peer_that_has_answered_is_waited_for`,
/// `shm::tests::a_full_ring_is_given_up_in_time`.
pub(crate) const SILENCE: Duration = Duration::from_millis(500);

/// The time for which one that was waited for in vain, or has no link here, is not asked again. To ask costs the wait again,
/// or a connection. Tests: as [`NOT_READING`].
pub const ASK_AGAIN: Duration = Duration::from_secs(1);

/// The most to which [`ASK_AGAIN`] doubles where asking for credit goes on being in vain.
pub(crate) const LAST_PAUSE: Duration = Duration::from_secs(64);

/// Time for which requests to an ended process go on waiting, though its end is known. On a network they would wait
/// until their retries had run out, and programs rely on that. A program whose peer has left with one message too many
/// on its way has taken what it wanted by then.
pub const GRACE: Duration = Duration::from_millis(250);

/// Interval of checks whether regions that this process has mapped were taken back. A mapping holds the peer's memory.
pub(crate) const SWEEP_EVERY: Duration = Duration::from_secs(1);
