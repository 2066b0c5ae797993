//! The layout of shared memory. Both sides must agree in all of it: a change is a new [`VERSION`].

use super::bells::{BellPlace, Spot};

/// The layout and the protocol on it, and that of stream sockets for bytes that are written before their message.
pub(crate) const VERSION: u32 = 14;

/// Bytes of a cache line, the unit in which a ring is used.
pub(crate) const LINE: usize = 64;

/// Longest header of a message.
pub const MAX_HEADER: usize = 120;

/// Words of a side: written by that side, read by the other. They lie 128 bytes apart because processors prefetch lines
/// in pairs.
///
/// The position up to which this side has read the other's ring, in bytes since the beginning.
pub(crate) const HEAD: usize = 0;
/// Whether this side looks at the other's ring by itself ([`WATCHED`]) or wants to be told ([`UNWATCHED`]).
pub(crate) const WATCH: usize = 128;
/// The last [`ROOM_ASKED`] of the other side that was answered.
pub(crate) const ROOM_GIVEN: usize = 256;
/// Counts how often this side, as a writer, has asked to be told when there is room.
pub(crate) const ROOM_ASKED: usize = 384;
/// Not 0 once this side has given the channel up. The other side then begins no further copy.
pub(crate) const REVOKED: usize = 448;
/// 1 as long as the kernel lets this side copy from and to the other's memory.
pub(crate) const ABLE: usize = 456;
/// The word of this side's [`Manner`](super::Manner).
pub(crate) const MANNER: usize = 464;
/// The marks of the copies that this side makes from and to the other's memory, a line each.
pub(crate) const MARKS: usize = 512;
pub(crate) const MARK_COUNT: usize = 8;
/// The counts of these copies, for each mark and each device of the other side: writes, their bytes, reads, their bytes.
pub(crate) const COPIES: usize = 1024;
pub(crate) const COPIES_LEN: usize = 32;
/// The devices of a process, at most.
pub(crate) const DEVICES: usize = LINE;
/// Least bytes of a page.
const PAGE: usize = 4096;

pub(crate) const UNWATCHED: u64 = 0;
pub(crate) const WATCHED: u64 = 1;

/// Smallest and largest ring, in bytes.
pub(crate) const RING_SIZES: std::ops::RangeInclusive<usize> = 64 << 10..=64 << 20;

/// The writer puts memory behind its ring in steps of this length, in the first lap. The first step is there from the
/// beginning.
pub(crate) const ALLOCATION: usize = 64 << 10;

/// Bytes of the words of a side, in front of its ring.
pub(crate) fn words() -> usize {
    (COPIES + MARK_COUNT * DEVICES * COPIES_LEN).next_multiple_of(page())
}

/// Words of the counts of all marks, from [`COPIES`] on.
pub(crate) const COUNTS: usize = MARK_COUNT * DEVICES * COPIES_LEN / 8;

/// The first of these words that count the copies of a mark, from and to the memory of a device of the other side.
#[inline]
pub(crate) fn copies(mark: usize, device: usize) -> usize {
    (mark * DEVICES + device % DEVICES) * COPIES_LEN / 8
}

/// The page size, also of the objects that only hold a word.
pub(crate) fn page() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).map_or(PAGE, |n| n.max(PAGE))
}

/// Bytes of one side with a ring of `ring` bytes: its words, the ring, the words of the lanes, and the lanes.
pub(crate) fn side_len(ring: usize) -> usize {
    lanes(ring) + LANES * LANE
}

/// The place of the answers to the lanes of the other side.
pub(crate) fn answers(ring: usize) -> usize {
    words() + ring
}

/// The words by which a side says where it looks, and by which it rings: behind its answers.
pub(crate) fn bells(ring: usize) -> BellPlace {
    let looks = answers(ring) + LANES * ANSWER;
    BellPlace { looks, bells: looks + Spot::COUNT * 8 }
}

/// The place of the lanes.
pub(crate) fn lanes(ring: usize) -> usize {
    (bells(ring).bells + BELLS * 8).next_multiple_of(page())
}

