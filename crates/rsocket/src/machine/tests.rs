//! Two machines on a wire that keeps order, under random operations, compared with a plain queue of bytes.

use std::collections::VecDeque;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::wire::{IoMapEntry, SGL_LEN};

const RING: u64 = 0x10_0000;
const TABLE: u64 = 0x1000;
const MAP_LEN: u16 = 2;

struct Wr {
    to: u64,
    data: Vec<u8>,
    imm: Option<u32>,
    posted: Posted,
}

struct Side {
    machine: Machine,
    sizes: Sizes,
    send_ring: Vec<u8>,
    recv_ring: Vec<u8>,
    /// The table of two, then the I/O map.
    table: Vec<u8>,
    /// Posted, not yet transmitted.
    wire: VecDeque<Wr>,
    /// Written to the peer without a message.
    at_once: Vec<Wr>,
    /// Transmitted, completion not yet polled.
    sent: VecDeque<Posted>,
    /// Received, completion not yet polled.
    received: VecDeque<(u32, u32)>,
    /// Bytes that the other side has sent and we have not read.
    expected: VecDeque<u8>,
}

impl Side {
    fn new(sizes: Sizes) -> Self {
        Self {
            machine: Machine::new(&sizes, RemoteAddr { va: RING, rkey: 1 }),
            sizes,
            send_ring: vec![0; sizes.send_buffer as usize],
            recv_ring: vec![0; sizes.recv_buffer as usize],
            table: vec![0; SGL_LEN * Target::LEN + usize::from(MAP_LEN) * IoMapEntry::LEN],
            wire: VecDeque::new(),
            at_once: Vec::new(),
            sent: VecDeque::new(),
            received: VecDeque::new(),
            expected: VecDeque::new(),
        }
    }

    fn conn_data(&self) -> ConnData {
        ConnData {
            order: ByteOrder::NATIVE,
            credits: self.sizes.recv_queue,
            iomap_len: MAP_LEN,
            sgl: Target { addr: TABLE, key: 2, len: SGL_LEN as u32 },
            buffer: Target { addr: RING, key: 1, len: self.sizes.recv_buffer / 2 },
        }
    }

    /// Posts a piece with `data`; by way of the ring, as a socket does.
    fn post(&mut self, piece: Piece, data: &[u8]) {
        let data = &data[..piece.len as usize];
        let bytes = match piece.source {
            Source::AtOnce => {
                let Piece { to, imm, posted, .. } = piece;
                // The bytes are there before any message that is still on the wire.
                let wr = Wr { to: to.va, data: data.to_vec(), imm: None, posted };
                self.at_once.push(wr);
                self.wire.push_back(Wr { to: 0, data: Vec::new(), imm, posted });
                return;
            }
            Source::Inline => data.to_vec(),
            Source::Ring(parts) => {
                let mut from = data;
                let mut bytes = Vec::new();
                for (at, len) in parts.map(|(at, len)| (at as usize, len as usize)) {
                    self.send_ring[at..at + len].copy_from_slice(&from[..len]);
                    from = &from[len..];
                    bytes.extend_from_slice(&self.send_ring[at..at + len]);
                }
                assert!(from.is_empty());
                bytes
            }
        };
        let Piece { to, imm, posted, .. } = piece;
        self.wire.push_back(Wr { to: to.va, data: bytes, imm, posted });
    }

    /// Sends as much of `data` as it can. Each piece goes only at the second attempt.
    fn send(&mut self, data: &[u8]) -> usize {
        let mut done = 0;
        loop {
            let left = data.len() - done;
            // Some pieces that may be written at once are, and some cannot be.
            if let Some(piece) = self.machine.sender.plan_at_once(left) {
                if piece.len % 3 > 0 {
                    self.post(piece, &data[done..]);
                    done += piece.len as usize;
                    continue;
                }
                self.machine.sender.cancel(&piece);
            }
            let Some(piece) = self.machine.sender.plan(left) else { break };
            self.machine.sender.cancel(&piece);
            assert_eq!(self.machine.sender.plan(left), Some(piece));
            self.post(piece, &data[done..]);
            done += piece.len as usize;
        }
        done
    }

