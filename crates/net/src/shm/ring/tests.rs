use super::super::layout::{WATCH, page, side_len};
use super::super::memory::{Access, SharedObject};
use super::*;
use std::cell::Cell;
use std::os::fd::AsFd;

const RING: usize = 64 << 10;
const MAX_PAYLOAD: usize = 16 << 10;

/// Both sides of a ring, and the memories that the writer and the reader write.
struct Pair {
    writer: Writer,
    reader: Reader,
    written: Area,
    read: Area,
}

fn pair() -> Pair {
    let side = side_len(RING);
    let object = SharedObject::new(2 * side).unwrap();
    let map = || Area::map(object.as_fd(), 2 * side, Access::ReadWrite).unwrap();
    let (a, b) = (map(), map());
    Pair {
        writer: Writer::new(a.part(0, side), a.part(side, side), page(), RING, MAX_PAYLOAD),
        reader: Reader::new(b.part(side, side), b.part(0, side), page(), RING, MAX_PAYLOAD),
        written: b.part(0, side),
        read: b.part(side, side),
    }
}

fn push<M: Memory>(
    writer: &mut Writer<M>,
    header: &[u8],
    payload: &[u8],
) -> Result<(), ReserveError> {
    let mut reservation = writer.reserve(header.len(), payload.len())?;
    reservation.write_header(header);
    reservation.write_payload(0, payload);
    reservation.commit();
    Ok(())
}

/// As [`push`], by one line where that is enough.
fn push_short<M: Memory>(
    writer: &mut Writer<M>,
    header: &[u8],
    payload: &[u8],
) -> Result<(), ReserveError> {
    let message = [header, payload].concat();
    if let Some(rest) = ONE_LINE.checked_sub(message.len()) {
        // The bytes behind it mean nothing.
        let line = [message, vec![0xff; rest]].concat().try_into().unwrap();
        if writer.commit_line(header.len(), payload.len(), &line) {
            return Ok(());
        }
    }
    push(writer, header, payload)
}

fn pop(reader: &mut Reader) -> Option<(Vec<u8>, Vec<u8>)> {
    let message = reader.batch(1).next()?;
    let mut header = [0; MAX_HEADER];
    let header = message.header(&mut header).to_vec();
    let mut payload = vec![0; message.payload_len()];
    message.read_payload(0, &mut payload);
    reader.release();
    Some((header, payload))
}

#[test]
fn a_message_is_seen_only_when_it_is_published() {
    let Pair { mut writer, mut reader, .. } = pair();
    push(&mut writer, b"header", b"payload").unwrap();
    assert!(!reader.is_ready() && writer.has_unpublished());
    assert_eq!(pop(&mut reader), None);
    assert!(writer.publish() && !writer.publish());
    assert!(reader.is_ready());
    assert_eq!(writer.is_drained(), Ok(false));
    assert_eq!(pop(&mut reader), Some((b"header".to_vec(), b"payload".to_vec())));
    assert_eq!((pop(&mut reader), writer.is_drained()), (None, Ok(true)));
}

#[test]
fn a_message_of_one_line_is_read_as_any_other() {
    let Pair { mut writer, mut reader, .. } = pair();
    for _ in 0..3 {
        // The first of a batch is held back, the others lie in their places.
        for n in 0..3 {
            let mut line = [n; ONE_LINE];
            line[20..].fill(0xee);
            assert!(writer.commit_line(12, 8, &line));
        }
        writer.publish();
        for n in 0..3 {
            assert_eq!(pop(&mut reader), Some((vec![n; 12], vec![n; 8])));
        }
    }
    let side = side_len(RING);
    let object = SharedObject::new(2 * side).unwrap();
    let area = Area::map(object.as_fd(), 2 * side, Access::ReadWrite).unwrap();
    let mut short = Writer::new(area.part(0, side), area.part(side, side), page(), RING, 20);
    for (header, payload) in [(ONE_LINE + 1, 0), (0, ONE_LINE + 1), (30, 27), (usize::MAX, 1)] {
        assert!(!writer.commit_line(header, payload, &[0; ONE_LINE]));
    }
    assert!(short.commit_line(9, 20, &[0; ONE_LINE]));
    assert!(!short.commit_line(9, 21, &[0; ONE_LINE]));
    assert!(!writer.publish());
}

#[test]
fn a_dropped_reservation_leaves_no_trace() {
    let Pair { mut writer, mut reader, .. } = pair();
    let _ = writer.reserve(8, 8).unwrap();
    assert!(!writer.publish());
    push(&mut writer, &[], b"x").unwrap();
    let _ = writer.reserve(100, 100).unwrap();
    writer.publish();
    assert_eq!(pop(&mut reader), Some((vec![], b"x".to_vec())));
    assert_eq!(pop(&mut reader), None);
}

