//! The machine's own limits: the best that a device in software could reach, without any of its work. And what the device
//! executes for a message, instruction by instruction.
//!
//! Every measurement of the machine prints one number. Bare system calls and the copies between two processors' caches are
//! the crate's only unsafe code.

mod copy;
mod instructions;
mod memory;
mod messages;
mod processor;
mod sharing;
mod trace;
mod udp_latency;
mod udp_stream;

use clap::{Parser, Subcommand};

/// Measure the machine's own limits, and count what the device executes
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Nanoseconds that a changed cache line takes to another processor
    CacheLine(memory::CacheLine),
    /// Gb/s of messages copied into a ring in shared memory and out of it by another processor
    Memory(memory::Ring),
    /// Copies to or from another process by one system call
    Copy(copy::Options),
    /// The passive process of `copy`
    #[command(hide = true)]
    CopyTarget {
        /// Bytes of its buffer
        size: usize,
    },
    /// Microseconds one way of a small datagram, by the median round trip
    UdpLatency(udp_latency::Options),
    /// Gb/s of datagrams that arrive; printed by the server
    UdpStream(udp_stream::Options),
    /// Instructions of each call of a message on one host
    Instructions(messages::Options),
    /// Cache lines at which two threads with queue pairs of their own meet
    Sharing(messages::Options),
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::CacheLine(options) => memory::cache_line(&options),
        Command::Memory(options) => memory::ring(&options),
        Command::Copy(options) => copy::run(&options),
        Command::CopyTarget { size } => copy::target(size),
        Command::UdpLatency(options) => udp_latency::run(&options),
        Command::UdpStream(options) => udp_stream::run(&options),
        Command::Instructions(options) => instructions::run(&options),
        Command::Sharing(options) => sharing::run(&options),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Args::command().debug_assert();
    }
}
