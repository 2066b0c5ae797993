//! Seeded faults for received datagrams: loss, duplication, reordering, corruption.

/// The probability of each fault, from 0 to 1 for each datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FaultPolicy {
    /// The datagram vanishes.
    pub loss: f64,
    /// The probability that it arrives twice.
    pub duplication: f64,
    /// The probability that it changes places with a later one of its batch.
    pub reorder: f64,
    /// The probability that one of its bits flips.
    pub corruption: f64,
    /// Begins the sequence of random decisions.
    pub seed: u64,
}

/// A [`FaultPolicy`] at work; the same seed and the same datagrams give the same faults.
#[derive(Clone, Debug)]
pub struct Fault {
    policy: FaultPolicy,
    state: u64,
    counters: FaultCounters,
    held: Vec<Delivery>,
}

/// The faults so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounters {
    /// Datagrams lost.
    pub lost: u64,
    /// Datagrams delivered twice.
    pub duplicated: u64,
    /// Datagrams delivered late.
    pub reordered: u64,
    /// Datagrams with a flipped bit.
    pub corrupted: u64,
}

/// One datagram to deliver: its place in the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    pub(crate) message: u16,
    pub(crate) segment: u16,
}

impl Fault {
    /// A fault injector.
    #[must_use]
    pub fn new(policy: FaultPolicy) -> Self {
        Self { policy, state: policy.seed, counters: FaultCounters::default(), held: Vec::new() }
    }

    /// The faults so far.
    #[must_use]
    pub fn counters(&self) -> FaultCounters {
        self.counters
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && ((self.next() >> 11) as f64) / ((1u64 << 53) as f64) < probability
    }

    /// Decides about one datagram: appends it to `out` as often as it is to be delivered.
    pub(crate) fn apply(&mut self, delivery: Delivery, bytes: &mut [u8], out: &mut Vec<Delivery>) {
        if self.happens(self.policy.loss) {
            self.counters.lost += 1;
            return;
        }
        if !bytes.is_empty() && self.happens(self.policy.corruption) {
            self.counters.corrupted += 1;
            let bit = (self.next() % (bytes.len() as u64 * 8)) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let copies = if self.happens(self.policy.duplication) {
            self.counters.duplicated += 1;
            2
        } else {
            1
        };
        if self.happens(self.policy.reorder) {
            self.counters.reordered += 1;
            self.held.extend(std::iter::repeat_n(delivery, copies));
            return;
        }
        out.extend(std::iter::repeat_n(delivery, copies));
        out.append(&mut self.held);
    }

    /// Ends a batch. A datagram that was held back for a later one is delivered now if none came.
    pub(crate) fn finish(&mut self, out: &mut Vec<Delivery>) {
        out.append(&mut self.held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(policy: FaultPolicy, n: u16) -> (Vec<u16>, FaultCounters, u32) {
        let (mut fault, mut out, mut flipped) = (Fault::new(policy), Vec::new(), 0);
        for segment in 0..n {
            let mut bytes = [0u8; 16];
            fault.apply(Delivery { message: 0, segment }, &mut bytes, &mut out);
            flipped += bytes.iter().map(|b| b.count_ones()).sum::<u32>();
        }
        fault.finish(&mut out);
        (out.iter().map(|d| d.segment).collect(), fault.counters(), flipped)
    }

    #[test]
    fn nothing_happens_by_default() {
        let (out, counters, flipped) = run(FaultPolicy::default(), 100);
        assert_eq!((out, counters, flipped), ((0..100).collect(), FaultCounters::default(), 0));
    }

    #[test]
    fn faults_have_their_rate_and_repeat_for_a_seed() {
        let policy =
            FaultPolicy { loss: 0.1, duplication: 0.2, reorder: 0.3, corruption: 0.4, seed: 7 };
        let (out, counters, flipped) = run(policy, 10_000);
        assert_eq!(run(policy, 10_000), (out.clone(), counters, flipped));
        assert_ne!(run(FaultPolicy { seed: 8, ..policy }, 10_000).0, out);
        assert!((900..1100).contains(&counters.lost), "{counters:?}");
        assert!((1620..1980).contains(&counters.duplicated), "{counters:?}");
        assert!((2430..2970).contains(&counters.reordered), "{counters:?}");
        assert_eq!(counters.corrupted, u64::from(flipped));
        assert_eq!(out.len() as u64, 10_000 - counters.lost + counters.duplicated);
        assert!(!out.is_sorted());
    }

    /// The numbers that the generator's author publishes for this seed.
    #[test]
    fn decisions_follow_the_published_generator() {
        let mut fault = Fault::new(FaultPolicy { seed: 1_234_567, ..FaultPolicy::default() });
        let wanted = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!([(); 5].map(|()| fault.next()), wanted);
    }

    #[test]
    fn every_bit_of_a_datagram_is_hit() {
        let policy = FaultPolicy { corruption: 1.0, seed: 3, ..FaultPolicy::default() };
        let (mut fault, mut hit) = (Fault::new(policy), [0u8; 5]);
        for segment in 0..1000 {
            let (mut bytes, mut out) = ([0u8; 5], Vec::new());
            fault.apply(Delivery { message: 0, segment }, &mut bytes, &mut out);
            assert_eq!(bytes.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
            hit.iter_mut().zip(bytes).for_each(|(hit, byte)| *hit |= byte);
        }
        assert_eq!(hit, [0xff; 5]);
        // A datagram without bytes has none to be hit.
        fault.apply(Delivery { message: 0, segment: 0 }, &mut [], &mut Vec::new());
        assert_eq!(fault.counters().corrupted, 1000);
    }

    #[test]
    fn what_always_happens_happens_to_each() {
        let always = |policy: FaultPolicy| run(FaultPolicy { seed: 9, ..policy }, 4);
        let none = FaultPolicy::default();
        let (out, counters, _) = always(FaultPolicy { loss: 1.0, ..none });
        assert_eq!((out, counters.lost), (vec![], 4));
        let (out, counters, _) = always(FaultPolicy { duplication: 1.0, ..none });
        assert_eq!((out, counters.duplicated), (vec![0, 0, 1, 1, 2, 2, 3, 3], 4));
        // Nothing comes before them: they leave at the end of the batch, in their order.
        let (out, counters, _) = always(FaultPolicy { reorder: 1.0, ..none });
        assert_eq!((out, counters.reordered), (vec![0, 1, 2, 3], 4));
    }
}
