//! Charts as SVG: throughput over time, latencies.

use std::fmt::Write as _;

use super::escaped;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 200.0;
/// Room for the labels: half of one above, and those at the left and below.
const ABOVE: f64 = 10.0;
const LEFT: f64 = 80.0;
const BELOW: f64 = 34.0;
/// Half of the last label of the time.
const RIGHT: f64 = 32.0;

/// A time in words: microseconds come in.
pub(super) fn duration(micros: f64) -> String {
    match micros {
        ..1.0 => format!("{:.0} ns", micros * 1e3),
        ..1e3 => format!("{} us", short(micros)),
        ..1e6 => format!("{} ms", short(micros / 1e3)),
        _ => format!("{} s", short(micros / 1e6)),
    }
}

/// Bytes in words.
pub(super) fn amount(bytes: f64) -> String {
    match bytes {
        ..1e3 => format!("{bytes:.0} B"),
        ..1e6 => format!("{} kB", short(bytes / 1e3)),
        ..1e9 => format!("{} MB", short(bytes / 1e6)),
        _ => format!("{} GB", short(bytes / 1e9)),
    }
}

/// Three digits.
fn short(value: f64) -> String {
    match value {
        ..10.0 => format!("{value:.2}"),
        ..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// The value that a part of all, sorted, does not exceed.
pub(super) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let at = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(at.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0.0)
}

/// A round number, this one or a little more.
fn step(least: f64) -> f64 {
    let ten = 10_f64.powf(least.log10().floor());
    let rounds = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0];
    rounds.map(|n| n * ten).into_iter().find(|n| *n >= least).unwrap_or(10.0 * ten)
}

fn begin(out: &mut String, title: &str) {
    let _ = writeln!(
        out,
        "<div class=\"wide\"><svg class=\"chart\" viewBox=\"0 0 {} {}\" role=\"img\"><title>{}</title>",
        LEFT + WIDTH + RIGHT,
        ABOVE + HEIGHT + BELOW,
        escaped(title)
    );
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escaped(text)
    );
}

/// The scale at the left, with lines across.
fn scale(out: &mut String, most: f64, label: impl Fn(f64) -> String) {
    for i in 0..=4 {
        let part = f64::from(i) / 4.0;
        let y = ABOVE + HEIGHT * (1.0 - part);
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.0}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
            LEFT + WIDTH
        );
        text(out, (LEFT - 6.0, y + 4.0), "end", &label(most * part));
    }
}

fn bar(out: &mut String, class: &str, (x, width): (f64, f64), part: f64, title: &str) {
    let height = HEIGHT * part;
    let _ = writeln!(
        out,
        "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{:.2}\" width=\"{width:.2}\" height=\"{height:.2}\"><title>{}</title></rect>",
        ABOVE + HEIGHT - height,
        escaped(title)
    );
}

/// Bytes over time. `done` has when work was done, and its bytes; `troubles` when something went wrong.
pub(super) fn throughput(done: &[(f64, u64)], troubles: &[f64], (from, to): (f64, f64)) -> String {
    const BINS: usize = 90;
    let bin = ((to - from) / BINS as f64).max(1e-3);
    let place = |at: f64| (((at - from) / bin) as usize).min(BINS - 1);
    let mut bins = [0.0; BINS];
    for (at, bytes) in done {
        bins[place(*at)] += *bytes as f64;
    }
    let mut bad = [0_u32; BINS];
    for at in troubles {
        bad[place(*at)] += 1;
    }
    // Bytes in a microsecond are megabytes in a second.
    let rates = bins.map(|bytes| bytes / bin);
    let most = 4.0 * step(rates.iter().copied().fold(0.0, f64::max).max(1e-6) / 4.0);
    let mut out = String::new();
    begin(&mut out, "Throughput over time");
    scale(&mut out, most, |rate| format!("{}/s", amount(rate * 1e6)));
    let width = WIDTH / BINS as f64;
    for (i, rate) in rates.iter().enumerate() {
        let x = LEFT + i as f64 * width;
        let at = duration(i as f64 * bin);
        if *rate > 0.0 {
            let title = format!("{}/s at {at}", amount(rate * 1e6));
            bar(&mut out, "bar", (x, width - 1.0), rate / most, &title);
        }
        if bad[i] > 0 {
            let _ = writeln!(
                out,
                "<rect class=\"bad\" x=\"{x:.2}\" y=\"{:.0}\" width=\"{:.2}\" height=\"6\"><title>{} retries or errors at {at}</title></rect>",
                ABOVE + HEIGHT + 2.0,
                width - 1.0,
                bad[i]
            );
        }
    }
    for i in 0..=5 {
        let part = f64::from(i) / 5.0;
        let label = duration((to - from) * part);
        text(&mut out, (LEFT + WIDTH * part, ABOVE + HEIGHT + 25.0), "middle", &label);
    }
    out.push_str("</svg></div>\n");
    out
}

