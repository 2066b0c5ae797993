//! Ping-pong: a message goes there and back, 1000 times.
//!
//! ```sh
//! pingpong             # the server, for one client
//! pingpong HOST        # the client
//! ```
//!
//! The two sides tell each other their queue pairs over a TCP connection.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyverbs::prelude::*;

const ROUNDS: u32 = 1000;
const SIZE: usize = 64;
const PORT: u16 = 7475;
const SOON: Duration = Duration::from_secs(10);

fn play(host: Option<&str>) -> Result<(), Box<dyn Error>> {
    let mut stream = match host {
        Some(host) => TcpStream::connect((host, PORT))?,
        None => {
            let listener = TcpListener::bind(("0.0.0.0", PORT))?;
            println!("waiting for a client");
            listener.accept()?.0
        }
    };

    let context = Context::open(&anyverbs::devices()?[0].name)?;
    let pd = context.alloc_pd()?;
    // Sends and receives complete apart, so that each can be waited for.
    let (sends, receives) = (context.create_cq(4, None, 0, 0)?, context.create_cq(4, None, 0, 0)?);
    let init = QpInitAttr {
        send_cq: &sends,
        recv_cq: &receives,
        srq: None,
        cap: QpCap {
            max_send_wr: 2,
            max_recv_wr: 2,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        },
        qp_type: QpType::Rc,
        sq_sig_all: true,
        cookie: 0,
    };
    let qp = context.create_qp(&pd, &init)?;

    let memory = pd.alloc(2 * SIZE, Access::LOCAL_WRITE)?;
    let (sent, received) = (memory.slice(..SIZE), memory.slice(SIZE..));
    sent.write(&[b'.'; SIZE]);

    // From here on receives may be posted. The first one is there before the peer can send.
    let local = context.endpoint(&qp)?;
    qp.recv(0, &received)?;
    stream.write_all(&local.to_bytes())?;
    let mut bytes = [0; Endpoint::LEN];
    stream.read_exact(&mut bytes)?;
    context.connect(&qp, &local, &Endpoint::from_bytes(bytes)?)?;

    let begin = Instant::now();
    for _ in 0..ROUNDS {
        if host.is_none() {
            // The server answers with what it got.
            receives.wait(SOON)?;
            sent.write(&received.to_vec());
            qp.recv(0, &received)?;
        }
        qp.send(0, &sent)?;
        sends.wait(SOON)?;
        if host.is_some() {
            receives.wait(SOON)?;
            assert_eq!(received.to_vec(), sent.to_vec(), "the answer differs");
            qp.recv(0, &received)?;
        }
    }
    let each = begin.elapsed() / ROUNDS;
    println!(
        "{ROUNDS} messages of {SIZE} bytes there and back, {:.1} us each",
        each.as_secs_f64() * 1e6
    );

    // Each side stays until the other has finished.
    stream.write_all(b"!")?;
    stream.read_exact(&mut [0])?;
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => play(None),
        [host] if !host.starts_with('-') => play(Some(host)),
        _ => {
            eprintln!("usage: pingpong [HOST]");
            return ExitCode::from(2);
        }
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("pingpong: {error}");
    ExitCode::FAILURE
}
