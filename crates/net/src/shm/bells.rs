//! Bells: which of the many lanes between two processes have something new.
//!
//! A reader looks at few lanes by itself, those that were busy of late, and says so in a word for each. For all others the
//! writer rings: it puts the number of the *spot* into a ring of words of its own side. A spot is where something new can
//! be: the cells of one lane, or the answers to one. The reader takes the numbers one after the other. If it lags so far
//! behind that numbers were overwritten, it looks at all spots.
//!
//! | the writer | the reader |
//! |---|---|
//! | shows a cell or an answer, fence, reads the word of the spot | `look_away`, fence, looks at the spot once more |
//! | rings, fence, reads whether the reader sleeps | says that it sleeps, fence, looks at the bells |

use std::sync::atomic::Ordering;

use super::layout::{BELLS, LANES};
use super::memory::{Memory, Words};

/// In the word of a bell that rang.
const RUNG: u64 = 1 << 31;

/// A place where something new can be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spot {
    /// The cells of this lane of the writer.
    Cells(usize),
    /// The writer's answers to this lane of the reader.
    Answers(usize),
}

impl Spot {
    /// The number of spots.
    pub const COUNT: usize = 2 * LANES;

    /// Its number.
    #[inline]
    #[must_use]
    pub fn number(self) -> usize {
        match self {
            Self::Cells(lane) => lane,
            Self::Answers(lane) => LANES + lane,
        }
    }
}

/// Where the words are: those by which a side says where it looks, and those by which it rings.
#[derive(Clone, Copy, Debug)]
pub struct BellPlace {
    /// One word for each spot.
    pub looks: usize,
    /// One word for each of the last bells.
    pub bells: usize,
}

impl BellPlace {
    #[inline]
    fn look(self, spot: usize) -> usize {
        self.looks + 8 * spot
    }

    #[inline]
    fn bell(self, number: u32) -> usize {
        self.bells + 8 * (number as usize % BELLS)
    }
}

/// The writer's end. One thread at a time rings.
#[derive(Debug)]
pub struct Ringer<M> {
    own: M,
    place: BellPlace,
    /// The number of the last bell, from 1 on.
    last: u32,
}

impl<M: Memory> Ringer<M> {
    /// The words of its side are zero.
    pub fn new(own: M, place: BellPlace) -> Self {
        Self { own, place, last: 0 }
    }

    /// Rings for a spot.
    pub fn ring(&mut self, spot: Spot) {
        self.last = self.last.wrapping_add(1);
        let word = u64::from(self.last) << 32 | RUNG | spot.number() as u64;
        self.own.store(self.place.bell(self.last), word, Ordering::Release);
    }
}

/// The words by which a reader says where it looks.
#[derive(Debug)]
pub struct Looks<M>(Words<M>);

impl<M: Memory> Looks<M> {
    /// Those of the reader whose words are `peer`.
    pub fn new(peer: M, place: BellPlace) -> Self {
        Self(Words::new(peer, place.looks, Spot::COUNT))
    }

    /// Whether the reader looks at a spot by itself. The caller has shown what is new there, and fenced.
    #[inline]
    pub fn has(&self, spot: Spot) -> bool {
        self.0.load(spot.number(), Ordering::Relaxed) != 0
    }
}

/// The finding of a look at the bells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rung {
    /// For the spot with this number.
    Spot(usize),
    /// For more spots than were noted.
    All,
    /// For none that there is.
    Nonsense,
}

/// The reader's end.
#[derive(Debug)]
pub struct Listener<M> {
    own: M,
    bells: Words<M>,
    place: BellPlace,
    /// The number of the last bell that was heard.
    heard: u32,
}

impl<M: Memory> Listener<M> {
    /// The words of its side are zero.
    pub fn new(own: M, peer: M, place: BellPlace) -> Self {
        Self { own, bells: Words::new(peer, place.bells, BELLS), place, heard: 0 }
    }

    /// Whether a bell rang: one load.
    #[inline]
    #[must_use]
    pub fn is_rung(&self) -> bool {
        self.find(Ordering::Relaxed).is_some()
    }

