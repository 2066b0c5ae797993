//! Buffers for data that comes in, between canaries.

use anyverbs_proto::wr::Sge;
use anyverbs_sim::{Mr, Sim};
use rand::Rng;
use rand::rngs::SmallRng;

const CANARY: u8 = 0xa5;
/// Room for the gaps between the pieces.
const GAPS: usize = 64;

/// Equal pieces of a region, handed out one by one.
#[derive(Debug)]
pub(crate) struct Slots {
    mr: Mr,
    size: usize,
    free: Vec<usize>,
    blank: Vec<u8>,
}

/// A buffer: some pieces of a slot.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    index: usize,
    pub(crate) sges: Vec<Sge>,
}

/// Cuts `len` into up to `most` pieces, empty ones among them.
pub(crate) fn cut(rng: &mut SmallRng, len: usize, most: usize) -> Vec<usize> {
    let count = rng.random_range(1..=most);
    let mut ends: Vec<usize> = (1..count).map(|_| rng.random_range(0..=len)).collect();
    ends.push(len);
    ends.sort_unstable();
    let mut start = 0;
    ends.into_iter().map(|end| end - std::mem::replace(&mut start, end)).collect()
}

impl Slots {
    pub(crate) fn mr(&self) -> Mr {
        self.mr
    }

    /// Bytes that `count` slots for `len` bytes need.
    pub(crate) fn bytes(count: usize, len: usize) -> usize {
        count * (len + GAPS)
    }

    /// Slots for `len` bytes each, all over `mr`.
    pub(crate) fn new(sim: &Sim, mr: Mr, len: usize) -> Self {
        let size = len + GAPS;
        sim.write(mr, 0, &vec![CANARY; mr.len]);
        Self { mr, size, free: (0..mr.len / size).collect(), blank: vec![CANARY; size] }
    }

    /// A buffer of exactly `len` bytes in at most `pieces` pieces.
    pub(crate) fn take(&mut self, rng: &mut SmallRng, len: usize, pieces: usize) -> Option<Slot> {
        if self.free.is_empty() {
            return None;
        }
        let index = self.free.swap_remove(rng.random_range(0..self.free.len()));
        let mut at = index * self.size;
        let mut sges = Vec::new();
        for len in cut(rng, len, pieces) {
            at += rng.random_range(0..=GAPS / (pieces + 1));
            sges.push(self.mr.sge(at, len));
            at += len;
        }
        Some(Slot { index, sges })
    }

    fn pieces(&self, slot: &Slot) -> impl Iterator<Item = std::ops::Range<usize>> {
        let base = self.mr.addr + (slot.index * self.size) as u64;
        slot.sges.iter().map(move |sge| {
            let start = (sge.addr - base) as usize;
            start..start + sge.len as usize
        })
    }

    fn raw(&self, sim: &Sim, index: usize) -> Vec<u8> {
        sim.bytes(self.mr, index * self.size, self.size)
    }

    /// The buffer's first `len` bytes. All bytes outside of them must be untouched, or, if it is `reused`, at least
    /// those outside of the buffer.
    pub(crate) fn contents(&self, sim: &Sim, slot: &Slot, len: usize, reused: bool) -> Vec<u8> {
        let mut raw = self.raw(sim, slot.index);
        let mut bytes = Vec::with_capacity(len);
        for piece in self.pieces(slot) {
            let here = piece.len().min(len - bytes.len());
            bytes.extend(&raw[piece.start..piece.start + here]);
            let checked_off = if reused { piece.len() } else { here };
            raw[piece.start..piece.start + checked_off].fill(CANARY);
        }
        assert_eq!(bytes.len(), len, "longer than the buffer");
        assert!(raw == self.blank, "written outside of {slot:?}");
        bytes
    }

    /// The buffer is not used any more.
    pub(crate) fn release(&mut self, sim: &Sim, slot: &Slot) {
        sim.write(self.mr, slot.index * self.size, &self.blank);
        self.free.push(slot.index);
    }

    /// Checks that no data came late.
    pub(crate) fn check_free(&self, sim: &Sim) {
        for &index in &self.free {
            let untouched = self.raw(sim, index) == self.blank;
            assert!(untouched, "written to a buffer that was given back");
        }
    }
}
