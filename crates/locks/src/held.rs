//! The ranks of the locks that the calling thread holds. Empty without debug assertions.

use crate::order::Rank;

#[cfg(debug_assertions)]
mod counted {
    use std::cell::Cell;

    use crate::order::Rank;

    const COUNT: usize = Rank::ALL.len();

    thread_local! {
        /// Locks of each rank. It has no destructor, so that locks work while a thread ends.
        static HELD: Cell<[u8; COUNT]> = const { Cell::new([0; COUNT]) };
    }

    pub(super) fn change(rank: Rank, by: i8) {
        HELD.with(|held| {
            let mut counts = held.get();
            let count = &mut counts[rank as usize];
            *count = count.checked_add_signed(by).expect("a lock is released once");
            held.set(counts);
        });
    }

    /// The last rank of which a lock is held.
    pub(super) fn last() -> Option<Rank> {
        let last = HELD.with(|held| held.get().iter().rposition(|&count| count > 0));
        last.map(|at| Rank::ALL[at])
    }
}

/// Panics if the thread holds a lock that it may take after this one only.
#[inline]
#[track_caller]
pub(crate) fn check(rank: Rank) {
    #[cfg(debug_assertions)]
    if let Some(held) = counted::last() {
        assert!(held < rank, "locks out of order: {rank:?} is taken while {held:?} is held");
    }
    #[cfg(not(debug_assertions))]
    let _ = rank;
}

/// A lock was taken.
#[inline]
pub(crate) fn add(rank: Rank) {
    #[cfg(debug_assertions)]
    counted::change(rank, 1);
    #[cfg(not(debug_assertions))]
    let _ = rank;
}

/// As [`add`], if it was. Returns that.
#[inline]
pub(crate) fn add_if(is_taken: bool, rank: Rank) -> bool {
    if is_taken {
        add(rank);
    }
    is_taken
}

/// A lock was released.
#[inline]
pub(crate) fn remove(rank: Rank) {
    #[cfg(debug_assertions)]
    counted::change(rank, -1);
    #[cfg(not(debug_assertions))]
    let _ = rank;
}
