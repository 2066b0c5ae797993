//! The durations by which links wait, each with its reason and the test that fails without it.

use std::time::Duration;

use anyverbs_objects::base::HOUSEKEEPING;
use anyverbs_proto::time::TIME_SLICE;

/// Probe timeout for a peer on another host, and interval of credit probes of a sender that waits: probes and answers may
/// be lost, and receives be posted. Test: `pace::tests::a_sender_without_receives_asks_again_and_gives_up`.
pub(crate) const PROBE_AFTER: Duration = TIME_SLICE;

/// Longest wait for credit of a peer that has never answered: it may be another make of device, which never will. It is
/// asked some times, since packets are lost. Test: `pace::tests::a_stranger_is_left_alone_for_a_while`.
pub(crate) const STRANGER: Duration = PROBE_AFTER.saturating_mul(4);

/// Longest wait, in milliseconds, for another program that lives and does not take what comes. It may wait for the processor, but one that never
/// reads must not stop its sender. Tests: `pace::tests::a_sender_without_receives_asks_again_and_gives_up`, and in
/// `anyverbs-transport` `handing::tests::a_process_that_never_reads_is_waited_for_rarely`.
pub const NOT_READING: Duration = Duration::from_millis(200);

/// Longest wait, in milliseconds, for a device of this make that has become silent: an answer to a credit probe, or room in a full ring.
/// Other processes may keep it from the processor for that long. Tests: `pace::tests::a_peer_that_has_answered_is_waited_for`,
/// `shm::tests::a_full_ring_is_given_up_in_time`.
pub(crate) const SILENCE: Duration = Duration::from_millis(500);

/// The time for which one that was waited for in vain, or has no link here, is not asked again. To ask costs the wait again,
/// or a connection. Tests: as [`NOT_READING`].
pub const ASK_AGAIN: Duration = HOUSEKEEPING;

/// The most to which [`ASK_AGAIN`] doubles, in seconds, where asking for credit goes on being in vain. Asking delays packets by
/// [`STRANGER`], a two-thousandth of this. Test: `pace::tests::pauses_in_vain_double_up_to_a_bound`.
pub(crate) const LAST_PAUSE: Duration = ASK_AGAIN.saturating_mul(64);

/// Time, in milliseconds, for which requests to an ended process go on waiting, though its end is known. On a network they would wait
/// until their retries had run out, and programs rely on that. A program whose peer has left with one message too many
/// on its way has taken what it wanted by then. Test:
/// `shm::tests::requests_to_an_ended_process_fail_after_a_while`.
pub const GRACE: Duration = Duration::from_millis(250);
