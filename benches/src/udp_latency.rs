//! Two programs that send one small datagram to and fro, spinning on their sockets or blocking in them.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Subcommand;

use crate::processor::percentile;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Block in the socket instead of spinning on it
    #[arg(long, global = true)]
    block: bool,
    /// Payload bytes
    #[arg(long, global = true, default_value_t = 20)]
    size: usize,
    /// The percentile of the times to print
    #[arg(long, global = true, default_value_t = 50.0)]
    percentile: f64,
    /// Round trips
    #[arg(long, global = true, default_value_t = 20_000)]
    rounds: u32,
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Clone, Subcommand)]
enum Role {
    /// Answers
    Server {
        /// The address to listen at
        address: SocketAddr,
    },
    /// Asks and measures
    Client {
        /// The server
        address: SocketAddr,
    },
}

/// A peer that is silent for this long is gone.
const TIME_LIMIT: Duration = Duration::from_secs(10);

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    match options.role {
        Role::Server { address } => serve(options, address),
        Role::Client { address } => measure(options, address),
    }
}

fn serve(options: &Options, address: SocketAddr) -> anyhow::Result<()> {
    let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
    prepare(&socket, options)?;
    let mut buffer = vec![0; options.size.max(1)];
    for _ in 0..options.rounds {
        let (len, peer) = receive(|| socket.recv_from(&mut buffer))?;
        socket.send_to(&buffer[..len], peer).context("cannot answer")?;
    }
    Ok(())
}

fn measure(options: &Options, address: SocketAddr) -> anyhow::Result<()> {
    let any: SocketAddr =
        if address.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).context("cannot bind")?;
    socket.connect(address).with_context(|| format!("cannot reach {address}"))?;
    prepare(&socket, options)?;
    let mut buffer = vec![0; options.size.max(1)];
    let mut times = Vec::with_capacity(options.rounds as usize);
    for _ in 0..options.rounds {
        let start = Instant::now();
        socket.send(&buffer).context("cannot send")?;
        receive(|| socket.recv(&mut buffer))?;
        times.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
    }
    println!("{:.3}", percentile(&mut times, options.percentile)?);
    Ok(())
}

fn prepare(socket: &UdpSocket, options: &Options) -> anyhow::Result<()> {
    socket.set_nonblocking(!options.block).context("cannot set the socket's mode")?;
    socket.set_read_timeout(Some(TIME_LIMIT)).context("cannot set a timeout")
}

/// Calls until something comes; a blocking socket has a timeout of its own.
fn receive<T>(mut call: impl FnMut() -> io::Result<T>) -> anyhow::Result<T> {
    let mut spins = 0u32;
    let mut give_up = None;
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other.context("cannot receive"),
        }
        spins = spins.wrapping_add(1);
        if spins.is_multiple_of(1 << 16) {
            let end = *give_up.get_or_insert_with(|| Instant::now() + TIME_LIMIT);
            if Instant::now() > end {
                bail!("the peer is silent");
            }
        }
    }
}
