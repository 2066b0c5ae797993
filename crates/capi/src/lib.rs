//! The C ABI of libibverbs, librdmacm and the vendor libraries on the anyverbs device, in one shared object.
//!
//! This crate translates and decides nothing. Its rooms:
//!
//! - `abi`: the C types, checked against `abi/layouts.65.txt` at compile time;
//! - `exports`: from Rust functions to versioned C symbols, generated from `abi/*.symbols`;
//! - `verbs`, `rdmacm`: the calls themselves, a file for each kind of object;
//! - `refuse`: the calls that are not built, and how each of them says so;
//! - `compat`, `private`, `vendor`: version nodes that must exist, and whose calls all refuse.

mod abi;
mod compat;
mod exports;
mod private;
mod rdmacm;
mod refuse;
mod vendor;
mod verbs;
