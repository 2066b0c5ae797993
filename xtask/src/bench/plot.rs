//! A chart as SVG: both axes logarithmic, each curve labelled at its end.

use std::path::Path;

use anyhow::{anyhow, bail};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::sweep::{Chart, Curve, Quantity};

const SIZE: (u32, u32) = (860, 500);
/// Room for the labels.
const RIGHT: i32 = 150;
const LINE_HEIGHT: i32 = 18;
/// Bytes of a message.
const SMALLEST: f64 = 2.0;
const LARGEST: f64 = 8_388_608.0;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(225, 225, 225);

/// Okabe and Ito's colours, which people with any colour vision tell apart. Ours are from the blue end, the peers' from
/// the rest. A program has one colour in every chart.
fn colour(name: &str) -> RGBColor {
    match name.split(' ').collect::<Vec<_>>()[..] {
        ["anyverbs", "SEND"] => RGBColor(0, 114, 178),
        ["anyverbs", "WRITE"] => RGBColor(86, 180, 233),
        ["anyverbs", ..] => RGBColor(0, 158, 115),
        ["UCX", ..] => RGBColor(213, 94, 0),
        ["libfabric", ..] => RGBColor(204, 121, 167),
        ["TCP", ..] => RGBColor(110, 110, 110),
        ["rxe", ..] => RGBColor(0, 0, 0),
        _ => RGBColor(230, 159, 0),
    }
}

/// Writes `chart` to `path`.
pub(super) fn write(chart: &Chart, path: &Path) -> anyhow::Result<()> {
    draw(chart, path).map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn draw(chart: &Chart, path: &Path) -> anyhow::Result<()> {
    let Some((low, high)) = range(chart) else { bail!("there is nothing to draw") };
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (title, axis) = match chart.quantity {
        Quantity::Latency => ("Latency, one way", "median"),
        Quantity::Bandwidth => ("Bandwidth, one stream", "median"),
    };
    let sizes = (0..12).map(|n| SMALLEST * 4f64.powi(n)).collect();
    let mut plot = ChartBuilder::on(&root)
        .caption(format!("{title}: {}", chart.place), (FONT, 19).into_font().color(&INK))
        .margin(12)
        .margin_right(RIGHT)
        .x_label_area_size(46)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (SMALLEST..LARGEST).log_scale().with_key_points(sizes),
            (low..high).log_scale().with_key_points(decades(low, high)),
        )?;
    plot.configure_mesh()
        .x_labels(12)
        .x_label_formatter(&|size| bytes(*size))
        .y_label_formatter(&|value| amount(chart.quantity, *value))
        .x_desc("size of a message")
        .y_desc(axis)
        .bold_line_style(FAINT)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .label_style((FONT, 13).into_font().color(&INK))
        .axis_desc_style((FONT, 14).into_font().color(&INK))
        .draw()?;

    let mut labels = Vec::new();
    for curve in &chart.curves {
        let colour = colour(&curve.name);
        let points: Vec<_> = curve.points.iter().map(|&(size, y)| (size as f64, y)).collect();
        let Some(&end) = points.last() else { continue };
        let width = if curve.ours { 3 } else { 2 };
        // A size that failed is a gap: a line across would be a figure.
        for run in points.chunk_by(|(size, _), (next, _)| !failed_between(curve, *size, *next)) {
            plot.draw_series(LineSeries::new(run.iter().copied(), colour.stroke_width(width)))?;
        }
        // Ours are filled, so that they differ without any colour too.
        let style = if curve.ours { colour.filled() } else { colour.stroke_width(2) };
        plot.draw_series(points.iter().map(|point| Circle::new(*point, 4, style)))?;
        let (x, y) = plot.backend_coord(&end);
        labels.push(Label { name: &curve.name, colour, from: (x, y), y });
    }
    let edge = SIZE.0.cast_signed() - RIGHT;
    spread(&mut labels, LINE_HEIGHT, SIZE.1.cast_signed() - 60);
    for label in &labels {
        let at = (edge + 16, label.y);
        let leader = vec![(label.from.0 + 6, label.from.1), (at.0 - 4, at.1)];
        root.draw(&PathElement::new(leader, label.colour.mix(0.5)))?;
        let anchor = Pos::new(HPos::Left, VPos::Center);
        let style = (FONT, 14).into_font().color(&darker(label.colour)).pos(anchor);
        root.draw(&Text::new(label.name.to_owned(), at, style))?;
    }
    root.present()?;
    Ok(())
}

/// A curve's name, beside where it ends.
struct Label<'a> {
    name: &'a str,
    colour: RGBColor,
    from: (i32, i32),
    y: i32,
}

