//! The machine of a stream socket whose peer says anything, while the program sends, reads and closes as it likes.

use std::collections::VecDeque;

use anyverbs::RemoteAddr;

use super::input::Input;
use crate::machine::{CONTROL_SLOTS, Machine, Piece, Posted, SEND_LOW_WATER, Sizes};
use crate::wire::{ByteOrder, ConnData, Control, Message, SGL_LEN, Target};

const RING: u64 = 0x10_0000;
/// Entries of the peer's table; a peer may name any number.
const TABLE: u32 = SGL_LEN as u32;

/// The input as private data of the peer, sizes, and a list of events.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let sizes = Sizes {
        send_queue: 5 + u16::from(input.byte() % 32),
        recv_queue: 2 + u16::from(input.byte() % 32),
        send_buffer: SEND_LOW_WATER + u32::from(input.word() % 20_000),
        recv_buffer: 2 * (1 + u32::from(input.word() % 9000)),
        inline: input.one_of(&[0, 16, 64, 500]),
    };
    let mut stream = Stream::new(sizes, &mut input);
    for _ in 0..500 {
        if input.is_empty() || !stream.step(&mut input) {
            break;
        }
        stream.check();
    }
    stream.finish();
}

struct Stream {
    machine: Machine,
    sizes: Sizes,
    /// Posted and not completed, in order.
    posted: VecDeque<Posted>,
    /// Bytes of the send ring that they use.
    held: u32,
    /// What the peer has granted and was not written to: where, and how many bytes.
    granted: VecDeque<(u64, u64)>,
    /// Bytes that the peer has written and the program has not read.
    unread: u32,
    /// Bytes of the receive ring that the peer may write.
    may_write: u64,
}

impl Stream {
    fn new(sizes: Sizes, input: &mut Input<'_>) -> Self {
        let mut bytes = [0; ConnData::LEN];
        bytes.iter_mut().for_each(|byte| *byte = input.byte());
        let well_known = ConnData {
            order: ByteOrder::NATIVE,
            credits: 4 + u16::from(input.byte()),
            iomap_len: 2,
            sgl: Target { addr: 0x1000, key: 2, len: TABLE },
            buffer: Target { addr: 0x8000, key: 3, len: 1 + u32::from(input.word()) },
        };
        let peer = ConnData::decode(&bytes).unwrap_or(well_known);
        let mut machine = Machine::new(&sizes, RemoteAddr { va: RING, rkey: 1 });
        machine.connect(&peer);
        let half = u64::from(sizes.recv_buffer / 2);
        Self {
            machine,
            sizes,
            posted: VecDeque::new(),
            held: 0,
            granted: VecDeque::from([(peer.buffer.addr, peer.buffer.len.into())]),
            unread: 0,
            may_write: half,
        }
    }

    /// False when the peer has broken the protocol: the connection then ends.
    fn step(&mut self, input: &mut Input<'_>) -> bool {
        match input.byte() % 10 {
            0 | 1 => {
                let imm = u32::from(input.word()) | u32::from(input.word()) << 16;
                let written =
                    if input.byte() & 1 == 0 { imm & 0xffff } else { input.word().into() };
                return self.hear(imm, written, input);
            }
            2 => {
                let len = u32::from(input.word() % 4096);
                return self.hear(Message::Data(len).encode(), len, input);
            }
            3 => return self.hear(Message::Credits(input.word()).encode(), 16, input),
            4 => {
                let want = usize::from(input.word());
                if let Some(piece) = self.machine.sender.plan(want) {
                    if input.rarely() {
                        self.machine.sender.cancel(&piece);
                        assert_eq!(self.machine.sender.plan(want), Some(piece), "as before");
                    }
                    self.wrote(piece);
                }
            }
            5 => {
                let index = input.byte().into();
                if let Some(piece) = self.machine.sender.plan_map_entry(index) {
                    assert!(u32::from(index) < self.machine.sender.iomap_len());
                    self.post(piece);
                }
            }
            6 => self.read(input.word().into(), input.byte().into()),
            7 => {
                if let Some(grant) = self.machine.plan_grant() {
                    if let Some((entry, to)) = grant.entry {
                        let half = Target::decode(&entry, self.machine.peer_order());
                        let ring = RING..=RING + u64::from(self.sizes.recv_buffer);
                        let end = half.addr + u64::from(half.len);
                        assert!(ring.contains(&half.addr) && ring.contains(&end), "{half:?}");
                        assert_ne!(to.va, 0, "a place in the peer's table");
                        self.may_write += u64::from(half.len);
                    }
                    self.posted.push_back(Posted::Control);
                }
            }
            8 => {
                if let Some(posted) = self.posted.pop_front() {
                    assert_eq!(Posted::from_wr_id(posted.wr_id()), posted);
                    if let Posted::Data(bytes) = posted {
                        self.held -= bytes;
                    }
                    self.machine.on_sent(posted);
                }
            }
            _ => {
                let how = input.byte();
                let told = if how & 4 == 0 {
                    self.machine.shutdown(how & 1 != 0, how & 2 != 0)
                } else {
                    Some(Control::Keepalive)
                };
                if let Some((posted, _)) = told.and_then(|told| self.machine.plan_control(told)) {
                    self.posted.push_back(posted);
                }
            }
        }
        true
    }

