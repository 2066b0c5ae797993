//! Completion queue.

use std::collections::VecDeque;

use crate::types::Qpn;
use crate::wc::Wc;

/// For which completions a program wants to be told (`ibv_req_notify_cq`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Armed {
    #[default]
    No,
    Solicited,
    Any,
}

/// What the device has to do after a completion was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pushed {
    /// Tell the completion channel.
    pub notify: bool,
    /// There was no room: the queue is in error from now on (IBA 11.6.3.1). Raise `CQ_ERR`.
    pub overrun: bool,
    /// The completion is lost, as all are after an overrun. Move the queue's queue pairs to the error state.
    pub lost: bool,
}

/// A completion queue. Its memory is allocated at creation and touched as it fills.
///
/// A slot of a send queue is free again when the completion that covers it is *polled*: whoever polls hands
/// [`Wc::sq_count`] back to the queue pair (`SqCredit`).
#[derive(Debug)]
pub struct Cq {
    wcs: VecDeque<Wc>,
    capacity: usize,
    armed: Armed,
    overrun: bool,
}

impl Cq {
    /// A queue for `cqe` completions.
    #[must_use]
    pub fn new(cqe: u32) -> Self {
        let capacity = cqe as usize;
        Self { wcs: VecDeque::with_capacity(capacity), capacity, armed: Armed::No, overrun: false }
    }

    /// Completions that it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Completions that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.wcs.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.wcs.is_empty()
    }

    /// Whether a completion was lost.
    #[must_use]
    pub fn is_overrun(&self) -> bool {
        self.overrun
    }

    /// Adds a completion. `solicited`: also tells a channel that wants solicited ones only; errors always do.
    pub fn push(&mut self, wc: Wc, solicited: bool) -> Pushed {
        if self.overrun || self.wcs.len() >= self.capacity {
            let first = !self.overrun;
            self.overrun = true;
            return Pushed { notify: false, overrun: first, lost: true };
        }
        let error = wc.status != crate::wc::WcStatus::Success;
        self.wcs.push_back(wc);
        let notify = match self.armed {
            Armed::No => false,
            Armed::Solicited => solicited || error,
            Armed::Any => true,
        };
        if notify {
            self.armed = Armed::No;
        }
        Pushed { notify, ..Pushed::default() }
    }

    /// Moves the oldest completions to `out`; returns how many.
    pub fn poll(&mut self, out: &mut [Wc]) -> usize {
        let mut out = out.iter_mut();
        self.take(out.len(), |wc| {
            if let Some(to) = out.next() {
                *to = *wc;
            }
        })
    }

    /// Takes up to `most` of the oldest completions; returns how many.
    #[inline]
    pub fn take(&mut self, most: usize, mut each: impl FnMut(&Wc)) -> usize {
        let n = most.min(self.wcs.len());
        for _ in 0..n {
            if let Some(wc) = self.wcs.front() {
                each(wc);
            }
            self.wcs.pop_front();
        }
        n
    }

    /// Asks for one notification, at the next completion that is added. Completions that wait already do not
    /// count. Asking for any overrides asking for solicited ones.
    pub fn arm(&mut self, solicited_only: bool) {
        if !solicited_only {
            self.armed = Armed::Any;
        } else if self.armed == Armed::No {
            self.armed = Armed::Solicited;
        }
    }

    /// Removes the completions of a queue pair that is destroyed or reset (S1.2).
    pub fn purge(&mut self, qpn: Qpn) {
        self.wcs.retain(|wc| wc.qpn != qpn);
    }

    /// Changes the capacity. False if what waits would not fit.
    pub fn resize(&mut self, cqe: u32) -> bool {
        let capacity = cqe as usize;
        if self.wcs.len() > capacity {
            return false;
        }
        self.wcs.reserve(capacity - self.wcs.len());
        self.capacity = capacity;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wc::WcStatus;

    fn wc(wr_id: u64) -> Wc {
        Wc { wr_id, qpn: Qpn::new(wr_id as u32 % 2), ..Wc::default() }
    }

    #[test]
    fn armed_once_for_the_next_completion() {
        let mut cq = Cq::new(8);
        assert!(!cq.push(wc(0), true).notify);
        cq.arm(false);
        assert!(cq.push(wc(1), false).notify);
        assert!(!cq.push(wc(2), true).notify);
        cq.arm(true);
        assert!(!cq.push(wc(3), false).notify);
        assert!(cq.push(Wc { status: WcStatus::WrFlushErr, ..wc(4) }, false).notify);
        cq.arm(true);
        cq.arm(false);
        cq.arm(true);
        assert!(cq.push(wc(5), false).notify);
    }

    #[test]
    fn overrun_is_told_once_and_stays() {
        let mut cq = Cq::new(1);
        assert_eq!(cq.push(wc(0), false), Pushed::default());
        assert!(cq.push(wc(1), false).overrun);
        assert!(!cq.push(wc(2), false).overrun);
        assert!(cq.push(wc(2), false).lost);
        assert!(cq.is_overrun());
        let mut out = [Wc::default(); 4];
        assert_eq!(cq.poll(&mut out), 1);
        assert_eq!(out[0].wr_id, 0);
        assert_eq!(cq.push(wc(3), false), Pushed { lost: true, ..Pushed::default() });
        assert!(cq.is_empty());
    }

    #[test]
    fn purge_gives_the_room_back_and_resize_keeps_what_waits() {
        let mut cq = Cq::new(4);
        for i in 0..4 {
            cq.push(wc(i), false);
        }
        cq.purge(Qpn::new(1));
        assert_eq!(cq.len(), 2);
        assert!(!cq.resize(1));
        assert!(cq.resize(2));
        assert!(cq.push(wc(9), false).overrun);
        let mut out = [Wc::default(); 4];
        assert_eq!(cq.poll(&mut out), 2);
        assert_eq!([out[0].wr_id, out[1].wr_id], [0, 2]);
    }
}