    /// The peer writes.
    fn write(&mut self, wr: &Wr) {
        let len = wr.data.len();
        if len > 0 {
            let (memory, at) = if wr.to >= RING {
                (&mut self.recv_ring, wr.to - RING)
            } else {
                (&mut self.table, wr.to - TABLE)
            };
            memory[at as usize..][..len].copy_from_slice(&wr.data);
        }
    }

    fn grant(&mut self) {
        while let Some(Grant { entry, imm }) = self.machine.plan_grant() {
            let (data, to) = entry.map_or((Vec::new(), 0), |(e, to)| (e.to_vec(), to.va));
            self.wire.push_back(Wr { to, data, imm: Some(imm), posted: Posted::Control });
        }
    }

    fn control(&mut self, control: Control) -> bool {
        let Some((posted, imm)) = self.machine.plan_control(control) else { return false };
        self.wire.push_back(Wr { to: 0, data: Vec::new(), imm: Some(imm), posted });
        true
    }

    fn read(&mut self, want: usize) -> usize {
        let mut done = 0;
        while let Some(part) = self.machine.receiver.peek(0, want - done) {
            for i in part.at..part.at + part.len {
                let byte = self.expected.pop_front().expect("bytes that nobody sent");
                assert_eq!(self.recv_ring[i as usize], byte);
            }
            self.machine.receiver.consume(part.len);
            done += part.len as usize;
        }
        done
    }

    fn poll(&mut self) -> Result<bool, Violation> {
        if let Some(posted) = self.sent.pop_front() {
            self.machine.on_sent(Posted::from_wr_id(posted.wr_id()));
            return Ok(true);
        }
        let Some((imm, written)) = self.received.pop_front() else { return Ok(false) };
        let table = &self.table;
        self.machine.on_message(imm, written, |i| {
            table[i * Target::LEN..][..Target::LEN].try_into().unwrap()
        })?;
        Ok(true)
    }
}

/// Moves one work request from `a` to `b`.
fn transmit(a: &mut Side, b: &mut Side) -> bool {
    a.at_once.drain(..).for_each(|wr| b.write(&wr));
    let Some(wr) = a.wire.pop_front() else { return false };
    let len = wr.data.len();
    b.write(&wr);
    if let Some(imm) = wr.imm {
        b.received.push_back((imm, len as u32));
    }
    a.sent.push_back(wr.posted);
    true
}

fn pair(a: Sizes, b: Sizes) -> [Side; 2] {
    let (mut a, mut b) = (Side::new(a), Side::new(b));
    a.machine.connect(&b.conn_data());
    b.machine.connect(&a.conn_data());
    [a, b]
}

fn sizes(rng: &mut SmallRng) -> Sizes {
    let half = if rng.random() { 9000 } else { 20_000 };
    Sizes {
        send_queue: rng.random_range(5..40),
        recv_queue: rng.random_range(2..40),
        send_buffer: rng.random_range(SEND_LOW_WATER..20_000),
        recv_buffer: 2 * rng.random_range(1..half),
        inline: *[0, 16, 64, 500].get(rng.random_range(0..4)).unwrap(),
    }
}

/// Polls, grants and transmits until nothing moves.
fn settle([a, b]: &mut [Side; 2]) {
    loop {
        let mut moved = false;
        for side in [&mut *a, &mut *b] {
            side.grant();
            while side.poll().unwrap() {
                moved = true;
            }
        }
        moved |= transmit(a, b) | transmit(b, a);
        if !moved {
            break;
        }
    }
}

