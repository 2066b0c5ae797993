//! Scenarios: queue pairs when the network, the peer or the program does something particular. S1.1 to S5.11 are the
//! rules of `docs/semantics.md` that a scenario proves.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::duplicate_mod, reason = "the scenarios of RC run over XRC as well")]

mod access_errors;
mod ack_coalescing;
mod atomic_write;
mod bad_response;
mod carried_ack;
mod congestion;
mod direct;
mod duplicate_atomic;
mod duplicate_read;
mod duplicate_send;
mod error_flush;
mod fence;
mod fetched;
mod flush;
mod foreign;
mod frozen;
mod inline_reuse;
mod invalid_request;
mod lanes;
mod lending;
mod local_errors;
mod long_messages;
mod loopback;
mod lost_ack;
mod lost_read_response;
mod lost_request;
mod max_rd_atomic;
mod memory_windows;
mod multi_sge;
mod over_xrc;
mod pacing;
mod pkey;
mod prelude;
mod probe;
mod psn_wrap;
mod repair;
mod reset;
mod retry_exhausted;
mod rnr;
mod rnr_retry_exhausted;
mod robustness;
mod segments;
mod send_inv;
mod send_queue_full;
mod sequence_nak;
mod solicited;
mod split_read;
mod split_write;
mod sqd;
mod sqe;
mod srq;
mod tag_matching;
mod too_early;
mod uc_loss;
mod ud;
mod vanished_pages;
mod window;
mod write_imm;
mod xrc;
mod zero_byte;

/// Runs all scenarios once more with this variable set, but those whose names contain one of `but`.
fn run_with(variable: &str, but: &[&str]) {
    let mut scenarios = std::process::Command::new(std::env::current_exe().unwrap());
    for name in but.iter().chain(&["scenarios_hold"]) {
        scenarios.args(["--skip", name]);
    }
    let output = scenarios.env(variable, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("test result: ok"), "{said}");
}

/// Without the short ways of frequent requests.
#[test]
fn scenarios_hold_in_the_general_way() {
    run_with(anyverbs_sim::GENERAL_WAY, &[]);
}

/// Scenarios that mean nothing where short SENDs take lanes.
const NOT_WITH_LANES: [&str; 24] = [
    // These pairs open their lanes by themselves.
    "lanes::",
    // Only reliable connections have lanes. The first of these names matches `over_xrc`, too.
    "xrc::",
    "uc_loss::",
    "ud::",
    // They hold back or lose the ACK of a SEND. A lane needs none.
    "ack_coalescing::a_reply_carries_the_ack_of_what_it_replies_to",
    "carried_ack::",
    "lost_ack::old_acks_and_acks_before_answers_are_not_repeated",
    "lost_ack::the_last_ack_is_repeated_when_its_queue_pair_ends",
    "lost_ack::the_repeated_last_ack_is_a_duplicate_without_loss",
    // They lose, delay or change the packet of a SEND.
    "lost_request::a_request_that_arrives_late_is_a_duplicate",
    "lost_request::the_only_packet",
    "pkey::another_partition",
    // A link of one host loses nothing. So the requester sends no packet alone that was lost.
    "repair::",
    // The ACK timer of a link of one host runs on. They run until nothing is to come, and say how long that may take.
    "probe::a_way_longer_than_the_timeout_costs_its_length_alone",
    "probe::losses_do_not_make_a_way_longer",
    "a_long_message_is_acknowledged_on_its_way",
    "empty_queues_flush_nothing_and_err_may_come_again",
    "an_ack_behind_a_missing_response_completes_nothing",
    "first_middle_or_last_of_a_message",
    "a_final_local_request_does_not_wait_for_the_timer",
    "reset::from_every_state",
    "certain_silence_keeps_all_intervals_as_short_as_the_first",
    // No request may have been answered before. One was, by which the lane was opened.
    "direct::a_connection_begins_with_messages_until_the_first_answer",
    "too_early::they_are_sent_again",
];

/// With open lanes from the beginning.
#[test]
fn scenarios_hold_with_lanes() {
    run_with(anyverbs_sim::LANES, &NOT_WITH_LANES);
}
