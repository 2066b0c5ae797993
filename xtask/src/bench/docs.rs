//! The result in docs/performance.md. The run that measured it writes it, so that the page agrees with a run.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::Context;

use super::{Results, picture, report};
use crate::page;
use crate::workspace::root;

const BEGIN: &str = "<!-- result: written by `cargo xtask bench --write-docs` -->";

/// Replaces the page's result and its pictures.
pub(super) fn write(results: &Results, folder: &Path) -> anyhow::Result<()> {
    let page = root().join("docs/performance.md");
    let pictures = root().join("docs/performance");
    fs::create_dir_all(&pictures).with_context(|| format!("cannot make {}", pictures.display()))?;
    for chart in &results.charts {
        let to = picture(&pictures, &chart.name);
        fs::copy(picture(folder, &chart.name), &to)
            .with_context(|| format!("cannot write {}", to.display()))?;
    }
    page::write(&page, BEGIN, &section(results))
}

fn section(results: &Results) -> String {
    let machine = &results.machine;
    let mut text = String::new();
    let kind = if machine.virtual_machine { "virtual machine" } else { "machine" };
    let versions: Vec<_> = machine.versions.iter().map(|(name, v)| format!("{name} {v}")).collect();
    let _ = write!(
        text,
        "A {kind} with {} processors ({}), {} GiB, Linux {}, {}; socket buffers of {} B; load {} before the run, others had {:.1}% of \
         the processors' time during it. {}.\nThe device was built with the profile `{}`; {} rounds a row, {} s a bandwidth run.\n\n",
        machine.processors,
        machine.processor,
        machine.memory_gib,
        machine.kernel,
        machine.distribution,
        machine.receive_buffer,
        machine.load,
        machine.stolen,
        versions.join(", "),
        results.profile,
        results.runs,
        results.seconds,
    );
    text += &report::markdown(&results.rows);
    for chart in &results.charts {
        let title = format!("{}, {}", chart.place, chart.quantity);
        let _ = write!(text, "\n![{title}](performance/{}.svg)\n", chart.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_its_marks() {
        let page = fs::read_to_string(root().join("docs/performance.md")).unwrap();
        assert!(page::replaced(&page, BEGIN, "").is_some());
    }
}