/// Lanes of a side.
pub const LANES: usize = 128;
/// Bells that are noted.
pub(crate) const BELLS: usize = 512;
/// Bytes of a lane: its cells, and its room behind them.
pub(crate) const LANE: usize = CELLS_LEN + ROOM;
/// Bytes of the cells of a lane.
pub(crate) const CELLS_LEN: usize = CELLS as usize * LINE;
/// Bytes of the room of a lane: 128 payloads of 1 KiB, since a program has often so many SENDs under way.
pub(crate) const ROOM: usize = 128 << 10;
/// Cells of a lane.
pub const CELLS: u32 = 128;
/// Answers lie this far apart.
pub(crate) const ANSWER: usize = 128;

/// The word in front of each message. 0 is "nothing here yet".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// A message with a header and a payload of these lengths.
    Message { header: usize, payload: usize },
    /// The rest of the ring is unused: the next message lies at its beginning.
    Skip,
}

const VALID: u64 = 1 << 63;
const SKIP: u64 = 1 << 62;
/// The first control word of messages that are published together says how many lines they have in all. So the reader
/// can fetch the lines before it comes to them. It also does not look behind the last, which costs a line from the
/// writer's cache.
const SHOWN_AT: u32 = 40;
const SHOWN: u64 = (1 << 21) - 1;

/// A control word that also says that `bytes`, from it on, are published.
pub(crate) fn with_shown(word: u64, bytes: u64) -> u64 {
    word & !(SHOWN << SHOWN_AT) | (bytes / LINE as u64).min(SHOWN) << SHOWN_AT
}

/// The number of published bytes by a control word; 0 if it does not say.
pub(crate) fn shown(word: u64) -> u64 {
    (word >> SHOWN_AT & SHOWN) * LINE as u64
}

impl Control {
    pub(crate) fn encode(self) -> u64 {
        match self {
            Self::Message { header, payload } => VALID | (header as u64) << 32 | payload as u64,
            Self::Skip => VALID | SKIP,
        }
    }

    /// `None` for a word that no writer of this version writes.
    pub(crate) fn decode(word: u64) -> Option<Self> {
        let word = with_shown(word, 0);
        if word == VALID | SKIP {
            return Some(Self::Skip);
        }
        let (header, payload) = ((word >> 32 & 0xff) as usize, (word & 0xffff_ffff) as usize);
        let is_valid = word >> 40 == VALID >> 40 && header <= MAX_HEADER;
        is_valid.then_some(Self::Message { header, payload })
    }
}

/// The place of the payload, counted from the control word, and the length of the whole.
///
/// A payload that fits into one line with its header lies there, so that one line changes hands. Longer payloads begin
/// on a line.
#[inline]
pub(crate) fn extent(header: usize, payload: usize) -> (usize, usize) {
    let front = 8 + header;
    if front + payload <= LINE {
        (front, LINE)
    } else {
        let front = front.next_multiple_of(LINE);
        (front, front + payload.next_multiple_of(LINE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_words_are_read_back_and_nothing_else_is() {
        for control in [
            Control::Skip,
            Control::Message { header: 0, payload: 0 },
            Control::Message { header: MAX_HEADER, payload: u32::MAX as usize },
        ] {
            assert_eq!(Control::decode(control.encode()), Some(control));
            assert_eq!(shown(control.encode()), 0);
            for (bytes, expected) in [(64, 64), (8001, 8000), (u64::MAX, SHOWN * 64)] {
                let word = with_shown(control.encode(), bytes);
                assert_eq!((Control::decode(word), shown(word)), (Some(control), expected));
            }
            assert_eq!(Control::decode(control.encode() & !VALID), None);
            assert_eq!(Control::decode(control.encode() | 1 << 61), None);
        }
        assert_eq!(Control::decode(VALID | SKIP | 1), None);
        assert_eq!(Control::decode(VALID | 121 << 32), None);
    }

    #[test]
    fn small_messages_take_a_line_long_payloads_begin_one() {
        assert_eq!(extent(0, 0), (8, 64));
        assert_eq!(extent(28, 28), (36, 64));
        assert_eq!(extent(28, 29), (64, 128));
        assert_eq!(extent(56, 0), (64, 64));
        assert_eq!(extent(57, 0), (128, 128));
        assert_eq!(extent(MAX_HEADER, 65_536), (128, 128 + 65_536));
    }
}
