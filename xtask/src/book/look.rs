//! Opens each page of the built book in a headless browser, and judges what a reader sees there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::Context;
use serde::Deserialize;

use super::pages;
use crate::browser::{self, Browser, Opened};
use crate::conformance::Tally;
use crate::workspace::{root, target};
use crate::{interrupt, packages};

/// The width of a window on a desk, and on a phone.
const WIDTHS: [u32; 2] = [1240, 400];

/// The answer of the script in `page.js`.
#[derive(Debug, Deserialize)]
struct Seen {
    window: f64,
    content: f64,
    scrolling: Vec<String>,
    unloaded: Vec<String>,
    links: BTreeSet<String>,
}

/// Builds the book, opens its pages, and leaves a picture of each in `target/book-pictures`. Where there is no browser or no
/// mdBook, the pages count as skipped.
pub(super) fn pages(filter: Option<&str>) -> anyhow::Result<Tally> {
    let mut pages = Vec::new();
    pages::below(&root().join("docs"), Path::new(""), "md", &mut pages)?;
    pages.retain(|page| {
        let name = Path::new("docs").join(page).display().to_string();
        !page.ends_with("SUMMARY.md") && filter.is_none_or(|text| name.contains(text))
    });
    pages.sort();
    if pages.is_empty() {
        return Ok(Tally::default());
    }
    let skipped = |why: &anyhow::Error| {
        interrupt::check()?;
        println!("skip {} pages in a browser: {why:#}", pages.len());
        Ok(Tally { skipped: pages.len(), ..Tally::default() })
    };
    if let Err(why) = packages::ensure(&[packages::CHROMIUM]) {
        return skipped(&why.context("no browser"));
    }
    let mdbook = match super::mdbook() {
        Ok(mdbook) => mdbook,
        Err(why) => return skipped(&why.context("no mdBook")),
    };
    let book = super::build(&mdbook)?;
    let pictures = target().join("book-pictures");
    fs::create_dir_all(&pictures).with_context(|| format!("cannot make {}", pictures.display()))?;
    let mut browser = Browser::start(&pictures)?;
    let mut tally = Tally::default();
    for page in pages {
        interrupt::check()?;
        let file = book.join(&page).with_extension("html");
        let name = page.with_extension("").display().to_string();
        let mut faults = Vec::new();
        for width in WIDTHS {
            let opened = browser.open(&file, width)?;
            let seen = browser.evaluate(include_str!("page.js"))?;
            let seen = serde_json::from_value(seen).context("what the page's script says")?;
            let found = judge(&opened, &seen, |address| leads_somewhere(address, &book));
            faults.extend(found.into_iter().map(|fault| format!("{width} pixels: {fault}")));
            let picture = format!("{}-{width}.png", name.replace('/', "-"));
            browser.save_picture(&pictures.join(picture), width)?;
        }
        if faults.is_empty() {
            tally.passed += 1;
        } else {
            tally.failed += 1;
            println!("FAIL {name} in a browser\n  {}", faults.join("\n  "));
        }
    }
    println!("ok   {} pages in a browser, with pictures in {}", tally.passed, pictures.display());
    Ok(tally)
}

/// The faults of a page.
fn judge(opened: &Opened, seen: &Seen, leads_somewhere: impl Fn(&str) -> bool) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut expect = |is_right: bool, what: String| {
        if !is_right {
            wrong.push(what);
        }
    };
    let Seen { window, content, scrolling, unloaded, links } = seen;
    expect(content <= window, format!("it is {content} pixels wide in a window of {window}"));
    expect(scrolling.is_empty(), format!("these scroll sideways: {scrolling:?}"));
    expect(unloaded.is_empty(), format!("images that do not load: {unloaded:?}"));
    let is_own = |address: &&String| address.starts_with("file:") || address.starts_with("data:");
    let foreign: Vec<_> = opened.fetched.iter().filter(|address| !is_own(address)).collect();
    expect(foreign.is_empty(), format!("it fetches {foreign:?}"));
    expect(opened.complaints.is_empty(), format!("the console: {:?}", opened.complaints));
    let dead: Vec<_> = links.iter().filter(|address| !leads_somewhere(address)).collect();
    expect(dead.is_empty(), format!("links to nothing: {dead:?}"));
    wrong
}

/// Whether an address is a place in the book. Those of other sites are not followed, but those of the repository must be its files.
fn leads_somewhere(address: &str, book: &Path) -> bool {
    let (place, fragment) = address.split_once('#').unwrap_or((address, ""));
    if let Some(file) = place.strip_prefix(super::REPOSITORY) {
        return root().join(file.trim_start_matches('/')).exists();
    }
    if !place.starts_with("file:") {
        return true;
    }
    let Some(file) = place.strip_prefix(&browser::address(book)) else { return false };
    let Ok(text) = fs::read_to_string(book.join(file.trim_start_matches('/'))) else {
        return false;
    };
    fragment.is_empty() || text.contains(&format!("id=\"{fragment}\""))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_fault_of_a_page_is_told() {
        let right = || Seen {
            window: 400.0,
            content: 400.0,
            scrolling: Vec::new(),
            unloaded: Vec::new(),
            links: ["a".to_owned()].into(),
        };
        let opened = |complaints| Opened { time: Duration::ZERO, fetched: Vec::new(), complaints };
        let faults = |seen: Seen, complaints| judge(&opened(complaints), &seen, |to| to == "a");
        assert!(faults(right(), Vec::new()).is_empty());
        let wrong = [
            faults(Seen { content: 401.0, ..right() }, Vec::new()),
            faults(Seen { scrolling: vec!["MAIN".into()], ..right() }, Vec::new()),
            faults(Seen { unloaded: vec!["x.png".into()], ..right() }, Vec::new()),
            faults(Seen { links: ["b".to_owned()].into(), ..right() }, Vec::new()),
            faults(right(), vec!["error".into()]),
        ];
        let fetched = vec!["file:///a.css".to_owned(), "https://example.org/b.js".to_owned()];
        let faults = judge(&Opened { fetched, ..opened(Vec::new()) }, &right(), |_| true);
        assert_eq!(faults, ["it fetches [\"https://example.org/b.js\"]"]);
        for faults in wrong {
            assert_eq!(faults.len(), 1, "{faults:?}");
        }
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let book = std::env::temp_dir().join(format!("anyverbs-links-{}", std::process::id()));
        fs::create_dir_all(&book).unwrap();
        fs::write(book.join("page.html"), "<h1 id=\"top\">").unwrap();
        let address = browser::address(&book);
        let leads = |to: &str| leads_somewhere(&to.replace("BOOK", &address), &book);
        for to in ["BOOK/page.html", "BOOK/page.html#top", "https://example.org/#x"] {
            assert!(leads(to), "{to}");
        }
        let repository = super::super::REPOSITORY;
        assert!(leads(&format!("{repository}/README.md")));
        for to in ["BOOK/none.html", "BOOK/page.html#x", "file:///none", &format!("{repository}/x")]
        {
            assert!(!leads(to), "{to}");
        }
        fs::remove_dir_all(book).unwrap();
    }
}
