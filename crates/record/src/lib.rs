//! Files that show what a program did on the device: captures of its packets, traces of its work. Several processes write one
//! file.
//!
//! This room knows formats and files, and nothing of RDMA or of sockets.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod capture;
mod file;
pub mod trace;

pub use file::{SharedFile, path_for_process};

/// The name and number of this process, as records name it: `ib_write_bw[1234]`.
#[must_use]
pub fn process() -> String {
    // Without /proc it has its number alone.
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let name: String = name.trim_end().chars().filter(|c| !c.is_control()).collect();
    format!("{name}[{}]", std::process::id())
}
