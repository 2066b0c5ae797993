//! The congestion window.

/// A bound on the window cost in flight, since packets were lost or marked. It grows with the answers, and goes out of
/// force when it reaches the link's own window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct CongestionWindow {
    limit: Option<u64>,
    /// Packets were lost since it came into force, and not only marked.
    lossy: bool,
}

impl CongestionWindow {
    /// One after losses.
    pub(super) fn of(limit: u64) -> Self {
        Self { limit: Some(limit), lossy: true }
    }

    pub(super) fn is_in_force(self) -> bool {
        self.limit.is_some()
    }

    /// Tells whether it is in force and packets were lost. Marks alone say that queues are long, so answers take long.
    pub(super) fn is_lossy(self) -> bool {
        self.lossy
    }

    /// Bytes that may be in flight on a link with this window.
    #[inline]
    pub(super) fn within(&mut self, of_link: u64) -> u64 {
        match self.limit {
            Some(limit) if limit < of_link => limit,
            Some(_) => {
                *self = Self::default();
                of_link
            }
            None => of_link,
        }
    }

    /// Shrinks by one part in `part`, but not below `least`, for packets were lost.
    pub(super) fn reduce_for_loss(&mut self, part: u64, of_link: u64, least: u64) {
        self.reduce(part, of_link, least);
        self.lossy = true;
    }

    /// The same, for packets were marked.
    pub(super) fn reduce_for_mark(&mut self, of_link: u64, least: u64) {
        self.reduce(2, of_link, least);
    }

    fn reduce(&mut self, part: u64, of_link: u64, least: u64) {
        let limit = self.within(of_link);
        self.limit = Some((limit - limit / part).max(least));
    }

    /// Grows by an eighth of what was answered.
    #[inline]
    pub(super) fn grow(&mut self, answered: u64) {
        if let Some(limit) = &mut self.limit {
            *limit = limit.saturating_add(answered / 8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shrinks_with_losses_and_goes_when_it_has_grown() {
        let mut window = CongestionWindow::default();
        assert_eq!((window.within(1000), window.is_in_force()), (1000, false));
        window.grow(8000);
        assert!(!window.is_in_force());
        window.reduce_for_loss(2, 1000, 100);
        assert_eq!(window, CongestionWindow::of(500));
        window.reduce_for_loss(8, 1000, 100);
        assert_eq!(window.within(1000), 438);
        window.reduce_for_loss(2, 1000, 400);
        assert_eq!(window.within(1000), 400);
        // The link's own window has become smaller.
        window.reduce_for_loss(2, 300, 100);
        assert_eq!(window.within(300), 150);
        window.grow(800);
        assert_eq!((window.within(300), window.is_in_force()), (250, true));
        window.grow(400);
        assert_eq!((window.within(300), window.is_in_force()), (300, false));
    }
    #[test]
    fn marks_are_no_losses() {
        let mut window = CongestionWindow::default();
        window.reduce_for_mark(1000, 100);
        assert_eq!((window.within(1000), window.is_lossy()), (500, false));
        window.reduce_for_loss(2, 1000, 100);
        window.reduce_for_mark(1000, 100);
        assert_eq!((window.within(1000), window.is_lossy()), (125, true));
        window.grow(8000);
        assert_eq!((window.within(1000), window.is_lossy()), (1000, false), "it is out of force");
        window.reduce_for_mark(1000, 100);
        assert!(!window.is_lossy());
    }
}