/// How many took how long, on a logarithmic scale. `latencies` are microseconds.
pub(super) fn histogram(title: &str, latencies: &[f64]) -> String {
    /// Bins that double the time.
    const PER_DOUBLING: f64 = 4.0;
    let place = |micros: f64| (micros.max(0.01).log2() * PER_DOUBLING).floor() as i32;
    let first = latencies.iter().copied().map(place).min().unwrap_or(0);
    let last = latencies.iter().copied().map(place).max().unwrap_or(0);
    let mut bins = vec![0_u64; (last - first + 1) as usize];
    for micros in latencies {
        bins[(place(*micros) - first) as usize] += 1;
    }
    let most = bins.iter().copied().max().unwrap_or(1).max(1);
    let most = 4.0 * step(most as f64 / 4.0).ceil();
    let begin_of = |i: usize| f64::exp2((f64::from(first) + i as f64) / PER_DOUBLING);
    let mut out = String::new();
    begin(&mut out, title);
    scale(&mut out, most, |n| format!("{n:.0}"));
    // A few bins are no broader than many.
    let width = (WIDTH / bins.len() as f64).min(60.0);
    let every = bins.len().div_ceil(10);
    for (i, n) in bins.iter().enumerate() {
        let x = LEFT + i as f64 * width;
        let (from, to) = (duration(begin_of(i)), duration(begin_of(i + 1)));
        if *n > 0 {
            let part = *n as f64 / most;
            bar(&mut out, "bar", (x, width - 1.0), part, &format!("{n}: {from} to {to}"));
        }
        if i % every == 0 {
            text(&mut out, (x, ABOVE + HEIGHT + 17.0), "middle", &from);
        }
    }
    out.push_str("</svg></div>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits_and_a_unit() {
        let times = [0.25, 1.0, 12.34, 999.4, 1234.0, 5e6].map(duration);
        assert_eq!(times, ["250 ns", "1.00 us", "12.3 us", "999 us", "1.23 ms", "5.00 s"]);
        assert_eq!([0.0, 999.0, 65536.0, 3e9].map(amount), ["0 B", "999 B", "65.5 kB", "3.00 GB"]);
    }

    #[test]
    fn scales_have_round_numbers() {
        let steps = [0.25, 1.0, 1.01, 17.0, 4968.0, 9.5e6].map(step);
        for (got, wanted) in steps.into_iter().zip([0.25, 1.0, 1.5, 20.0, 5000.0, 1e7]) {
            assert!((got - wanted).abs() < wanted * 1e-9, "{got} {wanted}");
        }
        // Counts are whole.
        let chart = histogram("ten", &[3.0; 10]);
        for label in [">0<", ">3<", ">6<", ">9<", ">12<"] {
            assert!(chart.contains(label), "{label} {chart}");
        }
    }

    #[test]
    fn quantiles_are_values_of_the_list() {
        let sorted: Vec<_> = (1..=100).map(f64::from).collect();
        assert_eq!(
            [0.5, 0.9, 0.99, 1.0].map(|part| quantile(&sorted, part)),
            [50.0, 90.0, 99.0, 100.0]
        );
        assert_eq!(quantile(&[7.0], 0.5), 7.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn a_chart_of_one_value_is_whole() {
        for chart in [
            histogram("one", &[3.0]),
            throughput(&[(5.0, 100)], &[5.0], (5.0, 5.0)),
            throughput(&[], &[], (0.0, 0.0)),
        ] {
            assert!(chart.starts_with("<div") && chart.ends_with("</svg></div>\n"));
            assert!(!chart.contains("NaN") && !chart.contains("inf"), "{chart}");
        }
    }
}
