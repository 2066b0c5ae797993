//! Results in pages of documentation. The run that measured them writes them, so that a page agrees with a run.

use std::fs;
use std::path::Path;

use anyhow::Context;

const END: &str = "<!-- end of the result -->";

/// Replaces the text in a page between `begin` and the next end of a result.
pub(crate) fn write(page: &Path, begin: &str, section: &str) -> anyhow::Result<()> {
    let text =
        fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
    let text = replaced(&text, begin, section)
        .with_context(|| format!("{} has no place for the result", page.display()))?;
    fs::write(page, text).with_context(|| format!("cannot write {}", page.display()))
}

/// `page` with `section` between the two marks.
pub(crate) fn replaced(page: &str, begin: &str, section: &str) -> Option<String> {
    let (before, rest) = page.split_once(begin)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{begin}\n\n{}\n\n{END}{after}", section.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_result_is_replaced() {
        const ONE: &str = "<!-- one -->";
        const TWO: &str = "<!-- two -->";
        let page = format!("method\n{ONE}\nold\n{END}\nmore\n{TWO}\nold\n{END}\ncommands\n");
        let fresh = replaced(&page, TWO, "new\n").unwrap();
        let wanted = format!("method\n{ONE}\nold\n{END}\nmore\n{TWO}\n\nnew\n\n{END}\ncommands\n");
        assert_eq!(fresh, wanted);
        // Writing the same again changes nothing.
        assert_eq!(replaced(&fresh, TWO, "new").unwrap(), fresh);
        assert_eq!(replaced("no marks", ONE, "new"), None);
    }

    /// The page names a test by two words, its file below the root or `crates`, and its name: a browser breaks lines between words.
    #[test]
    fn tests_that_reliability_names_exist() {
        let root = crate::workspace::root();
        let page = fs::read_to_string(root.join("docs/reliability.md")).unwrap();
        let (_, rest) = page.split_once("## Attacks, one by one").unwrap();
        let (table, _) = rest.split_once("\n## ").unwrap();
        let mut named = 0;
        let table = table.replace(".rs`: `", ".rs::");
        for (file, test) in table.split('`').filter_map(|text| text.split_once(".rs::")) {
            let path = ["", "crates"].map(|dir| root.join(dir).join(format!("{file}.rs")));
            let text = path.iter().find_map(|path| fs::read_to_string(path).ok());
            let text = text.unwrap_or_else(|| panic!("there is no {file}.rs"));
            assert!(text.contains(&format!("fn {test}()")), "{file}.rs has no {test}");
            named += 1;
        }
        assert!(named > 50, "{named}");
    }
}
