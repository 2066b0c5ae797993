//! `anyverbs explain`: the pages of the causes, and of the checks.

mod page;

use std::process::ExitCode;

use anyhow::bail;
use anyverbs_check::Check;

use crate::write_out;

/// Prints the page of a word, or the list of all words.
pub(crate) fn print(words: &[String]) -> anyhow::Result<ExitCode> {
    if words.is_empty() {
        return write_out(list().as_bytes());
    }
    let word = words.join(" ");
    if let Some(check) = Check::ALL.iter().find(|check| check.id().eq_ignore_ascii_case(&word)) {
        return write_out(page::shown(check.page(), page::columns()).as_bytes());
    }
    let Some(section) = anyverbs_causes::find(&word) else {
        if words.len() > 1 {
            return each(words);
        }
        bail!(
            "there is no page of {word:?}; ask for a status (12, IBV_WC_RETRY_EXC_ERR), a code (AV1204), an error number \
             (EINVAL), an event (IBV_EVENT_QP_FATAL) or a check (leak), or for the list: `anyverbs explain`{}",
            mentions(&word)
        );
    };
    let hint = anyverbs_causes::error_number(&word);
    let hint = hint.map_or(String::new(), |name| {
        format!("\n{word} is an error number, too: `anyverbs explain {name}`.\n")
    });
    write_out(format!("{}{hint}", page::shown(section, page::columns())).as_bytes())
}

/// The pages of several words.
fn each(words: &[String]) -> anyhow::Result<ExitCode> {
    for (n, word) in words.iter().enumerate() {
        if n > 0 {
            write_out(b"\n")?;
        }
        print(std::slice::from_ref(word))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The headings of the pages that have a word which is no page's name.
fn mentions(word: &str) -> String {
    const MOST: usize = 12;
    let word = word.to_lowercase();
    // "hang" finds "hangs", and not "change".
    let has_it = |text: &str| {
        let text = text.to_lowercase();
        text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|other| other.starts_with(&word))
    };
    let (mut headings, mut heading) = (Vec::new(), "");
    for line in anyverbs_causes::all().flat_map(str::lines) {
        if line.starts_with("##") {
            heading = line.trim_start_matches('#').trim();
        }
        if heading.contains(": ") && has_it(line) && headings.last() != Some(&heading.to_owned()) {
            headings.push(heading.to_owned());
        }
    }
    let checks = Check::ALL.iter().filter(|check| has_it(check.page()));
    headings.extend(checks.map(|check| format!("{check}: {}", check.title())));
    let left_out = headings.len().saturating_sub(MOST);
    headings.truncate(MOST);
    let list: String = headings.iter().map(|heading| format!("\n  {heading}")).collect();
    match (headings.is_empty(), left_out) {
        (true, _) => String::new(),
        (false, 0) => format!("\nThese pages have the word:{list}"),
        (false, n) => format!("\nThese pages have the word, and {n} more:{list}"),
    }
}

/// The headings of all pages.
fn list() -> String {
    let mut list = String::new();
    for line in anyverbs_causes::all().flat_map(str::lines) {
        let heading = line.trim_start_matches('#');
        let depth = line.len() - heading.len();
        if depth > 0 {
            list += &"  ".repeat(depth - 1);
            list += heading.trim();
            list.push('\n');
        }
    }
    list += "Checks of a program (`anyverbs run --check`)\n";
    for check in Check::ALL {
        list += &format!("  {check}: {}\n", check.title());
    }
    list
}
