//! A server and a client for any device: that of their process, or one of the system's libibverbs, such as hardware. They do
//! every operation that all devices have.
//!
//! ```sh
//! anywhere DEVICE          # the server, for one client; DEVICE is `device` (that of the process) or `system`
//! anywhere DEVICE HOST     # the client; its DEVICE may be another kind
//! ```

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::pin::pin;
use std::process::ExitCode;
use std::task::{self, Poll, Waker};
use std::time::Duration;

use anyverbs::WaitError;
use anyverbs::prelude::*;
use anyverbs::system::{self, Device};

/// Three packets of most networks.
const LONG: usize = 3000;
/// The place of a number of 8 bytes.
const WORD: usize = 4096;
/// A datagram arrives behind so many bytes of addresses.
const GRH: usize = 40;
const SHORT: usize = 500;
const IMMEDIATE: u32 = 0x0102_0304;
const PORT: u16 = 7484;
const SOON: Duration = Duration::from_secs(30);

type Done<T> = Result<T, Box<dyn Error>>;

/// One end of the connection.
struct End<V: Verbs> {
    device: V,
    pd: V::Pd,
    cq: V::Cq,
    connected: V::Qp,
    datagrams: V::Qp,
    memory: V::Slice,
    stream: TcpStream,
    /// The peer said these of its side.
    datagrams_peer: Endpoint,
    memory_peer: RemoteSlice,
}

impl<V: Verbs> End<V> {
    fn new(device: V, mut stream: TcpStream) -> Done<Self> {
        let (pd, cq) = (device.alloc_pd()?, device.create_default_cq(16)?);
        let connected = device.create_default_qp(&pd, &cq, QpType::Rc)?;
        let datagrams = device.create_default_qp(&pd, &cq, QpType::Ud)?;
        let rights = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let memory = device.alloc(&pd, 8192, Access::LOCAL_WRITE | rights)?;

        let local = device.endpoint(&connected)?;
        stream.write_all(&local.to_bytes())?;
        stream.write_all(&device.endpoint(&datagrams)?.to_bytes())?;
        stream.write_all(&memory.remote().to_bytes())?;
        let (mut endpoint, mut remote) = ([0; Endpoint::LEN], [0; RemoteSlice::LEN]);
        stream.read_exact(&mut endpoint)?;
        device.connect(&connected, &local, &Endpoint::from_bytes(endpoint)?)?;
        stream.read_exact(&mut endpoint)?;
        let datagrams_peer = Endpoint::from_bytes(endpoint)?;
        stream.read_exact(&mut remote)?;
        let memory_peer = RemoteSlice::from_bytes(remote);
        Ok(Self {
            device,
            pd,
            cq,
            connected,
            datagrams,
            memory,
            stream,
            datagrams_peer,
            memory_peer,
        })
    }

    /// Goes on when the peer is here as well.
    fn meet(&mut self) -> Done<()> {
        self.stream.write_all(b"!")?;
        Ok(self.stream.read_exact(&mut [0])?)
    }

    /// Waits for a completion: a runtime for one program.
    fn wait(&self) -> Result<Wc, WaitError> {
        let mut completion = pin!(self.device.completion(&self.cq, SOON));
        loop {
            let mut task = task::Context::from_waker(Waker::noop());
            if let Poll::Ready(wc) = completion.as_mut().poll(&mut task) {
                return wc;
            }
        }
    }

    /// The memory that both sides use: a message, and a number of 8 bytes.
    fn parts(&self) -> (V::Slice, V::Slice) {
        (self.memory.slice(..LONG), self.memory.slice(WORD..WORD + 8))
    }

    fn serve(mut self) -> Done<()> {
        let (message, word) = self.parts();
        self.connected.recv(1, &message)?;
        self.meet()?;
        let wc = self.wait()?;
        let is_whole = (wc.byte_len as usize, wc.imm) == (LONG, IMMEDIATE);
        check("a message came", is_whole && message.to_vec() == pattern(1))?;
        self.meet()?;

        self.meet()?;
        check("the client wrote", message.to_vec() == pattern(2))?;
        message.write(&pattern(3));
        word.write(&5u64.to_ne_bytes());
        self.meet()?;

        self.meet()?;
        check("the client counted", word.to_vec() == 12u64.to_ne_bytes())?;
        self.datagrams.recv(1, &self.memory.slice(..GRH + SHORT))?;
        self.meet()?;
        let wc = self.wait()?;
        let is_whole = (wc.byte_len as usize, wc.src_qpn) == (GRH + SHORT, self.datagrams_peer.qpn);
        let came = self.memory.slice(GRH..GRH + SHORT).to_vec();
        check("a datagram came", is_whole && came[..] == pattern(4)[..SHORT])?;
        self.meet()
    }

