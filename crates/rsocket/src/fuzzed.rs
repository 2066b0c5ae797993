//! The body of the fuzz target `rsocket`: a stream whose peer sends and writes anything it can, while the program goes on
//! with its calls; and datagrams of any bytes.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, Ipv6Addr};

use anyverbs::RemoteAddr;

use crate::dgram;
use crate::machine::{Machine, Piece, Posted, SEND_LOW_WATER, Sizes, Source};
use crate::wire::{ByteOrder, ConnData, Control, Message, SGL_LEN, Target};

const MAX_STEPS: usize = 400;
/// Where the receive ring lies, as the peer sees it.
const RING: u64 = 0x10_0000;

/// The rest of an input; zeros when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn long(&mut self) -> u32 {
        u32::from(self.word()) << 16 | u32::from(self.word())
    }
}

struct World {
    machine: Machine,
    sizes: Sizes,
    /// The table that the peer writes.
    table: [[u8; Target::LEN]; SGL_LEN],
    /// Posted and not complete, with the parts of the send ring that each holds.
    posted: VecDeque<(Posted, [(u32, u32); 2])>,
    /// Bytes of the stream that came and were not read, and where the next of them lies.
    unread: u32,
    read_at: u32,
}

/// Runs one input.
pub fn run(input: &[u8]) {
    datagram(input);
    let mut input = Input(input);
    let sizes = Sizes {
        send_queue: 5 + u16::from(input.byte() % 32),
        recv_queue: 2 + u16::from(input.byte() % 32),
        send_buffer: SEND_LOW_WATER + u32::from(input.word()),
        recv_buffer: 2 + 2 * u32::from(input.word()),
        inline: u32::from(input.byte()),
    };
    let Some(peer) = private_data(&mut input) else { return };
    let mut world = World {
        machine: Machine::new(&sizes, RemoteAddr { va: RING, rkey: 1 }),
        sizes,
        table: Default::default(),
        posted: VecDeque::new(),
        unread: 0,
        read_at: 0,
    };
    world.machine.connect(&peer);
    for _ in 0..MAX_STEPS {
        if input.0.is_empty() {
            break;
        }
        world.step(&mut input);
        world.machine.receiver.check();
        assert_eq!(world.machine.receiver.unread(), world.unread);
        assert!(world.posted.len() <= usize::from(world.sizes.send_queue), "the queue overflows");
    }
    while world.complete() {}
    assert!(world.machine.all_sent());
}

/// Datagrams of any bytes. A header that is read is written as the same one.
fn datagram(bytes: &[u8]) {
    dgram::check_headers(bytes, (Ipv4Addr::LOCALHOST, 7).into());
    dgram::check_headers(bytes, (Ipv6Addr::LOCALHOST, 7).into());
}

/// The peer's private data: any bytes, or often such that it goes on.
fn private_data(input: &mut Input<'_>) -> Option<ConnData> {
    let how = input.byte();
    let mut bytes = [0; ConnData::LEN];
    bytes.fill_with(|| input.byte());
    if how & 1 == 0 {
        bytes[0] = crate::wire::VERSION;
        // A half of moderate length.
        bytes[36..38].fill(0);
    }
    ConnData::decode(&bytes)
}

