//! The IPv4 IDs that a sender sends: a host, by one of its ports.
//!
//! The ICRC covers the ID, which a UDP socket does not show. So one of 65,536 damaged packets is right with some ID.
//! Unconnected sockets of this device send small ones, the place in a batch (see [`IcrcVerdict::SomeId`]). Connected ones,
//! kernels and hardware count. If a sender was seen to send small ones alone, a packet that would be right with a large one
//! counts as damaged. Then only one damaged packet of 2^25 passes by chance.
//!
//! [`IcrcVerdict::SomeId`]: anyverbs_proto::wire::icrc::IcrcVerdict::SomeId

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;

/// IDs below are small: of no more segments the kernel makes a batch (`UDP_MAX_SEGMENTS`).
const SMALL: u16 = 128;
/// Packets with small IDs in a row after which those alone are expected. A counter that wraps passes `SMALL` of them.
const CONVINCED_AFTER: u32 = 2 * SMALL as u32;
/// Packets that are right with large IDs after which any ID is expected of a sender for good. It is then another one than
/// it seemed, two are behind one address, or another host sends small IDs in its name. A real sender loses one less at
/// most.
const DOUBTED_AFTER: u8 = 3;
/// Packets with small IDs after which refused ones are forgotten: among so many, chance makes no [`DOUBTED_AFTER`]
/// damaged ones right.
const FORGIVEN_AFTER: u32 = 1 << 16;
/// Places for senders. If several share one, the last is remembered.
const PLACES: usize = 256;

/// The IDs that were seen of senders.
#[derive(Debug)]
pub(super) struct IpIds {
    seen: Box<[Seen]>,
    /// Strangers cannot choose who shares a place.
    hasher: RandomState,
}

#[derive(Clone, Copy, Default, Debug)]
struct Seen {
    sender: Option<SocketAddr>,
    counted: Counted,
    /// Packets with small IDs since the last with a large one that was taken. From `CONVINCED_AFTER` on small ones are expected.
    small: u32,
    /// Packets with large IDs since small ones are expected, up to `DOUBTED_AFTER`.
    refused: u8,
}

/// How a sender counts its IDs.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Counted {
    /// The ID of the first datagram of the last buffer, if those behind count up from there. It is not 0 where a batch was cut
    /// on its way, and by a connected socket.
    first: u16,
    /// The likely difference of the first ID of the next buffer. It is 1 by a connected socket, which counts its sends.
    step: u16,
}

impl Counted {
    /// The sender has sent the ID `id` in the datagram at this place of its buffer.
    pub(super) fn from(id: u16, segment: u16) -> Self {
        Self { first: id.wrapping_sub(segment), step: u16::from(!IpIds::is_small(id)) }
    }

    /// The likeliest ID of the next datagram, which is at this place of its buffer.
    #[inline]
    pub(super) fn foretell(&mut self, segment: u16) -> u16 {
        if segment == 0 {
            self.first = self.first.wrapping_add(self.step);
        }
        self.id(segment)
    }

    /// The ID at this place of the last buffer.
    #[inline]
    pub(super) fn id(&self, segment: u16) -> u16 {
        self.first.wrapping_add(segment)
    }
}

/// Where a sender's IDs are remembered.
#[derive(Clone, Copy, Debug)]
pub(super) struct SenderIndex(u8);

impl IpIds {
    pub(super) fn new() -> Self {
        Self { seen: vec![Seen::default(); PLACES].into(), hasher: RandomState::new() }
    }

    /// Where the IDs of `sender` are remembered, and how it counts, if it is.
    pub(super) fn find(&self, sender: SocketAddr) -> (SenderIndex, Counted) {
        let place = SenderIndex((self.hasher.hash_one(sender) % PLACES as u64) as u8);
        let seen = &self.seen[usize::from(place.0)];
        let counted = if seen.sender == Some(sender) { seen.counted } else { Counted::default() };
        (place, counted)
    }

    /// A packet of `sender` was right: it has its place from now on. Forgets the sender that was remembered there before.
    pub(super) fn admit(&mut self, place: SenderIndex, sender: SocketAddr) {
        let seen = &mut self.seen[usize::from(place.0)];
        if seen.sender != Some(sender) {
            *seen = Seen { sender: Some(sender), ..Seen::default() };
        }
    }

    /// Remembers how a sender counts that has this place.
    pub(super) fn keep(&mut self, place: SenderIndex, counted: Counted) {
        self.seen[usize::from(place.0)].counted = counted;
    }

    /// The sender has sent a large ID that was foretold: it counts, and any ID is expected of it for good.
    pub(super) fn counts(&mut self, place: SenderIndex) {
        self.seen[usize::from(place.0)].refused = DOUBTED_AFTER;
    }

