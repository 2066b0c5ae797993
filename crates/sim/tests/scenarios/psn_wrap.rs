//! PSNs wrap at 2^24 (IBA 9.7.1).

use super::prelude::*;

fn starts() -> impl Iterator<Item = Psn> {
    (0..6).map(|back| Psn::new(0u32.wrapping_sub(back)))
}

#[test]
fn every_operation_crosses_the_end() {
    for sq_psn in starts() {
        let (mut t, _, b) = rc(QpOptions { sq_psn, ..QpOptions::rc() });
        for _ in 0..2 {
            for op in every_op(b) {
                do_one(&mut t, op);
            }
        }
    }
}

#[test]
fn with_the_packets_around_the_end_lost() {
    for sq_psn in starts() {
        for op in 0..8 {
            for from_a in [true, false] {
                let (mut t, a, b) = rc(QpOptions { sq_psn, ..QpOptions::rc() });
                for lost in [0xff_ffff, 0, 1] {
                    t.net.once(
                        move |p| {
                            p.headers.bth.psn == Psn::new(lost) && (p.from == a.device) == from_a
                        },
                        Fate::Drop,
                    );
                }
                let op = every_op(b)[op];
                for _ in 0..3 {
                    do_one(&mut t, op);
                }
            }
        }
    }
}

#[test]
fn duplicates_from_before_the_end() {
    for sq_psn in starts() {
        for op in 0..8 {
            let (mut t, a, b) = rc(QpOptions { sq_psn, ..QpOptions::rc() });
            t.net.rule(move |p| {
                if p.from == a.device { Fate::Again(Duration::from_micros(23)) } else { Fate::Pass }
            });
            let op = every_op(b)[op];
            for _ in 0..3 {
                do_one(&mut t, op);
            }
        }
    }
}