impl World {
    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 16 {
            0..4 => {
                let imm = self.message(input);
                let written = match input.byte() % 4 {
                    0 => input.long(),
                    1 => 0,
                    _ => imm & 0x1fff_ffff,
                };
                self.receive(imm, written);
            }
            4 => {
                let which = usize::from(input.byte()) % SGL_LEN;
                let target = Target {
                    addr: u64::from(input.long()),
                    key: 9,
                    len: input.long() >> (input.byte() % 32),
                };
                self.table[which] = target.encode(ByteOrder::NATIVE);
            }
            5..8 => {
                let want = usize::from(input.word()) << (input.byte() % 8);
                let cancels = input.byte() & 1 == 1;
                if self.machine.writable && want.is_multiple_of(3) {
                    self.write_at_once(input, want, cancels);
                }
                if self.machine.writable
                    && let Some(piece) = self.machine.sender.plan(want)
                {
                    self.post(&piece, cancels, want);
                }
            }
            8 => {
                let index = input.byte();
                if self.machine.writable
                    && let Some(piece) = self.machine.sender.plan_map_entry(index.into())
                {
                    self.post(&piece, index & 1 == 1, usize::MAX);
                }
            }
            9 => {
                let want = usize::from(input.word());
                let to = RemoteAddr { va: 0, rkey: 3 };
                if self.machine.writable
                    && let Some(piece) = self.machine.sender.plan_direct(want, to)
                {
                    self.post(&piece, want & 1 == 1, want);
                }
            }
            10 | 11 => self.read(usize::from(input.word())),
            12 => self.grant(),
            13 => {
                let how = input.byte();
                let control = match how {
                    0..8 => self.machine.shutdown(how & 1 == 1, how & 2 == 2),
                    _ => self.machine.connected.then_some(Control::Keepalive),
                };
                if let Some((posted, _)) = control.and_then(|c| self.machine.plan_control(c)) {
                    self.posted.push_back((posted, Default::default()));
                }
            }
            _ => {
                self.complete();
            }
        }
    }

    /// A piece that is written at once, or cannot be after all. Meanwhile the peer may say something.
    fn write_at_once(&mut self, input: &mut Input<'_>, want: usize, cancels: bool) {
        let Some(piece) = self.machine.sender.plan_at_once(want) else { return };
        let says = input.byte();
        if says & 1 == 1 {
            let imm = self.message(input);
            self.receive(imm, says.into());
        }
        if cancels {
            self.machine.sender.cancel(&piece);
        } else {
            self.posted.push_back((piece.posted, Default::default()));
        }
    }

    /// Immediate data: any, or such as often means something.
    fn message(&self, input: &mut Input<'_>) -> u32 {
        match input.byte() % 8 {
            0..4 => Message::Data(u32::from(input.word()) % (self.sizes.recv_buffer + 2)),
            4 => Message::Credits(input.word()),
            5 => Message::IoMap(input.word()),
            6 => Message::Control(match input.byte() {
                0 => Control::Disconnect,
                1 => Control::Shutdown,
                code => Control::Unknown(code.into()),
            }),
            _ => Message::Unknown(input.long()),
        }
        .encode()
    }

    fn receive(&mut self, imm: u32, written: u32) {
        let before = self.machine.receiver.unread();
        let table = self.table;
        match self.machine.on_message(imm, written, |entry| table[entry]) {
            Ok(()) => {
                if let Message::Data(len) = Message::decode(imm) {
                    self.unread += len;
                }
            }
            Err(violation) => {
                assert!(!violation.0.is_empty());
                assert_eq!(self.machine.receiver.unread(), before);
                self.machine.disconnect();
            }
        }
    }

    /// Posts a piece, at the second attempt if the first is called off.
    fn post(&mut self, piece: &Piece, cancels: bool, want: usize) {
        if cancels {
            self.machine.sender.cancel(piece);
            let direct = piece.imm.is_none();
            let map = piece.imm.map(Message::decode).and_then(|message| match message {
                Message::IoMap(index) => Some(index),
                _ => None,
            });
            let again = match map {
                Some(index) => self.machine.sender.plan_map_entry(index),
                None if direct => self.machine.sender.plan_direct(want, piece.to),
                None => self.machine.sender.plan(want),
            };
            assert_eq!(again.as_ref(), Some(piece));
        }
        assert!(piece.len > 0);
        let (is_in_ring, parts) = match piece.source {
            Source::Ring(parts) => (true, parts),
            _ => (false, Default::default()),
        };
        let size = self.sizes.send_buffer;
        if is_in_ring {
            assert_eq!(parts[0].1 + parts[1].1, piece.len);
        } else {
            assert!(piece.len <= self.sizes.inline);
        }
        for part in parts {
            assert!(part.0 + part.1 <= size, "outside of the send ring");
            let others = self.posted.iter().flat_map(|(_, parts)| parts);
            assert!(!others.into_iter().any(|other| overlap(part, *other)), "sent bytes change");
        }
        self.posted.push_back((Posted::from_wr_id(piece.posted.wr_id()), parts));
    }

    fn complete(&mut self) -> bool {
        let Some((posted, _)) = self.posted.pop_front() else { return false };
        self.machine.on_sent(posted);
        true
    }

    fn read(&mut self, want: usize) {
        if let Some(part) = self.machine.receiver.peek(0, want) {
            let size = self.sizes.recv_buffer;
            assert_eq!(part.at, self.read_at);
            assert!(part.at + part.len <= size && part.len <= self.unread);
            self.machine.receiver.consume(part.len);
            self.unread -= part.len;
            self.read_at = (self.read_at + part.len) % size;
        }
    }

    /// No byte is granted that came and was not read.
    fn grant(&mut self) {
        let size = self.sizes.recv_buffer;
        let order = self.machine.peer_order();
        let Some(grant) = self.machine.plan_grant() else { return };
        if let Some((entry, _)) = grant.entry {
            let half = Target::decode(&entry, order);
            assert_eq!((half.key, half.len), (1, size / 2));
            let at = (half.addr - RING) as u32;
            assert!(at == 0 || at == size / 2);
            let first = self.unread.min(size - self.read_at);
            for part in [(self.read_at, first), (0, self.unread - first)] {
                assert!(!overlap((at, half.len), part), "unread bytes are granted");
            }
        }
        assert!(matches!(Message::decode(grant.imm), Message::Credits(_)));
        self.posted.push_back((Posted::Control, Default::default()));
    }
}

fn overlap(a: (u32, u32), b: (u32, u32)) -> bool {
    a.1 > 0 && b.1 > 0 && a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    #[test]
    fn the_corpus_is_replayed() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/rsocket");
        let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let replayed = files.map(|path| super::run(&fs::read(path).unwrap())).count();
        assert!(replayed > 0);
    }

    #[test]
    fn random_peers_break_nothing() {
        for seed in 0..3000 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut input = vec![0; rng.random_range(10..2000)];
            rng.fill(input.as_mut_slice());
            println!("seed {seed}");
            super::run(&input);
        }
    }
}
