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

/// All scenarios once more, without the short ways of frequent requests.
#[test]
fn scenarios_hold_in_the_general_way() {
    let mut scenarios = std::process::Command::new(std::env::current_exe().unwrap());
    scenarios.args(["--skip", "scenarios_hold_in_the_general_way"]);
    let output = scenarios.env(anyverbs_sim::GENERAL_WAY, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("test result: ok"), "{said}");
}