/// Moves labels apart that would lie on one another: down, and all up again where the last would leave the picture.
fn spread(labels: &mut [Label<'_>], distance: i32, bottom: i32) {
    labels.sort_by_key(|label| label.y);
    let mut next = i32::MIN;
    for label in labels.iter_mut() {
        label.y = label.y.max(next);
        next = label.y + distance;
    }
    let mut most = bottom;
    for label in labels.iter_mut().rev() {
        label.y = label.y.min(most);
        most = label.y - distance;
    }
}

/// Text is thin: it needs more contrast than a line.
fn darker(RGBColor(r, g, b): RGBColor) -> RGBColor {
    let part = |x: u8| x / 4 * 3;
    RGBColor(part(r), part(g), part(b))
}

fn failed_between(curve: &Curve, low: f64, high: f64) -> bool {
    curve.failures.iter().any(|&(size, _)| low < size as f64 && (size as f64) < high)
}

/// Every point, with some air.
fn range(chart: &Chart) -> Option<(f64, f64)> {
    let values = || chart.curves.iter().flat_map(|curve| &curve.points).map(|&(_, y)| y);
    Some((values().reduce(f64::min)? / 1.6, values().reduce(f64::max)? * 1.6))
}

/// The powers of ten within a range.
fn decades(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().ceil() as i32, high.log10().floor() as i32);
    (first..=last).map(|power| 10f64.powi(power)).collect()
}

/// A power of ten with its unit.
fn amount(quantity: Quantity, value: f64) -> String {
    // Powers of ten are not exact below one.
    let rounded = |value: f64| (value * 1e6).round() / 1e6;
    match quantity {
        Quantity::Bandwidth => format!("{} Gb/s", rounded(value)),
        Quantity::Latency if value < 999.0 => format!("{} us", rounded(value)),
        Quantity::Latency => format!("{} ms", rounded(value / 1e3)),
    }
}

/// A power of two as people write it.
fn bytes(size: f64) -> String {
    const UNITS: [&str; 3] = ["B", "KiB", "MiB"];
    let mut size = size.round();
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        let shown = [2.0, 512.0, 32768.0, 8388608.0].map(bytes);
        assert_eq!(shown, ["2 B", "512 B", "32 KiB", "8 MiB"]);
    }

    #[test]
    fn powers_of_ten_with_their_units() {
        assert_eq!(decades(0.07, 1500.0), [0.1, 1.0, 10.0, 100.0, 1000.0]);
        let shown = [0.1, 10.0, 1e3, 1e5].map(|us| amount(Quantity::Latency, us));
        assert_eq!(shown, ["0.1 us", "10 us", "1 ms", "100 ms"]);
        assert_eq!(amount(Quantity::Bandwidth, 10f64.powi(-3)), "0.001 Gb/s");
    }

    #[test]
    fn a_failure_is_a_gap() {
        let curve = Curve {
            name: String::new(),
            ours: true,
            points: vec![(2, 1.0), (8, 1.0), (128, 1.0)],
            failures: vec![(32, "it hangs".into())],
        };
        assert!(!failed_between(&curve, 2.0, 8.0));
        assert!(failed_between(&curve, 8.0, 128.0));
    }

    #[test]
    fn labels_do_not_lie_on_one_another() {
        let label = |y| Label { name: "", colour: BLACK, from: (0, y), y };
        let mut labels = [label(95), label(90), label(10), label(99)];
        spread(&mut labels, 18, 100);
        assert_eq!(labels.map(|label| label.y), [10, 64, 82, 100]);
    }

    #[test]
    fn a_curve_becomes_a_picture() {
        let chart = Chart {
            name: "test".into(),
            place: "same host".into(),
            between_hosts: false,
            quantity: Quantity::Latency,
            unit: "us",
            curves: vec![Curve {
                name: "anyverbs SEND".into(),
                ours: true,
                points: vec![(2, 0.3), (8 << 20, 400.0)],
                failures: vec![],
            }],
        };
        let path = std::env::temp_dir().join(format!("anyverbs-plot-{}.svg", std::process::id()));
        let written = write(&chart, &path);
        let svg = std::fs::read_to_string(&path).unwrap_or_default();
        let _ = std::fs::remove_file(&path);
        written.unwrap();
        for text in ["anyverbs SEND", "size of a message", "8 MiB", "same host"] {
            assert!(svg.contains(text), "{text}");
        }
        let empty = Chart { curves: vec![], ..chart };
        assert!(write(&empty, &path).is_err());
    }
}
