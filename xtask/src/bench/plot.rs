//! A chart as SVG: both axes logarithmic, each curve labelled at its end.

use std::path::Path;

use anyhow::{anyhow, bail};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::sweep::{Chart, Quantity};

const SIZE: (u32, u32) = (860, 500);
/// For the labels.
const RIGHT: i32 = 150;
const LINE_HEIGHT: i32 = 18;
/// Bytes of a message.
const SMALLEST: f64 = 2.0;
const LARGEST: f64 = 8_388_608.0;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(225, 225, 225);

/// Okabe and Ito's, which people with any colour vision tell apart: ours from the blue end, peers from the rest.
const OURS: [RGBColor; 3] = [RGBColor(0, 114, 178), RGBColor(86, 180, 233), RGBColor(0, 158, 115)];
const PEERS: [RGBColor; 4] =
    [RGBColor(213, 94, 0), RGBColor(204, 121, 167), RGBColor(110, 110, 110), RGBColor(230, 159, 0)];

/// Writes `chart` to `path`.
pub(super) fn write(chart: &Chart, path: &Path) -> anyhow::Result<()> {
    draw(chart, path).map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn draw(chart: &Chart, path: &Path) -> anyhow::Result<()> {
    let Some((low, high)) = range(chart) else { bail!("there is nothing to draw") };
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (title, axis) = match chart.quantity {
        Quantity::Latency => ("Latency, one way", "median, microseconds"),
        Quantity::Bandwidth => ("Bandwidth, one stream", "gigabits a second"),
    };
    let ticks = (0..12).map(|n| SMALLEST * 4f64.powi(n)).collect();
    let mut plot = ChartBuilder::on(&root)
        .caption(format!("{title}: {}", chart.place), (FONT, 19).into_font().color(&INK))
        .margin(12)
        .margin_right(RIGHT)
        .x_label_area_size(46)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (SMALLEST..LARGEST).log_scale().with_key_points(ticks),
            (low..high).log_scale(),
        )?;
    plot.configure_mesh()
        .x_labels(12)
        .x_label_formatter(&|size| bytes(*size))
        .y_label_formatter(&|value| format!("{value}"))
        .x_desc("size of a message")
        .y_desc(axis)
        .bold_line_style(FAINT)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .label_style((FONT, 13).into_font().color(&INK))
        .axis_desc_style((FONT, 14).into_font().color(&INK))
        .draw()?;

    let (mut ours, mut peers) = (OURS.iter().cycle(), PEERS.iter().cycle());
    let mut labels = Vec::new();
    for curve in &chart.curves {
        let colour = *if curve.ours { ours.next() } else { peers.next() }.expect("a cycle");
        let points: Vec<_> = curve.points.iter().map(|&(size, y)| (size as f64, y)).collect();
        let Some(&end) = points.last() else { continue };
        let width = if curve.ours { 3 } else { 2 };
        plot.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(width)))?;
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

/// Whole decades around every point.
fn range(chart: &Chart) -> Option<(f64, f64)> {
    let values = || chart.curves.iter().flat_map(|curve| &curve.points).map(|&(_, y)| y);
    let low = values().reduce(f64::min)?;
    let high = values().reduce(f64::max)?;
    let decade = |value: f64| 10f64.powf(value);
    Some((decade(low.log10().floor()), decade((high.log10() + 1e-9).ceil())))
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
    use super::super::sweep::Curve;
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        let shown = [2.0, 512.0, 32768.0, 8388608.0].map(bytes);
        assert_eq!(shown, ["2 B", "512 B", "32 KiB", "8 MiB"]);
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
            quantity: Quantity::Latency,
            unit: "us",
            curves: vec![Curve {
                name: "anyverbs SEND".into(),
                ours: true,
                points: vec![(2, 0.3), (8 << 20, 400.0)],
                failures: vec![],
            }],
        };
        assert_eq!(range(&chart).map(|(low, high)| (low.log10(), high.log10())), Some((-1.0, 3.0)));
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
