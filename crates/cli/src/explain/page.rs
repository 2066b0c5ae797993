//! A page of the book as a terminal shows it: as wide as that, and with the texts of its links.

use std::mem::{take, zeroed};

/// Where the width is not known.
const COLUMNS: usize = 80;

/// The width of the terminal, if standard output is one.
pub(super) fn columns() -> usize {
    // SAFETY: plain data, and a live value of the type that the call writes.
    let columns = unsafe {
        let mut size: libc::winsize = zeroed();
        let done = libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size);
        if done == 0 { usize::from(size.ws_col) } else { 0 }
    };
    if columns == 0 { COLUMNS } else { columns }
}

/// The page. Headings, tables and code keep their lines.
pub(super) fn shown(page: &str, columns: usize) -> String {
    let mut out = String::new();
    let (mut paragraph, mut in_code) = (String::new(), false);
    let end = |paragraph: &mut String, out: &mut String| {
        if !paragraph.is_empty() {
            wrap(&without_targets(&take(paragraph)), columns, out);
        }
    };
    for line in page.lines() {
        let text = line.trim_start();
        let is_fence = text.starts_with("```");
        if in_code || is_fence || text.is_empty() || text.starts_with(['#', '|']) {
            end(&mut paragraph, &mut out);
            let line = if in_code { line.to_owned() } else { without_targets(line) };
            out.push_str(&line);
            out.push('\n');
            in_code ^= is_fence;
        } else if paragraph.is_empty() || mark(text) > 0 {
            end(&mut paragraph, &mut out);
            line.clone_into(&mut paragraph);
        } else {
            paragraph.push(' ');
            paragraph.push_str(text);
        }
    }
    end(&mut paragraph, &mut out);
    out
}

/// The length of the mark of an item of a list, or 0.
fn mark(text: &str) -> usize {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let rest = &text[digits..];
    if digits > 0 && rest.starts_with(". ") {
        digits + 2
    } else if digits == 0 && (rest.starts_with("- ") || rest.starts_with("* ")) {
        2
    } else {
        0
    }
}

/// Appends a paragraph, in lines that begin below its first word.
fn wrap(paragraph: &str, columns: usize, out: &mut String) {
    let text = paragraph.trim_start();
    let before = paragraph.len() - text.len();
    let indent = before + mark(text);
    out.push_str(&paragraph[..indent]);
    let mut at = indent;
    for (n, word) in paragraph[indent..].split_whitespace().enumerate() {
        let width = word.chars().count();
        if n > 0 && at + 1 + width > columns {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            at = indent;
        } else if n > 0 {
            out.push(' ');
            at += 1;
        }
        out.push_str(word);
        at += width;
    }
    out.push('\n');
}

/// The text with the texts of its links alone. Addresses of other sites stay.
fn without_targets(text: &str) -> String {
    let mut out = String::new();
    // Every second part is code.
    for (n, part) in text.split('`').enumerate() {
        if n > 0 {
            out.push('`');
        }
        if n % 2 == 1 {
            out.push_str(part);
            continue;
        }
        let mut rest = part;
        while let Some((before, after)) = rest.split_once("](") {
            let (target, behind) = after.split_once(')').unwrap_or((after, ""));
            out.push_str(before);
            // The bracket may stand before code, which is in the text of the link.
            if let Some(open) = out.rfind('[') {
                out.remove(open);
            }
            if target.contains("://") {
                out.push_str(&format!(" ({target})"));
            }
            rest = behind;
        }
        out.push_str(rest);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_their_texts() {
        for (text, wanted) in [
            ("see [faults](../recipes/faults.md#a), and [b](c.md).", "see faults, and b."),
            (
                "`x[i](j)` stays, and [`--check`](d.md) is one",
                "`x[i](j)` stays, and `--check` is one",
            ),
            ("[kind](https://kind.io) is elsewhere", "kind (https://kind.io) is elsewhere"),
        ] {
            assert_eq!(without_targets(text), wanted);
        }
    }

    #[test]
    fn paragraphs_and_items_are_as_wide_as_the_terminal() {
        let page = "# A heading that is long\n\nOne two [three\nfour](x.md) five.\n\n- an item that\n  goes on\n- b\n\n\
                    ```sh\na command that is long\n- [no](list)\n```\n";
        let wanted = "# A heading that is long\n\nOne two three\nfour five.\n\n- an item that\n  goes on\n- b\n\n\
                      ```sh\na command that is long\n- [no](list)\n```\n";
        assert_eq!(shown(page, 14), wanted);
        assert!(shown(page, 80).contains("\nOne two three four five.\n\n- an item that goes on\n"));
    }
}
