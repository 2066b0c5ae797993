//! Copies a file from another machine, with a progress bar.
//!
//! ```sh
//! filecopy give FILE          # offers the file to one client
//! filecopy take HOST COPY     # fetches it
//! ```
//!
//! The client READs the file out of the memory of the other process, which does nothing meanwhile.

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{Ipv4Addr, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use anyverbs::cm::*;
use anyverbs::prelude::*;

const PORT: u16 = 7482;
/// So many READs are under way at a time, each of so many bytes.
const DEPTH: usize = 4;
const PIECE: usize = 1 << 20;
/// No file is longer.
const MOST: usize = 1 << 50;
const SOON: Duration = Duration::from_secs(10);

type Done<T> = Result<T, Box<dyn Error>>;

/// The next event of the connection manager, which must be this one.
fn expect(channel: &EventChannel, wanted: EventKind) -> Done<Event> {
    let event = channel.get_event()?;
    if event.kind != wanted {
        return Err(format!("{}, status {}", event.kind.name(), event.status).into());
    }
    Ok(event)
}

/// Gives an id a queue pair.
fn attach(id: &Id) -> Done<(Pd, Cq, Qp)> {
    let device = id.info().device.ok_or("the id has no device")?;
    let context = Context::open(&anyverbs::devices()?[device].name)?;
    let (pd, cq) = (context.alloc_pd()?, context.create_default_cq(DEPTH as u32)?);
    let qp = context.create_default_qp(&pd, &cq, QpType::Rc)?;
    id.attach_qp(&qp)?;
    Ok((pd, cq, qp))
}

fn give(name: &str) -> Done<()> {
    let bytes = fs::read(name).map_err(|error| format!("{name}: {error}"))?;
    if bytes.is_empty() {
        return Err(format!("{name} is empty").into());
    }
    let channel = create_event_channel()?;
    let listener = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0)?;
    listener.bind_addr(&Address::Ip((Ipv4Addr::UNSPECIFIED, PORT).into()))?;
    listener.listen(0)?;
    println!("waiting for a client");
    let id = expect(&channel, EventKind::ConnectRequest)?.new_id.ok_or("a request has an id")?;
    let (pd, _cq, _qp) = attach(&id)?;
    // Registered so that the peer may READ it. The name of the memory travels with the answer.
    let file = pd.adopt(bytes.into(), Access::REMOTE_READ)?;
    let offer = file.remote(..).to_bytes();
    let reads = DEPTH as u8;
    id.accept(Some(&ConnParam {
        private_data: &offer,
        responder_resources: reads,
        ..ConnParam::default()
    }))?;
    expect(&channel, EventKind::Established)?;
    // The memory stays registered until the client has all of it, and parts.
    expect(&channel, EventKind::Disconnected)?;
    Ok(id.disconnect()?)
}

fn take(host: &str, name: &str) -> Done<()> {
    let server = (host, PORT).to_socket_addrs()?.next().ok_or("the host has no address")?;
    let channel = create_event_channel()?;
    let id = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0)?;
    id.resolve_addr(None, &Address::Ip(server))?;
    expect(&channel, EventKind::AddrResolved)?;
    id.resolve_route()?;
    expect(&channel, EventKind::RouteResolved)?;
    let (pd, cq, qp) = attach(&id)?;
    id.connect(&ConnParam {
        initiator_depth: DEPTH as u8,
        retry_count: 7,
        ..ConnParam::default()
    })?;
    let EventParam::Conn(answer) = expect(&channel, EventKind::Established)?.param else {
        return Err("the answer says nothing".into());
    };
    let offer = answer.private_data.first_chunk().ok_or("the answer is too short")?;
    let file = RemoteSlice::from_bytes(*offer);
    let memory = pd.alloc(DEPTH * PIECE, Access::LOCAL_WRITE)?;
    let mut copy = File::create(name).map_err(|error| format!("{name}: {error}"))?;
    if let Err(error) = fetch(&qp, &cq, &file, &memory, &mut copy) {
        if copy.metadata()?.is_file() {
            fs::remove_file(name)?;
        }
        return Err(format!("{name}: {error}").into());
    }
    println!("\n{name}: {} bytes", file.len);
    Ok(id.disconnect()?)
}

fn fetch(qp: &Qp, cq: &Cq, file: &RemoteSlice, memory: &Region, copy: &mut File) -> Done<()> {
    let length = usize::try_from(file.len).ok().filter(|length| (1..=MOST).contains(length));
    let length = length.ok_or_else(|| format!("the peer offers {} bytes", file.len))?;
    let range = |at: usize| at..length.min(at + PIECE);
    let place = |at: usize| memory.slice(at % (DEPTH * PIECE)..).slice(..range(at).len());
    let read = |at: usize| qp.read(at as u64, &place(at), &file.slice(range(at)));
    (0..length).step_by(PIECE).take(DEPTH).try_for_each(read)?;
    // The READs complete in the order in which they were posted.
    for at in (0..length).step_by(PIECE) {
        cq.wait(SOON)?;
        copy.write_all(&place(at).to_vec())?;
        if at + DEPTH * PIECE < length {
            read(at + DEPTH * PIECE)?;
        }
        show(range(at).end, length)?;
    }
    Ok(copy.sync_all()?)
}

fn show(done: usize, length: usize) -> io::Result<()> {
    let bar = "#".repeat(40 * done / length);
    print!("\r[{bar:-<40}] {:3} %", 100 * done / length);
    io::stdout().flush()
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["give", name] => give(name),
        ["take", host, name] => take(host, name),
        _ => {
            eprintln!("usage: filecopy give FILE | filecopy take HOST COPY");
            return ExitCode::from(2);
        }
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("filecopy: {error}");
    ExitCode::FAILURE
}
