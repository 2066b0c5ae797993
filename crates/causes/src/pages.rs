//! The pages, and how a word leads to a section of them.

/// The pages of the book; `pages` is a link to `docs/troubleshooting`.
const PAGES: &[&str] = &[
    include_str!("../pages/01-loc-len-err.md"),
    include_str!("../pages/02-loc-qp-op-err.md"),
    include_str!("../pages/04-loc-prot-err.md"),
    include_str!("../pages/05-wr-flush-err.md"),
    include_str!("../pages/06-mw-bind-err.md"),
    include_str!("../pages/07-bad-resp-err.md"),
    include_str!("../pages/09-rem-inv-req-err.md"),
    include_str!("../pages/10-rem-access-err.md"),
    include_str!("../pages/11-rem-op-err.md"),
    include_str!("../pages/12-retry-exc-err.md"),
    include_str!("../pages/13-rnr-retry-exc-err.md"),
    include_str!("../pages/uc.md"),
    include_str!("../pages/other-statuses.md"),
    include_str!("../pages/calls.md"),
    include_str!("../pages/events.md"),
    include_str!("../pages/connections.md"),
];

/// The parts of a name that programs and logs leave out, or put in front.
const PREFIXES: &[&str] = &["", "IBV_WC_", "IBV_EVENT_", "RDMA_CM_EVENT_"];

/// All pages, in the order of the book.
pub fn all() -> impl Iterator<Item = &'static str> {
    PAGES.iter().copied()
}

/// Further words that lead to a section: what programs and other devices print.
const ALSO: &[(&str, &str)] = &[
    // Errno names that mean the same here.
    ("EHOSTUNREACH", "ENETUNREACH"),
    ("ENOTSUP", "EOPNOTSUPP"),
];

/// Linux' error numbers that have a section.
const ERROR_NUMBERS: &[(u32, &str)] = &[
    (1, "EPERM"),
    (2, "ENOENT"),
    (5, "EIO"),
    (7, "E2BIG"),
    (11, "EAGAIN"),
    (12, "ENOMEM"),
    (14, "EFAULT"),
    (16, "EBUSY"),
    (19, "ENODEV"),
    (22, "EINVAL"),
    (24, "EMFILE"),
    (28, "ENOSPC"),
    (32, "EPIPE"),
    (38, "ENOSYS"),
    (61, "ENODATA"),
    (71, "EPROTO"),
    (92, "ENOPROTOOPT"),
    (93, "EPROTONOSUPPORT"),
    (95, "EOPNOTSUPP"),
    (98, "EADDRINUSE"),
    (99, "EADDRNOTAVAIL"),
    (101, "ENETUNREACH"),
    (104, "ECONNRESET"),
    (107, "ENOTCONN"),
    (110, "ETIMEDOUT"),
    (111, "ECONNREFUSED"),
    (113, "EHOSTUNREACH"),
];

/// The name of the error number that a word may mean, where it is a status or a cause as well.
#[must_use]
pub fn error_number(word: &str) -> Option<&'static str> {
    let number = number(word.trim())?;
    let name = name_of_error(number.try_into().ok()?)?;
    // The section of a name that means the same would do as well.
    let own = find(name)?;
    (find(word)? != own).then_some(name)
}

/// The name of an error number that has a section.
#[must_use]
pub fn name_of_error(number: i32) -> Option<&'static str> {
    let is_it = |(known, _): &&(u32, _)| known.cast_signed() == number;
    ERROR_NUMBERS.iter().find(is_it).map(|(_, name)| *name)
}

/// The section that explains a word. The word is a number or name of a status, the code or number of a cause, or the name
/// or number of an error or event. It may be their text, too. A status goes before an error of its number. Upper and lower
/// case count as equal.
#[must_use]
pub fn find(word: &str) -> Option<&'static str> {
    let word = word.trim();
    let number = number(word);
    // A number in digits of another base is the same status.
    let spelled = number.map(|number| number.to_string());
    let code = number.filter(|number| *number >= 100).map(|number| format!("AV{number:04}"));
    let by_code = code.as_deref().and_then(by_heading);
    if by_code.is_some() {
        return by_code;
    }
    let word = spelled.as_deref().unwrap_or(word);
    let name = number.and_then(|number| name_of_error(number.try_into().ok()?));
    by_heading(same(word)).or_else(|| by_heading(same(name?)))
}

