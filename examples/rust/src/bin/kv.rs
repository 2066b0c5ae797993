//! A key-value store whose clients look values up by one-sided READs. The server's processor does nothing for a lookup.
//!
//! ```sh
//! kv serve CLIENTS KEY=VALUE ...       # ends after so many clients
//! kv get HOST KEY ...
//! ```
//!
//! The table is an array of slots. A key's hash says where the search for it begins; the search ends at an empty slot.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use anyverbs::prelude::*;

const SLOTS: usize = 1024;
/// A slot: a checksum of the rest (0: empty), two lengths, and room for key and value.
const SLOT: usize = 128;
const HEADER: usize = 10;
const PORT: u16 = 7476;
const SOON: Duration = Duration::from_secs(10);
/// READs of a slot that is being written.
const TRIES: u32 = 1000;

type Done<T> = Result<T, Box<dyn Error>>;

/// FNV-1a. Both sides must agree, so it is not the hasher of the standard library, which may change.
fn hash(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

fn pack(key: &str, value: &str) -> Option<[u8; SLOT]> {
    let mut slot = [0; SLOT];
    let room = slot[HEADER..].get_mut(..key.len() + value.len())?;
    room.copy_from_slice([key, value].concat().as_bytes());
    (slot[8], slot[9]) = (key.len() as u8, value.len() as u8);
    let sum = hash(&slot[8..]).max(1);
    slot[..8].copy_from_slice(&sum.to_le_bytes());
    Some(slot)
}

/// Key and value of a slot. `None` if it is empty. An error if a write was under way: then read it again.
fn unpack(slot: &[u8]) -> Done<Option<(&[u8], &[u8])>> {
    let sum = u64::from_le_bytes(*slot.first_chunk().expect("a slot has a header"));
    if sum == 0 {
        return Ok(None);
    }
    if sum != hash(&slot[8..]).max(1) {
        return Err("the checksum of a slot stays wrong".into());
    }
    let pair = slot[HEADER..].split_at_checked(slot[8].into());
    let pair = pair.and_then(|(key, rest)| Some((key, rest.get(..slot[9].into())?)));
    pair.map(Some).ok_or_else(|| "the lengths in a slot stay wrong".into())
}

/// A connected queue pair, where its requests complete, and what the peer's side said beside its endpoint.
fn connect(
    context: &Context,
    pd: &Pd,
    peer: &mut TcpStream,
    tell: &RemoteSlice,
) -> Done<(Qp, Cq, RemoteSlice)> {
    let cq = context.create_cq(16, None, 0, 0)?;
    let qp = context.create_default_qp(pd, &cq, QpType::Rc)?;
    let local = context.endpoint(&qp)?;
    peer.write_all(&local.to_bytes())?;
    peer.write_all(&tell.to_bytes())?;
    let (mut endpoint, mut told) = ([0; Endpoint::LEN], [0; RemoteSlice::LEN]);
    peer.read_exact(&mut endpoint)?;
    peer.read_exact(&mut told)?;
    context.connect(&qp, &local, &Endpoint::from_bytes(endpoint)?)?;
    // Both are ready when both have said so.
    peer.write_all(b"!")?;
    peer.read_exact(&mut [0])?;
    Ok((qp, cq, RemoteSlice::from_bytes(told)))
}

fn serve(clients: usize, pairs: &[(&str, &str)]) -> Done<()> {
    let context = Context::open(&anyverbs::devices()?[0].name)?;
    let pd = context.alloc_pd()?;
    let table = pd.alloc(SLOTS * SLOT, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    for (key, value) in pairs {
        let slot = pack(key, value).ok_or("key and value are longer than a slot")?;
        let places = (0..SLOTS).map(|step| (hash(key.as_bytes()) as usize + step) % SLOTS * SLOT);
        let mut free = places.filter(|at| table.slice(*at..at + 8).to_vec() == [0; 8]);
        table.write(free.next().ok_or("the table is full")?, &slot);
    }
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    println!("serving {} keys", pairs.len());
    for stream in listener.incoming().take(clients) {
        let mut stream = stream?;
        let connection = connect(&context, &pd, &mut stream, &table.remote(..))?;
        // The client closes its connection when it is done; meanwhile there is nothing to do.
        stream.read_to_end(&mut Vec::new())?;
        drop(connection);
    }
    Ok(())
}

fn get(host: &str, keys: &[String]) -> Done<()> {
    let context = Context::open(&anyverbs::devices()?[0].name)?;
    let pd = context.alloc_pd()?;
    let mut stream = TcpStream::connect((host, PORT))?;
    let nothing = RemoteSlice { va: 0, len: 0, rkey: 0 };
    let (qp, cq, table) = connect(&context, &pd, &mut stream, &nothing)?;
    if table.len < (SLOTS * SLOT) as u64 {
        return Err(format!("the table of the server has only {} bytes", table.len).into());
    }
    let buffer = pd.alloc(SLOT, Access::LOCAL_WRITE)?;
    for key in keys {
        let (mut step, mut tries) = (0, 0);
        let value = loop {
            let at = (hash(key.as_bytes()) as usize + step) % SLOTS * SLOT;
            qp.read(1, &buffer.slice(..), &table.slice(at..at + SLOT))?;
            cq.wait(SOON)?;
            match unpack(&buffer.slice(..).to_vec()) {
                Ok(Some((found, value))) if found == key.as_bytes() => {
                    break Some(String::from_utf8_lossy(value).into_owned());
                }
                Ok(Some(_)) if step + 1 < SLOTS => step += 1,
                Ok(_) => break None,
                Err(wrong) if tries == TRIES => return Err(wrong),
                Err(_) => tries += 1,
            }
        };
        println!("{key} = {}", value.as_deref().unwrap_or("(none)"));
    }
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let pairs: Option<Vec<_>> = words.iter().skip(2).map(|word| word.split_once('=')).collect();
    let number = words.get(1).and_then(|word| word.parse().ok()).filter(|number| *number > 0);
    let done = match (words.first().map(String::as_str), number, pairs) {
        (Some("serve"), Some(clients), Some(pairs)) if !pairs.is_empty() => serve(clients, &pairs),
        (Some("get"), ..) if words.len() > 2 => get(&words[1], &words[2..]),
        _ => {
            eprintln!("usage: kv serve CLIENTS KEY=VALUE... | kv get HOST KEY...");
            return ExitCode::from(2);
        }
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("kv: {error}");
    ExitCode::FAILURE
}
