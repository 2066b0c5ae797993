//! Short texts of people: names, and messages that become a line.

/// The form of a name, for a message.
pub(crate) const NAME: &str =
    "a name of 1 to 48 bytes, not . or .., without a slash or control characters";

/// Whether a name can be that of a device. It becomes the name of a directory, and a part of a line.
pub(crate) fn is_name(name: &str) -> bool {
    let fits = (1..=48).contains(&name.len()) && name != "." && name != "..";
    fits && !name.contains(|c: char| c == '/' || c.is_control())
}

/// The parser's message has several lines: place, excerpt, reason. The excerpt may hold control characters for a
/// terminal.
pub(crate) fn one_line(message: &str) -> String {
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    line.replace(char::is_control, "\u{fffd}")
}
