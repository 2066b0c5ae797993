//! Latency of bare UDP: two programs that send one small datagram to and fro, spinning on their sockets or
//! blocking in them. What an RDMA device over UDP could reach at best.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(about = "UDP ping-pong: prints the median one-way time in microseconds")]
struct Args {
    /// Block in the socket instead of spinning on it
    #[arg(long, global = true)]
    block: bool,
    /// Payload bytes
    #[arg(long, global = true, default_value_t = 20)]
    size: usize,
    /// Round trips
    #[arg(long, global = true, default_value_t = 20_000)]
    rounds: u32,
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Answers
    Server {
        /// Where to listen
        address: SocketAddr,
    },
    /// Asks and measures
    Client {
        /// The server
        address: SocketAddr,
    },
}

/// A peer that is silent for this long is gone.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    match args.role {
        Role::Server { address } => serve(&args, address),
        Role::Client { address } => measure(&args, address),
    }
}

fn serve(args: &Args, address: SocketAddr) -> anyhow::Result<()> {
    let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
    prepare(&socket, args)?;
    let mut buffer = vec![0; args.size.max(1)];
    for _ in 0..args.rounds {
        let (len, peer) = receive(|| socket.recv_from(&mut buffer))?;
        socket.send_to(&buffer[..len], peer).context("cannot answer")?;
    }
    Ok(())
}

fn measure(args: &Args, address: SocketAddr) -> anyhow::Result<()> {
    let any: SocketAddr =
        if address.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).context("cannot bind")?;
    socket.connect(address).with_context(|| format!("cannot reach {address}"))?;
    prepare(&socket, args)?;
    let mut buffer = vec![0; args.size.max(1)];
    let mut times = Vec::with_capacity(args.rounds as usize);
    for _ in 0..args.rounds {
        let start = Instant::now();
        socket.send(&buffer).context("cannot send")?;
        receive(|| socket.recv(&mut buffer))?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let Some(median) = times.get(times.len() / 2) else { bail!("no rounds") };
    println!("{:.3}", median.as_secs_f64() * 1e6 / 2.0);
    Ok(())
}

fn prepare(socket: &UdpSocket, args: &Args) -> anyhow::Result<()> {
    socket.set_nonblocking(!args.block).context("cannot set the socket's mode")?;
    socket.set_read_timeout(Some(PATIENCE)).context("cannot set a timeout")
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
            let end = *give_up.get_or_insert_with(|| Instant::now() + PATIENCE);
            if Instant::now() > end {
                bail!("the peer is silent");
            }
        }
    }
}
