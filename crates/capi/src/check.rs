//! Tells the checker (`anyverbs run --check`) what a program makes and ends. What it posts and polls, `verbs::watched` tells.

use std::any::type_name;

use anyverbs_check::{Kind, QueuePair, Region, checker};

use crate::abi::*;

/// An object was given to the program.
pub(crate) fn made<P>(pointer: *const P) {
    if let Some(checker) = checker() {
        checker.ledger().made(pointer as usize, Kind::of_struct(type_name::<P>()));
    }
}

/// Facts about a queue pair that was given to the program.
pub(crate) fn made_qp(pointer: *const ibv_qp, init: &ibv_qp_init_attr, number: u32) {
    if let Some(checker) = checker() {
        let facts = QueuePair {
            number,
            is_datagram: init.qp_type == IBV_QPT_UD,
            signals_all: init.sq_sig_all != 0,
            max_inline: init.cap.max_inline_data,
            max_sends: init.cap.max_send_wr,
            srq: init.srq as usize,
        };
        checker.ledger().made_qp(pointer as usize, facts);
    }
}

/// The program was given an SRQ whose completions do not say that they are its own.
pub(crate) fn made_unwatched_srq(pointer: *const ibv_srq) {
    if let Some(checker) = checker() {
        checker.ledger().made_unwatched_srq(pointer as usize);
    }
}

/// Facts about a memory region that was given to the program, or that it changed.
pub(crate) fn made_region(pointer: *const ibv_mr, region: Region) {
    if let Some(checker) = checker() {
        checker.ledger().made_region(pointer as usize, region);
    }
}

/// The program ends an object. `works` tells of a queue pair's address whether it works on what was posted.
pub(crate) fn ends<P>(pointer: *const P, works: impl Fn(usize) -> bool) {
    if let Some(checker) = checker() {
        checker.ledger().ends(pointer as usize, works);
    }
}

/// It has ended.
pub(crate) fn ended(address: usize) {
    if let Some(checker) = checker() {
        checker.ledger().ended(address);
    }
}

/// A queue pair forgets what was posted.
pub(crate) fn reset(pointer: *const ibv_qp) {
    if let Some(checker) = checker() {
        checker.ledger().reset(pointer as usize);
    }
}