#[test]
fn an_overwritten_zero_ahead_is_not_relied_on() {
    let Pair { mut writer, mut reader, .. } = pair();
    let line = |byte: u8| [byte; 40];
    for lap in 0..3 * RING / LINE {
        let push = if lap % 3 == 0 { push } else { push_short };
        push(&mut writer, &[], &line(1)).unwrap();
        writer.publish();
        writer.prepare();
        assert_eq!(pop(&mut reader), Some((vec![], line(1).to_vec())));
        // Reservations of several lines that are never committed, and one behind a committed one. All of them leave
        // bytes in the second line.
        let mut dropped = writer.reserve(8, 200).unwrap();
        dropped.write_payload(0, &[0xff; 200]);
        push(&mut writer, &[], &line(2)).unwrap();
        if lap % 2 == 0 {
            let mut dropped = writer.reserve(8, 40).unwrap();
            dropped.write_header(&[0xff; 8]);
            dropped.write_payload(0, &[0xff; 40]);
        }
        writer.publish();
        assert_eq!(pop(&mut reader), Some((vec![], line(2).to_vec())));
        assert_eq!((pop(&mut reader), reader.is_broken()), (None, false));
    }
}

/// A memory that checks that all written bytes have memory behind them.
struct Given {
    area: Area,
    limit: Cell<usize>,
    /// Whether there is more to give.
    more: Cell<bool>,
}

impl Given {
    fn check(&self, at: usize, len: usize) {
        assert!(at + len <= self.limit.get(), "{at} + {len} of {}", self.limit.get());
    }
}

impl Memory for Given {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.area.load(at, order)
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.check(at, 8);
        self.area.store(at, value, order);
    }

    fn fence(&self) {
        self.area.fence();
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        self.area.read(at, into);
    }

    fn write(&self, at: usize, from: &[u8]) {
        self.check(at, from.len());
        self.area.write(at, from);
    }

    fn allocate(&self, at: usize, len: usize) -> bool {
        if self.more.get() {
            assert_eq!(at, self.limit.get());
            self.limit.set(at + len);
        }
        self.more.get()
    }
}

#[test]
fn nothing_is_written_where_the_system_has_given_no_memory() {
    const RING: usize = 4 * ALLOCATION;
    let side = side_len(RING);
    let object = SharedObject::new(2 * side).unwrap();
    let area = Area::map(object.as_fd(), 2 * side, Access::ReadWrite).unwrap();
    let own = Given {
        area: area.part(0, side),
        limit: Cell::new(page() + ALLOCATION),
        more: Cell::new(true),
    };
    let peer = Given {
        area: area.part(side, side),
        limit: Cell::new(page() + ALLOCATION),
        more: Cell::new(false),
    };
    let mut writer = Writer::new(own, peer, page(), RING, MAX_PAYLOAD);
    let mut n = 0;
    let mut send = |writer: &mut Writer<Given>| {
        n += 1;
        let push = if n % 2 == 0 { push } else { push_short };
        push(writer, &[], &[7; 40])?;
        writer.publish();
        writer.prepare();
        Ok::<_, ReserveError>(())
    };
    for _ in 0..2 * ALLOCATION / LINE {
        send(&mut writer).unwrap();
    }
    writer.own.more.set(false);
    let left = (0..).find(|_| send(&mut writer).is_err());
    assert_eq!(left, Some(ALLOCATION / LINE - 1), "behind the last there is a zero");
}

#[test]
fn a_zero_is_put_ahead_only_where_there_is_room() {
    for push in [push, push_short] {
        let Pair { mut writer, mut reader, .. } = pair();
        let mut sent = 0;
        while push(&mut writer, &[], &[7; 40]).is_ok() {
            writer.publish();
            writer.prepare();
            sent += 1;
        }
        assert_eq!(sent, RING / LINE - 1);
        (0..sent).for_each(|_| assert_eq!(pop(&mut reader), Some((vec![], vec![7; 40]))));
        assert_eq!(pop(&mut reader), None);
    }
}

