//! The whole device, through its public API.

#![allow(clippy::unwrap_used, reason = "tests")]

mod capture;
mod cm;
mod completion;
mod congestion;
mod crowd;
mod direct;
mod endpoint;
mod events;
mod faults;
mod fetched;
mod forged;
mod fork;
mod frozen;
mod host;
mod hostile;
mod lanes;
mod many_processes;
mod mapped;
mod multicast;
mod one_process;
mod ordinary;
mod pkeys;
mod processes;
mod rails;
mod random_faults;
mod raw;
mod rules;
mod same_host;
mod scarce;
mod several;
mod silence;
mod spoiler;
mod steps;
mod too_early;
mod trace;
mod two_hosts;
mod two_links;
mod two_ports;
mod windows;
mod within;
mod xrc;
mod xrc_processes;