#[test]
fn bytes_arrive_exactly_in_order_and_all_waits_end() {
    for seed in 0..400 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut sides = pair(sizes(&mut rng), sizes(&mut rng));
        let mut next = [0u8; 2];
        let mut total = 0;
        for _ in 0..600 {
            let i = rng.random_range(0..2);
            let [a, b] = &mut sides;
            let (me, other) = if i == 0 { (a, b) } else { (b, a) };
            match rng.random_range(0..10) {
                0..4 => {
                    let want = 1 << rng.random_range(0..15);
                    let data: Vec<u8> =
                        (0..want).map(|k| next[i].wrapping_add((k % 251) as u8)).collect();
                    let done = me.send(&data);
                    other.expected.extend(&data[..done]);
                    next[i] = next[i].wrapping_add(17);
                    total += done;
                }
                4..6 => _ = me.read(1 << rng.random_range(0..15)),
                6 => me.grant(),
                7 => _ = me.poll().unwrap(),
                _ => _ = transmit(me, other),
            }
            for side in &sides {
                side.machine.receiver.check();
                assert!(side.machine.sender.credits() <= side.sizes.recv_queue.max(40));
                assert!(side.received.len() <= 2 * 40 + 2 * CONTROL_SLOTS as usize);
            }
        }
        // Whatever is under way ends, and everything is there to be read.
        for _ in 0..2 {
            settle(&mut sides);
            for side in &mut sides {
                side.read(usize::MAX);
                assert!(side.expected.is_empty(), "seed {seed}");
            }
        }
        settle(&mut sides);
        for side in &mut sides {
            assert!(side.machine.all_sent() && side.machine.sender.can_send(), "seed {seed}");
        }
        assert!(total > 0);
    }
}

#[test]
fn a_slow_reader_stops_the_writer_until_it_reads() {
    let small =
        Sizes { send_queue: 64, recv_queue: 8, send_buffer: 8192, recv_buffer: 4096, inline: 64 };
    let mut sides = pair(small, small);
    let mut written = 0;
    loop {
        settle(&mut sides);
        let data = vec![7; 1000];
        let n = sides[0].send(&data);
        sides[1].expected.extend(&data[..n]);
        written += n;
        if n == 0 {
            break;
        }
    }
    assert_eq!(written, 4096, "both halves, no more");
    sides[1].read(2048);
    settle(&mut sides);
    assert!(sides[0].machine.sender.can_send());
}

#[test]
fn tiny_messages_end_at_the_credits() {
    let small =
        Sizes { send_queue: 64, recv_queue: 8, send_buffer: 8192, recv_buffer: 4096, inline: 64 };
    let mut sides = pair(small, small);
    for _ in 0..8 {
        assert_eq!(sides[0].send(&[1]), 1);
        sides[1].expected.push_back(1);
    }
    assert_eq!(sides[0].send(&[1]), 0);
    settle(&mut sides);
    assert_eq!(sides[0].send(&[1]), 0, "nothing was read");
    assert_eq!(sides[1].read(4), 4);
    settle(&mut sides);
    assert!(sides[0].machine.sender.credits() >= 4);
}

#[test]
fn pieces_that_are_written_at_once_need_no_ring() {
    let sizes = Sizes {
        send_queue: 64,
        recv_queue: 64,
        send_buffer: 4096,
        recv_buffer: 64 << 10,
        inline: 64,
    };
    let [mut side, _] = pair(sizes, sizes);
    let sender = &mut side.machine.sender;
    assert_eq!(sender.plan_at_once(4095), None, "too few bytes");
    let first = sender.plan_at_once(20_000).unwrap();
    assert_eq!((first.len, first.source), (20_000, Source::AtOnce));
    sender.cancel(&first);
    let again = sender.plan_at_once(100_000).unwrap();
    assert_eq!((again.len, again.to), (32 << 10, first.to), "as much as was granted");
    assert_eq!(sender.plan_at_once(100_000), None, "until more is granted");
    sender.cancel(&again);
    assert_eq!(sender.plan(100_000).map(|piece| (piece.len, piece.to)), Some((4096, first.to)));
}