#[test]
fn messages_of_all_sizes_pass_for_many_laps() {
    let Pair { mut writer, mut reader, .. } = pair();
    let sizes = [0, 1, 2, 20, 36, 48, 56, 57, 100, 1000, 4096, 5000, 16_383, MAX_PAYLOAD];
    let mut sent = std::collections::VecDeque::new();
    let mut n = 0usize;
    let mut received = 0;
    while received < 3000 {
        let header = vec![n as u8; n * 7 % (MAX_HEADER + 1)];
        let payload = vec![(n >> 3) as u8 | 1; sizes[n * 31 % sizes.len()]];
        let push = if n.is_multiple_of(2) { push } else { push_short };
        match push(&mut writer, &header, &payload) {
            Ok(()) => {
                sent.push_back((header, payload));
                n += 1;
                if n.is_multiple_of(3) {
                    writer.publish();
                }
            }
            Err(error) => {
                assert_eq!(error, ReserveError::Full);
                writer.publish();
                for _ in 0..=n % 5 {
                    let Some(message) = pop(&mut reader) else { break };
                    assert_eq!(Some(message), sent.pop_front());
                    received += 1;
                }
            }
        }
    }
    assert!(reader.position() > 100 * RING as u64);
}

#[test]
fn the_longest_message_fits_an_empty_ring_at_every_position() {
    let Pair { mut writer, mut reader, .. } = pair();
    for _ in 0..2 * RING / 64 {
        push(&mut writer, &[0; MAX_HEADER], &vec![0; MAX_PAYLOAD]).unwrap();
        writer.publish();
        pop(&mut reader).unwrap();
        push(&mut writer, &[], &[]).unwrap();
        writer.publish();
        pop(&mut reader).unwrap();
    }
    assert_eq!(push(&mut writer, &[0; MAX_HEADER + 1], &[]), Err(ReserveError::TooLong));
    assert_eq!(push(&mut writer, &[], &vec![0; MAX_PAYLOAD + 1]), Err(ReserveError::TooLong));
}

#[test]
fn old_payload_is_never_taken_for_a_control_word() {
    let Pair { mut writer, mut reader, .. } = pair();
    // A lap of payload that looks like messages, read while the writer publishes one by one over it.
    let evil = Control::Message { header: 0, payload: 1 }.encode().to_le_bytes().repeat(1000);
    for n in 0..100 {
        push(&mut writer, &[], &evil).unwrap();
        writer.publish();
        pop(&mut reader).unwrap();
        for _ in 0..n % 7 {
            push_short(&mut writer, &[], b"good").unwrap();
            writer.publish();
            assert_eq!(pop(&mut reader).unwrap().1, b"good");
            assert_eq!(pop(&mut reader), None);
        }
    }
}

#[test]
fn places_are_given_back_on_release_and_not_before() {
    let Pair { mut writer, mut reader, .. } = pair();
    while push(&mut writer, &[], &[1; MAX_PAYLOAD]).is_ok() {}
    writer.publish();
    let n = reader.batch(usize::MAX).count();
    assert_eq!(n, 3, "the fourth does not fit with the zero behind it");
    assert_eq!(push(&mut writer, &[], &[1; MAX_PAYLOAD]), Err(ReserveError::Full));
    reader.release();
    push(&mut writer, &[], &[1; MAX_PAYLOAD]).unwrap();
}

#[test]
fn a_writer_that_asks_for_room_is_answered() {
    let Pair { mut writer, mut reader, .. } = pair();
    assert!(!reader.is_room_asked() && writer.was_answered());
    writer.ask_for_room();
    assert!(reader.is_room_asked() && !writer.was_answered());
    reader.feed();
    assert!(!reader.is_room_asked() && writer.was_answered());
}

#[test]
fn an_impossible_head_breaks_the_writer_only_when_it_looks() {
    for head in [64, 8, u64::MAX, 1 << 40] {
        let Pair { mut writer, read, .. } = pair();
        read.store(HEAD, head, Ordering::Relaxed);
        let error = loop {
            if let Err(error) = push(&mut writer, &[], &[0; MAX_PAYLOAD]) {
                break error;
            }
        };
        assert_eq!(error, ReserveError::Broken, "{head}");
        assert_eq!(push(&mut writer, &[], &[]), Err(ReserveError::Broken));
        assert!(!writer.commit_line(0, 0, &[0; ONE_LINE]));
    }
    let Pair { mut writer, mut reader, read, .. } = pair();
    push(&mut writer, &[], &[]).unwrap();
    writer.publish();
    pop(&mut reader).unwrap();
    assert_eq!(writer.is_drained(), Ok(true));
    read.store(HEAD, 0, Ordering::Relaxed);
    assert_eq!(writer.is_drained(), Err(ReserveError::Broken), "backwards");
}

