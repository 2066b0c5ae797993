//! Places where the peer has accepted a WRITE before.

use crate::wr::RemoteAddr;

/// Ranges that the peer has taken a WRITE of, whole: under one key they are one piece of one region.
///
/// A place where the peer has accepted a WRITE before. The first packet of a WRITE announces all of it, so that a peer
/// refuses it before it has written a byte. That packet is longer than the others, which costs a batch where a link
/// wants packets of one length. So a WRITE to such a place goes out as a message for each packet, all of one length.
/// The peer notices only if the key became invalid in between, and then half of a message under way would have been
/// written, too.
#[derive(Debug, Default)]
pub(super) struct Accepted {
    /// Key, first byte, byte after the last.
    ranges: [(u32, u64, u64); 4],
    next: usize,
}

impl Accepted {
    pub(super) fn covers(&self, at: RemoteAddr, len: u32) -> bool {
        let Some(end) = at.va.checked_add(len.into()) else { return false };
        self.ranges.iter().any(|(rkey, first, last)| {
            *rkey == at.rkey && *first <= at.va && end <= *last && first < last
        })
    }

    pub(super) fn add(&mut self, at: RemoteAddr, len: u32) {
        let Some(end) = at.va.checked_add(len.into()) else { return };
        let touches = |(rkey, first, last): &&mut (u32, u64, u64)| {
            *rkey == at.rkey && *first <= end && at.va <= *last && first < last
        };
        if let Some((_, first, last)) = self.ranges.iter_mut().find(touches) {
            (*first, *last) = ((*first).min(at.va), (*last).max(end));
            return;
        }
        self.ranges[self.next] = (at.rkey, at.va, end);
        self.next = (self.next + 1) % self.ranges.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rkey: u32, va: u64) -> RemoteAddr {
        RemoteAddr { va, rkey }
    }

    #[test]
    fn a_range_is_covered_where_one_was_taken_whole() {
        let mut accepted = Accepted::default();
        assert!(!accepted.covers(at(0, 0), 0) && !accepted.covers(at(5, 100), 1));
        accepted.add(at(5, 100), 50);
        for (first, len) in [(100, 50), (100, 1), (149, 1), (120, 10)] {
            assert!(accepted.covers(at(5, first), len), "{first} {len}");
            assert!(!accepted.covers(at(6, first), len), "another key");
        }
        for (first, len) in [(99, 2), (100, 51), (149, 2), (99, 60), (150, 1), (0, 50)] {
            assert!(!accepted.covers(at(5, first), len), "{first} {len}");
        }
        accepted.add(at(5, u64::MAX - 9), 20);
        assert!(!accepted.covers(at(5, u64::MAX - 9), 20), "beyond the end of all addresses");
    }

    #[test]
    fn ranges_of_a_key_that_touch_are_one() {
        for (first, len, touches) in [
            (150, 50, true),
            (151, 50, false),
            (50, 50, true),
            (49, 50, false),
            (120, 10, true),
            (90, 100, true),
        ] {
            let mut accepted = Accepted::default();
            accepted.add(at(5, 100), 50);
            accepted.add(at(5, first), len);
            let (begin, end) = (first.min(100), (first + u64::from(len)).max(150));
            let whole = (end - begin) as u32;
            assert_eq!(accepted.covers(at(5, begin), whole), touches, "{first}");
            assert!(accepted.covers(at(5, 100), 50) && accepted.covers(at(5, first), len));
            let mut apart = Accepted::default();
            apart.add(at(5, 100), 50);
            apart.add(at(6, first), len);
            assert!(!apart.covers(at(5, begin), whole) || whole == 50);
        }
    }

    #[test]
    fn the_last_four_ranges_are_known() {
        // The key 0 and the address 0 are as good as any.
        let mut accepted = Accepted::default();
        let ranges: [(u32, u64); 5] = [(0, 0), (1, 1000), (1, 3000), (2, 1000), (3, 0)];
        for (rkey, va) in &ranges[..4] {
            accepted.add(at(*rkey, *va), 10);
        }
        assert!(ranges[..4].iter().all(|(rkey, va)| accepted.covers(at(*rkey, *va), 10)));
        accepted.add(at(3, 0), 10);
        assert!(ranges[1..].iter().all(|(rkey, va)| accepted.covers(at(*rkey, *va), 10)));
        assert!(!accepted.covers(at(0, 0), 10), "the oldest made room");
    }
}
