//! Short texts of people: names, and messages that become a line.

use toml::de::DeTable;

/// The form of a name, for a message.
pub(crate) const NAME: &str =
    "a name of 1 to 48 bytes, not . or .., without a slash or control characters";

/// Whether it is the name of a file, and a part of a line.
pub(crate) fn is_name(name: &str) -> bool {
    let fits = (1..=48).contains(&name.len()) && name != "." && name != "..";
    fits && !name.contains(|c: char| c == '/' || c.is_control())
}

/// The form of a device's name, for a message.
pub(crate) const DEVICE_NAME: &str = "a name of 1 to 48 bytes, not . or .., rdma_cm or like uverbs0, without a slash, blank, colon, semicolon, # or control character";

/// Whether a name can be that of a device. Scripts of faults and variables of programs such as `UCX_NET_DEVICES` name it among other
/// words. In `/dev/infiniband` it stands beside the nodes of the kernel's names.
pub(crate) fn is_device_name(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let is_node = name == "rdma_cm" || name.strip_prefix("uverbs").is_some_and(is_number);
    is_name(name) && !is_node && !name.contains(|c: char| c.is_whitespace() || ":;#".contains(c))
}

/// The line of a TOML file, from 1, that has a key: `pci.speed` of the table `pci`, however that is written.
pub(crate) fn line_of(text: &str, key: &str) -> Option<usize> {
    let file = DeTable::parse(text).ok()?;
    let (mut table, mut at) = (Some(file.get_ref()), None);
    for part in key.split('.') {
        let (_, value) = table?.iter().find(|(name, _)| name.get_ref() == part)?;
        (table, at) = (value.get_ref().as_table(), Some(value.span().start));
    }
    let before = text.get(..at?)?;
    Some(before.matches('\n').count() + 1)
}

/// The parser's message in a line. It has several: place, excerpt, and a reason that may name a type of Rust at its end. The excerpt may
/// hold control characters for a terminal.
pub(crate) fn in_words(message: &str) -> String {
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = line.replace(char::is_control, "\u{fffd}");
    let words = [
        ("u8", "a number from 0 to 255"),
        ("u16", "a number from 0 to 65535"),
        ("u32", "a number from 0 to 4294967295"),
        ("u64", "a number, 0 at least"),
        ("usize", "a number, 0 at least"),
        ("i128", "a whole number"),
        ("f64", "a number"),
        ("path string", "the name of a file"),
        ("a sequence", "a list"),
    ];
    let found = words.into_iter().find_map(|(name, words)| {
        let before = line.strip_suffix(name)?;
        before.ends_with("expected ").then(|| format!("{before}{words}"))
    });
    found.unwrap_or(line)
}