#[test]
fn impossible_control_words_break_the_reader_for_good() {
    let too_long = Control::Message { header: 0, payload: MAX_PAYLOAD + 1 }.encode();
    let long_header = Control::Message { header: MAX_HEADER + 1, payload: 0 }.encode();
    let good = Control::Message { header: 0, payload: 0 }.encode();
    for word in [1, too_long, long_header, u64::MAX, Control::Skip.encode()] {
        let Pair { mut reader, written, .. } = pair();
        written.store(page(), word, Ordering::Relaxed);
        assert!(reader.is_ready());
        assert_eq!((pop(&mut reader), reader.is_broken()), (None, true), "{word:#x}");
        written.store(page(), good, Ordering::Relaxed);
        assert_eq!((pop(&mut reader), reader.is_ready()), (None, false));
    }
}

#[test]
fn a_message_that_reaches_out_of_the_ring_breaks_it() {
    let Pair { mut reader, written, .. } = pair();
    let word = |len| Control::Message { header: 0, payload: len }.encode();
    let mut at = 0;
    while RING - at > 64 {
        let len = (RING - at - 128).min(MAX_PAYLOAD);
        written.store(page() + at, word(len), Ordering::Relaxed);
        at += extent(0, len).1;
    }
    // The last line of the ring holds a message of two.
    written.store(page() + at, word(64), Ordering::Relaxed);
    while pop(&mut reader).is_some() {}
    assert!(reader.is_broken() && reader.position() == at as u64);
}

#[test]
fn the_words_do_not_overlap_and_fit_a_side() {
    let mut words = [HEAD, WATCH, ROOM_GIVEN, ROOM_ASKED];
    words.sort_unstable();
    assert!(words.windows(2).all(|w| w[1] - w[0] >= 128) && words[3] + 8 <= page());
}

#[test]
fn a_front_is_a_header_of_any_length() {
    let Pair { mut writer, mut reader, .. } = pair();
    let front: [u8; MAX_HEADER] = std::array::from_fn(|n| n as u8 + 1);
    for len in [0, 1, 20, 55, 56, 57, MAX_HEADER] {
        for payload in
            [&b""[..], b"ab", b"a payload that takes another line than that of its header"]
        {
            let mut reservation = writer.reserve(len, payload.len()).unwrap();
            reservation.write_front(&front);
            reservation.write_payload(0, payload);
            reservation.commit();
            writer.publish();
            assert_eq!(pop(&mut reader), Some((front[..len].to_vec(), payload.to_vec())), "{len}");
        }
    }
}

/// Random bytes that no writer writes, over control words, headers and payloads. All results lie inside the ring, and
/// the reader does not go on for ever.
#[test]
fn random_bytes_all_over_the_ring_do_no_harm() {
    let mut seed = 1u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut broken = 0;
    for round in 0..200 {
        let Pair { mut writer, mut reader, written, .. } = pair();
        for n in 0..20u8 {
            push(&mut writer, &[n; 28], &vec![n; usize::from(n) * 40]).unwrap();
        }
        writer.publish();
        for _ in 0..1 + round % 8 {
            let at = page() + (random() as usize % (16 << 10)) / 64 * 64;
            let word = match random() % 4 {
                0 => random(),
                1 => 1 << 63 | random() >> 24,
                2 => 3 << 62,
                _ => 1 << 63 | (random() % 121) << 32 | (random() % (MAX_PAYLOAD as u64 + 64)),
            };
            written.store(at, word, Ordering::Relaxed);
        }
        for _ in 0..2 * RING / 64 {
            if pop(&mut reader).is_none() {
                break;
            }
        }
        broken += u32::from(reader.is_broken());
    }
    assert!(broken > 20, "{broken}");
}

#[test]
fn a_batch_of_one_publication_ends_with_it() {
    let Pair { mut writer, mut reader, .. } = pair();
    for messages in [1, 2, 3, 1] {
        for n in 0..messages {
            push(&mut writer, &[n], b"").unwrap();
        }
        writer.publish();
    }
    assert_eq!(reader.batch(64).of_one_publication().count(), 1);
    // Messages beyond the limit are left, and the rest ends where it would have.
    assert_eq!(reader.batch(1).of_one_publication().count(), 1);
    assert_eq!(reader.batch(64).of_one_publication().count(), 1);
    assert_eq!(reader.batch(64).count(), 4);
    assert!(!reader.is_ready() && !reader.is_broken());
    // The end of the ring, where a publication begins with a skip.
    let mut seen = 0;
    for _ in 0..3 * RING / (16 << 10) {
        push(&mut writer, b"h", &[7; 12_000]).unwrap();
        writer.publish();
        seen += reader.batch(64).of_one_publication().count();
        assert!(!reader.is_ready());
        reader.release();
    }
    assert_eq!(seen, 3 * RING / (16 << 10));
}
