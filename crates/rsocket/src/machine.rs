//! A stream without I/O: credits, rings, and the place of each write.
//!
//! Either side has a receive buffer of two halves. The peer writes into the half that it was granted last, message by
//! message, from its beginning to its end. Then it goes on with the next. When a half was read, it is granted again, by
//! an entry written into the peer's table of two. Each message costs the sender a credit, since the receiver must
//! remember its length. Credits come back with every grant, and on their own when half of them were used up.
//!
//! The machine moves no bytes: it says where they lie, and is told about completions.

mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use anyverbs::RemoteAddr;

use crate::wire::{ByteOrder, ConnData, Control, Message, Target};
use receiver::Receiver;

pub(crate) use sender::{Piece, Sender, Source};

/// Control messages and grants that may be on their way; the rest of the send queue is for data.
pub(crate) const CONTROL_SLOTS: u32 = 4;

/// Room in the send buffer below which nothing is sent: the rest would make tiny messages.
pub(crate) const SEND_LOW_WATER: u32 = 2048;

/// Sizes that a stream is made with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Work requests of the send queue; more than [`CONTROL_SLOTS`].
    pub(crate) send_queue: u16,
    /// Receives posted, which are the credits that the peer has.
    pub(crate) recv_queue: u16,
    /// Bytes of the send ring; [`SEND_LOW_WATER`] at least.
    pub(crate) send_buffer: u32,
    /// Bytes of the receive ring; even and not 0.
    pub(crate) recv_buffer: u32,
    /// Bytes up to which a message is sent without the ring.
    pub(crate) inline: u32,
}

/// The kind of a completed work request, kept in its `wr_id`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Posted {
    /// A receive.
    Receive,
    /// Data, with the bytes of the send ring that it holds.
    Data(u32),
    /// A grant, or a control message that asks for nothing more.
    Control,
    /// The last control message.
    Disconnect,
}

impl Posted {
    pub(crate) fn wr_id(self) -> u64 {
        match self {
            Self::Receive => 0,
            Self::Data(bytes) => (1 << 32) | u64::from(bytes),
            Self::Control => 2 << 32,
            Self::Disconnect => 3 << 32,
        }
    }

    pub(crate) fn from_wr_id(id: u64) -> Self {
        match id >> 32 {
            0 => Self::Receive,
            1 => Self::Data(id as u32),
            2 => Self::Control,
            _ => Self::Disconnect,
        }
    }
}

/// The peer broke the protocol. The connection is of no use any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Violation(pub(crate) &'static str);

/// A grant to be posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Grant {
    /// The entry and where in the peer's table it goes; none when only credits are returned.
    pub(crate) entry: Option<([u8; Target::LEN], RemoteAddr)>,
    pub(crate) imm: u32,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
    /// Byte order of the peer's memory.
    order: ByteOrder,
    control_free: u32,
    /// The program still writes, and the peer still reads.
    pub(crate) writable: bool,
    /// The peer still writes, and the program still reads.
    pub(crate) readable: bool,
    /// Neither side has said that it is all over.
    pub(crate) connected: bool,
    /// Counts events that make the stream readable.
    pub(crate) read_edges: u64,
    /// Counts how often room appeared where there was none.
    pub(crate) write_edges: u64,
}

impl Machine {
    /// A stream that can do nothing until [`Machine::connect`]. `ring` is where its receive buffer lies, as peers see it.
    pub(crate) fn new(sizes: &Sizes, ring: RemoteAddr) -> Self {
        Self {
            sender: Sender::new(sizes),
            receiver: Receiver::new(sizes, ring),
            order: ByteOrder::NATIVE,
            control_free: CONTROL_SLOTS,
            writable: false,
            readable: false,
            connected: false,
            read_edges: 0,
            write_edges: 0,
        }
    }

    /// The peer's private data came.
    pub(crate) fn connect(&mut self, peer: &ConnData) {
        self.order = peer.order;
        self.sender.connect(peer);
        self.receiver.connect(peer);
        (self.writable, self.readable, self.connected) = (true, true, true);
        self.write_edges += 1;
    }