/// The word that stands in the heading of a section.
fn same(word: &str) -> &str {
    ALSO.iter().find(|(name, _)| name.eq_ignore_ascii_case(word)).map_or(word, |(_, same)| same)
}

fn by_heading(word: &str) -> Option<&'static str> {
    all().find_map(|page| section(page, |heading| names(heading, word)))
}

/// A decimal number, or a hexadecimal one as programs print `vendor_err`.
fn number(word: &str) -> Option<u32> {
    match word.strip_prefix("0x").or_else(|| word.strip_prefix("0X")) {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

/// Tells whether a heading such as `12 IBV_WC_RETRY_EXC_ERR: transport retry counter exceeded` names a word.
fn names(heading: &str, word: &str) -> bool {
    let Some((front, text)) = heading.split_once(": ") else { return false };
    text.eq_ignore_ascii_case(word)
        || front.split(' ').any(|name| {
            PREFIXES.iter().any(|prefix| {
                name.len() == prefix.len() + word.len()
                    && name.is_char_boundary(prefix.len())
                    && name.starts_with(prefix)
                    && name[prefix.len()..].eq_ignore_ascii_case(word)
            })
        })
}

/// The section whose heading is the wanted one, with all that is below it.
fn section(page: &str, mut is_wanted: impl FnMut(&str) -> bool) -> Option<&str> {
    let level = |line: &str| line.bytes().take_while(|byte| *byte == b'#').count();
    let (mut at, mut found) = (0, None);
    for line in page.split_inclusive('\n') {
        let depth = level(line);
        match found {
            None if depth > 0 && is_wanted(line[depth..].trim()) => found = Some((at, depth)),
            Some((start, of)) if depth > 0 && depth <= of => {
                return Some(page[start..at].trim_end());
            }
            _ => {}
        }
        at += line.len();
    }
    found.map(|(start, _)| page[start..].trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heading(word: &str) -> &'static str {
        find(word).unwrap_or_else(|| panic!("{word}")).lines().next().unwrap()
    }

    #[test]
    fn each_error_number_with_a_name_has_a_section() {
        for (number, name) in ERROR_NUMBERS {
            assert_eq!(name_of_error(number.cast_signed()), Some(*name));
            assert!(find(name).is_some(), "{name}");
        }
        assert_eq!(name_of_error(101), Some("ENETUNREACH"));
        assert_eq!(name_of_error(5000), None);
    }

    #[test]
    fn a_status_is_found_by_its_number_name_and_text() {
        for word in [
            "12",
            "IBV_WC_RETRY_EXC_ERR",
            "retry_exc_err",
            "transport retry counter exceeded",
            "Transport Retry Counter Exceeded",
        ] {
            let wanted = "# 12 IBV_WC_RETRY_EXC_ERR: transport retry counter exceeded";
            assert_eq!(heading(word), wanted, "{word}");
        }
    }

    #[test]
    fn a_cause_is_found_by_code_and_vendor_err() {
        for word in ["AV1204", "av1204", "1204", "0x4b4"] {
            assert_eq!(
                heading(word),
                "## AV1204: the peer's process has ended, or never was",
                "{word}"
            );
        }
        let page = find("AV1204").unwrap();
        assert!(page.lines().count() > 1 && !page.contains("AV1205"), "{page}");
    }

    #[test]
    fn events_and_error_numbers_are_found() {
        assert!(heading("IBV_EVENT_QP_FATAL").starts_with("## IBV_EVENT_QP_FATAL:"));
        assert!(heading("QP_FATAL").starts_with("## IBV_EVENT_QP_FATAL:"));
        assert!(heading("RDMA_CM_EVENT_REJECTED").starts_with("## RDMA_CM_EVENT_REJECTED:"));
        assert!(find("EINVAL").unwrap().contains("AV8004"));
        assert!(!find("EINVAL").unwrap().contains("ENOMEM"));
    }

    #[test]
    fn each_event_of_the_headers_has_a_section() {
        for name in [
            "CQ_ERR",
            "QP_FATAL",
            "QP_REQ_ERR",
            "QP_ACCESS_ERR",
            "COMM_EST",
            "SQ_DRAINED",
            "PATH_MIG",
            "PATH_MIG_ERR",
            "DEVICE_FATAL",
            "PORT_ACTIVE",
            "PORT_ERR",
            "LID_CHANGE",
            "PKEY_CHANGE",
            "SM_CHANGE",
            "SRQ_ERR",
            "SRQ_LIMIT_REACHED",
            "QP_LAST_WQE_REACHED",
            "CLIENT_REREGISTER",
            "GID_CHANGE",
            "WQ_FATAL",
        ] {
            assert!(heading(name).starts_with(&format!("## IBV_EVENT_{name}:")), "{name}");
        }
        for name in [
            "ADDR_RESOLVED",
            "ADDR_ERROR",
            "ROUTE_RESOLVED",
            "ROUTE_ERROR",
            "CONNECT_REQUEST",
            "CONNECT_RESPONSE",
            "CONNECT_ERROR",
            "UNREACHABLE",
            "REJECTED",
            "ESTABLISHED",
            "DISCONNECTED",
            "DEVICE_REMOVAL",
            "MULTICAST_JOIN",
            "MULTICAST_ERROR",
            "ADDR_CHANGE",
            "TIMEWAIT_EXIT",
        ] {
            assert!(heading(name).starts_with(&format!("## RDMA_CM_EVENT_{name}:")), "{name}");
        }
    }

    #[test]
    fn an_error_number_that_is_no_status_is_found() {
        assert!(heading("110").starts_with("## ETIMEDOUT:"));
        assert!(heading("24").starts_with("## EMFILE:"));
        assert!(heading("113").starts_with("## ENETUNREACH:"));
        assert!(heading("16").starts_with("## 16 IBV_WC_REM_ABORT_ERR:"));
        assert_eq!(error_number("16"), Some("EBUSY"));
        assert_eq!((error_number("20"), name_of_error(20)), (None, None));
    }

    #[test]
    fn all_statuses_that_a_program_can_see_are_found() {
        for status in 0..=23 {
            assert!(heading(&status.to_string()).contains("IBV_WC_"), "{status}");
        }
    }

    #[test]
    fn a_number_is_found_in_either_base() {
        let wanted = "# 12 IBV_WC_RETRY_EXC_ERR: transport retry counter exceeded";
        assert_eq!((heading("0x0c"), heading("0XC")), (wanted, wanted));
        let other = "## 129 0x81: a vendor_err of another device";
        assert_eq!((heading("129"), heading("0x81")), (other, other));
        assert!(find("129").unwrap().contains("status 12"));
    }

    #[test]
    fn error_numbers_of_calls_are_found() {
        for name in [
            "E2BIG",
            "ECONNREFUSED",
            "ECONNRESET",
            "EMFILE",
            "ENODATA",
            "ENOPROTOOPT",
            "EPIPE",
            "EPROTO",
            "ETIMEDOUT",
            "EADDRINUSE",
            "EADDRNOTAVAIL",
            "EHOSTUNREACH",
            "ENOSYS",
            "ENOTCONN",
            "ENOTSUP",
            "EPROTONOSUPPORT",
        ] {
            assert!(heading(name).starts_with("## E"), "{name}");
        }
        assert_eq!((error_number("22"), error_number("0x16")), (Some("EINVAL"), Some("EINVAL")));
        assert_eq!((error_number("13"), error_number("EINVAL")), (None, None));
        // No status and no cause has the number.
        assert_eq!((error_number("110"), error_number("24")), (None, None));
        assert_eq!(error_number("104"), Some("ECONNRESET"), "AV0104 has it, too");
        for (_, name) in ERROR_NUMBERS {
            assert!(find(name).is_some(), "{name}");
        }
    }

    #[test]
    fn other_words_are_not_found() {
        for word in ["", "77", "AV0000", "IBV", "é", "RETRY", "AV", "12 "] {
            assert_eq!(find(word).is_some(), word == "12 ", "{word:?}");
        }
    }
}