#[test]
fn forbidden_messages_are_violations() {
    let sizes =
        Sizes { send_queue: 64, recv_queue: 2, send_buffer: 8192, recv_buffer: 4096, inline: 64 };
    let fresh = || {
        let [mut side, _] = pair(sizes, sizes);
        move |message: Message, written: u32, entry: Target| {
            side.machine.on_message(message.encode(), written, |_| entry.encode(ByteOrder::NATIVE))
        }
    };
    let none = Target::default();
    // More than the first half.
    assert!(fresh()(Message::Data(2049), 2049, none).is_err());
    // A length that was not written.
    assert!(fresh()(Message::Data(100), 99, none).is_err());
    // Bytes that were written before their message, and more of them than fit.
    assert!(fresh()(Message::Data(100), 0, none).is_ok());
    assert!(fresh()(Message::Data(2049), 0, none).is_err());
    // More messages than credits.
    let mut side = fresh();
    assert!(side(Message::Data(1), 1, none).is_ok() && side(Message::Data(1), 1, none).is_ok());
    assert!(side(Message::Data(1), 1, none).is_err());
    // Grants that overtake, or grant nothing.
    let mut side = fresh();
    let half = Target { addr: 1, key: 1, len: 10 };
    assert!(side(Message::Credits(9), 16, half).is_ok());
    assert!(side(Message::Credits(9), 16, half).is_err(), "the first half is not used up");
    assert!(fresh()(Message::Credits(9), 16, none).is_err());
    // Unknown messages are ignored.
    assert!(fresh()(Message::Unknown(0x2000_0000), 0, none).is_ok());
    assert!(fresh()(Message::Control(Control::Unknown(9)), 0, none).is_ok());
}

#[test]
fn closing_by_halves() {
    let sizes =
        Sizes { send_queue: 64, recv_queue: 8, send_buffer: 8192, recv_buffer: 4096, inline: 64 };
    let mut sides = pair(sizes, sizes);
    sides[0].send(&[1, 2, 3]);
    sides[1].expected.extend([1, 2, 3]);
    assert_eq!(sides[0].machine.shutdown(false, true), Some(Control::Shutdown));
    assert!(sides[0].control(Control::Shutdown));
    assert_eq!(sides[0].machine.shutdown(false, true), None);
    settle(&mut sides);
    let [a, b] = &mut sides;
    assert!(a.machine.connected && a.machine.readable && !a.machine.writable);
    assert!(b.machine.connected && !b.machine.readable && b.machine.writable);
    assert_eq!(b.read(10), 3);
    b.send(&[4]);
    a.expected.push_back(4);
    assert_eq!(b.machine.shutdown(true, true), Some(Control::Disconnect));
    assert!(b.control(Control::Disconnect));
    settle(&mut sides);
    let [a, b] = &mut sides;
    assert!(!a.machine.connected && !b.machine.connected);
    assert_eq!(a.read(10), 1, "what came before the end can be read");
    assert_eq!(a.machine.shutdown(true, true), None);
    // Only to stop reading tells the peer nothing.
    let mut sides = pair(sizes, sizes);
    assert_eq!(sides[0].machine.shutdown(true, false), None);
    assert_eq!(sides[0].machine.shutdown(false, true), Some(Control::Disconnect));
}

#[test]
fn control_messages_wait_for_their_slots() {
    let sizes =
        Sizes { send_queue: 64, recv_queue: 8, send_buffer: 8192, recv_buffer: 4096, inline: 64 };
    let mut sides = pair(sizes, sizes);
    for _ in 0..CONTROL_SLOTS {
        assert!(sides[0].control(Control::Keepalive));
    }
    assert!(!sides[0].control(Control::Keepalive));
    assert_eq!(sides[0].machine.plan_grant(), None);
    settle(&mut sides);
    assert!(sides[0].machine.all_sent());
}

#[test]
fn entries_of_the_io_map_cost_a_returning_credit() {
    let sizes =
        Sizes { send_queue: 64, recv_queue: 4, send_buffer: 8192, recv_buffer: 4096, inline: 0 };
    let mut sides = pair(sizes, sizes);
    for round in 0..100u64 {
        let entry = IoMapEntry { offset: round, target: Target { addr: 5, key: 6, len: 7 } };
        let piece = sides[0].machine.sender.plan_map_entry((round % 2) as u16).unwrap();
        sides[0].post(piece, &entry.encode(ByteOrder::NATIVE));
        settle(&mut sides);
        let at = SGL_LEN * Target::LEN + (round % 2) as usize * IoMapEntry::LEN;
        let bytes = sides[1].table[at..][..IoMapEntry::LEN].try_into().unwrap();
        assert_eq!(IoMapEntry::decode(bytes, ByteOrder::NATIVE), entry);
    }
    assert_eq!(sides[0].machine.sender.plan_map_entry(MAP_LEN), None);
    assert_eq!(sides[0].machine.sender.iomap_len(), 2);
}
