//! Requests that wait for a target's responder to come back, in the order of their PSNs.
//!
//! A requester without an answer sends its requests again, the more often the longer it takes. Each waits once here.
//! Otherwise repeats would take longer than new requests are waited for.

use std::sync::atomic::{AtomicUsize, Ordering};

use anyverbs_proto::qp::Incoming;
use anyverbs_proto::types::Psn;

/// Most bytes of one target; more is dropped, and comes again.
const KEEP: usize = 4 << 20;
/// Most bytes of all targets of the process.
const KEEP_IN_ALL: usize = 64 << 20;

/// Bytes that wait, for all targets of a process.
#[derive(Debug, Default)]
pub(super) struct Room(AtomicUsize);

impl Room {
    fn reserve(&'static self, bytes: Vec<u8>) -> Option<HeldBytes> {
        let len = bytes.len();
        let more = |used: usize| used.checked_add(len).filter(|sum| *sum <= KEEP_IN_ALL);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(HeldBytes { bytes, len, room: self })
    }
}

/// A message that has its room.
#[derive(Debug)]
struct HeldBytes {
    bytes: Vec<u8>,
    len: usize,
    room: &'static Room,
}

impl HeldBytes {
    fn take(mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.room.0.fetch_sub(self.len, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Request {
    psn: Psn,
    packets: u32,
    ends_message: bool,
    ack_req: bool,
    message: HeldBytes,
}

/// The waiting requests of one target. All PSNs are within half of their range.
#[derive(Debug, Default)]
pub(super) struct HeldRequests {
    requests: Vec<Request>,
    bytes: usize,
}

/// The result of [`HeldRequests::add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    New,
    /// It waits already.
    Again,
    NoRoom,
}

impl HeldRequests {
    /// Adds a request with its message.
    pub(super) fn add(
        &mut self,
        packet: &Incoming<'_>,
        bytes: Vec<u8>,
        room: &'static Room,
    ) -> Added {
        let Some(message) = room.reserve(bytes) else { return Added::NoRoom };
        let bth = &packet.headers.bth;
        let request = Request {
            psn: bth.psn,
            packets: packet.packets,
            ends_message: bth.opcode.ends_message(),
            ack_req: bth.ack_req,
            message,
        };
        self.add_request(request)
    }

    fn add_request(&mut self, request: Request) -> Added {
        let at = self.requests.binary_search_by(|other| {
            let order = other.psn.since(request.psn).cmp(&0);
            order.then(other.packets.cmp(&request.packets))
        });
        match at {
            Ok(at) => {
                // Only the later copy may ask for an ACK.
                self.requests[at].ack_req |= request.ack_req;
                if request.ack_req {
                    self.bytes = self.bytes + request.message.len - self.requests[at].message.len;
                    self.requests[at].message = request.message;
                }
                Added::Again
            }
            Err(_) if self.bytes + request.message.len > KEEP => Added::NoRoom,
            Err(at) => {
                self.bytes += request.message.len;
                self.requests.insert(at, request);
                Added::New
            }
        }
    }

    /// Takes the packets before the end of the message in whose midst `next` is expected: all of them, if the end is
    /// not there.
    pub(super) fn take_message(&mut self, mut next: Psn) -> Vec<Vec<u8>> {
        let mut end = self.requests.len();
        for (at, request) in self.requests.iter().enumerate() {
            if request.psn == next {
                next = next.plus(request.packets);
                if request.ends_message {
                    end = at + 1;
                    break;
                }
            }
        }
        let taken: Vec<_> =
            self.requests.drain(..end).map(|request| request.message.take()).collect();
        self.bytes -= taken.iter().map(Vec::len).sum::<usize>();
        taken
    }

    pub(super) fn into_requests(self) -> impl Iterator<Item = Vec<u8>> {
        self.requests.into_iter().map(|request| request.message.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(bytes: Vec<u8>) -> HeldBytes {
        static ROOM: Room = Room(AtomicUsize::new(0));
        ROOM.reserve(bytes).unwrap()
    }

    fn request(psn: u32, ends_message: bool, ack_req: bool) -> Request {
        Request {
            psn: Psn::new(psn),
            packets: 1,
            ends_message,
            ack_req,
            message: kept(vec![psn as u8; 100]),
        }
    }

    fn first_bytes(requests: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
        requests.into_iter().map(|bytes| bytes[0]).collect()
    }

    #[test]
    fn each_waits_once_in_order() {
        let mut waiting = HeldRequests::default();
        let (new, again) = (Added::New, Added::Again);
        for (psn, added) in [
            (0xff_fffe, new),
            (1, new),
            (0xff_fffe, again),
            (0, new),
            (0xff_ffff, new),
            (0, again),
            (1, again),
        ] {
            assert_eq!(waiting.add_request(request(psn, true, false)), added);
        }
        assert_eq!(waiting.bytes, 400);
        assert_eq!(first_bytes(waiting.into_requests()), [0xfe, 0xff, 0, 1]);
    }

    #[test]
    fn a_copy_with_an_ack_request_replaces_one_without() {
        let mut waiting = HeldRequests::default();
        for (ack_req, byte) in [(false, 1), (true, 2), (false, 3)] {
            waiting
                .add_request(Request { message: kept(vec![byte; 8]), ..request(5, true, ack_req) });
        }
        assert_eq!(first_bytes(waiting.into_requests()), [2]);
    }

    #[test]
    fn the_rest_of_a_message_is_taken_with_earlier_packets() {
        let mut waiting = HeldRequests::default();
        for (psn, ends) in [(3, true), (4, false), (5, true), (6, false), (7, true)] {
            waiting.add_request(request(psn, ends, false));
        }
        assert_eq!(first_bytes(waiting.take_message(Psn::new(4))), [3, 4, 5]);
        // A gap: the expected packet is not there.
        assert_eq!(first_bytes(waiting.take_message(Psn::new(5))), [6, 7]);
        assert_eq!(waiting.bytes, 0);
    }

    #[test]
    fn there_is_an_end_to_what_waits() {
        let mut waiting = HeldRequests::default();
        let large = |psn| Request { message: kept(vec![0; KEEP / 2]), ..request(psn, true, false) };
        let mut add = |psn| waiting.add_request(large(psn));
        assert_eq!(
            [1, 2, 3, 2].map(&mut add),
            [Added::New, Added::New, Added::NoRoom, Added::Again]
        );
    }

    #[test]
    fn there_is_an_end_to_what_waits_for_all_targets() {
        static ROOM: Room = Room(AtomicUsize::new(0));
        let packet = Incoming::default();
        let mut targets = Vec::new();
        loop {
            let mut waiting = HeldRequests::default();
            if waiting.add(&packet, vec![0; KEEP], &ROOM) == Added::NoRoom {
                break;
            }
            targets.push(waiting);
        }
        assert_eq!(targets.len(), KEEP_IN_ALL / KEEP);
        targets.pop();
        let mut waiting = HeldRequests::default();
        assert_eq!(waiting.add(&packet, vec![0; KEEP], &ROOM), Added::New);
        assert_eq!(waiting.take_message(Psn::new(0)).len(), 1);
        drop((waiting, targets));
        assert_eq!(ROOM.0.load(Ordering::Relaxed), 0);
    }
}
