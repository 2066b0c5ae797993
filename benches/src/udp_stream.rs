//! Datagrams one way as fast as they go, with the kernel's offloads or without. None is acknowledged: the figure counts
//! datagrams that arrive.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Subcommand;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Payload bytes of a datagram
    #[arg(long, global = true, default_value_t = 4112)]
    segment: usize,
    /// One datagram a send
    #[arg(long, global = true)]
    no_gso: bool,
    /// One datagram a receive
    #[arg(long, global = true)]
    no_gro: bool,
    /// Duration
    #[arg(long, global = true, default_value_t = 1.0)]
    seconds: f64,
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Clone, Subcommand)]
enum Role {
    /// Receives and measures
    Server {
        /// The address to listen at
        address: SocketAddr,
    },
    /// Sends
    Client {
        /// The server
        address: SocketAddr,
    },
}

/// The greatest size of one send with segmentation: an IPv4 datagram's, in 64 segments at most.
const LARGEST: usize = 65_507;
const MOST_SEGMENTS: usize = 64;
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// A datagram of this length ends the stream.
const END: usize = 1;

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if !(END + 1..=LARGEST).contains(&options.segment) {
        bail!("a datagram has {} to {LARGEST} bytes", END + 1);
    }
    match options.role {
        Role::Server { address } => receive(options, address),
        Role::Client { address } => send(options, address),
    }
}

fn receive(options: &Options, address: SocketAddr) -> anyhow::Result<()> {
    let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
    socket.set_read_timeout(Some(TIME_LIMIT)).context("cannot set a timeout")?;
    if !options.no_gro {
        set(&socket, libc::UDP_GRO, 1).context("the kernel has no UDP_GRO")?;
    }
    let mut buffer = vec![0; 1 << 16];
    // The first starts the clock and does not count.
    socket.recv(&mut buffer).context("nothing arrives")?;
    let begin = Instant::now();
    let (mut bytes, mut last) = (0, begin);
    loop {
        match socket.recv(&mut buffer).context("the stream stopped without an end")? {
            END => break,
            len => bytes += len,
        }
        last = Instant::now();
    }
    let seconds = last.duration_since(begin).as_secs_f64();
    if seconds == 0.0 {
        bail!("too little has arrived");
    }
    println!("{:.3}", bytes as f64 * 8.0 / seconds / 1e9);
    Ok(())
}

fn send(options: &Options, address: SocketAddr) -> anyhow::Result<()> {
    let any: SocketAddr =
        if address.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).context("cannot bind")?;
    socket.connect(address).with_context(|| format!("cannot reach {address}"))?;
    let mut segments = 1;
    if !options.no_gso {
        let segment = i32::try_from(options.segment).context("too long a segment")?;
        set(&socket, libc::UDP_SEGMENT, segment).context("the kernel has no UDP_SEGMENT")?;
        segments = (LARGEST / options.segment).min(MOST_SEGMENTS);
    }
    let buffer = vec![0x5a; options.segment * segments];
    let end = Instant::now() + Duration::from_secs_f64(options.seconds);
    while Instant::now() < end {
        socket.send(&buffer).context("cannot send")?;
    }
    // Several, since the receiver's socket may be full.
    for _ in 0..20 {
        sleep(Duration::from_millis(5));
        // The receiver is gone after the first that arrives.
        if socket.send(&buffer[..END]).is_err() {
            break;
        }
    }
    Ok(())
}

fn set(socket: &UdpSocket, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value lives through the call, and its size is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
