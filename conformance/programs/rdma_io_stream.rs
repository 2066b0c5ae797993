//! A stream of the crate `rdma-io` between two processes, over each of its three transports. Every byte is compared.
//!
//! ```text
//! rdma_io_stream server 192.0.2.1:7471 send-recv
//! rdma_io_stream client 192.0.2.1:7471 send-recv
//! ```
//!
//! `rdma_io.sh` builds and runs it.

use std::error::Error;
use std::net::SocketAddr;

use rdma_io::async_cm::AsyncCmListener;
use rdma_io::async_stream::AsyncRdmaStream;
use rdma_io::credit_ring_transport::CreditRingConfig;
use rdma_io::read_ring_transport::ReadRingConfig;
use rdma_io::send_recv_transport::SendRecvConfig;
use rdma_io::transport::{Transport, TransportBuilder};

type Outcome = Result<(), Box<dyn Error>>;

/// Sizes of messages.
const SIZES: [usize; 5] = [1, 64, 1500, 4096, 16_384];
/// Longer ones, which only a stream of SENDs can carry: a ring of 64 KiB has 43 places, and the crate fails beyond.
const LONG: [usize; 3] = [65_536, 65_537, 1 << 20];
const ROUNDS: usize = 20;

fn pattern(round: usize, size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 7 + at / 251 + round * 13) as u8).collect()
}

async fn read<T: Transport>(
    stream: &mut AsyncRdmaStream<T>,
    size: usize,
) -> Result<Vec<u8>, Box<dyn Error>> {
    let (mut bytes, mut got) = (vec![0; size], 0);
    while got < size {
        match stream.read(&mut bytes[got..]).await? {
            0 => return Err(format!("the stream ended after {got} of {size} bytes").into()),
            count => got += count,
        }
    }
    Ok(bytes)
}

/// Sends a message back and forth. Both sides compare it.
async fn talk<T: Transport>(
    mut stream: AsyncRdmaStream<T>,
    is_server: bool,
    long: &[usize],
) -> Outcome {
    for size in SIZES.into_iter().chain(long.iter().copied()) {
        for round in 0..ROUNDS {
            let bytes = pattern(round, size);
            if !is_server {
                stream.write_all(&bytes).await?;
            }
            if read(&mut stream, size).await? != bytes {
                return Err(format!("round {round}: {size} bytes differ").into());
            }
            if is_server {
                stream.write_all(&bytes).await?;
            }
        }
    }
    // The client has all. The server sees the end of the stream.
    if is_server {
        if stream.read(&mut [0]).await? != 0 {
            return Err("there is more than was sent".into());
        }
        return Ok(());
    }
    Ok(stream.shutdown().await?)
}

async fn over<B: TransportBuilder>(
    name: &str,
    config: B,
    is_server: bool,
    address: SocketAddr,
) -> Outcome {
    let transport = if is_server {
        let listener = AsyncCmListener::bind(&address)?;
        println!("{name}: listens");
        config.accept(&listener).await?
    } else {
        config.connect(&address).await?
    };
    let long = if name == "send-recv" { &LONG[..] } else { &[] };
    talk(AsyncRdmaStream::new(transport), is_server, long).await?;
    println!("{name}: every byte is right");
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome {
    let words: Vec<_> = std::env::args().collect();
    let [_, role, address, transport] = &words[..] else {
        return Err(
            "usage: rdma_io_stream server|client ADDRESS:PORT send-recv|credit-ring|read-ring"
                .into(),
        );
    };
    let (is_server, address) = (role == "server", address.parse()?);
    match &transport[..] {
        "send-recv" => over(transport, SendRecvConfig::stream(), is_server, address).await,
        "credit-ring" => over(transport, CreditRingConfig::default(), is_server, address).await,
        "read-ring" => over(transport, ReadRingConfig::default(), is_server, address).await,
        _ => Err(format!("no transport {transport}").into()),
    }
}