    /// Whether an ID is one that is always plausible.
    #[inline]
    pub(super) fn is_small(id: u16) -> bool {
        id < SMALL
    }

    /// Whether a packet of the sender that is remembered at `place` is to be taken, which is right with the ID `id`.
    #[inline]
    pub(super) fn is_plausible(&mut self, place: SenderIndex, id: u16) -> bool {
        let seen = &mut self.seen[usize::from(place.0)];
        if !Self::is_small(id) {
            return seen.takes_large();
        }
        seen.small += 1;
        if seen.small == CONVINCED_AFTER + FORGIVEN_AFTER {
            seen.small = CONVINCED_AFTER;
            if !seen.is_doubted() {
                seen.refused = 0;
            }
        }
        true
    }
}

impl Seen {
    /// Whether any ID is expected for good.
    fn is_doubted(&self) -> bool {
        self.refused == DOUBTED_AFTER
    }

    #[cold]
    fn takes_large(&mut self) -> bool {
        if self.small < CONVINCED_AFTER {
            self.small = 0;
            return true;
        }
        self.refused = (self.refused + 1).min(DOUBTED_AFTER);
        self.is_doubted()
    }
}

#[cfg(test)]
mod tests {
    use std::iter::repeat_n;

    use super::*;

    fn host(last: u8) -> SocketAddr {
        ([10, 0, 0, last], 0xc001).into()
    }

    /// Tells for one sender whether packets with these IDs are taken.
    fn taken(ids: &mut IpIds, of: SocketAddr, packets: impl IntoIterator<Item = u16>) -> Vec<bool> {
        let (place, _) = ids.find(of);
        ids.admit(place, of);
        packets.into_iter().map(|id| ids.is_plausible(place, id)).collect()
    }

    #[test]
    fn a_large_id_among_small_ones_is_refused() {
        let mut ids = IpIds::new();
        assert!(taken(&mut ids, host(1), (0..8).flat_map(|_| 0..64)).iter().all(|t| *t));
        let packets = [5, 40_000, 6, 700, 0, 127];
        assert_eq!(taken(&mut ids, host(1), packets), [true, false, true, false, true, true]);
        // So few of so many are chance.
        assert!(taken(&mut ids, host(1), repeat_n(0, FORGIVEN_AFTER as usize)).iter().all(|t| *t));
        assert_eq!(taken(&mut ids, host(1), [128, 0, 129]), [false, true, false]);
    }

    /// Whoever sends small ones in its name, or beside it, does not keep it out.
    #[test]
    fn a_host_that_seemed_another_loses_two_packets() {
        let mut ids = IpIds::new();
        taken(&mut ids, host(1), [0; 1000]);
        let packets = [9000, 0, 9001, 0, 9002, 0, 9003];
        assert_eq!(taken(&mut ids, host(1), packets), [false, true, false, true, true, true, true]);
        // Now it is known, and not forgiven.
        taken(&mut ids, host(1), repeat_n(0, 2 * FORGIVEN_AFTER as usize));
        assert_eq!(taken(&mut ids, host(1), [9004, 9005]), [true, true]);
    }

    #[test]
    fn ids_of_one_host_say_nothing_of_another() {
        let mut ids = IpIds::new();
        taken(&mut ids, host(1), [0; 1000]);
        for other in 2..=255 {
            // One that shares a place takes it.
            assert_eq!(taken(&mut ids, host(other), [40_000]), [true]);
        }
    }

    #[test]
    fn a_sender_that_counts_may_send_small_ids_for_long() {
        let mut ids = IpIds::new();
        let (place, _) = ids.find(host(1));
        assert_eq!(taken(&mut ids, host(1), [40_000]), [true]);
        ids.counts(place);
        taken(&mut ids, host(1), [0; 1000]);
        assert_eq!(taken(&mut ids, host(1), [40_001, 40_002]), [true, true]);
    }

    #[test]
    fn ids_of_one_port_say_nothing_of_another() {
        let mut ids = IpIds::new();
        taken(&mut ids, host(1), [0; 1000]);
        let connected = SocketAddr::new(host(1).ip(), 0xc002);
        assert_eq!(taken(&mut ids, connected, [40_000, 40_001]), [true, true]);
    }

    /// Also where it wraps; not every packet of its is for us.
    #[test]
    fn no_packet_of_a_host_that_counts_is_refused() {
        for step in 1..200 {
            let mut ids = IpIds::new();
            let packets = (0..=u16::MAX).map(|n| n.wrapping_mul(step));
            assert!(taken(&mut ids, host(1), packets).iter().all(|taken| *taken), "{step}");
        }
    }
}