    fn hear(&mut self, imm: u32, written: u32, input: &mut Input<'_>) -> bool {
        let mut entry = [0; Target::LEN];
        entry.iter_mut().for_each(|byte| *byte = input.byte());
        if input.byte() & 1 == 0 {
            // Half of them plausible.
            let target = Target { addr: 0x8000, key: 3, len: 1 + u32::from(input.word()) };
            entry = target.encode(ByteOrder::NATIVE);
        }
        let mut asked = None;
        let heard = self.machine.on_message(imm, written, |i| {
            assert!(i < SGL_LEN, "an entry of our table");
            asked = Some(i);
            entry
        });
        let heard = heard.is_ok();
        match Message::decode(imm) {
            Message::Data(len) if heard => {
                assert_eq!(len, written, "as long as what was written");
                assert!(u64::from(len) <= self.may_write, "inside what was granted");
                self.may_write -= u64::from(len);
                self.unread += len;
            }
            Message::Credits(_) if heard && asked.is_some() => {
                let target = Target::decode(&entry, ByteOrder::NATIVE);
                assert!(target.len > 0);
                self.granted.push_back((target.addr, target.len.into()));
                assert!(self.granted.len() <= SGL_LEN, "as many as the table has entries");
            }
            _ => {}
        }
        heard
    }

    /// A piece of the stream lies where the peer's grants are, one after the other.
    fn wrote(&mut self, piece: Piece) {
        while self.granted.front().is_some_and(|(_, len)| *len == 0) {
            self.granted.pop_front();
        }
        let (at, left) = self.granted.front_mut().expect("somewhere to write");
        assert_eq!(piece.to.va, *at);
        assert!(piece.len > 0 && u64::from(piece.len) <= *left, "{piece:?} in {left}");
        *at = at.wrapping_add(piece.len.into());
        *left -= u64::from(piece.len);
        if *left == 0 {
            self.granted.pop_front();
        }
        assert_eq!(piece.imm.map(Message::decode), Some(Message::Data(piece.len)));
        self.post(piece);
    }

    fn post(&mut self, piece: Piece) {
        match piece.ring {
            None => assert!(piece.len <= self.sizes.inline && piece.posted == Posted::Data(0)),
            Some(parts) => {
                for (at, len) in parts {
                    assert!(at + len <= self.sizes.send_buffer, "inside the ring: {piece:?}");
                }
                assert_eq!(parts[0].1 + parts[1].1, piece.len);
                assert_eq!(piece.posted, Posted::Data(piece.len));
                self.held += piece.len;
                assert!(self.held <= self.sizes.send_buffer, "no byte in use twice");
            }
        }
        self.posted.push_back(piece.posted);
    }

    fn read(&mut self, want: usize, skip: u32) {
        if let Some(part) = self.machine.receiver.peek(skip, want) {
            assert!(part.at + part.len <= self.sizes.recv_buffer, "inside the ring");
            assert!(part.len + skip <= self.unread, "no more than came");
        }
        if let Some(part) = self.machine.receiver.peek(0, want) {
            self.machine.receiver.consume(part.len);
            self.unread -= part.len;
        }
    }

    fn check(&self) {
        assert_eq!(self.machine.receiver.unread(), self.unread);
        assert!(self.may_write + u64::from(self.unread) <= self.sizes.recv_buffer.into());
        let queue = usize::from(self.sizes.send_queue);
        assert!(self.posted.len() <= queue.max(1 + CONTROL_SLOTS as usize), "as many as the queue");
        assert!(!self.machine.owes_grant() || self.machine.control_free());
    }

    /// All that was posted completes, and what came can be read.
    fn finish(mut self) {
        for posted in std::mem::take(&mut self.posted) {
            self.machine.on_sent(posted);
        }
        assert!(self.machine.all_sent());
        while self.machine.receiver.unread() > 0 {
            self.read(usize::MAX, 0);
        }
        assert_eq!(self.unread, 0);
        self.machine.disconnect();
        assert_eq!(self.machine.plan_grant(), None);
        assert!(!self.machine.connected && !self.machine.readable && !self.machine.writable);
    }
}
