//! The C ABI of libibverbs, librdmacm and the vendor libraries on the anyverbs device, in one shared object.
//!
//! This crate translates and decides nothing. Its rooms:
//!
//! - `abi`: the C types, checked against `abi/layouts.65.txt` at compile time;
//! - `exports`: from Rust functions to versioned C symbols, generated from `abi/*.symbols`;
//! - `verbs`, `rdmacm`, `rsocket`: the calls themselves, a file for each kind of object;
//! - `object`: the objects that a program's pointers point to;
//! - `session`: calls that come in a row and have an object to themselves;
//! - `check`: what the checker of programs is told;
//! - `cancel`: waiting where a thread may be cancelled;
//! - `errno`: the outcome of calls; `log`: the messages on stderr;
//! - `refuse`: the calls that are not built, and how each of them says so;
//! - `compat`, `private`, `vendor`: version nodes that must exist, and whose calls all refuse;
//! - `coverage`: `docs/coverage.md`, made from those tables.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
// Only the trampolines call the exported functions, and a test binary has none.
#![cfg_attr(test, allow(dead_code))]

mod abi;
mod cancel;
mod check;
mod compat;
#[cfg(test)]
mod coverage;
#[cfg(test)]
mod differential;
mod errno;
mod exports;
mod faults;
mod log;
mod object;
mod private;
mod probes;
mod rdmacm;
mod refuse;
mod rsocket;
mod session;
mod vendor;
mod verbs;
