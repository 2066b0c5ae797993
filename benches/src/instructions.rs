//! `cargo xtask bench --instructions`: what each call of a message on one host executes, exactly.
//!
//! The counts are those of the processor, whatever instructions the library chose for it. A call that takes milliseconds in steps
//! meets work that is due by the clock. The least count has the least of the rest.

use std::collections::{BTreeMap, BTreeSet};

use crate::messages::{Observer, Options};
use crate::trace::{self, Step};

/// The cases of `benches/messages.c`: its arguments, the number of devices, and what its four marked calls are.
const CASES: [(&[&str], u32, &str); 15] = [
    (&["send"], 1, "SEND of 2 bytes, to and fro"),
    (&["one-cq"], 1, "SEND of 2 bytes, to and fro, with one CQ for both"),
    (&["list"], 1, "SENDs of 8 bytes in lists of 16, the sender"),
    (&["write"], 1, "WRITE of 2 bytes"),
    (&["read"], 1, "READ of 2 bytes"),
    (&["send", "1000"], 1, "SEND of 2 bytes beside 1,000 idle queue pairs"),
    (&["send", "10000"], 1, "SEND of 2 bytes beside 10,000 idle queue pairs"),
    (&["send", "0", "62"], 1, "SEND of 2 bytes, connected to 63 processes, of which 62 are idle"),
    (&["write", "10000", "62"], 1, "WRITE of 2 bytes beside all these"),
    (&["send"], 8, "SEND of 2 bytes by one of 8 devices"),
    (&["bulk"], 1, "WRITE of 64 KiB"),
    (&["bulk"], 8, "WRITE of 64 KiB by one of 8 devices"),
    (&["own-send"], 1, "SEND of 2 bytes by a queue pair to itself"),
    (&["own-write"], 1, "WRITE of 2 bytes by a queue pair to itself"),
    (&["own-read"], 1, "READ of 2 bytes by a queue pair to itself"),
];

/// The marked calls by their number.
const CALLS: [&str; 5] = ["", "post_send", "poll_cq, receive", "post_recv", "poll_cq, send"];

/// The instructions that one call executed.
#[derive(Default)]
struct Count {
    all: u64,
    locked: u64,
    /// Their addresses.
    places: BTreeSet<u64>,
}

/// The counts of the calls of a case.
#[derive(Default)]
struct Counts {
    call: u64,
    count: Count,
    all: BTreeMap<u64, Vec<Count>>,
}

impl Observer for Counts {
    fn begin(&mut self, call: u64, _: i32) {
        self.call = call;
        self.count = Count::default();
    }

    // A poll that finds nothing is counted anew.
    fn again(&mut self) {
        self.count = Count::default();
    }

    fn step(&mut self, step: &Step) {
        self.count.all += 1;
        self.count.places.insert(step.registers.rip);
        self.count.locked += u64::from(trace::is_locked(&step.code));
    }

    fn end(&mut self) {
        self.all.entry(self.call).or_default().push(std::mem::take(&mut self.count));
    }
}

/// Prints the counts of all cases.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let messages = options.open()?;
    for (words, devices, what) in CASES {
        println!("{what}");
        let mut counts = Counts::default();
        let symbols = messages.observe(words, devices, &mut counts)?;
        let mut places = BTreeSet::new();
        for (call, mut counts) in counts.all {
            let name = CALLS.get(call as usize).copied().unwrap_or("?");
            counts.sort_by_key(|count| count.all);
            let (least, median) = (&counts[0], &counts[counts.len() / 2]);
            places.extend(&least.places);
            println!(
                "  {name:<18} {:>6} instructions, {:>3} locked (least {}, {} calls)",
                median.all,
                median.locked,
                least.all,
                counts.len()
            );
        }
        let (lines, functions) = symbols.lines(&places)?;
        println!("  the least of each: {lines} lines of {functions} functions of the source");
    }
    Ok(())
}
