//! The rate of a sender that gets congestion notifications: the reaction point of DCQCN (Zhu et al., "Congestion Control for
//! Large-Scale RDMA Deployments", SIGCOMM 2015, section 3.1).
//!
//! The receiver is no part of this: a queue pair of `anyverbs_proto` notifies its peer at most every 50 us by itself.

use serde::{Deserialize, Serialize};

/// Picoseconds of a microsecond.
const US: f64 = 1e6;

/// Parameters, with the names of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parameters {
    /// Weight of a notification in `alpha`.
    pub g: f64,
    /// `alpha` shrinks after so many microseconds without a notification: K.
    pub k_us: f64,
    /// Microseconds between two increases of the rate: the timer T.
    pub t_us: f64,
    /// Bytes between two increases of the rate: the byte counter B.
    pub b_bytes: u64,
    /// Increases of fast recovery: F.
    pub f: u32,
    /// Step of additive increase, in Mbit/s.
    pub r_ai_mbps: f64,
    /// Step of hyper increase, in Mbit/s.
    pub r_hai_mbps: f64,
    /// The least rate, in Mbit/s.
    pub r_min_mbps: f64,
    /// Each notification makes the current rate the target rate, as in the paper. Otherwise only one does that comes after
    /// an increase, as in network interfaces and in ns-3.
    pub clamp_target_rate: bool,
}

impl Default for Parameters {
    /// The paper's values. It gives none for hyper increase and for the least rate.
    fn default() -> Self {
        Self {
            g: 1.0 / 256.0,
            k_us: 55.0,
            t_us: 55.0,
            b_bytes: 10_000_000,
            f: 5,
            r_ai_mbps: 40.0,
            r_hai_mbps: 400.0,
            r_min_mbps: 100.0,
            clamp_target_rate: true,
        }
    }
}

impl Parameters {
    /// The reason why these make no sense.
    pub(crate) fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: f64, least: f64, most: f64| {
            (least..=most)
                .contains(&value)
                .then_some(())
                .ok_or(format!("{name} = {value}: expected {least} to {most}"))
        };
        within("k_us", self.k_us, 0.1, 1e6)?;
        within("t_us", self.t_us, 0.1, 1e6)?;
        within("b_bytes", self.b_bytes as f64, 1000.0, 1e12)?;
        within("r_ai_mbps", self.r_ai_mbps, 0.001, 1e7)?;
        within("r_hai_mbps", self.r_hai_mbps, 0.001, 1e7)?;
        within("r_min_mbps", self.r_min_mbps, 0.1, 1e7)?;
        let is_weight = self.g > 0.0 && self.g < 1.0;
        is_weight.then_some(()).ok_or(format!("g = {}: expected a number between 0 and 1", self.g))
    }
}

/// The state of one sender. Timers need no events: they are made up for whenever the rate is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Dcqcn {
    p: Parameters,
    line_mbps: f64,
    /// Current rate `R_C`, in Mbit/s.
    current: f64,
    /// Target rate `R_T`.
    target: f64,
    alpha: f64,
    /// When `alpha` shrinks and when the timer ends next, in picoseconds; nothing runs before the first notification.
    deadlines: Option<(u64, u64)>,
    sent_bytes: u64,
    timer_rounds: u32,
    byte_rounds: u32,
}

impl Dcqcn {
    pub(crate) fn new(p: Parameters, line_gbps: f64) -> Self {
        let line_mbps = line_gbps * 1000.0;
        Self {
            p,
            line_mbps,
            current: line_mbps,
            target: line_mbps,
            alpha: 1.0,
            deadlines: None,
            sent_bytes: 0,
            timer_rounds: 0,
            byte_rounds: 0,
        }
    }

    /// Picoseconds that a packet of so many bytes, which leaves now, takes at the rate.
    pub(crate) fn spacing(&mut self, bytes: u32, now: u64) -> u64 {
        self.catch_up(now);
        if self.deadlines.is_some() {
            self.sent_bytes += u64::from(bytes);
            if self.sent_bytes >= self.p.b_bytes {
                self.sent_bytes -= self.p.b_bytes;
                self.byte_rounds += 1;
                self.increase();
            }
        }
        (f64::from(bytes) * 8.0 * US / self.current) as u64
    }

