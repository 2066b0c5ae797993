//! Raw throughput of `TxBatch` to `RxBatch`: `throughput receive SECONDS`, `throughput send ADDRESS LENGTH SECONDS`.
//!
//! The receiver grants small credits for each 128 KiB that it has taken, as a protocol above would, and the sender
//! keeps to them. The receiver reports all that arrived.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyverbs_net::{Destination, PortOptions, RxBatch, TxBatch, UdpPort};

const PORT: u16 = 4791;
const CREDIT: u64 = 128 << 10;
const WINDOW: u64 = 1 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["receive", seconds] => receive(seconds.parse().expect("seconds")),
        ["send", address, len, seconds] => send(
            address.parse().expect("an address"),
            len.parse().expect("a length"),
            Duration::from_secs(seconds.parse().expect("seconds")),
        ),
        _ => {
            eprintln!("usage: throughput receive SECONDS | throughput send ADDRESS LENGTH SECONDS")
        }
    }
}

fn wait(port: &UdpPort, milliseconds: i32) {
    let mut fds: Vec<_> = port
        .fds()
        .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    // SAFETY: a live array of its own length.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, milliseconds) };
}

fn receive(seconds: u64) {
    let port = UdpPort::open(PortOptions::new(PORT)).expect("the port");
    let (mut batch, mut out) = (RxBatch::new(8).expect("memory"), TxBatch::new());
    let (mut bytes, mut datagrams, mut messages, mut calls, mut credited) =
        (0u64, 0u64, 0u64, 0u64, 0u64);
    let mut checksum = 0u64;
    let mut times: Option<(Instant, Instant)> = None;
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        let n = port.receive(&mut batch).expect("receiving");
        if n == 0 {
            wait(&port, 100);
            continue;
        }
        calls += 1;
        messages += n as u64;
        let mut source = None;
        for d in batch.datagrams() {
            bytes += d.bytes.len() as u64;
            datagrams += 1;
            checksum = checksum.wrapping_add(u64::from(d.bytes[0]));
            source = Some(d.source.ip());
        }
        let now = Instant::now();
        times = Some((times.map_or(now, |(first, _)| first), now));
        if bytes - credited >= CREDIT
            && let Some(ip) = source
        {
            credited = bytes;
            let (room, _) =
                out.segment(&port, &Destination::new((ip, PORT).into()), 8).expect("room");
            room.copy_from_slice(&bytes.to_le_bytes());
            out.flush(&port).expect("sending a credit");
        }
    }
    let Some((first, last)) = times else {
        return println!("nothing arrived");
    };
    let gbps = bytes as f64 * 8.0 / (last - first).as_secs_f64() / 1e9;
    println!(
        "{gbps:.2} Gb/s, {datagrams} datagrams, {:.1} a message, {:.1} messages a call, {} dropped, checksum {checksum:x}",
        datagrams as f64 / messages as f64,
        messages as f64 / calls as f64,
        port.dropped()
    );
}

fn send(ip: IpAddr, len: usize, duration: Duration) {
    let port = UdpPort::open(PortOptions::new(PORT)).expect("the port");
    let (mut batch, mut out) = (RxBatch::new(8).expect("memory"), TxBatch::new());
    let to = Destination::new(SocketAddr::new(ip, PORT));
    let payload = vec![0x5a; len];
    let (mut sent, mut credit) = (0u64, 0u64);
    let end = Instant::now() + duration;
    while Instant::now() < end {
        while sent - credit < WINDOW {
            let (room, _) = out.segment(&port, &to, len).expect("room");
            room.copy_from_slice(&payload);
            sent += len as u64;
        }
        out.flush(&port).expect("sending");
        let begin = Instant::now();
        while sent - credit >= WINDOW {
            if port.receive(&mut batch).expect("receiving") == 0 {
                wait(&port, 10);
            }
            for d in batch.datagrams() {
                if let Some(bytes) = d.bytes.first_chunk() {
                    credit = credit.max(u64::from_le_bytes(*bytes));
                }
            }
            if begin.elapsed() > Duration::from_millis(200) {
                // Packets were lost, so their credit will not come.
                credit = sent;
            }
        }
    }
    println!("{:?}", out.stats());
}