    fn call(mut self) -> Done<()> {
        let (message, old) = self.parts();
        let peers = (self.memory_peer.slice(..LONG), self.memory_peer.slice(WORD..WORD + 8));
        self.meet()?;
        message.write(&pattern(1));
        let (op, sges) = (SendOp::SendImm(IMMEDIATE), [message.sge()]);
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 1, op, flags, sges: &sges, ud: None, xrc_srqn: 0 };
        self.connected.post_send_wr(&wr)?;
        check("SEND with immediate", self.wait()?.opcode == WcOpcode::Send)?;
        self.meet()?;

        message.write(&pattern(2));
        self.connected.write(1, &message, &peers.0)?;
        check("WRITE", self.wait()?.opcode == WcOpcode::RdmaWrite)?;
        self.meet()?;

        self.meet()?;
        self.connected.read(1, &message, &peers.0)?;
        let wc = self.wait()?;
        check("READ", wc.opcode == WcOpcode::RdmaRead && message.to_vec() == pattern(3))?;
        self.connected.fetch_add(1, &old, &peers.1, 6)?;
        let is_done = self.wait()?.opcode == WcOpcode::FetchAdd;
        check("FETCH_ADD", is_done && old.to_vec() == 5u64.to_ne_bytes())?;
        self.connected.compare_swap(1, &old, &peers.1, 11, 12)?;
        let is_done = self.wait()?.opcode == WcOpcode::CompSwap;
        check("COMPARE_SWAP", is_done && old.to_vec() == 11u64.to_ne_bytes())?;
        self.meet()?;

        self.meet()?;
        message.write(&pattern(4));
        let to = self.device.destination(&self.pd, &self.datagrams_peer)?;
        self.datagrams.send_to(1, &message.slice(..SHORT), to)?;
        check("SEND of a datagram", self.wait()?.opcode == WcOpcode::Send)?;

        // It ends the connection.
        let wrong = RemoteSlice { rkey: !peers.0.rkey, ..peers.0 };
        self.connected.read(1, &message, &wrong)?;
        let is_refused = match self.wait() {
            Err(WaitError::Failed(error)) => error.status == WcStatus::RemAccessErr,
            _ => false,
        };
        check("READ with a wrong key is refused", is_refused)?;
        self.meet()
    }
}

/// The bytes of a message.
fn pattern(number: u8) -> Vec<u8> {
    (0..LONG).map(|at| (at as u8).wrapping_mul(31).wrapping_add(number)).collect()
}

fn check(what: &str, is_so: bool) -> Done<()> {
    println!("{what}: {}", if is_so { "ok" } else { "WRONG" });
    if is_so { Ok(()) } else { Err(format!("{what}: not as it must be").into()) }
}

fn play(device: impl Verbs, host: Option<&str>) -> Done<()> {
    match host {
        Some(host) => End::new(device, TcpStream::connect((host, PORT))?)?.call(),
        None => End::new(device, TcpListener::bind(("0.0.0.0", PORT))?.accept()?.0)?.serve(),
    }
}

fn on_system(host: Option<&str>) -> Done<()> {
    let names = system::devices()?;
    play(Device::open(names.first().ok_or("the system has no RDMA device")?)?, host)
}

fn on_own(host: Option<&str>) -> Done<()> {
    play(Context::open(&anyverbs::devices()?[0].name)?, host)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let host = words.get(1).map(String::as_str);
    let done = match words.first().map(String::as_str) {
        Some("device") if words.len() < 3 => on_own(host),
        Some("system") if words.len() < 3 => on_system(host),
        _ => {
            eprintln!("usage: anywhere device|system [HOST]");
            return ExitCode::from(2);
        }
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("anywhere: {error}");
    ExitCode::FAILURE
}
