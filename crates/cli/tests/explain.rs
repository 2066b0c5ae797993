//! `anyverbs explain`.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::process::{Command, Output};

fn explain(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_anyverbs")).arg("explain").args(words).output().unwrap()
}

#[test]
fn it_prints_the_page_of_a_word() {
    for (words, heading) in [
        (&["12"][..], "# 12 IBV_WC_RETRY_EXC_ERR: transport retry counter exceeded"),
        (&["transport", "retry", "counter", "exceeded"], "# 12 IBV_WC_RETRY_EXC_ERR:"),
        (&["AV1204"], "## AV1204: the peer's process has ended, or never was"),
        (&["ENOMEM"], "## ENOMEM:"),
        (&["IBV_EVENT_QP_FATAL"], "## IBV_EVENT_QP_FATAL:"),
        (&["buffer-changed"], "# buffer-changed: the buffer of a send"),
        (&["LEAK"], "# leak: "),
    ] {
        let output = explain(words);
        assert!(output.status.success(), "{words:?}");
        assert!(String::from_utf8(output.stdout).unwrap().starts_with(heading), "{words:?}");
    }
}

#[test]
fn several_words_have_a_page_each_and_some_numbers_a_hint() {
    let said = |words: &[&str]| String::from_utf8(explain(words).stdout).unwrap();
    let both = said(&["12", "13"]);
    let at = |heading: &str| both.find(heading).unwrap();
    assert!(at("# 12 IBV_WC_RETRY_EXC_ERR:") < at("# 13 IBV_WC_RNR_RETRY_EXC_ERR:"), "{both}");
    assert!(said(&["22"]).ends_with("22 is an error number, too: `anyverbs explain EINVAL`.\n"));
    assert!(!said(&["13"]).contains("error number, too"));
    assert_eq!(explain(&["12", "EWHAT"]).status.code(), Some(125));
}

#[test]
fn it_lists_all_words() {
    let list = String::from_utf8(explain(&[]).stdout).unwrap();
    assert!(list.contains("\n12 IBV_WC_RETRY_EXC_ERR:") && list.contains("\n  AV1204: "), "{list}");
    assert!(
        list.contains("\nChecks of a program (`anyverbs run --check`)\n  qp-destroyed"),
        "{list}"
    );
    assert!(list.contains("\n  leak: an object is left"), "{list}");
}

#[test]
fn pages_fit_80_columns_and_show_the_texts_of_links() {
    let all = explain(&[]);
    let words = String::from_utf8(all.stdout).unwrap();
    let words: Vec<_> =
        words.lines().filter_map(|line| line.trim_start().split([' ', ':']).next()).collect();
    let (mut long, mut seen) = (Vec::new(), 0);
    for word in words {
        let output = explain(&[word]);
        if !output.status.success() {
            continue;
        }
        seen += 1;
        let text = String::from_utf8(output.stdout).unwrap();
        let is_free = |line: &&str| !line.starts_with(['#', '|', ' ']);
        for line in text.lines().filter(is_free) {
            if line.contains("](") || (line.chars().count() > 80 && line.contains(' ')) {
                long.push(format!("{word}: {line}"));
            }
        }
    }
    assert!(seen > 50, "{seen}");
    assert!(long.is_empty(), "{}", long.join("\n"));
}

#[test]
fn a_word_that_is_no_name_finds_the_pages_that_have_it() {
    let output = explain(&["hang"]);
    assert_eq!(output.status.code(), Some(125));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("\n  AV8010: ") && error.contains("\n  AV8007: "), "{error}");
    assert!(!error.contains("IBV_EVENT_GID_CHANGE"), "{error}");
    assert!(error.lines().count() < 16, "{error}");
}

#[test]
fn an_unknown_word_fails_with_one_line() {
    let output = explain(&["EWHAT"]);
    assert_eq!(output.status.code(), Some(125));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.lines().count() == 1 && error.contains("EINVAL"), "{error}");
}
