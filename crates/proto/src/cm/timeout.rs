//! Times as the CM's messages carry them: 5-bit codes of 4.096 us * 2^code.

use std::time::Duration;

/// The response timeout that Linux's clients ask for, as a code: 4.3 s. They send a request 16 times.
const LINUX: u8 = 20;

/// Shortest wait for one answer, in milliseconds, whatever the program asks for: it must not make us send in a loop
/// (`waits_are_bounded`).
pub(super) const SHORTEST: Duration = Duration::from_millis(1);
/// Longest wait for an answer, of a peer or of the program: a peer must not keep a state for hours. Linux's clients ask
/// for as long, 69 s (`waits_are_bounded`, and `mras_without_end_are_not_waited_for` in the simulator).
pub const LONGEST: Duration = decode(LINUX + 4);
/// Time for which a rejection or a SIDR answer is kept. A peer whose answer was lost asks again within half of it
/// (`a_lost_rejection_is_said_again` in the simulator).
pub(super) const HOLD: Duration = decode(LINUX + 1);

/// The time that a code stands for.
pub(super) const fn decode(code: u8) -> Duration {
    Duration::from_nanos(4096 << (code & 0x1f))
}

/// Time to wait for an answer. The peer needs the time of `code` for it, and it crosses the path twice (`round_trip`,
/// an ACK timeout code).
pub(super) fn answer(code: u8, round_trip: u8) -> Duration {
    (decode(code) + decode(round_trip)).clamp(SHORTEST, LONGEST)
}

/// As [`answer`], where the peer has chosen `code` and `round_trip`. A stranger does not set our pace: a sixteenth of
/// Linux's timeout at least.
pub(super) fn answer_of_peer(code: u8, round_trip: u8) -> Duration {
    answer(code, round_trip).max(decode(LINUX - 4))
}

/// The time for which packets of a connection may still be on the way (IBA 12.9.8.4), as its ACK timeout allows.
pub(super) fn timewait(ack_timeout: u8) -> Duration {
    decode(ack_timeout).min(LONGEST)
}

/// ACK timeout code for a path: twice its packet life time, and the delay with which the responder acknowledges; the
/// smallest code that covers both (IBA 12.7.34).
pub(super) fn ack_code(packet_life_time: u8, ack_delay: u8) -> u8 {
    let need = (2u64 << packet_life_time.min(31)) + (1u64 << ack_delay.min(31));
    (need.next_power_of_two().trailing_zeros() as u8).min(31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ack_timeouts_cover_path_and_delay() {
        for life in 0..=30u8 {
            for delay in 0..=30u8 {
                let code = ack_code(life, delay);
                let need = 2 * decode(life) + decode(delay);
                assert!(code == 31 || decode(code) >= need);
                assert!(code == 0 || decode(code - 1) < need);
            }
        }
        assert_eq!(ack_code(31, 31), 31);
    }

    #[test]
    fn waits_are_bounded() {
        assert_eq!(answer(0, 0), SHORTEST);
        assert_eq!(answer(31, 31), LONGEST);
        assert_eq!(answer(20, 17), decode(20) + decode(17));
        assert_eq!(answer_of_peer(0, 0), decode(16));
        assert_eq!(answer_of_peer(20, 17), decode(20) + decode(17));
    }
}