    /// A notification has come.
    pub(crate) fn notify(&mut self, now: u64) {
        self.catch_up(now);
        if self.p.clamp_target_rate || self.timer_rounds + self.byte_rounds > 0 {
            self.target = self.current;
        }
        let least = self.p.r_min_mbps.min(self.line_mbps);
        self.current = (self.current * (1.0 - self.alpha / 2.0)).max(least);
        self.alpha = (1.0 - self.p.g) * self.alpha + self.p.g;
        self.deadlines = Some((now + us(self.p.k_us), now + us(self.p.t_us)));
        (self.sent_bytes, self.timer_rounds, self.byte_rounds) = (0, 0, 0);
    }

    fn catch_up(&mut self, now: u64) {
        let Some((mut alpha_at, mut timer_at)) = self.deadlines else { return };
        while alpha_at <= now {
            self.alpha *= 1.0 - self.p.g;
            alpha_at += us(self.p.k_us);
        }
        while timer_at <= now {
            self.timer_rounds += 1;
            self.increase();
            timer_at += us(self.p.t_us);
        }
        self.deadlines = Some((alpha_at, timer_at));
    }

    fn increase(&mut self) {
        let (least, most) =
            (self.timer_rounds.min(self.byte_rounds), self.timer_rounds.max(self.byte_rounds));
        if least > self.p.f {
            self.target += self.p.r_hai_mbps * f64::from(least - self.p.f);
        } else if most > self.p.f {
            self.target += self.p.r_ai_mbps;
        }
        self.target = self.target.min(self.line_mbps);
        self.current = f64::midpoint(self.current, self.target);
    }
}

/// At least one picosecond.
fn us(us: f64) -> u64 {
    ((us * US) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> u64 {
        us * 1_000_000
    }

    #[test]
    fn a_notification_halves_the_rate_and_fast_recovery_brings_it_back() {
        let mut rate = Dcqcn::new(Parameters::default(), 40.0);
        // 1000 bytes at 40 Gbit/s take 200 ns.
        assert_eq!(rate.spacing(1000, at(1)), 200_000);
        rate.notify(at(2));
        assert_eq!(rate.spacing(1000, at(3)), 400_000);
        // Each round of fast recovery halves the distance to the target: 20, 30, 35 Gbit/s.
        assert!((rate.spacing(1000, at(2 + 55)) as f64 - 8e9 / 30_000.0).abs() < 1.0);
        assert!((rate.spacing(1000, at(2 + 110)) as f64 - 8e9 / 35_000.0).abs() < 1.0);
        // It is never above the line's.
        assert!((200_000..200_100).contains(&rate.spacing(1000, at(100_000))));
    }

    #[test]
    fn additive_increase_follows_fast_recovery() {
        let mut rate = Dcqcn::new(Parameters::default(), 40.0);
        for _ in 0..4 {
            rate.notify(at(2));
        }
        let (target, f) = (rate.target, u64::from(rate.p.f));
        rate.catch_up(at(2 + 55 * f));
        assert!((rate.target - target).abs() < 1e-9);
        rate.catch_up(at(2 + 55 * (f + 3)));
        assert!((rate.target - target - 120.0).abs() < 1e-9);
    }

    #[test]
    fn the_target_stays_over_cuts_in_a_row_unless_it_is_clamped() {
        let p = Parameters { clamp_target_rate: false, ..Parameters::default() };
        let mut rate = Dcqcn::new(p, 40.0);
        rate.notify(at(1));
        rate.notify(at(2));
        assert!((rate.current - 10_000.0).abs() < 1.0 && (rate.target - 40_000.0).abs() < 1.0);
        rate.catch_up(at(2 + 55));
        rate.notify(at(2 + 56));
        assert!((rate.target - 25_000.0).abs() < 1.0, "{}", rate.target);
    }

    #[test]
    fn alpha_shrinks_while_there_are_no_notifications() {
        let mut rate = Dcqcn::new(Parameters { g: 0.5, ..Parameters::default() }, 40.0);
        rate.notify(at(0));
        rate.catch_up(at(110));
        assert!((rate.alpha - 0.25).abs() < 1e-9);
        let before = rate.current;
        rate.notify(at(110));
        assert!((rate.current - before * 0.875).abs() < 1e-6);
    }

    #[test]
    fn the_rate_has_a_least_value() {
        let mut rate = Dcqcn::new(Parameters::default(), 40.0);
        (0..40).for_each(|_| rate.notify(at(1)));
        assert!((rate.current - 100.0).abs() < 1e-9);
    }
}
