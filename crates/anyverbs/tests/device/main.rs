//! The whole device, through its public API.

mod endpoint;
mod events;
mod fork;
mod one_process;
mod processes;
mod rules;