    /// Byte order in which the peer's memory is written.
    pub(crate) fn peer_order(&self) -> ByteOrder {
        self.order
    }

    /// Takes a received message. `written` is how many bytes came with it; `table` reads an entry of our table.
    pub(crate) fn on_message(
        &mut self,
        imm: u32,
        written: u32,
        table: impl FnOnce(usize) -> [u8; Target::LEN],
    ) -> Result<(), Violation> {
        match Message::decode(imm) {
            Message::Data(len) => {
                self.receiver.on_data(len, written)?;
                self.read_edges += 1;
            }
            Message::Credits(seq) => {
                let could = self.sender.can_send();
                if written > 0 {
                    let entry = table(self.sender.next_entry());
                    self.sender.on_entry(Target::decode(&entry, ByteOrder::NATIVE))?;
                }
                self.sender.on_credits(seq);
                self.note_room(could);
            }
            Message::IoMap(_) => self.receiver.on_map_entry(),
            Message::Control(Control::Disconnect) => self.disconnect(),
            Message::Control(Control::Shutdown) => {
                self.read_edges += 1;
                if self.writable {
                    self.readable = false;
                } else {
                    self.disconnect();
                }
            }
            Message::Control(Control::Keepalive | Control::Unknown(_)) | Message::Unknown(_) => {}
        }
        Ok(())
    }

    /// A work request on the send queue completed.
    pub(crate) fn on_sent(&mut self, posted: Posted) {
        match posted {
            Posted::Data(bytes) => {
                let could = self.sender.can_send();
                self.sender.on_sent(bytes);
                self.note_room(could);
            }
            Posted::Control => self.control_free += 1,
            Posted::Disconnect => {
                self.control_free += 1;
                self.disconnect();
            }
            Posted::Receive => {}
        }
    }

    fn note_room(&mut self, could: bool) {
        if !could && self.sender.can_send() {
            self.write_edges += 1;
        }
    }

    /// Neither side sends any more. Received data can still be read.
    pub(crate) fn disconnect(&mut self) {
        (self.writable, self.readable, self.connected) = (false, false, false);
        self.read_edges += 1;
        self.write_edges += 1;
    }

    /// Whether a grant is due and can be posted.
    pub(crate) fn owes_grant(&self) -> bool {
        self.connected && self.control_free > 0 && self.receiver.owes_grant()
    }

    /// The grant that is due, if there is one.
    pub(crate) fn plan_grant(&mut self) -> Option<Grant> {
        if !self.owes_grant() {
            return None;
        }
        self.control_free -= 1;
        let order = self.order;
        let entry = self.receiver.grant_half().map(|(entry, at)| (entry.encode(order), at));
        Some(Grant { entry, imm: Message::Credits(self.receiver.grant_messages()).encode() })
    }

    /// The program closes directions. Returns the message for the peer.
    pub(crate) fn shutdown(&mut self, read: bool, write: bool) -> Option<Control> {
        if !self.connected {
            return None;
        }
        let wrote = self.writable;
        if read {
            self.readable = false;
            self.read_edges += 1;
        }
        if write {
            self.writable = false;
            self.write_edges += 1;
        }
        match (self.readable, self.writable) {
            (false, false) => Some(Control::Disconnect),
            (true, false) if wrote => Some(Control::Shutdown),
            _ => None,
        }
    }

    /// Takes a slot for a control message; none is free until an earlier one completed.
    pub(crate) fn plan_control(&mut self, control: Control) -> Option<(Posted, u32)> {
        if self.control_free == 0 {
            return None;
        }
        self.control_free -= 1;
        let posted =
            if control == Control::Disconnect { Posted::Disconnect } else { Posted::Control };
        Some((posted, Message::Control(control).encode()))
    }

    /// Whether a control message could be posted.
    pub(crate) fn control_free(&self) -> bool {
        self.control_free > 0
    }

    /// Whether everything that was posted has completed.
    pub(crate) fn all_sent(&self) -> bool {
        self.control_free == CONTROL_SLOTS && self.sender.all_sent()
    }
}
