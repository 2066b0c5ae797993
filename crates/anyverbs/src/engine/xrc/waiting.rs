//! Requests that wait for a target's responder to come back, in the order of their PSNs.
//!
//! A requester that hears nothing sends its requests again, the more often the longer it takes: each waits once, or what is done
//! again would take longer than new requests are waited for.

use anyverbs_proto::qp::Incoming;
use anyverbs_proto::types::Psn;

/// Most bytes; more is dropped, and comes again.
const KEEP: usize = 4 << 20;

#[derive(Debug)]
struct Request {
    psn: Psn,
    packets: u32,
    ends_message: bool,
    ack_req: bool,
    bytes: Vec<u8>,
}

/// Of one target. All PSNs are within half of their range.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    requests: Vec<Request>,
    bytes: usize,
}

impl Waiting {
    /// Adds a request with its message; false if there is no room.
    pub(super) fn add(&mut self, packet: &Incoming<'_>, bytes: Vec<u8>) -> bool {
        let bth = &packet.headers.bth;
        let request = Request {
            psn: bth.psn,
            packets: packet.packets,
            ends_message: bth.opcode.ends_message(),
            ack_req: bth.ack_req,
            bytes,
        };
        self.add_request(request)
    }

    fn add_request(&mut self, request: Request) -> bool {
        let at = self.requests.binary_search_by(|other| {
            let order = other.psn.since(request.psn).cmp(&0);
            order.then(other.packets.cmp(&request.packets))
        });
        match at {
            Ok(at) => {
                // Only the later copy may ask for an ACK.
                self.requests[at].ack_req |= request.ack_req;
                if request.ack_req {
                    self.bytes = self.bytes + request.bytes.len() - self.requests[at].bytes.len();
                    self.requests[at].bytes = request.bytes;
                }
                true
            }
            Err(_) if self.bytes + request.bytes.len() > KEEP => false,
            Err(at) => {
                self.bytes += request.bytes.len();
                self.requests.insert(at, request);
                true
            }
        }
    }

    /// Takes what comes before the end of the message in whose midst `next` is expected: everything, if the end is not there.
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
        let taken: Vec<_> = self.requests.drain(..end).map(|request| request.bytes).collect();
        self.bytes -= taken.iter().map(Vec::len).sum::<usize>();
        taken
    }

    pub(super) fn into_requests(self) -> impl Iterator<Item = Vec<u8>> {
        self.requests.into_iter().map(|request| request.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(psn: u32, ends_message: bool, ack_req: bool) -> Request {
        Request {
            psn: Psn::new(psn),
            packets: 1,
            ends_message,
            ack_req,
            bytes: vec![psn as u8; 100],
        }
    }

    fn first_bytes(requests: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
        requests.into_iter().map(|bytes| bytes[0]).collect()
    }

    #[test]
    fn each_waits_once_in_order() {
        let mut waiting = Waiting::default();
        for psn in [0xff_fffe, 1, 0xff_fffe, 0, 0xff_ffff, 0, 1] {
            assert!(waiting.add_request(request(psn, true, false)));
        }
        assert_eq!(waiting.bytes, 400);
        assert_eq!(first_bytes(waiting.into_requests()), [0xfe, 0xff, 0, 1]);
    }

    #[test]
    fn a_copy_that_asks_for_an_ack_replaces_one_that_does_not() {
        let mut waiting = Waiting::default();
        for (ack_req, byte) in [(false, 1), (true, 2), (false, 3)] {
            waiting.add_request(Request { bytes: vec![byte; 8], ..request(5, true, ack_req) });
        }
        assert_eq!(first_bytes(waiting.into_requests()), [2]);
    }

    #[test]
    fn the_rest_of_a_message_is_taken_with_what_is_before_it() {
        let mut waiting = Waiting::default();
        for (psn, ends) in [(3, true), (4, false), (5, true), (6, false), (7, true)] {
            waiting.add_request(request(psn, ends, false));
        }
        assert_eq!(first_bytes(waiting.take_message(Psn::new(4))), [3, 4, 5]);
        // A gap: what is expected is not there.
        assert_eq!(first_bytes(waiting.take_message(Psn::new(5))), [6, 7]);
        assert_eq!(waiting.bytes, 0);
    }

    #[test]
    fn there_is_an_end_to_what_waits() {
        let mut waiting = Waiting::default();
        let large = |psn| Request { bytes: vec![0; KEEP / 2], ..request(psn, true, false) };
        assert!(waiting.add_request(large(1)) && waiting.add_request(large(2)));
        assert!(!waiting.add_request(large(3)));
        assert!(waiting.add_request(large(2)));
    }
}
