//! The congestion window.

/// A bound on the window cost in flight, since packets were lost or marked. It grows with the answers, and goes out of
/// force when it reaches the link's own window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct CongestionWindow(Option<u64>);

impl CongestionWindow {
    pub(super) fn of(limit: u64) -> Self {
        Self(Some(limit))
    }

    pub(super) fn is_in_force(self) -> bool {
        self.0.is_some()
    }

    /// Bytes that may be in flight on a link with this window.
    #[inline]
    pub(super) fn within(&mut self, of_link: u64) -> u64 {
        self.0 = self.0.filter(|limit| *limit < of_link);
        self.0.unwrap_or(of_link)
    }

    /// Shrinks by one part in `part`, but not below `least`.
    pub(super) fn reduce(&mut self, part: u64, of_link: u64, least: u64) {
        let limit = self.0.map_or(of_link, |limit| limit.min(of_link));
        self.0 = Some((limit - limit / part).max(least));
    }

    /// Grows by an eighth of what was answered.
    #[inline]
    pub(super) fn grow(&mut self, answered: u64) {
        if let Some(limit) = &mut self.0 {
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
        window.reduce(2, 1000, 100);
        assert_eq!(window, CongestionWindow::of(500));
        window.reduce(8, 1000, 100);
        assert_eq!(window.within(1000), 438);
        window.reduce(2, 1000, 400);
        assert_eq!(window.within(1000), 400);
        // The link's own window has become smaller.
        window.reduce(2, 300, 100);
        assert_eq!(window.within(300), 150);
        window.grow(800);
        assert_eq!((window.within(300), window.is_in_force()), (250, true));
        window.grow(400);
        assert_eq!((window.within(300), window.is_in_force()), (300, false));
    }
}
