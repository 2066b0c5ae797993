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
    if let Some(check) = Check::ALL.iter().find(|check| check.id() == word) {
        return write_out(page::shown(check.page(), page::columns()).as_bytes());
    }
    let Some(section) = anyverbs_causes::find(&word) else {
        if words.len() > 1 {
            return each(words);
        }
        bail!(
            "there is no page of {word:?}; ask for a status (12, IBV_WC_RETRY_EXC_ERR), a code (AV1204), an error number \
             (EINVAL), an event (IBV_EVENT_QP_FATAL) or a check (leak), or for the list: `anyverbs explain`"
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
