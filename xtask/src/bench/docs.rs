//! The result in docs/performance.md: written by the run that measured it, so that the page never says anything else.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::Context;

use super::{Results, picture, report};
use crate::workspace::root;

const BEGIN: &str = "<!-- result: written by `cargo xtask bench --write-docs` -->";
const END: &str = "<!-- end of the result -->";

/// Replaces the page's result and its pictures.
pub(super) fn write(results: &Results, folder: &Path) -> anyhow::Result<()> {
    let page = root().join("docs/performance.md");
    let text =
        fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
    let text = replaced(&text, &section(results))
        .with_context(|| format!("{} has no place for the result", page.display()))?;
    let pictures = root().join("docs/performance");
    fs::create_dir_all(&pictures).with_context(|| format!("cannot make {}", pictures.display()))?;
    for chart in &results.charts {
        let to = picture(&pictures, &chart.name);
        fs::copy(picture(folder, &chart.name), &to)
            .with_context(|| format!("cannot write {}", to.display()))?;
    }
    fs::write(&page, text).with_context(|| format!("cannot write {}", page.display()))
}

/// `page` with `section` between the two marks.
fn replaced(page: &str, section: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{}\n\n{END}{after}", section.trim()))
}

fn section(results: &Results) -> String {
    let machine = &results.machine;
    let mut text = String::new();
    let kind = if machine.virtual_machine { "virtual machine" } else { "machine" };
    let versions: Vec<_> = machine.versions.iter().map(|(name, v)| format!("{name} {v}")).collect();
    let _ = write!(
        text,
        "A {kind} with {} processors ({}), {} GiB, Linux {}, {}; socket buffers of {} B; load {} before the run. \
         {}.\nThe device was built with the profile `{}`; {} rounds a row, {} s a bandwidth run.\n\n",
        machine.processors,
        machine.processor,
        machine.memory_gib,
        machine.kernel,
        machine.distribution,
        machine.receive_buffer,
        machine.load,
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
    fn only_the_result_is_replaced() {
        let page = format!("method\n{BEGIN}\nold\n{END}\ncommands\n");
        let fresh = replaced(&page, "new\n").unwrap();
        assert_eq!(fresh, format!("method\n{BEGIN}\n\nnew\n\n{END}\ncommands\n"));
        // Writing the same again changes nothing.
        assert_eq!(replaced(&fresh, "new").unwrap(), fresh);
        assert_eq!(replaced("no marks", "new"), None);
    }

    #[test]
    fn the_page_has_its_marks() {
        let page = fs::read_to_string(root().join("docs/performance.md")).unwrap();
        assert!(replaced(&page, "").is_some());
    }
}