    /// The next bell, if one rang.
    pub fn hear(&mut self) -> Option<Rung> {
        let (number, spot) = self.find(Ordering::Acquire)?;
        let next = self.heard.wrapping_add(1);
        self.heard = number;
        Some(match spot < Spot::COUNT {
            true if number == next => Rung::Spot(spot),
            true => Rung::All,
            false => Rung::Nonsense,
        })
    }

    /// The number of a bell that was not heard, and its spot.
    #[inline]
    fn find(&self, order: Ordering) -> Option<(u32, usize)> {
        let next = self.heard.wrapping_add(1);
        let word = self.bells.load(next as usize, order);
        let number = (word >> 32) as u32;
        // Behind the last bell stands the one before it by as many as there are.
        let ahead = number.wrapping_sub(next);
        let is_new = word & RUNG != 0 && ahead < 1 << 31 && (ahead as usize).is_multiple_of(BELLS);
        is_new.then_some((number, (word & (RUNG - 1)) as usize))
    }

    /// Looks at a spot from now on.
    pub fn look_at(&self, spot: usize) {
        self.own.store(self.place.look(spot), 1, Ordering::Release);
    }

    /// Does not look at a spot any more. The caller looks once more.
    pub fn look_away(&self, spot: usize) {
        self.own.store(self.place.look(spot), 0, Ordering::Release);
        self.own.fence();
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::page;
    use super::super::memory::Area;
    use super::*;

    const PLACE: BellPlace = BellPlace { looks: 0, bells: Spot::COUNT * 8 };

    fn ends() -> (Ringer<Area>, Listener<Area>) {
        let side = || Area::private(page() + (Spot::COUNT + BELLS) * 8).unwrap();
        let (own, peer) = (side(), side());
        (Ringer::new(own.clone(), PLACE), Listener::new(peer, own, PLACE))
    }

    #[test]
    fn bells_are_heard_once_and_in_order() {
        let (mut ringer, mut listener) = ends();
        assert!(!listener.is_rung() && listener.hear().is_none());
        for round in 0..3 * BELLS {
            ringer.ring(Spot::Cells(round % LANES));
            ringer.ring(Spot::Answers(5));
            assert!(listener.is_rung());
            assert_eq!(listener.hear(), Some(Rung::Spot(round % LANES)));
            assert_eq!(listener.hear(), Some(Rung::Spot(LANES + 5)));
            assert!(!listener.is_rung() && listener.hear().is_none());
        }
    }

    #[test]
    fn a_listener_that_lags_looks_at_all() {
        let (mut ringer, mut listener) = ends();
        for _ in 0..=BELLS {
            ringer.ring(Spot::Cells(1));
        }
        assert_eq!(listener.hear(), Some(Rung::All));
        let mut rest = 0;
        while let Some(rung) = listener.hear() {
            rest += 1;
            assert_ne!(rung, Rung::Spot(2));
        }
        assert!(rest < BELLS, "{rest}");
        ringer.ring(Spot::Cells(2));
        assert_eq!((listener.hear(), listener.hear()), (Some(Rung::Spot(2)), None));
    }

    #[test]
    fn a_spot_is_looked_at_until_the_reader_looks_away() {
        let (ringer, listener) = ends();
        let spot = Spot::Answers(3);
        let is_looked_at = || Looks::new(listener.own.clone(), PLACE).has(spot);
        assert!(!is_looked_at());
        listener.look_at(spot.number());
        assert!(is_looked_at());
        listener.look_away(spot.number());
        assert!(!is_looked_at());
        drop(ringer);
    }

    #[test]
    fn nonsense_in_a_bell_names_no_spot() {
        let (ringer, mut listener) = ends();
        ringer.own.store(PLACE.bell(1), 1 << 32 | 0xffff, Ordering::Relaxed);
        assert_eq!(listener.hear(), None);
        ringer.own.store(PLACE.bell(1), 1 << 32 | RUNG | 0xffff, Ordering::Relaxed);
        assert_eq!(listener.hear(), Some(Rung::Nonsense));
        // A number that no writer has come to.
        ringer.own.store(PLACE.bell(2), (1 << 31) << 32 | RUNG | 4, Ordering::Relaxed);
        assert_eq!(listener.hear(), None);
    }
}
